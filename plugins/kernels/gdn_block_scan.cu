// Four kernels, one after another:
//   gdn_prepare      convolution, SiLU, L2 norms, gates; a block for each token
//   gdn_conv_state   the convolution's state after the committed tokens; a thread for each channel
//   gdn_prefill      gated delta rule over many committed tokens, in chunks on the tensor cores (bf16 only)
//   gdn_scan         gated delta rule over a few committed tokens, then the noisy block
// Columns of the state never meet: a block takes all key rows of some columns of one head and keeps them in registers
// (gdn_scan) or shared memory (gdn_prefill). Chunked form: https://arxiv.org/abs/2406.06484.
#include "gdn_block_scan.h"

#include "mma.cuh"

namespace clover {

namespace {

constexpr int kPrepareThreads = 256;
constexpr int kMostTaps = 8;
constexpr int kStage = 16;        // tokens whose keys, queries and values gdn_scan holds at a time
constexpr int kChunk = 32;        // tokens that gdn_prefill takes at a time
constexpr int kPrefillColumns = 64;
constexpr int kPrefillThreads = 256;
constexpr int kPrefillFrom = 65;  // committed tokens from which the chunked form is used
constexpr int kPrefillDim = 128;  // the key dimension it is written for

// What gdn_prepare leaves behind, float32.
struct Prepared {
  float* q;      // [B, T, k_heads, k_dim], normed, unscaled
  float* k;      // [B, T, k_heads, k_dim], normed
  float* v;      // [B, T, v_heads, v_dim]
  float* g;      // [B, T, v_heads], log decay; 0 at noisy tokens
  float* beta;   // [B, T, v_heads], write strength; 0 at noisy tokens
};

size_t lay_out(const GdnShape& s, void* workspace, Prepared& p) {
  Workspace space{static_cast<unsigned char*>(workspace)};
  size_t tokens = static_cast<size_t>(s.rows) * s.tokens;
  p.q = space.take<float>(tokens * s.k_heads * s.k_dim);
  p.k = space.take<float>(tokens * s.k_heads * s.k_dim);
  p.v = space.take<float>(tokens * s.v_heads * s.v_dim);
  p.g = space.take<float>(tokens * s.v_heads);
  p.beta = space.take<float>(tokens * s.v_heads);
  return space.used;
}

// One channel of one token: left taps over state and row, right taps over the rest of the noisy block, SiLU.
template <class T>
__device__ __forceinline__ float convolved(const GdnShape& s, const GdnArguments<T>& x, int row, int token, int channel, bool noisy,
                                           int end) {
  const int C = s.channels();
  const T* input = x.qkv + (static_cast<size_t>(row) * s.tokens) * C + channel;
  const T* state = x.conv_state + (static_cast<size_t>(row) * C + channel) * (s.kernel - 1);
  float sum = 0.0f;
  for (int tap = 0; tap < s.kernel; ++tap) {
    int at = token + tap - (s.kernel - 1);
    float value = at < 0 ? to_float(state[at + s.kernel - 1]) : to_float(input[static_cast<size_t>(at) * C]);
    sum += value * to_float(x.conv[channel * s.kernel + tap]);
  }
  if (noisy) {
    for (int tap = 0; tap < s.right_kernel; ++tap) {
      int at = token + 1 + tap;
      if (at < end) sum += to_float(input[static_cast<size_t>(at) * C]) * to_float(x.right_conv[channel * s.right_kernel + tap]);
    }
  }
  return silu(sum);
}

template <class T>
__global__ void __launch_bounds__(kPrepareThreads) gdn_prepare(GdnShape s, GdnArguments<T> x, Prepared p) {
  const int token = blockIdx.x, row = blockIdx.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = kPrepareThreads / 32;
  const int commit = x.lengths.commit[row], end = commit + x.lengths.noisy[row];
  const size_t at = static_cast<size_t>(row) * s.tokens + token;
  if (token >= end) {
    for (int i = threadIdx.x; i < s.v_heads * s.v_dim; i += kPrepareThreads) x.out[at * s.v_heads * s.v_dim + i] = from_float<T>(0.0f);
    return;
  }
  const bool noisy = token >= commit;
  for (int head = warp; head < 2 * s.k_heads; head += warps) {
    float value[4], squares = 0.0f;
    CLOVER_UNROLL
    for (int i = 0; i < 4; ++i) {
      int d = lane + 32 * i;
      value[i] = d < s.k_dim ? convolved(s, x, row, token, head * s.k_dim + d, noisy, end) : 0.0f;
      squares += value[i] * value[i];
    }
    float scale = rsqrtf(lane_sum(squares) + 1e-6f);
    float* to = head < s.k_heads ? p.q + (at * s.k_heads + head) * s.k_dim : p.k + (at * s.k_heads + head - s.k_heads) * s.k_dim;
    CLOVER_UNROLL
    for (int i = 0; i < 4; ++i)
      if (lane + 32 * i < s.k_dim) to[lane + 32 * i] = value[i] * scale;
  }
  const int values = s.v_heads * s.v_dim, first = 2 * s.k_heads * s.k_dim;
  for (int i = threadIdx.x; i < values; i += kPrepareThreads) p.v[at * values + i] = convolved(s, x, row, token, first + i, noisy, end);
  for (int head = threadIdx.x; head < s.v_heads; head += kPrepareThreads) {
    float a = to_float(x.a[at * s.v_heads + head]), b = to_float(x.b[at * s.v_heads + head]);
    p.g[at * s.v_heads + head] = noisy ? 0.0f : -expf(x.A_log[head]) * softplus(a + x.dt_bias[head]);
    p.beta[at * s.v_heads + head] = noisy ? 0.0f : sigmoid(b);
  }
}

template <class T>
__global__ void __launch_bounds__(256) gdn_conv_state(GdnShape s, GdnArguments<T> x) {
  const int channel = blockIdx.x * 256 + threadIdx.x, row = blockIdx.y, C = s.channels(), width = s.kernel - 1;
  if (channel >= C) return;
  const int commit = x.lengths.commit[row];
  const size_t state = (static_cast<size_t>(row) * C + channel) * width;
  T kept[kMostTaps - 1];
  CLOVER_UNROLL
  for (int i = 0; i < kMostTaps - 1; ++i) {
    if (i >= width) break;
    int at = commit + i - width;  // token of the row, negative in the old state
    kept[i] = at < 0 ? x.conv_state[state + at + width] : x.qkv[(static_cast<size_t>(row) * s.tokens + at) * C + channel];
  }
  if (commit == 0 && x.conv_state_out == x.conv_state) return;
  CLOVER_UNROLL
  for (int i = 0; i < kMostTaps - 1; ++i)
    if (i < width) x.conv_state_out[state + i] = kept[i];
}

// ---- a few committed tokens, then the noisy block ---------------------------------------------------------------

// Four lanes share a column of the state: lane part p holds the key rows 4 (p + 4 i) .. + 3.
template <int KDim>
struct Column {
  float row[KDim / 4];
};

template <int KDim>
__device__ __forceinline__ float dot(const Column<KDim>& s, const float* vector, int part) {
  float sum = 0.0f;
  CLOVER_UNROLL
  for (int i = 0; i < KDim / 16; ++i) {
    float4 x = *reinterpret_cast<const float4*>(vector + 4 * (part + 4 * i));
    sum += s.row[4 * i] * x.x;
    sum += s.row[4 * i + 1] * x.y;
    sum += s.row[4 * i + 2] * x.z;
    sum += s.row[4 * i + 3] * x.w;
  }
  return lane_sum<4>(sum);
}

__host__ __device__ constexpr int padded(int dim) { return dim + 4; }  // rows of shared memory that 8 lanes read 16 bytes of without conflicts

template <int KDim>
size_t scan_shared(int columns, int block) {
  size_t stage = kStage * (2 * static_cast<size_t>(KDim) + columns + 2);
  size_t noisy = block * (2 * static_cast<size_t>(padded(KDim)) + 2 * columns + block + 1);
  return 4 * (stage > noisy ? stage : noisy) + 16;
}

template <class T, int KDim>
__global__ void __launch_bounds__(128, 4) gdn_scan(GdnShape s, GdnArguments<T> x, Prepared p, int columns, bool prefilled) {
  CLOVER_SHARED(memory);
  float* const shared = reinterpret_cast<float*>(memory);
  const int threads = 4 * columns, column = threadIdx.x / 4, part = threadIdx.x % 4;
  const int slices = s.v_dim / columns, head = blockIdx.x / slices, first = blockIdx.x % slices * columns, row = blockIdx.y;
  const int k_head = head / (s.v_heads / s.k_heads);
  const int commit = x.lengths.commit[row], noisy = x.lengths.noisy[row];
  if (commit + noisy == 0 && x.recurrent_state_out == x.recurrent_state) return;
  const bool skip = prefilled && commit >= kPrefillFrom;  // gdn_prefill has been here
  const size_t state = (static_cast<size_t>(row) * s.v_heads + head) * KDim * s.v_dim + first + column;
  const float* from = skip ? x.recurrent_state_out : x.recurrent_state;
  const float scale = rsqrtf(static_cast<float>(KDim));
  Column<KDim> S;
  CLOVER_UNROLL
  for (int i = 0; i < KDim / 4; ++i) S.row[i] = from[state + static_cast<size_t>(4 * (part + i / 4 * 4) + i % 4) * s.v_dim];

  const size_t token0 = static_cast<size_t>(row) * s.tokens;
  float *k = shared, *q = k + kStage * KDim, *v = q + kStage * KDim, *g = v + kStage * columns, *beta = g + kStage;
  for (int begin = 0; begin < commit && !skip; begin += kStage) {
    const int count = commit - begin < kStage ? commit - begin : kStage;
    sync_threads();
    for (int i = threadIdx.x; i < count * KDim; i += threads) {
      size_t at = ((token0 + begin + i / KDim) * s.k_heads + k_head) * KDim + i % KDim;
      k[i] = p.k[at];
      q[i] = p.q[at];
    }
    for (int i = threadIdx.x; i < count * columns; i += threads)
      v[i] = p.v[((token0 + begin + i / columns) * s.v_heads + head) * s.v_dim + first + i % columns];
    for (int i = threadIdx.x; i < count; i += threads) {
      g[i] = expf(p.g[(token0 + begin + i) * s.v_heads + head]);
      beta[i] = p.beta[(token0 + begin + i) * s.v_heads + head];
    }
    sync_threads();
    for (int t = 0; t < count; ++t) {
      const float decay = g[t];
      const float delta = beta[t] * (v[t * columns + column] - decay * dot<KDim>(S, k + t * KDim, part));
      CLOVER_UNROLL
      for (int i = 0; i < KDim / 16; ++i) {
        float4 key = *reinterpret_cast<const float4*>(k + t * KDim + 4 * (part + 4 * i));
        S.row[4 * i] = decay * S.row[4 * i] + key.x * delta;
        S.row[4 * i + 1] = decay * S.row[4 * i + 1] + key.y * delta;
        S.row[4 * i + 2] = decay * S.row[4 * i + 2] + key.z * delta;
        S.row[4 * i + 3] = decay * S.row[4 * i + 3] + key.w * delta;
      }
      const float o = scale * dot<KDim>(S, q + t * KDim, part);
      if (part == 0) x.out[((token0 + begin + t) * s.v_heads + head) * s.v_dim + first + column] = from_float<T>(o);
    }
  }
  if (!skip && (commit > 0 || x.recurrent_state_out != x.recurrent_state)) {
    CLOVER_UNROLL
    for (int i = 0; i < KDim / 4; ++i)
      x.recurrent_state_out[state + static_cast<size_t>(4 * (part + i / 4 * 4) + i % 4) * s.v_dim] = S.row[i];
  }
  if (noisy == 0) return;

  // The noisy block: a softmax over its tokens and the memory.
  constexpr int Stride = padded(KDim);
  sync_threads();
  k = shared;
  q = k + noisy * Stride;
  v = q + noisy * Stride;
  float *memory_read = v + noisy * columns, *weight = memory_read + noisy * columns;  // weight: [noisy, noisy + 1], memory last
  for (int i = threadIdx.x; i < noisy * KDim; i += threads) {
    size_t at = ((token0 + commit + i / KDim) * s.k_heads + k_head) * KDim + i % KDim;
    k[i / KDim * Stride + i % KDim] = p.k[at];
    q[i / KDim * Stride + i % KDim] = p.q[at];
  }
  for (int i = threadIdx.x; i < noisy * columns; i += threads)
    v[i] = p.v[((token0 + commit + i / columns) * s.v_heads + head) * s.v_dim + first + i % columns];
  sync_threads();
  for (int t = 0; t < noisy; ++t) {
    const float read = scale * dot<KDim>(S, q + t * Stride, part);
    if (part == 0) memory_read[t * columns + column] = read;
  }
  const float temperature = x.temperature[head];
  for (int pair = threadIdx.x; pair < noisy * noisy; pair += threads) {
    const float *qi = q + pair / noisy * Stride, *kj = k + pair % noisy * Stride;
    float sum = 0.0f;
    CLOVER_UNROLL
    for (int d = 0; d < KDim; d += 4) {
      float4 a = *reinterpret_cast<const float4*>(qi + d), b = *reinterpret_cast<const float4*>(kj + d);
      sum += a.x * b.x;
      sum += a.y * b.y;
      sum += a.z * b.z;
      sum += a.w * b.w;
    }
    weight[pair / noisy * (noisy + 1) + pair % noisy] = temperature * sum;
  }
  sync_threads();
  const int n = x.lengths.prefix[row] + commit;
  const float memory_logit = n == 0 ? -INFINITY : x.memory_bias[head] + x.memory_slope[head] * log1pf(static_cast<float>(n));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = threads / 32;
  for (int t = warp; t < noisy; t += warps) {
    float* logits = weight + t * (noisy + 1);
    float most = memory_logit;
    for (int j = lane; j < noisy; j += 32) most = fmaxf(most, logits[j]);
    most = lane_max(most);
    float sum = 0.0f;
    for (int j = lane; j < noisy; j += 32) {
      logits[j] = expf(logits[j] - most);
      sum += logits[j];
    }
    const float of_memory = expf(memory_logit - most);
    const float total = 1.0f / (lane_sum(sum) + of_memory);
    for (int j = lane; j < noisy; j += 32) logits[j] *= total;
    if (lane == 0) logits[noisy] = of_memory * total;
  }
  sync_threads();
  for (int t = part; t < noisy; t += 4) {
    const float* w = weight + t * (noisy + 1);
    float sum = w[noisy] * memory_read[t * columns + column];
    for (int j = 0; j < noisy; ++j) sum += w[j] * v[j * columns + column];
    x.out[((token0 + commit + t) * s.v_heads + head) * s.v_dim + first + column] = from_float<T>(sum);
  }
}

// ---- many committed tokens --------------------------------------------------------------------------------------

// D [16 x 8] += A [16, depth] B [depth, 8] on one warp, TF32; `a(row, depth)` and `b(depth, column)` read an element.
template <int Depth, class A, class B>
__device__ __forceinline__ void tile_product(float (&d)[4], A a, B b) {
  const int g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  CLOVER_UNROLL
  for (int depth = 0; depth < Depth; depth += 8) {
    const uint32_t fa[4] = {to_tf32(a(g, depth + c)), to_tf32(a(g + 8, depth + c)), to_tf32(a(g, depth + c + 4)),
                            to_tf32(a(g + 8, depth + c + 4))};
    const uint32_t fb[2] = {to_tf32(b(depth + c, g)), to_tf32(b(depth + c + 4, g))};
    mma_tf32(d, fa, fb);
  }
}

// Rows and columns of the four elements that a lane holds of a 16 x 8 product.
__device__ __forceinline__ int tile_row(int i) { return threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ __forceinline__ int tile_column(int i) { return threadIdx.x % 4 * 2 + i % 2; }

struct PrefillShared {
  static constexpr int KStride = kPrefillDim + 4, VStride = kPrefillColumns + 8, CStride = kChunk + 4;
  float S[kPrefillDim * VStride];
  float k[kChunk * KStride], q[kChunk * KStride];
  float u[kChunk * VStride];      // values, then what each token writes
  float o[kChunk * VStride];      // what each token reads of the state before the chunk
  float write[kChunk * CStride];  // strictly lower: beta_t exp(total_t - total_s) (k_t . k_s)
  float read[kChunk * CStride];   // lower: exp(total_t - total_s) (q_t . k_s) / sqrt(k_dim)
  float total[kChunk], beta[kChunk];
};

template <class T>
__global__ void __launch_bounds__(kPrefillThreads) gdn_prefill(GdnShape s, GdnArguments<T> x, Prepared p) {
  CLOVER_SHARED(memory);
  PrefillShared& m = *reinterpret_cast<PrefillShared*>(memory);
  constexpr int KDim = kPrefillDim, Columns = kPrefillColumns, KS = PrefillShared::KStride, VS = PrefillShared::VStride,
                CS = PrefillShared::CStride;
  const int slices = s.v_dim / Columns, head = blockIdx.x / slices, first = blockIdx.x % slices * Columns, row = blockIdx.y;
  const int k_head = head / (s.v_heads / s.k_heads), commit = x.lengths.commit[row];
  if (commit < kPrefillFrom) return;
  const int warp = threadIdx.x / 32;
  const float scale = rsqrtf(static_cast<float>(KDim));
  const size_t state = (static_cast<size_t>(row) * s.v_heads + head) * KDim * s.v_dim + first;
  const size_t token0 = static_cast<size_t>(row) * s.tokens;
  for (int i = threadIdx.x; i < KDim * Columns; i += kPrefillThreads)
    m.S[i / Columns * VS + i % Columns] = x.recurrent_state[state + static_cast<size_t>(i / Columns) * s.v_dim + i % Columns];

  for (int begin = 0; begin < commit; begin += kChunk) {
    const int count = commit - begin < kChunk ? commit - begin : kChunk;
    sync_threads();
    for (int i = threadIdx.x; i < kChunk * KDim; i += kPrefillThreads) {
      const int t = i / KDim, d = i % KDim;
      const size_t at = ((token0 + begin + t) * s.k_heads + k_head) * KDim + d;
      m.k[t * KS + d] = t < count ? p.k[at] : 0.0f;
      m.q[t * KS + d] = t < count ? scale * p.q[at] : 0.0f;
    }
    for (int i = threadIdx.x; i < kChunk * Columns; i += kPrefillThreads) {
      const int t = i / Columns, d = i % Columns;
      m.u[t * VS + d] = t < count ? p.v[((token0 + begin + t) * s.v_heads + head) * s.v_dim + first + d] : 0.0f;
    }
    if (warp == 0) {  // running sum of the log decays; past the end it stays, and nothing is written
      const int t = threadIdx.x;
      const size_t at = (token0 + begin + t) * s.v_heads + head;
      float sum = t < count ? p.g[at] : 0.0f;
      CLOVER_UNROLL
      for (int step = 1; step < kChunk; step *= 2) {
        const float before = shuffle(sum, t >= step ? t - step : t);
        if (t >= step) sum += before;
      }
      m.total[t] = sum;
      m.beta[t] = t < count ? p.beta[at] : 0.0f;
    }
    sync_threads();
    // 8 warps: keys against keys and queries against keys (2 x 8 tiles of 16 x 8), then both against the state (32 tiles).
    for (int tile = warp; tile < 16; tile += 8) {
      const bool of_keys = tile < 8;
      const int r0 = tile % 8 / 4 * 16, c0 = tile % 4 * 8;
      const float* left = of_keys ? m.k : m.q;
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      tile_product<KDim>(
          d, [&](int r, int e) { return left[(r0 + r) * KS + e]; }, [&](int e, int c) { return m.k[(c0 + c) * KS + e]; });
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int t = r0 + tile_row(i), from = c0 + tile_column(i);
        const float decayed = from <= t ? expf(m.total[t] - m.total[from]) * d[i] : 0.0f;
        if (of_keys) m.write[t * CS + from] = from < t ? m.beta[t] * decayed : 0.0f;
        else m.read[t * CS + from] = decayed;
      }
    }
    for (int tile = warp; tile < 32; tile += 8) {
      const bool of_keys = tile < 16;
      const int r0 = tile % 16 / 8 * 16, c0 = tile % 8 * 8;
      const float* left = of_keys ? m.k : m.q;
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      tile_product<KDim>(
          d, [&](int r, int e) { return left[(r0 + r) * KS + e]; }, [&](int e, int c) { return m.S[e * VS + c0 + c]; });
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int t = r0 + tile_row(i), at = t * VS + c0 + tile_column(i);
        const float decayed = expf(m.total[t]) * d[i];
        if (of_keys) m.u[at] = m.beta[t] * (m.u[at] - decayed);
        else m.o[at] = decayed;
      }
    }
    sync_threads();
    {  // forward substitution, four lanes a column: u_t -= sum over s < t of write[t, s] u_s
      const int column = threadIdx.x / 4, part = threadIdx.x % 4;
      for (int t = 1; t < kChunk; ++t) {
        float sum = 0.0f;
        for (int from = part; from < t; from += 4) sum += m.write[t * CS + from] * m.u[from * VS + column];
        sum = lane_sum<4>(sum);
        if (part == 0) m.u[t * VS + column] -= sum;
        sync_warp();
      }
    }
    sync_threads();
    for (int tile = warp; tile < 16; tile += 8) {
      const int r0 = tile / 8 * 16, c0 = tile % 8 * 8;
      float d[4];
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) d[i] = m.o[(r0 + tile_row(i)) * VS + c0 + tile_column(i)];
      tile_product<kChunk>(
          d, [&](int r, int e) { return m.read[(r0 + r) * CS + e]; }, [&](int e, int c) { return m.u[e * VS + c0 + c]; });
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int t = r0 + tile_row(i);
        if (t < count)
          x.out[((token0 + begin + t) * s.v_heads + head) * s.v_dim + first + c0 + tile_column(i)] = from_float<T>(d[i]);
      }
    }
    const float last = m.total[kChunk - 1];
    for (int tile = warp; tile < KDim / 16 * Columns / 8; tile += 8) {
      const int r0 = tile / (Columns / 8) * 16, c0 = tile % (Columns / 8) * 8;
      float d[4];
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) d[i] = expf(last) * m.S[(r0 + tile_row(i)) * VS + c0 + tile_column(i)];
      tile_product<kChunk>(
          d, [&](int r, int e) { return expf(last - m.total[e]) * m.k[e * KS + r0 + r]; },
          [&](int e, int c) { return m.u[e * VS + c0 + c]; });
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) m.S[(r0 + tile_row(i)) * VS + c0 + tile_column(i)] = d[i];
    }
  }
  sync_threads();
  for (int i = threadIdx.x; i < KDim * Columns; i += kPrefillThreads)
    x.recurrent_state_out[state + static_cast<size_t>(i / Columns) * s.v_dim + i % Columns] = m.S[i / Columns * VS + i % Columns];
}

