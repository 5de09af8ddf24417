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

// How a bank of experts is held: the numbers in one W, and the rows and columns that share a scale.
template <class W>
struct Format;
template <>
struct Format<bf16> {  // no scales
  using Activation = bf16;
  using Scale = bf16;
  static constexpr int kNumbers = 1, kScaleRows = 1, kScaleColumns = 1 << 30;
};
template <>
struct Format<e4m3> {  // FP8; activations are rounded too
  using Activation = e4m3;
  using Scale = bf16;
  static constexpr int kNumbers = 1, kScaleRows = kQuantBlock, kScaleColumns = kQuantBlock;
};
template <>
struct Format<e2m1x2> {  // NVFP4 weights alone; each four bytes hold eight numbers in the order 0 2 4 6 1 3 5 7
  using Activation = bf16;
  using Scale = e4m3;
  static constexpr int kNumbers = 2, kScaleRows = 1, kScaleColumns = kQuantGroup;
};

// W is the type of the routed experts' banks; the router and the shared expert are always bf16. R and C are the rows and
// columns that share a scale.
template <class W>
struct MoeArguments {
  using Scale = typename Format<W>::Scale;
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
  const Scale* gate_up_scale;      // [E, 2I / R, H / C]; not in bf16
  const Scale* down_scale;         // [E, H / R, I / C]; not in bf16
  const float* gate_up_scale_2;    // [E, 2], of the whole gate and up matrices; NVFP4 only
  const float* down_scale_2;       // [E, 1]; NVFP4 only
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
