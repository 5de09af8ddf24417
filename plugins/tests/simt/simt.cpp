#include "simt.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>


#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define CLOVER_ASAN 1
#endif

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace simt {

thread_local dim3 block_index, block_size, grid_size;
thread_local unsigned thread_index;

namespace {

constexpr size_t kStack = 256 << 10;
constexpr size_t kSlot = 256;  // bytes that a lane may hand in or take from a warp's collective

[[noreturn]] void fail(const char* message) {
  std::fprintf(stderr, "simt: block (%u, %u, %u), thread %u: %s\n", block_index.x, block_index.y, block_index.z, thread_index,
               message);
  std::abort();
}

#if defined(__x86_64__)
// Saves the callee-saved registers and the stack pointer of one fiber and takes up those of another.
extern "C" void simt_switch(void** from, void* to);
asm(R"(
.text
.globl simt_switch
.type simt_switch, @function
simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size simt_switch, .-simt_switch
)");
#endif

enum class State { kReady, kAtBarrier, kInWarp, kDone };

struct Fiber {
  unsigned char* stack = nullptr;
#if defined(__x86_64__)
  void* context = nullptr;
#else
  ucontext_t context;
#endif
  State state = State::kDone;
};

struct Warp {
  unsigned arrived = 0;
  const void* operation = nullptr;
  std::vector<unsigned> ready;
  alignas(16) unsigned char in[32 * kSlot];
  alignas(16) unsigned char out[32 * kSlot];
};

struct Machine {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<unsigned> order;  // of the warps: the first that can run goes on
  bool shuffled = true;         // a new order at every step; otherwise one for the whole block
  std::unique_ptr<unsigned char[]> shared;
  const std::function<void()>* body = nullptr;
  unsigned running = 0, at_barrier = 0, alive = 0;
#if defined(__x86_64__)
  void* scheduler = nullptr;
#else
  ucontext_t scheduler;
#endif
#ifdef CLOVER_ASAN
  void* fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t size = 0;
#endif
  std::mt19937_64 random{1};
};

thread_local Machine machine;

void to_scheduler(bool ends) {
  Fiber& fiber = machine.fibers[machine.running];
#ifdef CLOVER_ASAN
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(ends ? nullptr : &fake, machine.bottom, machine.size);
#else
  (void)ends;
#endif
#if defined(__x86_64__)
  simt_switch(&fiber.context, machine.scheduler);
#else
  swapcontext(&fiber.context, &machine.scheduler);
#endif
#ifdef CLOVER_ASAN
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}

void enter() {
#ifdef CLOVER_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &machine.bottom, &machine.size);
#endif
  (*machine.body)();
  machine.fibers[machine.running].state = State::kDone;
  --machine.alive;
  to_scheduler(true);
  fail("a finished thread ran on");
}

void prepare(Fiber& fiber) {
  if (fiber.stack == nullptr) {
    void* memory = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for a thread's stack");
    fiber.stack = static_cast<unsigned char*>(memory);
  }
#if defined(__x86_64__)
  auto** top = reinterpret_cast<void**>(fiber.stack + kStack);
  *--top = nullptr;  // keeps the stack pointer 8 past a multiple of 16 at entry, as after a call
  *--top = reinterpret_cast<void*>(&enter);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.context = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = fiber.stack;
  fiber.context.uc_stack.ss_size = kStack;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, enter, 0);
#endif
  fiber.state = State::kReady;
}

void resume(unsigned index) {
  machine.running = index;
  thread_index = index;
  Fiber& fiber = machine.fibers[index];
#ifdef CLOVER_ASAN
  __sanitizer_start_switch_fiber(&machine.fake_stack, fiber.stack, kStack);
#endif
#if defined(__x86_64__)
  simt_switch(&machine.scheduler, fiber.context);
#else
  swapcontext(&machine.scheduler, &fiber.context);
#endif
#ifdef CLOVER_ASAN
  __sanitizer_finish_switch_fiber(machine.fake_stack, nullptr, nullptr);
#endif
}

void wake(unsigned index) {
  machine.fibers[index].state = State::kReady;
  machine.warps[index / 32].ready.push_back(index);
}

// The next thread to run: of any warp, or of the first in the block's order, so that some warps run far ahead of others.
bool take_ready(unsigned& index) {
  if (machine.shuffled) std::swap(machine.order[0], machine.order[machine.random() % machine.order.size()]);
  for (unsigned warp : machine.order) {
    std::vector<unsigned>& ready = machine.warps[warp].ready;
    if (ready.empty()) continue;
    std::swap(ready[machine.random() % ready.size()], ready.back());
    index = ready.back();
    ready.pop_back();
    return true;
  }
  return false;
}

void run_block(unsigned threads) {
  machine.alive = threads;
  machine.at_barrier = 0;
  machine.order.resize(threads / 32);
  std::iota(machine.order.begin(), machine.order.end(), 0u);
  std::shuffle(machine.order.begin(), machine.order.end(), machine.random);
  machine.shuffled = machine.random() % 2 == 0;
  for (Warp& warp : machine.warps) warp.arrived = 0;
  for (unsigned i = 0; i < threads; ++i) {
    prepare(machine.fibers[i]);
    wake(i);
  }
  while (machine.alive > 0) {
    unsigned index;
    if (take_ready(index)) {
      resume(index);
    } else if (machine.at_barrier == machine.alive) {  // threads that have ended count as arrived
      machine.at_barrier = 0;
      for (unsigned i = 0; i < threads; ++i)
        if (machine.fibers[i].state == State::kAtBarrier) wake(i);
    } else {
      fail("threads wait for others that wait elsewhere or have ended (a barrier or warp operation in divergent code)");
    }
  }
}

}  // namespace