template <class T, int KDim>
cudaError_t run_scan(const GdnShape& s, const GdnArguments<T>& x, const Prepared& p, bool prefilled, cudaStream_t stream) {
  const int columns = s.v_dim < 32 ? s.v_dim : 32;
  const int block = s.block < s.tokens ? s.block : s.tokens;
  return launch<gdn_scan<T, KDim>>(dim3(static_cast<unsigned>(s.v_heads * (s.v_dim / columns)), static_cast<unsigned>(s.rows)),
                static_cast<unsigned>(4 * columns), scan_shared<KDim>(columns, block), stream, s, x, p, columns, prefilled);
}

bool is_dim(int dim) { return dim == 16 || dim == 32 || dim == 64 || dim == 128; }

}  // namespace

const char* gdn_unsupported(const GdnShape& s) {
  if (!is_dim(s.k_dim) || !is_dim(s.v_dim)) return "k_dim and v_dim of 16, 32, 64 or 128";
  if (s.k_heads < 1 || s.v_heads < 1 || s.v_heads % s.k_heads != 0) return "v_heads a multiple of k_heads";
  if (s.kernel < 2 || s.kernel > kMostTaps) return "a convolution of 2 to 8 taps";
  if (s.right_kernel < 1 || s.right_kernel > kMostTaps) return "a right convolution of 1 to 8 taps";
  if (s.block < 1 || s.block > 64) return "blocks of 1 to 64 tokens";
  return nullptr;
}

