// Products that stream weights: 32 rows of a weight matrix against a few tokens, by one block.
//
// The rows are read once, straight from memory into registers, 16 bytes a lane, and serve as the A side of the tensor
// core product (16 rows, two tiles); up to 8 * TokenTiles tokens are its B side. The warps of a block share the depth
// between them and add up at the end, in a fixed order. A lane takes 16 neighbouring bytes of the depth from a row and
// from a token: the tensor core sums over the depth in an order that both share, so no fragment is ever rearranged.
#pragma once

#include "mma.cuh"

namespace clover {

constexpr int kStreamWarps = 8;
constexpr int kStreamThreads = 32 * kStreamWarps;
constexpr int kStreamRows = 32;   // weight rows of a block

template <int TokenTiles>
struct StreamSums {
  float at[2][TokenTiles][4];
};

template <int TokenTiles>
__device__ __forceinline__ void clear(StreamSums<TokenTiles>& sums) {
  CLOVER_UNROLL
  for (int i = 0; i < 2 * TokenTiles * 4; ++i) sums.at[i / (4 * TokenTiles)][i / 4 % TokenTiles][i % 4] = 0.0f;
}

// 16 bytes of the depth: rows g, g + 8 of both tiles against a token tile, with the product of their type.
template <class Mma>
__device__ __forceinline__ void multiply_rows(float (&first)[4], float (&second)[4], const Vector16 (&a)[4], const Vector16& b, Mma mma) {
  CLOVER_UNROLL
  for (int w = 0; w < 4; w += 2) {
    const uint32_t fb[2] = {b.word[w], b.word[w + 1]};
    const uint32_t above[4] = {a[0].word[w], a[1].word[w], a[0].word[w + 1], a[1].word[w + 1]};
    const uint32_t below[4] = {a[2].word[w], a[3].word[w], a[2].word[w + 1], a[3].word[w + 1]};
    mma(first, above, fb);
    mma(second, below, fb);
  }
}

// Rows g, g + 8 of the first tile and of the second; tokens g of each token tile. Only the first `tiles` tiles are done.
// The depth is a multiple of 8.
template <int TokenTiles>
__device__ __forceinline__ void stream_product(StreamSums<TokenTiles>& sums, const bf16* const (&row)[4],
                                               const bf16* const (&token)[TokenTiles], int tiles, int depth) {
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4;
  CLOVER_UNROLL_BY(2)
  for (int at = 32 * warp; at < depth; at += 32 * kStreamWarps) {
    const int k = at + 8 * c;
    const bool inside = k < depth;
    Vector16 a[4] = {};
    CLOVER_UNROLL
    for (int i = 0; i < 4; ++i)
      if (inside) a[i] = load16_once(row[i] + k);
    CLOVER_UNROLL
    for (int n = 0; n < TokenTiles; ++n) {
      if (n >= tiles) break;
      Vector16 b{};
      if (inside) b = load16(token[n] + k);
      multiply_rows(sums.at[0][n], sums.at[1][n], a, b, mma_bf16);
    }
  }
}

// The same in e4m3; every group of 128 of the depth has its scales, and rows g and g + 8 of a tile share theirs.
// `token_scale(n, i, group)` is that of the token of a lane's result column i (0 or 1) of token tile n.
template <int TokenTiles, class TokenScale>
__device__ __forceinline__ void stream_product(StreamSums<TokenTiles>& sums, const e4m3* const (&row)[4], const bf16* const (&row_scale)[4],
                                               const e4m3* const (&token)[TokenTiles], int tiles, int depth, TokenScale token_scale) {
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4;
  for (int group = warp; group * kQuantBlock < depth; group += kStreamWarps) {
    StreamSums<TokenTiles> part;
    clear(part);
    CLOVER_UNROLL_BY(1)
    for (int half = 0; half < 2; ++half) {
      const int k = group * kQuantBlock + half * 64 + 16 * c;
      const Vector16 a[4] = {load16_once(row[0] + k), load16_once(row[1] + k), load16_once(row[2] + k), load16_once(row[3] + k)};
      CLOVER_UNROLL
      for (int n = 0; n < TokenTiles; ++n) {
        if (n >= tiles) break;
        const Vector16 b = load16(token[n] + k);
        multiply_rows(part.at[0][n], part.at[1][n], a, b, mma_e4m3);
      }
    }
    const float scale[2] = {to_float(row_scale[0][group]), to_float(row_scale[2][group])};
    CLOVER_UNROLL
    for (int n = 0; n < TokenTiles; ++n) {
      if (n >= tiles) break;
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const float of_token = token_scale(n, i % 2, group);
        sums.at[0][n][i] += part.at[0][n][i] * (scale[0] * of_token);
        sums.at[1][n][i] += part.at[1][n][i] * (scale[1] * of_token);
      }
    }
  }
}

