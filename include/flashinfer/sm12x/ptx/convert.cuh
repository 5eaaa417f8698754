// SPDX-License-Identifier: Apache-2.0
//
// Conversions between the narrow formats (PTX ISA 9.0, section 9.7.9.21; OCP Microscaling Formats v1.0, section 5.3),
// and clamps that pass NaN (sections 9.7.3.11 and 9.7.3.12).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace flashinfer::sm12x::ptx {

// The smaller and the larger of two numbers; NaN if one is none, which fminf and fmaxf would drop.
__device__ __forceinline__ float min_or_nan(float a, float b) {
  float result;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Two e4m3 (low half of `pair`) to two halves; exact.
__device__ __forceinline__ uint32_t e4m3x2_to_f16x2(uint16_t pair) {
  uint32_t result;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(pair));
  return result;
}

// Round to nearest even, saturating to +-448; NaN stays NaN. `low` goes to the low byte.
__device__ __forceinline__ uint16_t f32x2_to_e4m3x2(float low, float high) {
  uint16_t result;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(high), "f"(low));
  return result;
}

__device__ __forceinline__ uint32_t f32x2_to_bf16x2(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Two e4m3 values times 2^s, which a bfloat16 holds (unless it is below 2^-133).
__device__ __forceinline__ uint32_t e4m3x2_to_bf16x2(uint16_t e4m3, float scale) {
  const uint32_t halves = e4m3x2_to_f16x2(e4m3);
  const float2 pair = __half22float2(reinterpret_cast<const __half2&>(halves));
  return f32x2_to_bf16x2(pair.x * scale, pair.y * scale);
}

__device__ __forceinline__ uint32_t bf16x2_fma(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}
// mul.bf16x2 needs sm_90, this also runs on sm_89, and -0 keeps the sign of zeros.
__device__ __forceinline__ uint32_t bf16x2_multiply(uint32_t a, uint32_t b) { return bf16x2_fma(a, b, 0x80008000u); }

// Bits of `a` where the mask is set, of `b` elsewhere. Given this in C++, the compiler moves a mask of the result into
// both operands: an instruction more for each use of the word.
__device__ __forceinline__ uint32_t select_bits(uint32_t mask, uint32_t a, uint32_t b) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(result) : "r"(mask), "r"(a), "r"(b));
  return result;
}

// `a & mask | bits`. An instruction can hold one constant. From C++, the compiler makes two instructions with a
// constant each, rather than one that takes the second constant from a register.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// Byte `kByte` of four UE8M0 scales as a float32: 2^(s - 127); s = 0 is the subnormal 2^-127, s = 255 is NaN.
template <int kByte>
__device__ __forceinline__ float ue8m0_to_f32(uint32_t scales) {
  const uint32_t exponent = kByte == 3 ? scales >> 1 : scales << (23 - 8 * kByte);
  const uint32_t bits = max(exponent & 0x7F800000u, 0x00400000u);
  const float value = __uint_as_float(bits);
  return fmaf(value, 0.0f, value);  // infinity (s = 255) becomes NaN, everything else stays
}

__device__ __forceinline__ float4 ue8m0x4_to_f32x4(uint32_t scales) {
  return make_float4(ue8m0_to_f32<0>(scales), ue8m0_to_f32<1>(scales), ue8m0_to_f32<2>(scales),
                     ue8m0_to_f32<3>(scales));
}

// To nearest even, saturating to +-6; of NaN anything. Times 2^-126 a float32's bits above the 22nd are e2m1's, its
// subnormal included. `x` is a bfloat16 or half times a power of two; the bits that it loses there are far below half
// of the least value, so that it is rounded once. In integers, since Hopper has no instruction for it.
__device__ __forceinline__ uint32_t f32_to_e2m1(float x) {
  const uint32_t bits = __float_as_uint(x * 0x1p-126f), magnitude = bits & 0x7FFFFFFFu;
  return min((magnitude + 0x1FFFFFu + (magnitude >> 22 & 1)) >> 22, 7u) | bits >> 31 << 3;
}

}  // namespace flashinfer::sm12x::ptx
