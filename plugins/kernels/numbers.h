// Number types and the lengths of rows: all that the declarations of the kernels need.
#pragma once

#ifdef CLOVER_HOST
#include "simt.h"
#else
#include <cuda_runtime_api.h>
#endif

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace clover {

struct bf16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e2m1x2 {  // two numbers of four bits: sign, two of exponent, one of mantissa
  uint8_t bits;
};

template <class To, class From>
__host__ __device__ __forceinline__ To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast between types of one size");
  To to;
  memcpy(&to, &value, sizeof to);
  return to;
}

__host__ __device__ __forceinline__ float to_float(float value) { return value; }
__host__ __device__ __forceinline__ float to_float(bf16 value) { return bit_cast<float>(static_cast<uint32_t>(value.bits) << 16); }

// The four exponent and three mantissa bits sit where bfloat16 has them, so one multiplication sets the bias right,
// subnormal numbers included. 0x7f and 0xff (not a number) are not told apart: a checkpoint with them is refused earlier.
__host__ __device__ __forceinline__ float to_float(e4m3 value) {
  uint32_t sign = static_cast<uint32_t>(value.bits & 0x80) << 24, rest = static_cast<uint32_t>(value.bits & 0x7f) << 20;
  return bit_cast<float>(sign | rest) * 0x1p120f;
}

template <class T>
__host__ __device__ __forceinline__ T from_float(float value);
template <>
__host__ __device__ __forceinline__ float from_float<float>(float value) {
  return value;
}
template <>
__host__ __device__ __forceinline__ bf16 from_float<bf16>(float value) {  // to nearest, ties to even
  uint32_t bits = bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{static_cast<uint16_t>((bits >> 16) | 0x40)};
  return bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
template <>
__host__ __device__ __forceinline__ e4m3 from_float<e4m3>(float value) {  // to nearest, ties to even, saturating at 448
  uint32_t sign = (bit_cast<uint32_t>(value) >> 24) & 0x80u;
  float size = fabsf(value);
  if (!(size < 448.0f)) return e4m3{static_cast<uint8_t>(sign | (size == size ? 0x7eu : 0x7fu))};
  if (size < 0x1p-6f) return e4m3{static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(size * 0x1p9f)))};
  uint32_t bits = bit_cast<uint32_t>(size);
  bits += 0x7ffffu + ((bits >> 20) & 1u);
  return e4m3{static_cast<uint8_t>(sign | ((bits >> 20) - (120u << 3)))};
}

constexpr int kQuantBlock = 128;  // a side of the blocks that share a scale in an FP8 matrix, and a token's group
constexpr int kQuantGroup = 16;   // numbers of a row that share a scale in an NVFP4 matrix

// Lengths of the rows of a block step, `[B]` each; see docs/block-step.md.
struct Lengths {
  const int32_t* prefix;
  const int32_t* commit;
  const int32_t* noisy;
};

}  // namespace clover
