// clover::ExpertSubsetMoe: routing inside each row's expert subset, the routed experts and the shared one.
// The formulas are in docs/block-step.md; the reference is clover_trt/model/moe.py.
#pragma once

#include "numbers.h"

namespace clover {

struct MoeShape {
  int rows, tokens;         // B, T
  int hidden;               // H
  int experts, top_k;       // E, at most 512; K, at most 16
  int width, shared_width;  // I and S, the experts' inner sizes
  int block;                // most noisy tokens of a row, at most 64
};

// W is bf16, or e4m3 with a scale for each block of 128 x 128; the router and the shared expert are always bf16.
template <class W>
struct MoeArguments {
  const bf16* x;                   // [B, T, H]
  const bf16* router;              // [E, H]
  const W* gate_up;                // [E, 2I, H], gate rows first
  const W* down;                   // [E, H, I]
  const bf16* shared_gate;         // [S, H]
  const bf16* shared_up;           // [S, H]
  const bf16* shared_down;         // [H, S]
  const bf16* shared_scalar_gate;  // [1, H]
  Lengths lengths;
  const float* expert_mass;        // [B]
  const bf16* gate_up_scale;       // [E, 2I / 128, H / 128]; e4m3 only
  const bf16* down_scale;          // [E, H / 128, I / 128]; e4m3 only
  bf16* out;                       // [B, T, H]; zero at padding
  int64_t* distinct_experts;       // [1]
};

// Null when the kernels can run this shape, otherwise what they expect.
template <class W>
const char* moe_unsupported(const MoeShape& shape);

template <class W>
size_t moe_workspace(const MoeShape& shape);

template <class W>
cudaError_t expert_subset_moe(const MoeShape& shape, const MoeArguments<W>& arguments, void* workspace, cudaStream_t stream);

}  // namespace clover
