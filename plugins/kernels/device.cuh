// What every kernel stands on: warp operations, loads, launches. The same source compiles with nvcc and, under
// CLOVER_HOST, as host C++ on the harness in tests/simt.
#pragma once

#ifndef CLOVER_HOST
#include <cuda_runtime.h>
#endif

#include <cfloat>

#include "numbers.h"

#ifdef CLOVER_HOST
#define CLOVER_SHARED(name) unsigned char* name = simt::shared_memory()
#define CLOVER_UNROLL
#define CLOVER_UNROLL_BY(count)
#else
#define CLOVER_SHARED(name) extern __shared__ __align__(16) unsigned char name[]
#define CLOVER_PRAGMA(text) _Pragma(#text)
#define CLOVER_UNROLL _Pragma("unroll")
#define CLOVER_UNROLL_BY(count) CLOVER_PRAGMA(unroll count)
#endif

namespace clover {

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }
__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// ---- blocks and warps -------------------------------------------------------------------------------------------

#ifdef CLOVER_HOST
__device__ __forceinline__ void sync_threads() { simt::sync_threads(); }

__device__ __forceinline__ void sync_warp() {
  static const char name = 0;
  char none = 0;
  simt::warp_collective(&name, &none, 1, &none, 1, [](const unsigned char*, unsigned char* out) { memset(out, 0, 32); });
}

template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  struct In {
    T value;
    int lane;
  };
  static const char name = 0;
  In in{value, lane & 31};
  T out;
  simt::warp_collective(&name, &in, sizeof in, &out, sizeof out, [](const unsigned char* from, unsigned char* to) {
    for (int i = 0; i < 32; ++i) {
      In mine, theirs;
      memcpy(&mine, from + i * sizeof(In), sizeof mine);
      memcpy(&theirs, from + mine.lane * sizeof(In), sizeof theirs);
      memcpy(to + i * sizeof(T), &theirs.value, sizeof(T));
    }
  });
  return out;
}

template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return shuffle(value, static_cast<int>(threadIdx.x & 31) ^ mask);
}

__device__ __forceinline__ unsigned ballot(bool predicate) {
  static const char name = 0;
  char in = predicate;
  unsigned out;
  simt::warp_collective(&name, &in, 1, &out, sizeof out, [](const unsigned char* from, unsigned char* to) {
    unsigned bits = 0;
    for (int i = 0; i < 32; ++i) bits |= static_cast<unsigned>(from[i] != 0) << i;
    for (int i = 0; i < 32; ++i) memcpy(to + i * sizeof bits, &bits, sizeof bits);
  });
  return out;
}

__device__ __forceinline__ int count_bits(unsigned bits) { return __builtin_popcount(bits); }
#else
__device__ __forceinline__ void sync_threads() { __syncthreads(); }
__device__ __forceinline__ void sync_warp() { __syncwarp(); }
template <class T>
__device__ __forceinline__ T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
__device__ __forceinline__ unsigned ballot(bool predicate) { return __ballot_sync(0xffffffffu, predicate); }
__device__ __forceinline__ int count_bits(unsigned bits) { return __popc(bits); }
#endif

// Sum and maximum over the `Width` neighbouring lanes of a lane, a power of two; every lane gets it, in one fixed order.
template <int Width = 32>
__device__ __forceinline__ float lane_sum(float value) {
  CLOVER_UNROLL
  for (int mask = Width / 2; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}
template <int Width = 32>
__device__ __forceinline__ float lane_max(float value) {
  CLOVER_UNROLL
  for (int mask = Width / 2; mask > 0; mask /= 2) value = fmaxf(value, shuffle_xor(value, mask));
  return value;
}

// The largest value of a warp and its id (ties: the lower id), on every lane.
__device__ __forceinline__ void lane_best(float& value, int& id) {
  CLOVER_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(value, mask);
    const int other_id = shuffle_xor(id, mask);
    if (other > value || (other == value && other_id < id)) {
      value = other;
      id = other_id;
    }
  }
}

// 16 bytes in one load, and 8.
struct alignas(16) Vector16 {
  uint32_t word[4];
};
struct alignas(8) Vector8 {
  uint32_t word[2];
};
__device__ __forceinline__ Vector16 load16(const void* from) { return *static_cast<const Vector16*>(from); }

// Loads of bytes that are read once: weights, which need not stay in the first-level cache.
__device__ __forceinline__ Vector16 load16_once(const void* from) {
#ifdef CLOVER_HOST
  return load16(from);
#else
  Vector16 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(from));
  return v;
#endif
}

__device__ __forceinline__ Vector8 load8_once(const void* from) {
#ifdef CLOVER_HOST
  return *static_cast<const Vector8*>(from);
#else
  Vector8 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.word[0]), "=r"(v.word[1]) : "l"(from));
  return v;
#endif
}

// Products of two pairs of bfloat16, each rounded once; subnormal numbers count.
__device__ __forceinline__ uint32_t multiply_pairs(uint32_t a, uint32_t b) {
#ifdef CLOVER_HOST
  const auto product = [&](int shift) {
    const bf16 x{static_cast<uint16_t>(a >> shift)}, y{static_cast<uint16_t>(b >> shift)};
    return static_cast<uint32_t>(from_float<bf16>(to_float(x) * to_float(y)).bits) << shift;
  };
  return product(0) | product(16);
#else
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(0x80008000u));  // plus -0, which changes nothing
  return out;
#endif
}

// ---- launches ---------------------------------------------------------------------------------------------------

// The parameter types of a kernel.
template <class... P>
struct Parameters {};
template <class... P>
Parameters<P...> parameters_of(void (*)(P...));

template <auto kernel, class... P, class... A>
cudaError_t launch_with(Parameters<P...>, dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream, A... arguments) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
#ifdef CLOVER_HOST
  (void)stream;
  simt::launch(__PRETTY_FUNCTION__, grid, dim3(threads), shared_bytes, [=] { kernel(static_cast<P>(arguments)...); });
  return cudaSuccess;
#else
  if (shared_bytes > 48 << 10) {
    cudaError_t error = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             static_cast<int>(shared_bytes));
    if (error != cudaSuccess) return error;
  }
  kernel<<<grid, threads, shared_bytes, stream>>>(static_cast<P>(arguments)...);
  return cudaGetLastError();
#endif
}

// Runs a kernel on `stream`; arguments are converted to the kernel's parameter types.
template <auto kernel, class... A>
cudaError_t launch(dim3 grid, unsigned threads, size_t shared_bytes, cudaStream_t stream, A... arguments) {
  return launch_with<kernel>(decltype(parameters_of(kernel)){}, grid, threads, shared_bytes, stream, arguments...);
}

constexpr size_t align16(size_t bytes) { return (bytes + 15) / 16 * 16; }

// Hands out parts of a workspace; with a null base it counts the bytes that are needed.
struct Workspace {
  unsigned char* base;
  size_t used = 0;
  template <class T>
  T* take(size_t count) {
    T* part = base == nullptr ? nullptr : reinterpret_cast<T*>(base + used);
    used += align16(count * sizeof(T));
    return part;
  }
};

#define CLOVER_TRY(expression)                    \
  do {                                            \
    cudaError_t error_ = (expression);            \
    if (error_ != cudaSuccess) return error_;     \
  } while (false)

}  // namespace clover
