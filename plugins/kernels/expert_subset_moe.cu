// One kernel after another:
//   moe_logits      router logits and the shared expert's scalar gate
//   moe_subset      the experts that a row's noisy tokens may use; a block for each row
//   moe_route       experts and weights of each token; a warp for each
//   moe_count, moe_fill   tokens grouped by expert, in order; a warp for each expert
//   moe_quantize    e4m3 only: activations, a scale for each token and group of 128
//   moe_gate_up     silu(gate) * up of each expert's tokens; a block for 16 rows of each
//   moe_down        the way back; a block for 32 rows
//   moe_combine     weighted sum over a token's experts, and the shared expert
// A block of moe_gate_up or moe_down takes all tokens of its expert, so a byte of the weights is read from memory once
// (beyond 32 tokens of one expert it is read again from the second-level cache). No atomics: the order of every sum is fixed.
#include "expert_subset_moe.h"

#include <type_traits>

#include "stream.cuh"

namespace clover {

namespace {

template <class W>
constexpr bool kIsFp8 = std::is_same_v<W, e4m3>;
template <class W>
constexpr bool kIsFp4 = std::is_same_v<W, e2m1x2>;

constexpr int kTiles = 4;  // token tiles of a block: 32 tokens at a time
constexpr int kTokens = 8 * kTiles;
__host__ __device__ constexpr int words(int experts) { return (experts + 31) / 32; }  // of a bit an expert

// Blocks that a multiprocessor is to hold; before sm_89 e4m3 is widened in registers, which takes twice as many.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
template <class W>
constexpr int kBlocks = kIsFp8<W> ? 1 : 2;
#else
template <class W>
constexpr int kBlocks = 2;
#endif
template <class W>
constexpr int kExpertTiles = kIsFp8<W> || kIsFp4<W> ? 2 : 4;  // sums of a group (FP8) and widened weights (NVFP4) take registers
constexpr int kMostExperts = 512, kMostTopK = 16, kPerLane = kMostExperts / 32;
constexpr int kRouteThreads = 256;

struct Plan {
  float* logits;     // [N, E]
  float* scalar;     // [N], before the sigmoid
  uint32_t* kept;    // [B, words], bit e: the row's noisy tokens may use expert e
  float* weight;     // [N, K]
  int32_t* expert;   // [N, K], -1 at padding
  int32_t* count;    // [E + 1] tokens of each expert; the shared one last
  int32_t* offset;   // [E + 1] where its tokens begin in `list`; the shared one has its own list
  int32_t* list;     // [N K], token * K + slot
  int32_t* tokens;   // [N], those that are not padding
  bf16* inner;       // [N K, I], silu(gate) * up, grouped by expert
  bf16* shared_inner;  // [N, S]
  bf16* result;      // [N K, H] by token * K + slot
  bf16* shared_result;  // [N, H]
  e4m3* x8;          // [N, H], and its scales [N, H / 128]
  float* x8_scale;
  e4m3* inner8;      // [N K, I], and its scales [N K, I / 128]
  float* inner8_scale;
};

template <class W>
size_t lay_out(const MoeShape& s, void* workspace, Plan& p) {
  Workspace space{static_cast<unsigned char*>(workspace)};
  const size_t N = static_cast<size_t>(s.rows) * s.tokens, pairs = N * s.top_k;
  p.logits = space.take<float>(N * s.experts);
  p.scalar = space.take<float>(N);
  p.kept = space.take<uint32_t>(static_cast<size_t>(s.rows) * words(s.experts));
  p.weight = space.take<float>(pairs);
  p.expert = space.take<int32_t>(pairs);
  p.count = space.take<int32_t>(s.experts + 1);
  p.offset = space.take<int32_t>(s.experts + 1);
  p.list = space.take<int32_t>(pairs);
  p.tokens = space.take<int32_t>(N);
  p.inner = space.take<bf16>(pairs * s.width);
  p.shared_inner = space.take<bf16>(N * s.shared_width);
  p.result = space.take<bf16>(pairs * s.hidden);
  p.shared_result = space.take<bf16>(N * s.hidden);
  if constexpr (kIsFp8<W>) {
    p.x8 = space.take<e4m3>(N * s.hidden);
    p.x8_scale = space.take<float>(N * (s.hidden / kQuantBlock));
    p.inner8 = space.take<e4m3>(pairs * s.width);
    p.inner8_scale = space.take<float>(pairs * (s.width / kQuantBlock));
  }
  return space.used;
}

__device__ __forceinline__ int row_end(const Lengths& lengths, int row) { return lengths.commit[row] + lengths.noisy[row]; }

// ---- routing ----------------------------------------------------------------------------------------------------

// The last block x has the scalar gate, the others 32 rows of the router each; block y has 32 tokens.
__global__ void __launch_bounds__(kStreamThreads) moe_logits(MoeShape s, const bf16* x, const bf16* router, const bf16* scalar_gate, Plan p) {
  CLOVER_SHARED(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  const int N = s.rows * s.tokens, first = blockIdx.y * kTokens, g = threadIdx.x % 32 / 4;
  const int here = N - first < kTokens ? N - first : kTokens;
  const bool scalar = static_cast<int>(blockIdx.x) == words(s.experts);
  const bf16* row[4];
  CLOVER_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int e = static_cast<int>(blockIdx.x) * kStreamRows + 8 * i + g;
    row[i] = scalar ? scalar_gate : router + static_cast<size_t>(e < s.experts ? e : s.experts - 1) * s.hidden;
  }
  const bf16* token[kTiles];
  CLOVER_UNROLL
  for (int n = 0; n < kTiles; ++n) {
    const int at = 8 * n + g < here ? 8 * n + g : 0;
    token[n] = x + static_cast<size_t>(first + at) * s.hidden;
  }
  StreamSums<kTiles> sums;
  clear(sums);
  stream_product<kTiles>(sums, row, token, (here + 7) / 8, s.hidden);
  stream_gather<kTiles>(sums, shared);
  for (int i = threadIdx.x; i < here * kStreamRows; i += kStreamThreads) {
    const int at = i / kStreamRows, r = i % kStreamRows;
    const float sum = stream_total<kTiles>(shared, r, at);
    const int e = static_cast<int>(blockIdx.x) * kStreamRows + r;
    if (scalar && r == 0) p.scalar[first + at] = sum;
    if (!scalar && e < s.experts) p.logits[static_cast<size_t>(first + at) * s.experts + e] = sum;
  }
}

// Softmax of a token's logits; lane l holds experts l, l + 32, ...
__device__ __forceinline__ void load_probabilities(float (&probability)[kPerLane], const float* logits, int experts) {
  const int lane = threadIdx.x % 32;
  float most = -INFINITY, sum = 0.0f;
  CLOVER_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    probability[i] = lane + 32 * i < experts ? logits[lane + 32 * i] : -INFINITY;
    most = fmaxf(most, probability[i]);
  }
  most = lane_max(most);
  CLOVER_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    probability[i] = lane + 32 * i < experts ? expf(probability[i] - most) : -1.0f;
    if (probability[i] > 0.0f) sum += probability[i];
  }
  sum = 1.0f / lane_sum(sum);
  CLOVER_UNROLL
  for (int i = 0; i < kPerLane; ++i)
    if (probability[i] > 0.0f) probability[i] *= sum;
}

