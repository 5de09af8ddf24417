// Two kernels: head_part takes 128 rows of the vocabulary against 32 or 64 positions at a time, applies the controls to the
// logits in shared memory and keeps of each position the largest logit, the sum of exponentials and the best candidates;
// head_join puts the parts of a position together. The logits themselves go to memory only when asked for.
#include "confidence_head.h"

#include "stream.cuh"

namespace clover {

namespace {

constexpr int kVocabularyRows = 128;
constexpr int kMostCandidates = 64;
constexpr int kJoinThreads = 256;

struct Parts {
  float* most;     // [parts, N]
  float* sum;      // [parts, N], of exp(logit - most)
  float* value;    // [parts, N, k'], k' = candidates of a part, falling
  int32_t* id;     // [parts, N, k']
};

__host__ __device__ constexpr int parts_of(int vocabulary) { return (vocabulary + kVocabularyRows - 1) / kVocabularyRows; }

size_t lay_out(const HeadShape& s, void* workspace, Parts& p) {
  Workspace space{static_cast<unsigned char*>(workspace)};
  const size_t all = static_cast<size_t>(parts_of(s.vocabulary)) * s.rows * s.positions;
  p.most = space.take<float>(all);
  p.sum = space.take<float>(all);
  p.value = space.take<float>(all * s.candidates);
  p.id = space.take<int32_t>(all * s.candidates);
  return space.used;
}

// Penalties, then biases, on logits[(row of the vocabulary - v0) * Stride + position - first].
template <int Stride>
__device__ __forceinline__ void apply_controls(const HeadShape& s, const HeadArguments& x, float* logits, int v0, int first, int here) {
  for (int b = first / s.positions; b <= (first + here - 1) / s.positions; ++b) {
    const int begin = b * s.positions > first ? b * s.positions : first;
    const int end = (b + 1) * s.positions < first + here ? (b + 1) * s.positions : first + here;
    for (int r = threadIdx.x; r < s.history; r += kStreamThreads) {
      const int64_t id = x.history_ids[static_cast<size_t>(b) * s.history + r];
      if (id < v0 || id >= v0 + kVocabularyRows || id >= s.vocabulary || x.vocab_mask[id] != 0.0f) continue;
      const float count = x.history_counts[static_cast<size_t>(b) * s.history + r], penalty = x.repetition_penalty[b];
      const float less = x.presence_penalty[b] + x.frequency_penalty[b] * count;
      for (int n = begin; n < end; ++n) {
        float& logit = logits[(id - v0) * Stride + n - first];
        logit = (logit < 0.0f ? logit * penalty : logit / penalty) - less;
      }
    }
  }
  sync_threads();
  for (int b = first / s.positions; b <= (first + here - 1) / s.positions; ++b) {
    const int begin = b * s.positions > first ? b * s.positions : first;
    const int end = (b + 1) * s.positions < first + here ? (b + 1) * s.positions : first + here;
    for (int a = threadIdx.x; a < s.biases; a += kStreamThreads) {
      const int64_t id = x.bias_ids[static_cast<size_t>(b) * s.biases + a];
      if (id < v0 || id >= v0 + kVocabularyRows || id >= s.vocabulary || x.vocab_mask[id] != 0.0f) continue;
      for (int n = begin; n < end; ++n) logits[(id - v0) * Stride + n - first] += x.bias_values[static_cast<size_t>(n) * s.biases + a];
    }
  }
  sync_threads();
}

template <int Tiles>
__global__ void __launch_bounds__(kStreamThreads, Tiles == 4 ? 2 : 1) head_part(HeadShape s, HeadArguments x, Parts p) {
  constexpr int Positions = 8 * Tiles, Stride = Positions + 1;
  CLOVER_SHARED(memory);
  float* const gathered = reinterpret_cast<float*>(memory);
  float* const logits = gathered + stream_shared<Tiles>() / sizeof(float);  // [128, Stride]
  const int N = s.rows * s.positions, v0 = blockIdx.x * kVocabularyRows;
  const int g = threadIdx.x % 32 / 4, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int first = 0; first < N; first += Positions) {
    const int here = N - first < Positions ? N - first : Positions;
    const bf16* token[Tiles];
    CLOVER_UNROLL
    for (int n = 0; n < Tiles; ++n) token[n] = x.hidden + static_cast<size_t>(first + (8 * n + g < here ? 8 * n + g : 0)) * s.hidden;
    for (int r0 = 0; r0 < kVocabularyRows; r0 += kStreamRows) {
      const bf16* row[4];
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int v = v0 + r0 + 8 * i + g;
        row[i] = x.weight + static_cast<size_t>(v < s.vocabulary ? v : s.vocabulary - 1) * s.hidden;
      }
      StreamSums<Tiles> sums;
      clear(sums);
      stream_product<Tiles>(sums, row, token, (here + 7) / 8, s.hidden);
      stream_gather<Tiles>(sums, gathered);
      for (int i = threadIdx.x; i < kStreamRows * Positions; i += kStreamThreads) {
        const int r = i % kStreamRows, n = i / kStreamRows, v = v0 + r0 + r;
        if (n >= here) continue;
        const float logit = v < s.vocabulary ? stream_total<Tiles>(gathered, r, n) : -INFINITY;
        logits[(r0 + r) * Stride + n] = logit;
        if (x.logits != nullptr && v < s.vocabulary) x.logits[static_cast<size_t>(first + n) * s.vocabulary + v] = logit;
      }
    }
    sync_threads();
    apply_controls<Stride>(s, x, logits, v0, first, here);
    for (int n = warp; n < here; n += kStreamWarps) {  // lane l looks at rows l, l + 32, ...
      float value[kVocabularyRows / 32], most = -INFINITY, sum = 0.0f;
      bool number = true;
      CLOVER_UNROLL
      for (int i = 0; i < kVocabularyRows / 32; ++i) {
        const int v = v0 + lane + 32 * i;
        value[i] = v < s.vocabulary ? logits[(lane + 32 * i) * Stride + n] + x.vocab_mask[v] : -INFINITY;
        number = number && value[i] == value[i] && value[i] != INFINITY;
        most = fmaxf(most, value[i]);
      }
      most = lane_max(most);
      CLOVER_UNROLL
      for (int i = 0; i < kVocabularyRows / 32; ++i) sum += most == -INFINITY ? 0.0f : expf(value[i] - most);
      sum = lane_sum(sum);
      if (ballot(!number) != 0) sum = NAN;  // a row whose logits are not numbers is found by its log-probabilities
      const size_t at = static_cast<size_t>(blockIdx.x) * N + first + n;
      if (lane == 0) {
        p.most[at] = most;
        p.sum[at] = sum;
      }
      for (int rank = 0; rank < s.candidates; ++rank) {
        float best = -INFINITY;
        int id = 0x7fffffff;
        CLOVER_UNROLL
        for (int i = 0; i < kVocabularyRows / 32; ++i) {
          if (value[i] > best) {
            best = value[i];
            id = v0 + lane + 32 * i;
          }
        }
        lane_best(best, id);
        CLOVER_UNROLL
        for (int i = 0; i < kVocabularyRows / 32; ++i)
          if (id == v0 + lane + 32 * i) value[i] = -INFINITY;
        if (lane == 0) {
          p.value[at * s.candidates + rank] = best;
          p.id[at * s.candidates + rank] = id;
        }
      }
    }
  }
}

