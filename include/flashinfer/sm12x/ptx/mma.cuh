// SPDX-License-Identifier: Apache-2.0
//
// mma.sync, ldmatrix and movmatrix (PTX ISA 9.0, sections 9.7.14.5, 9.7.14.5.15 and 9.7.14.5.17). Fragments are plain
// registers.
#pragma once

#include <cstdint>

#include "../types.h"
#include "sync.cuh"

namespace flashinfer::sm12x::ptx {

// Four 8x8 matrices of 16-bit elements, i.e. 8 rows of 16 bytes each; lanes 8j..8j+7 give the row addresses of matrix
// j.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&matrix)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(address)
               : "memory");
}

// The transpose of an 8x8 matrix of 16-bit elements; lane (g, t) holds elements 2t and 2t+1 of row g, before and after.
__device__ __forceinline__ uint32_t transpose_8x8(uint32_t pair) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(pair));
  return result;
}

// d = a * b + c, 16x8x16, half or bfloat16 operands, float32 accumulation.
template <bool kBf16>
__device__ __forceinline__ void mma_16816(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                          const float (&c)[4]) {
  if constexpr (kBf16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9},"
        " {%10, %11, %12, %13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
  }
}

// Block-scaled 16x8x32: a is e4m3, or in 8-bit containers e2m1 (00xxxx00) or e2m3 (00xxxxxx); b is e4m3 or, unless a is
// e2m3, e5m2. Or 16x8x64, both packed e2m1, at twice the rate. `scale_a` and `scale_b` hold four UE8M0 scales each;
// kByte picks one, or the first of two. Lanes 4i and 4i+1 supply the scales of rows i and i+8 of a, lane 4i those of
// column i of b (thread-id 0 on both sides).
#define FLASHINFER_MXF8F6F4 "mxf8f6f4.block_scale.scale_vec::1X.m16n8k32"
#define FLASHINFER_BLOCK_SCALED_MMA(kind, a_type, b_type)                                                            \
  asm("mma.sync.aligned.kind::" kind ".row.col.f32." a_type "." b_type                                               \
      ".f32.ue8m0 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, 0}, {%11}, {%12, 0};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b), "n"(kByte))

template <int kByte, Element kA, Element kB>
__device__ __forceinline__ void mma_block_scaled(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                                 uint32_t scale_a, uint32_t scale_b) {
  static_assert(kA == Element::kE2m1 || kA == Element::kE2m3 || kA == Element::kE4m3, "elements with UE8M0 scales");
  static_assert(kB == Element::kE4m3 || (kB == Element::kE5m2 && kA != Element::kE2m3) || kB == Element::kE2m1);
  if constexpr (kB == Element::kE2m1) {
    static_assert(kB != Element::kE2m1 || (kA == kB && kByte % 2 == 0),
                  "scale_vec::2X takes bytes 0 and 1, or 2 and 3");
    FLASHINFER_BLOCK_SCALED_MMA("mxf4.block_scale.scale_vec::2X.m16n8k64", "e2m1", "e2m1");
  } else if constexpr (kA == Element::kE2m1) {
    if constexpr (kB == Element::kE4m3) {
      FLASHINFER_BLOCK_SCALED_MMA(FLASHINFER_MXF8F6F4, "e2m1", "e4m3");
    } else {
      FLASHINFER_BLOCK_SCALED_MMA(FLASHINFER_MXF8F6F4, "e2m1", "e5m2");
    }
  } else if constexpr (kA == Element::kE2m3) {
    FLASHINFER_BLOCK_SCALED_MMA(FLASHINFER_MXF8F6F4, "e2m3", "e4m3");
  } else if constexpr (kB == Element::kE4m3) {
    FLASHINFER_BLOCK_SCALED_MMA(FLASHINFER_MXF8F6F4, "e4m3", "e4m3");
  } else {
    FLASHINFER_BLOCK_SCALED_MMA(FLASHINFER_MXF8F6F4, "e4m3", "e5m2");
  }
}

#undef FLASHINFER_BLOCK_SCALED_MMA
#undef FLASHINFER_MXF8F6F4

}  // namespace flashinfer::sm12x::ptx