// Takes out the largest (ties: the lower expert); the same answer on every lane.
__device__ __forceinline__ int take_best(float (&probability)[kPerLane], float& best) {
  const int lane = threadIdx.x % 32;
  best = -2.0f;
  int at = 0;
  CLOVER_UNROLL
  for (int i = 0; i < kPerLane; ++i) {
    if (probability[i] > best) {
      best = probability[i];
      at = lane + 32 * i;
    }
  }
  lane_best(best, at);
  CLOVER_UNROLL
  for (int i = 0; i < kPerLane; ++i)
    if (at == lane + 32 * i) probability[i] = -2.0f;
  return at;
}

struct SubsetShared {
  float candidate[64 * kMostTopK];
  int candidate_expert[64 * kMostTopK];
  float score[kMostExperts], ranked[kMostExperts];
  int order[kMostExperts];
  unsigned char keep[kMostExperts];
};

__global__ void __launch_bounds__(kRouteThreads) moe_subset(MoeShape s, Lengths lengths, const float* mass, Plan p) {
  CLOVER_SHARED(memory);
  SubsetShared& m = *reinterpret_cast<SubsetShared*>(memory);
  const int row = blockIdx.x, commit = lengths.commit[row], noisy = lengths.noisy[row];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int t = warp; t < noisy; t += kRouteThreads / 32) {
    float probability[kPerLane];
    load_probabilities(probability, p.logits + static_cast<size_t>(row * s.tokens + commit + t) * s.experts, s.experts);
    for (int slot = 0; slot < s.top_k; ++slot) {
      float best;
      const int expert = take_best(probability, best);
      if (lane == 0) {
        m.candidate[t * s.top_k + slot] = best;
        m.candidate_expert[t * s.top_k + slot] = expert;
      }
    }
  }
  sync_threads();
  for (int e = threadIdx.x; e < s.experts; e += kRouteThreads) {
    float sum = 0.0f;
    for (int i = 0; i < noisy * s.top_k; ++i)
      if (m.candidate_expert[i] == e) sum += m.candidate[i];
    m.score[e] = sum;
  }
  sync_threads();
  for (int e = threadIdx.x; e < s.experts; e += kRouteThreads) {
    const float mine = m.score[e];
    int rank = 0;
    for (int other = 0; other < s.experts; ++other) rank += m.score[other] > mine || (m.score[other] == mine && other < e);
    m.ranked[rank] = mine;
    m.order[rank] = e;
  }
  sync_threads();
  if (threadIdx.x == 0) {
    float total = 0.0f, before = 0.0f;
    for (int rank = 0; rank < s.experts; ++rank) total += m.ranked[rank];
    for (int rank = 0; rank < s.experts; ++rank) {
      const bool wanted = (before < mass[row] * total || mass[row] >= 1.0f) && m.ranked[rank] > 0.0f;
      m.keep[m.order[rank]] = wanted || rank < s.top_k;
      before += m.ranked[rank];
    }
  }
  sync_threads();
  for (int word = warp; word < words(s.experts); word += kRouteThreads / 32) {
    const unsigned bits = ballot(32 * word + lane < s.experts && m.keep[32 * word + lane] != 0);
    if (lane == 0) p.kept[row * words(s.experts) + word] = bits;
  }
}