struct JoinShared {
  float value[kJoinThreads / 32];
  int id[kJoinThreads / 32];
  float sum[kJoinThreads / 32];
};

// A block for each position. `taken` counts how many candidates of each part are used up. Four blocks a multiprocessor: aiming at
// eight, nvcc 13.5 spills.
__global__ void __launch_bounds__(kJoinThreads, 4) head_join(HeadShape s, HeadArguments x, Parts p) {
  CLOVER_SHARED(memory);
  JoinShared& m = *reinterpret_cast<JoinShared*>(memory);
  unsigned char* const taken = memory + sizeof(JoinShared);
  const int N = s.rows * s.positions, parts = parts_of(s.vocabulary), n = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = kJoinThreads / 32;
  float most = -INFINITY;
  for (int part = threadIdx.x; part < parts; part += kJoinThreads) {
    taken[part] = 0;
    most = fmaxf(most, p.most[static_cast<size_t>(part) * N + n]);
  }
  most = lane_max(most);
  if (lane == 0) m.value[warp] = most;
  sync_threads();
  for (int w = 0; w < warps; ++w) most = fmaxf(most, m.value[w]);
  float sum = 0.0f;
  for (int part = threadIdx.x; part < parts; part += kJoinThreads) {
    const size_t at = static_cast<size_t>(part) * N + n;
    sum += p.most[at] == -INFINITY && p.sum[at] == 0.0f ? 0.0f : p.sum[at] * expf(p.most[at] - most);
  }
  sum = lane_sum(sum);
  if (lane == 0) m.sum[warp] = sum;
  sync_threads();
  sum = 0.0f;
  for (int w = 0; w < warps; ++w) sum += m.sum[w];
  const float log_total = most + logf(sum);
  for (int rank = 0; rank < s.candidates; ++rank) {
    float best = -INFINITY;
    int id = 0x7fffffff;
    for (int part = threadIdx.x; part < parts; part += kJoinThreads) {
      if (taken[part] >= s.candidates) continue;
      const size_t at = (static_cast<size_t>(part) * N + n) * s.candidates + taken[part];
      if (p.value[at] > best || (p.value[at] == best && p.id[at] < id)) {
        best = p.value[at];
        id = p.id[at];
      }
    }
    lane_best(best, id);
    if (lane == 0) {
      m.value[warp] = best;
      m.id[warp] = id;
    }
    sync_threads();
    if (threadIdx.x == 0) {
      for (int w = 1; w < warps; ++w) {
        if (m.value[w] > best || (m.value[w] == best && m.id[w] < id)) {
          best = m.value[w];
          id = m.id[w];
        }
      }
      if (id < s.vocabulary) ++taken[id / kVocabularyRows];
      const size_t at = static_cast<size_t>(n) * s.candidates + rank;
      x.candidate_ids[at] = id < s.vocabulary ? id : rank;  // all logits of the row are not numbers
      x.candidate_logprobs[at] = id < s.vocabulary || sum != sum ? best - log_total : -INFINITY;
    }
    sync_threads();
  }
}

