// A small SIMT harness: the kernel sources compile as host C++ and run thread by thread.
//
// Each thread of a block is a fiber. A fiber runs until it meets a barrier or an operation of its warp; then any other
// fiber that can run goes on, in an order drawn from a seed: now any, now those of one warp as far as they get before
// another's. Between two barriers threads therefore see each other's writes in all kinds of orders, and a missing barrier
// gives a wrong result under some seed. Blocks run one after another, in a drawn order too. A barrier that not every thread reaches ends the program with a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

struct alignas(16) float4 {
  float x, y, z, w;
};

inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid argument"; }

namespace simt {

extern thread_local dim3 block_index, block_size, grid_size;
extern thread_local unsigned thread_index;  // blocks have one dimension

// Runs `body` once for each thread of each block.
// `kernel` names the kernel, as __PRETTY_FUNCTION__ does. The most shared memory that each one asks for is appended to the file
// $CLOVER_SHARED_BYTES, when it is set.
void launch(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>& body);

// Seed of the order of threads and blocks.
void set_seed(uint64_t seed);

// Bytes of shared memory that the block was launched with; a touch outside is seen by AddressSanitizer.
unsigned char* shared_memory();

void sync_threads();

// A collective of one warp: every lane hands in `in`; once all 32 have, `combine` sees the inputs of all and writes the
// outputs of all. `operation` names it: lanes that meet in different operations end the program.
void warp_collective(const void* operation, const void* in, size_t in_bytes, void* out, size_t out_bytes,
                     void (*combine)(const unsigned char* in, unsigned char* out));

}  // namespace simt

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define threadIdx (dim3(simt::thread_index))
#define blockIdx (simt::block_index)
#define blockDim (simt::block_size)
#define gridDim (simt::grid_size)