size_t gdn_workspace(const GdnShape& shape) {
  Prepared p;
  return lay_out(shape, nullptr, p);
}

template <class T>
cudaError_t gdn_block_scan(const GdnShape& s, const GdnArguments<T>& x, void* workspace, cudaStream_t stream) {
  if (gdn_unsupported(s) != nullptr) return cudaErrorInvalidValue;
  Prepared p;
  lay_out(s, workspace, p);
  const unsigned rows = static_cast<unsigned>(s.rows);
  CLOVER_TRY(launch<gdn_prepare<T>>(dim3(static_cast<unsigned>(s.tokens), rows), kPrepareThreads, 0, stream, s, x, p));
  CLOVER_TRY(launch<gdn_conv_state<T>>(dim3(static_cast<unsigned>((s.channels() + 255) / 256), rows), 256, 0, stream, s, x));
  bool chunked = false;
  if constexpr (sizeof(T) == 2) {
    chunked = s.k_dim == kPrefillDim && s.v_dim % kPrefillColumns == 0 && s.tokens >= kPrefillFrom;
    const dim3 grid(static_cast<unsigned>(s.v_heads * (s.v_dim / kPrefillColumns)), rows);
    if (chunked) CLOVER_TRY(launch<gdn_prefill<T>>(grid, kPrefillThreads, sizeof(PrefillShared), stream, s, x, p));
  }
  switch (s.k_dim) {
    case 16: return run_scan<T, 16>(s, x, p, chunked, stream);
    case 32: return run_scan<T, 32>(s, x, p, chunked, stream);
    case 64: return run_scan<T, 64>(s, x, p, chunked, stream);
    default: return run_scan<T, 128>(s, x, p, chunked, stream);
  }
}

template cudaError_t gdn_block_scan<float>(const GdnShape&, const GdnArguments<float>&, void*, cudaStream_t);
template cudaError_t gdn_block_scan<bf16>(const GdnShape&, const GdnArguments<bf16>&, void*, cudaStream_t);

}  // namespace clover