template <int Tiles>
cudaError_t run_part(const HeadShape& s, const HeadArguments& x, const Parts& p, cudaStream_t stream) {
  const size_t shared = stream_shared<Tiles>() + sizeof(float) * kVocabularyRows * (8 * Tiles + 1);
  return launch<head_part<Tiles>>(dim3(static_cast<unsigned>(parts_of(s.vocabulary))), kStreamThreads, shared, stream, s, x, p);
}

}  // namespace

const char* head_unsupported(const HeadShape& s) {
  if (s.hidden % 32 != 0) return "a hidden size that is a multiple of 32";
  if (s.candidates < 1 || s.candidates > kMostCandidates) return "1 to 64 candidates";
  return nullptr;
}

size_t head_workspace(const HeadShape& shape) {
  Parts p;
  return lay_out(shape, nullptr, p);
}

cudaError_t confidence_head(const HeadShape& s, const HeadArguments& x, void* workspace, cudaStream_t stream) {
  if (head_unsupported(s) != nullptr) return cudaErrorInvalidValue;
  Parts p;
  lay_out(s, workspace, p);
  CLOVER_TRY(s.rows * s.positions <= 32 ? run_part<4>(s, x, p, stream) : run_part<8>(s, x, p, stream));
  const size_t shared = sizeof(JoinShared) + static_cast<size_t>(parts_of(s.vocabulary));
  return launch<head_join>(dim3(static_cast<unsigned>(s.rows * s.positions)), kJoinThreads, shared, stream, s, x, p);
}

}  // namespace clover
