// clover::GdnBlockScan: everything between a Gated DeltaNet layer's input projections and its gated norm.
// The formulas are in docs/block-step.md; the reference is clover_trt/model/gdn.py.
#pragma once

#include "numbers.h"

namespace clover {

struct GdnShape {
  int rows, tokens;            // B, T
  int k_heads, v_heads;        // value head h reads the keys of head h * k_heads / v_heads
  int k_dim, v_dim;            // 16, 32, 64 or 128; v_dim 16, 32, 64 or 128
  int kernel, right_kernel;    // taps of the two convolutions, at most 8
  int block;                   // most noisy tokens of a row, at most 64
  __host__ __device__ int channels() const { return 2 * k_heads * k_dim + v_heads * v_dim; }
};

// T is float or bf16. The states may be updated in place: `conv_state_out == conv_state`, and so for the recurrent one.
template <class T>
struct GdnArguments {
  const T* qkv;                // [B, T, C]
  const T* a;                  // [B, T, v_heads], input of the decay
  const T* b;                  // [B, T, v_heads], input of the write strength
  const T* conv;               // [C, 1, kernel], oldest input first
  const T* right_conv;         // [C, 1, right_kernel], position i + 1 first
  const float* A_log;          // [v_heads], and so the next four
  const float* dt_bias;
  const float* temperature;
  const float* memory_bias;
  const float* memory_slope;
  const T* conv_state;         // [B, C, kernel - 1]
  const float* recurrent_state;  // [B, v_heads, k_dim, v_dim]
  Lengths lengths;
  T* out;                      // [B, T, v_heads, v_dim]; zero at padding
  T* conv_state_out;
  float* recurrent_state_out;
};

// Null when the kernels can run this shape, otherwise what they expect.
const char* gdn_unsupported(const GdnShape& shape);

size_t gdn_workspace(const GdnShape& shape);

template <class T>
cudaError_t gdn_block_scan(const GdnShape& shape, const GdnArguments<T>& arguments, void* workspace, cudaStream_t stream);

}  // namespace clover