void set_seed(uint64_t seed) { machine.random.seed(seed); }

unsigned char* shared_memory() { return machine.shared.get(); }

void note_shared_bytes(const char* kernel, size_t bytes) {
  static const char* const path = std::getenv("CLOVER_SHARED_BYTES");
  static std::map<std::string, size_t> most;
  if (path == nullptr) return;
  const auto known = most.emplace(kernel, 0);
  if (!known.second && bytes <= known.first->second) return;
  known.first->second = bytes;
  std::ofstream(path, most.size() == 1 && known.second ? std::ios::trunc : std::ios::app) << bytes << ' ' << kernel << '\n';
}

void launch(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body) {
  note_shared_bytes(kernel, shared_bytes);
  unsigned threads = block.x;
  if (block.y != 1 || block.z != 1 || threads == 0 || threads % 32 != 0 || threads > 1024)
    fail("expected a block of one dimension, a multiple of 32 threads, at most 1024");
  if (shared_bytes > 99 << 10) fail("more than 99 KB of shared memory, which not every GPU from sm_80 on has");
  machine.fibers.resize(std::max<size_t>(machine.fibers.size(), threads));
  machine.warps.resize(std::max<size_t>(machine.warps.size(), threads / 32));
  machine.body = &body;
  block_size = block;
  grid_size = grid;
  std::vector<uint64_t> order(static_cast<uint64_t>(grid.x) * grid.y * grid.z);
  std::iota(order.begin(), order.end(), uint64_t{0});
  std::shuffle(order.begin(), order.end(), machine.random);
  for (uint64_t at : order) {
    block_index = dim3(static_cast<unsigned>(at % grid.x), static_cast<unsigned>(at / grid.x % grid.y),
                       static_cast<unsigned>(at / grid.x / grid.y));
    machine.shared.reset(new unsigned char[shared_bytes]);
    std::memset(machine.shared.get(), 0xff, shared_bytes);  // not-a-number: what is read before it is written shows
    run_block(threads);
  }
  machine.shared.reset();
}

void sync_threads() {
  machine.fibers[machine.running].state = State::kAtBarrier;
  ++machine.at_barrier;
  to_scheduler(false);
}

void warp_collective(const void* operation, const void* in, size_t in_bytes, void* out, size_t out_bytes,
                     void (*combine)(const unsigned char*, unsigned char*)) {
  unsigned index = machine.running, lane = index % 32;
  Warp& warp = machine.warps[index / 32];
  if (in_bytes > kSlot || out_bytes > kSlot) fail("a collective with too much data");
  if (warp.arrived == 0) warp.operation = operation;
  if (warp.operation != operation) fail("lanes of a warp meet in different operations");
  std::memcpy(warp.in + lane * in_bytes, in, in_bytes);
  if (++warp.arrived == 32) {
    combine(warp.in, warp.out);
    warp.arrived = 0;
    for (unsigned i = index - lane; i < index - lane + 32; ++i)
      if (i != index) wake(i);
  } else {
    machine.fibers[index].state = State::kInWarp;
    to_scheduler(false);
  }
  std::memcpy(out, warp.out + lane * out_bytes, out_bytes);
}

}  // namespace simt
