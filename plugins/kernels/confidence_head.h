// clover::ConfidenceHead: language-model head, logit controls, and the best candidates with their log-probabilities.
// The formulas are in docs/block-step.md; the reference is clover_trt/model/head.py.
#pragma once

#include "numbers.h"

namespace clover {

struct HeadShape {
  int rows, positions;   // B, L
  int hidden;            // H, a multiple of 32
  int vocabulary;        // V
  int history, biases;   // R, A
  int candidates;        // k, 1 to 64
};

// Ids of a row are distinct; an unused entry holds an id whose `vocab_mask` is minus infinity.
struct HeadArguments {
  const bf16* hidden;               // [B, L, H], after the last norm
  const bf16* weight;               // [V, H]
  const float* vocab_mask;          // [V], 0 or minus infinity
  const int64_t* history_ids;       // [B, R]
  const float* history_counts;      // [B, R]
  const float* repetition_penalty;  // [B]
  const float* presence_penalty;    // [B]
  const float* frequency_penalty;   // [B]
  const int64_t* bias_ids;          // [B, A]
  const float* bias_values;         // [B, L, A]
  int64_t* candidate_ids;           // [B, L, k], by falling log-probability, ties to the lower id
  float* candidate_logprobs;        // [B, L, k]
  float* logits;                    // [B, L, V] before any control, or null
};

// Null when the kernels can run this shape, otherwise what they expect.
const char* head_unsupported(const HeadShape& shape);

size_t head_workspace(const HeadShape& shape);

cudaError_t confidence_head(const HeadShape& shape, const HeadArguments& arguments, void* workspace, cudaStream_t stream);

}  // namespace clover
