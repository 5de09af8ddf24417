// Warp-wide matrix products of the tensor cores, with the fragment layouts of the PTX ISA ("Matrix multiply-accumulate
// operation using mma instruction"). With g = lane / 4 and c = lane % 4, D (16 x 8) is held as d0 (g, 2c), d1 (g, 2c + 1),
// d2 (g + 8, 2c), d3 (g + 8, 2c + 1).
//
// On the host the 32 lanes hand in their fragments and one of them multiplies.
#pragma once

#include "device.cuh"

namespace clover {

#ifdef CLOVER_HOST
// Multiplies fragments: `a_at(lane, i)` and `b_at(lane, i)` give row (column) and depth of element i of a lane.
template <int Depth, int Each, class Value, class AtA, class AtB>
void multiply_fragments(const unsigned char* in, unsigned char* out, Value value, AtA a_at, AtB b_at) {
  struct In {
    float d[4];
    uint32_t a[4], b[2];
  };
  static thread_local double a[16][Depth], b[Depth][8];
  static thread_local In lanes[32];
  memcpy(lanes, in, sizeof lanes);
  for (int lane = 0; lane < 32; ++lane) {
    for (int i = 0; i < 4 * Each; ++i) {
      auto [row, depth] = a_at(lane, i);
      a[row][depth] = value(lanes[lane].a[i / Each], i % Each);
    }
    for (int i = 0; i < 2 * Each; ++i) {
      auto [column, depth] = b_at(lane, i);
      b[depth][column] = value(lanes[lane].b[i / Each], i % Each);
    }
  }
  for (int lane = 0; lane < 32; ++lane) {
    float d[4];
    for (int i = 0; i < 4; ++i) {
      int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = lanes[lane].d[i];
      for (int depth = 0; depth < Depth; ++depth) sum += a[row][depth] * b[depth][column];
      d[i] = static_cast<float>(sum);
    }
    memcpy(out + lane * sizeof d, d, sizeof d);
  }
}

struct At {
  int line, depth;
};

template <int Depth, int Each, class Value>
void combine_fragments(const unsigned char* in, unsigned char* out, Value value) {
  // A register holds `Each` neighbours of the depth; registers 1 and 3 of A are 8 rows down, 2 and 3 half the depth on.
  multiply_fragments<Depth, Each>(
      in, out, value,
      [](int lane, int i) {
        int reg = i / Each;
        return At{lane / 4 + reg % 2 * 8, lane % 4 * Each + i % Each + reg / 2 * Depth / 2};
      },
      [](int lane, int i) { return At{lane / 4, lane % 4 * Each + i % Each + i / Each * Depth / 2}; });
}

inline void collect_fragments(const void* name, float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                              void (*combine)(const unsigned char*, unsigned char*)) {
  struct {
    float d[4];
    uint32_t a[4], b[2];
  } in;
  memcpy(in.d, d, sizeof in.d);
  memcpy(in.a, a, sizeof in.a);
  memcpy(in.b, b, sizeof in.b);
  simt::warp_collective(name, &in, sizeof in, d, sizeof(float[4]), combine);
}
#endif

// D += A B, bfloat16, depth 16: A 16 x 16 with a register of two neighbours of the depth, B 16 x 8.
__device__ __forceinline__ void mma_bf16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CLOVER_HOST
  static const char name = 0;
  collect_fragments(&name, d, a, b, [](const unsigned char* in, unsigned char* out) {
    combine_fragments<16, 2>(in, out, [](uint32_t word, int i) {
      return to_float(bf16{static_cast<uint16_t>(word >> 16 * i)});
    });
  });
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// A float as the tensor cores take it for `mma_tf32`: 10 bits of mantissa, to nearest.
__device__ __forceinline__ uint32_t to_tf32(float value) {
#ifdef CLOVER_HOST
  return (bit_cast<uint32_t>(value) + 0x1000u) & 0xffffe000u;
#else
  uint32_t word;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(word) : "f"(value));
  return word;
#endif
}

// D += A B, TF32, depth 8: A 16 x 8 with a register an element, B 8 x 8.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CLOVER_HOST
  static const char name = 0;
  collect_fragments(&name, d, a, b, [](const unsigned char* in, unsigned char* out) {
    combine_fragments<8, 1>(in, out, [](uint32_t word, int) { return bit_cast<float>(word); });
  });
#else
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

#if !defined(CLOVER_HOST) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
// Two of the four e4m3 numbers of a register as a pair of bfloat16, exact.
__device__ __forceinline__ uint32_t widen_pair(uint32_t word, int first) {
  bf16 low = from_float<bf16>(to_float(e4m3{static_cast<uint8_t>(word >> 8 * first)}));
  bf16 high = from_float<bf16>(to_float(e4m3{static_cast<uint8_t>(word >> 8 * (first + 1))}));
  return low.bits | static_cast<uint32_t>(high.bits) << 16;
}
#endif

// D += A B, e4m3, depth 32: A 16 x 32 with a register of four neighbours of the depth, B 32 x 8. Before sm_89 as two
// bfloat16 products: an order of the depth that A and B share does not matter.
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef CLOVER_HOST
  static const char name = 0;
  collect_fragments(&name, d, a, b, [](const unsigned char* in, unsigned char* out) {
    combine_fragments<32, 4>(in, out, [](uint32_t word, int i) {
      return to_float(e4m3{static_cast<uint8_t>(word >> 8 * i)});
    });
  });
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
  CLOVER_UNROLL
  for (int half = 0; half < 2; ++half) {
    uint32_t wide_a[4] = {widen_pair(a[2 * half], 0), widen_pair(a[2 * half + 1], 0), widen_pair(a[2 * half], 2),
                          widen_pair(a[2 * half + 1], 2)};
    uint32_t wide_b[2] = {widen_pair(b[half], 0), widen_pair(b[half], 2)};
    mma_bf16(d, wide_a, wide_b);
  }
#else
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace clover