__global__ void __launch_bounds__(kRouteThreads) moe_route(MoeShape s, Lengths lengths, Plan p) {
  const int at = (blockIdx.x * kRouteThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (at >= s.rows * s.tokens) return;
  const int row = at / s.tokens, token = at % s.tokens;
  if (token >= row_end(lengths, row)) {
    if (lane < s.top_k) p.expert[at * s.top_k + lane] = -1;
    return;
  }
  float probability[kPerLane];
  load_probabilities(probability, p.logits + static_cast<size_t>(at) * s.experts, s.experts);
  if (token >= lengths.commit[row]) {
    const uint32_t* kept = p.kept + row * words(s.experts);
    CLOVER_UNROLL
    for (int i = 0; i < kPerLane; ++i)
      if (lane + 32 * i < s.experts && !(kept[i] >> lane & 1u)) probability[i] = -1.0f;
  }
  float mine = 0.0f, sum = 0.0f;
  for (int slot = 0; slot < s.top_k; ++slot) {
    float best;
    const int expert = take_best(probability, best);
    sum += best;
    if (lane == slot) {
      mine = best;
      p.expert[at * s.top_k + slot] = expert;
    }
  }
  if (lane < s.top_k) p.weight[at * s.top_k + lane] = mine / sum;
}

__global__ void __launch_bounds__(kRouteThreads) moe_count(MoeShape s, Lengths lengths, Plan p) {
  const int e = (blockIdx.x * kRouteThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (e > s.experts) return;
  const int N = s.rows * s.tokens, total = e < s.experts ? N * s.top_k : N;
  int count = 0;
  for (int begin = 0; begin < total; begin += 32) {
    const int i = begin + lane;
    const bool mine = i < total && (e < s.experts ? p.expert[i] == e : i % s.tokens < row_end(lengths, i / s.tokens));
    const unsigned bits = ballot(mine);
    if (e == s.experts && mine) p.tokens[count + count_bits(bits & ((1u << lane) - 1u))] = i;
    count += count_bits(bits);
  }
  if (lane == 0) p.count[e] = count;
}

__global__ void __launch_bounds__(kRouteThreads) moe_fill(MoeShape s, Plan p, int64_t* distinct) {
  const int e = (blockIdx.x * kRouteThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (e > s.experts) return;
  int before = 0, used = 0;  // of the experts that this lane looks at
  for (int other = lane; other < s.experts; other += 32) {
    if (other < e) before += p.count[other];
    used += p.count[other] > 0;
  }
  CLOVER_UNROLL
  for (int mask = 16; mask > 0; mask /= 2) {
    before += shuffle_xor(before, mask);
    used += shuffle_xor(used, mask);
  }
  if (e == s.experts) {
    if (lane == 0) {
      p.offset[e] = 0;
      *distinct = used;
    }
    return;
  }
  if (lane == 0) p.offset[e] = before;
  const int pairs = s.rows * s.tokens * s.top_k;
  for (int begin = 0; begin < pairs; begin += 32) {
    const bool mine = begin + lane < pairs && p.expert[begin + lane] == e;
    const unsigned bits = ballot(mine);
    if (mine) p.list[before + count_bits(bits & ((1u << lane) - 1u))] = begin + lane;
    before += count_bits(bits);
  }
}

// ---- experts ----------------------------------------------------------------------------------------------------

// A warp for each token and group of 128: scale = largest / 448, so that the largest number stays in range.
__global__ void __launch_bounds__(kRouteThreads) moe_quantize(const bf16* from, e4m3* to, float* scale, int groups) {
  const int at = (blockIdx.x * kRouteThreads + threadIdx.x) / 32, lane = threadIdx.x % 32;
  if (at >= groups) return;
  float value[4], most = 0.0f;
  CLOVER_UNROLL
  for (int i = 0; i < 4; ++i) {
    value[i] = to_float(from[static_cast<size_t>(at) * kQuantBlock + 4 * lane + i]);
    most = fmaxf(most, fabsf(value[i]));
  }
  most = lane_max(most);
  const float unit = most > 0.0f ? most / 448.0f : 1.0f;
  CLOVER_UNROLL
  for (int i = 0; i < 4; ++i) to[static_cast<size_t>(at) * kQuantBlock + 4 * lane + i] = from_float<e4m3>(value[i] / unit);
  if (lane == 0) scale[at] = unit;
}

// A matrix of each expert, one after another.
template <class W>
struct Matrices {
  using F = Format<W>;
  const W* values;
  const typename F::Scale* scales;
  const float* whole;  // scales of whole matrices
  size_t stride, scale_stride, whole_stride;  // from one expert to the next
  int columns;

  __device__ __forceinline__ const W* row(int expert, int r) const {
    return values + expert * stride + static_cast<size_t>(r) * columns / F::kNumbers;
  }
  __device__ __forceinline__ const typename F::Scale* row_scale(int expert, int r) const {
    return scales + expert * scale_stride + static_cast<size_t>(r / F::kScaleRows) * (columns / F::kScaleColumns);
  }
  // What a sum of the streamed product is to be multiplied by.
  __device__ __forceinline__ float unit(int expert) const {
    if constexpr (kIsFp4<W>) return whole[expert * whole_stride] * kE2m1Unit;
    return 1.0f;
  }
};

// The matrices `rows` x `columns` of a bank whose experts have `parts` of them, beginning at one of those.
template <class W>
Matrices<W> matrices(const W* values, const typename Format<W>::Scale* scales, const float* whole, size_t rows, size_t columns, size_t parts,
                     size_t part) {
  using F = Format<W>;
  const size_t each = rows * columns / F::kNumbers, scales_each = rows / F::kScaleRows * (columns / F::kScaleColumns);
  return {values + part * each, scales + part * scales_each, kIsFp4<W> ? whole + part : nullptr,
          parts * each,         parts * scales_each,         parts,
          static_cast<int>(columns)};
}

// The weights of one layer's experts (or of the shared one), and the tokens that use each.
template <class W>
struct Bank {
  using Activation = typename Format<W>::Activation;
  Matrices<W> gate, up, down;
  int width;
  const int32_t *count, *offset, *list;
  int top_k;
  const Activation* x;
  const float* x_scale;
  const Activation* inner;
  const float* inner_scale;
  bf16 *inner_out, *result;
};

template <class W>
constexpr size_t expert_shared() {
  return stream_shared<kExpertTiles<W>>() + sizeof(int) * 8 * kExpertTiles<W>;
}

// Sums of 32 rows against `here` tokens of an expert, gathered in `shared`; `line_at(i)` is the line of token i in `lines`.
template <class W, class LineAt>
__device__ __forceinline__ void expert_product(float* shared, const W* const (&row)[4], const typename Format<W>::Scale* const (&row_scale)[4],
                                               const typename Format<W>::Activation* lines, const float* line_scales, int depth, int here,
                                               LineAt line_at) {
  constexpr int Tiles = kExpertTiles<W>;
  int* const line = reinterpret_cast<int*>(shared + stream_shared<Tiles>() / sizeof(float));
  const int g = threadIdx.x % 32 / 4;
  if (threadIdx.x < 8 * Tiles) line[threadIdx.x] = line_at(static_cast<int>(threadIdx.x) < here ? static_cast<int>(threadIdx.x) : 0);
  sync_threads();
  const typename Format<W>::Activation* token[Tiles];
  CLOVER_UNROLL
  for (int n = 0; n < Tiles; ++n) token[n] = lines + static_cast<size_t>(line[8 * n + g]) * depth;
  StreamSums<Tiles> sums;
  clear(sums);
  if constexpr (kIsFp8<W>) {
    const int groups = depth / kQuantBlock, c = threadIdx.x % 4;
    stream_product<Tiles>(sums, row, row_scale, token, (here + 7) / 8, depth, [&](int n, int i, int group) {
      return line_scales[static_cast<size_t>(line[8 * n + 2 * c + i]) * groups + group];
    });
  } else if constexpr (kIsFp4<W>) {
    stream_product<Tiles>(sums, row, row_scale, token, (here + 7) / 8, depth);
  } else {
    stream_product<Tiles>(sums, row, token, (here + 7) / 8, depth);
  }
  stream_gather<Tiles>(sums, shared);
}

// Block x: 16 gate rows and the same 16 up rows. Block y: the expert.
template <class W>
__global__ void __launch_bounds__(kStreamThreads, kBlocks<W>) moe_gate_up(Bank<W> b, int hidden) {
  CLOVER_SHARED(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  constexpr int Tiles = kExpertTiles<W>;
  const int e = blockIdx.y, count = b.count[e], offset = b.offset[e], r0 = blockIdx.x * 16, g = threadIdx.x % 32 / 4;
  const W* row[4];
  const typename Format<W>::Scale* row_scale[4];
  CLOVER_UNROLL
  for (int i = 0; i < 4; ++i) {
    const int r = r0 + 8 * (i % 2) + g, inside = r < b.width ? r : b.width - 1;
    row[i] = (i < 2 ? b.gate : b.up).row(e, inside);
    row_scale[i] = (i < 2 ? b.gate : b.up).row_scale(e, inside);
  }
  const float gate_unit = b.gate.unit(e), up_unit = b.up.unit(e);
  for (int begin = 0; begin < count; begin += 8 * Tiles) {
    const int here = count - begin < 8 * Tiles ? count - begin : 8 * Tiles;
    expert_product<W>(shared, row, row_scale, b.x, b.x_scale, hidden, here, [&](int i) { return b.list[offset + begin + i] / b.top_k; });
    for (int i = threadIdx.x; i < here * 16; i += kStreamThreads) {
      if (r0 + i % 16 >= b.width) continue;
      const float up_sum = stream_total<Tiles>(shared, 16 + i % 16, i / 16) * up_unit;
      const float value = silu(stream_total<Tiles>(shared, i % 16, i / 16) * gate_unit) * up_sum;
      b.inner_out[static_cast<size_t>(offset + begin + i / 16) * b.width + r0 + i % 16] = from_float<bf16>(value);
    }
  }
}

// Block x: 32 rows of the way back. Block y: the expert.
template <class W>
__global__ void __launch_bounds__(kStreamThreads, kBlocks<W>) moe_down(Bank<W> b, int hidden) {
  CLOVER_SHARED(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  constexpr int Tiles = kExpertTiles<W>;
  const int e = blockIdx.y, count = b.count[e], offset = b.offset[e], r0 = blockIdx.x * kStreamRows, g = threadIdx.x % 32 / 4;
  const W* row[4];
  const typename Format<W>::Scale* row_scale[4];
  CLOVER_UNROLL
  for (int i = 0; i < 4; ++i) {
    row[i] = b.down.row(e, r0 + 8 * i + g);
    row_scale[i] = b.down.row_scale(e, r0 + 8 * i + g);
  }
  const float unit = b.down.unit(e);
  for (int begin = 0; begin < count; begin += 8 * Tiles) {
    const int here = count - begin < 8 * Tiles ? count - begin : 8 * Tiles;
    expert_product<W>(shared, row, row_scale, b.inner, b.inner_scale, b.width, here, [&](int i) { return offset + begin + i; });
    for (int i = threadIdx.x; i < here * kStreamRows; i += kStreamThreads) {
      const float value = stream_total<Tiles>(shared, i % kStreamRows, i / kStreamRows) * unit;
      b.result[static_cast<size_t>(b.list[offset + begin + i / kStreamRows]) * hidden + r0 + i % kStreamRows] = from_float<bf16>(value);
    }
  }
}

__global__ void __launch_bounds__(256) moe_combine(MoeShape s, Lengths lengths, Plan p, bf16* out) {
  const int at = blockIdx.x;
  const bool padding = at % s.tokens >= row_end(lengths, at / s.tokens);
  const float scalar = padding ? 0.0f : sigmoid(p.scalar[at]);
  for (int h = threadIdx.x; h < s.hidden; h += 256) {
    float sum = 0.0f;
    if (!padding) {
      for (int slot = 0; slot < s.top_k; ++slot) {
        const size_t pair = static_cast<size_t>(at) * s.top_k + slot;
        sum += p.weight[pair] * to_float(p.result[pair * s.hidden + h]);
      }
      sum += scalar * to_float(p.shared_result[static_cast<size_t>(at) * s.hidden + h]);
    }
    out[static_cast<size_t>(at) * s.hidden + h] = from_float<bf16>(sum);
  }
}

template <class W>
cudaError_t run_gate_up(const Bank<W>& b, int experts, int hidden, cudaStream_t stream) {
  const unsigned e = static_cast<unsigned>(experts);
  return launch<moe_gate_up<W>>(dim3(static_cast<unsigned>((b.width + 15) / 16), e), kStreamThreads, expert_shared<W>(), stream, b, hidden);
}

template <class W>
cudaError_t run_down(const Bank<W>& b, int experts, int hidden, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(hidden / kStreamRows), static_cast<unsigned>(experts));
  return launch<moe_down<W>>(grid, kStreamThreads, expert_shared<W>(), stream, b, hidden);
}

cudaError_t quantize(const bf16* from, e4m3* to, float* scale, size_t numbers, cudaStream_t stream) {
  const int groups = static_cast<int>(numbers / kQuantBlock), each = kRouteThreads / 32;
  return launch<moe_quantize>(dim3(static_cast<unsigned>((groups + each - 1) / each)), kRouteThreads, 0, stream, from, to, scale, groups);
}

}  // namespace

template <class W>
const char* moe_unsupported(const MoeShape& s) {
  if (s.experts < 1 || s.experts > kMostExperts) return "1 to 512 experts";
  if (s.top_k < 1 || s.top_k > kMostTopK || s.top_k > s.experts) return "1 to 16 experts a token, no more than there are";
  if (s.block < 1 || s.block > 64) return "blocks of 1 to 64 tokens";
  if (s.hidden % 32 != 0 || s.width % 8 != 0 || s.shared_width % 8 != 0) return "a hidden size that is a multiple of 32, widths of 8";
  if (kIsFp4<W> && (s.hidden % kQuantGroup != 0 || s.width % kQuantGroup != 0))
    return "a hidden size and an expert width that are multiples of 16, for groups of 16";
  if (kIsFp8<W> && (s.hidden % kQuantBlock != 0 || s.width % kQuantBlock != 0))
    return "a hidden size and an expert width that are multiples of 128, for blocks of 128 x 128";
  return nullptr;
}

template <class W>
size_t moe_workspace(const MoeShape& shape) {
  Plan p;
  return lay_out<W>(shape, nullptr, p);
}

template <class W>
cudaError_t expert_subset_moe(const MoeShape& s, const MoeArguments<W>& x, void* workspace, cudaStream_t stream) {
  if (moe_unsupported<W>(s) != nullptr) return cudaErrorInvalidValue;
  Plan p;
  lay_out<W>(s, workspace, p);
  const int N = s.rows * s.tokens, warps = kRouteThreads / 32;
  const size_t H = s.hidden, I = s.width, S = s.shared_width, pairs = static_cast<size_t>(N) * s.top_k;
  const unsigned groups = static_cast<unsigned>((s.experts + 1 + warps - 1) / warps);
  CLOVER_TRY(launch<moe_logits>(dim3(static_cast<unsigned>(words(s.experts) + 1), static_cast<unsigned>((N + kTokens - 1) / kTokens)),
                    kStreamThreads, stream_shared<kTiles>(), stream, s, x.x, x.router, x.shared_scalar_gate, p));
  CLOVER_TRY(launch<moe_subset>(dim3(static_cast<unsigned>(s.rows)), kRouteThreads, sizeof(SubsetShared), stream, s, x.lengths, x.expert_mass, p));
  CLOVER_TRY(launch<moe_route>(dim3(static_cast<unsigned>((N + warps - 1) / warps)), kRouteThreads, 0, stream, s, x.lengths, p));
  CLOVER_TRY(launch<moe_count>(dim3(groups), kRouteThreads, 0, stream, s, x.lengths, p));
  CLOVER_TRY(launch<moe_fill>(dim3(groups), kRouteThreads, 0, stream, s, p, x.distinct_experts));

  Bank<W> routed{};
  routed.gate = matrices(x.gate_up, x.gate_up_scale, x.gate_up_scale_2, I, H, 2, 0);
  routed.up = matrices(x.gate_up, x.gate_up_scale, x.gate_up_scale_2, I, H, 2, 1);
  routed.down = matrices(x.down, x.down_scale, x.down_scale_2, H, I, 1, 0);
  routed.width = s.width;
  routed.count = p.count;
  routed.offset = p.offset;
  routed.list = p.list;
  routed.top_k = s.top_k;
  routed.inner_out = p.inner;
  routed.result = p.result;
  if constexpr (kIsFp8<W>) {
    routed.x = p.x8;
    routed.x_scale = p.x8_scale;
    routed.inner = p.inner8;
    routed.inner_scale = p.inner8_scale;
    CLOVER_TRY(quantize(x.x, p.x8, p.x8_scale, N * H, stream));
    CLOVER_TRY(run_gate_up(routed, s.experts, s.hidden, stream));
    CLOVER_TRY(quantize(p.inner, p.inner8, p.inner8_scale, pairs * I, stream));
  } else {
    routed.x = x.x;
    routed.inner = p.inner;
    CLOVER_TRY(run_gate_up(routed, s.experts, s.hidden, stream));
  }
  CLOVER_TRY(run_down(routed, s.experts, s.hidden, stream));

  Bank<bf16> shared{};
  shared.gate = matrices<bf16>(x.shared_gate, nullptr, nullptr, S, H, 1, 0);
  shared.up = matrices<bf16>(x.shared_up, nullptr, nullptr, S, H, 1, 0);
  shared.down = matrices<bf16>(x.shared_down, nullptr, nullptr, H, S, 1, 0);
  shared.width = s.shared_width;
  shared.count = p.count + s.experts;
  shared.offset = p.offset + s.experts;
  shared.list = p.tokens;
  shared.top_k = 1;
  shared.x = x.x;
  shared.inner = shared.inner_out = p.shared_inner;
  shared.result = p.shared_result;
  CLOVER_TRY(run_gate_up(shared, 1, s.hidden, stream));
  CLOVER_TRY(run_down(shared, 1, s.hidden, stream));
  return launch<moe_combine>(dim3(static_cast<unsigned>(N)), 256, 0, stream, s, x.lengths, p, x.out);
}

#define CLOVER_INSTANTIATE(W)                                     \
  template const char* moe_unsupported<W>(const MoeShape&);       \
  template size_t moe_workspace<W>(const MoeShape&);              \
  template cudaError_t expert_subset_moe<W>(const MoeShape&, const MoeArguments<W>&, void*, cudaStream_t);
CLOVER_INSTANTIATE(bf16)
CLOVER_INSTANTIATE(e4m3)
CLOVER_INSTANTIATE(e2m1x2)

}  // namespace clover