constexpr float kE2m1Unit = 0x1p7f;  // what the sums of an NVFP4 product are to be multiplied by

// The scale of a group, twice as bfloat16, for `widen`; exact.
__device__ __forceinline__ uint32_t widening_scale(e4m3 scale) {
  const uint32_t bits = bit_cast<uint32_t>(to_float(scale) * 0x1p119f);
  return bits | bits >> 16;
}

// Eight e2m1 numbers of a group as bfloat16, times scale / 128: two and four bits of mantissa, so every product is exact.
// In a word of four bytes the numbers lie in the order 0 2 4 6 1 3 5 7, so that a shift puts a pair where bfloat16 has the
// sign, the low bits of the exponent and the high bit of the mantissa. What that stands for is 2^126 too small, subnormal
// numbers included; 2^119 of it comes with the scale (more would overflow), 2^7 with the sums.
__device__ __forceinline__ Vector16 widen(uint32_t word, uint32_t scale) {
  Vector16 out;
  CLOVER_UNROLL
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t size = pair < 2 ? word << (6 - 4 * pair) : word >> (4 * pair - 6), sign = word << (12 - 4 * pair);
    out.word[pair] = multiply_pairs((size & 0x01c001c0u) | (sign & 0x80008000u), scale);
  }
  return out;
}

// Weights in NVFP4, tokens in bfloat16; a lane takes a group of 16: 8 bytes and a scale of each row. The depth is a
// multiple of 16. The sums are to be multiplied by kE2m1Unit and the scale of the whole matrix.
template <int TokenTiles>
__device__ __forceinline__ void stream_product(StreamSums<TokenTiles>& sums, const e2m1x2* const (&row)[4],
                                               const e4m3* const (&row_scale)[4], const bf16* const (&token)[TokenTiles], int tiles,
                                               int depth) {
  const int warp = threadIdx.x / 32, c = threadIdx.x % 4;
  CLOVER_UNROLL_BY(2)
  for (int at = 64 * warp; at < depth; at += 64 * kStreamWarps) {
    const int k = at + kQuantGroup * c;
    const bool inside = k < depth;
    Vector8 packed[4] = {};
    uint32_t scale[4] = {};
    CLOVER_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (!inside) continue;
      packed[i] = load8_once(row[i] + k / 2);
      scale[i] = widening_scale(row_scale[i][k / kQuantGroup]);
    }
    CLOVER_UNROLL
    for (int half = 0; half < 2; ++half) {
      Vector16 a[4];
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) a[i] = widen(packed[i].word[half], scale[i]);
      CLOVER_UNROLL
      for (int n = 0; n < TokenTiles; ++n) {
        if (n >= tiles) break;
        Vector16 b{};
        if (inside) b = load16(token[n] + k + 8 * half);
        multiply_rows(sums.at[0][n], sums.at[1][n], a, b, mma_bf16);
      }
    }
  }
}

template <int TokenTiles>
__host__ __device__ constexpr size_t stream_shared() {
  return sizeof(float) * kStreamWarps * kStreamRows * 8 * TokenTiles;
}

// Puts the sums of all warps into shared memory; after it `stream_total` gives the product of a row and a token.
template <int TokenTiles>
__device__ __forceinline__ void stream_gather(const StreamSums<TokenTiles>& sums, float* shared) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, c = threadIdx.x % 4;
  sync_threads();
  CLOVER_UNROLL
  for (int tile = 0; tile < 2; ++tile) {
    CLOVER_UNROLL
    for (int n = 0; n < TokenTiles; ++n) {
      CLOVER_UNROLL
      for (int i = 0; i < 4; ++i) {
        const int row = 16 * tile + g + i / 2 * 8, token = 8 * n + 2 * c + i % 2;
        shared[(warp * kStreamRows + row) * 8 * TokenTiles + token] = sums.at[tile][n][i];
      }
    }
  }
  sync_threads();
}

template <int TokenTiles>
__device__ __forceinline__ float stream_total(const float* shared, int row, int token) {
  float sum = 0.0f;
  CLOVER_UNROLL
  for (int warp = 0; warp < kStreamWarps; ++warp) sum += shared[(warp * kStreamRows + row) * 8 * TokenTiles + token];
  return sum;
}

}  // namespace clover
