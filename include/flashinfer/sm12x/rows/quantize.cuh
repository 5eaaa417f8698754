// SPDX-License-Identifier: Apache-2.0
//
// bf16, fp16 or float32 to MXFP8 or MXFP4: e4m3 or e2m1 values and one UE8M0 scale per 32 elements of a row, in the
// formats of OCP MX v1.0. The scale is amax / 448 or / 6, rounded up to a power of two, so that values saturate only
// where float32 ends (block_scale). In quantize_eight four lanes share a block, eight elements (16 bytes) each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/convert.cuh"
#include "../types.h"

namespace flashinfer::sm12x {

template <bool kBf16>
__device__ __forceinline__ void unpack_pair(uint32_t packed, float& low, float& high) {
  float2 pair;
  if constexpr (kBf16) {
    pair = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(packed));
  } else {
    pair = __half22float2(reinterpret_cast<const __half2&>(packed));
  }
  low = pair.x;
  high = pair.y;
}

template <bool kBf16>
__device__ __forceinline__ void unpack_eight(const uint4& packed, float (&x)[8]) {
  unpack_pair<kBf16>(packed.x, x[0], x[1]);
  unpack_pair<kBf16>(packed.y, x[2], x[3]);
  unpack_pair<kBf16>(packed.z, x[4], x[5]);
  unpack_pair<kBf16>(packed.w, x[6], x[7]);
}

__device__ __forceinline__ uint4 pack_eight_bf16(const float (&x)[8]) {
  return make_uint4(ptx::f32x2_to_bf16x2(x[0], x[1]), ptx::f32x2_to_bf16x2(x[2], x[3]),
                    ptx::f32x2_to_bf16x2(x[4], x[5]), ptx::f32x2_to_bf16x2(x[6], x[7]));
}

// UE8M0 scale of a block whose largest magnitude is `amax`: amax over the format's largest value, 2^kExponent times the
// significand with those mantissa bits, rounded up to a power of two. So the exponent is that of amax less kExponent,
// one more where the significand is larger.
//
// At most 254 - kExponent: with a larger one the largest element exceeds bfloat16 and float32, and would be infinite
// where rows are dequantized and a number where an MMA takes the scale. So infinity counts as 448 x 2^119 in MXFP8, as
// 6 x 2^125 in MXFP4. (mxfp8_quantize and fp4_quantize give 254.)
template <int kExponent, uint32_t kMantissa>
__device__ __forceinline__ uint32_t block_scale(float amax) {
  const uint32_t bits = __float_as_uint(amax);
  if (bits > 0x7F800000u) return kNanScale;
  const int scale = static_cast<int>(bits >> 23) - kExponent + ((bits & 0x7FFFFFu) > kMantissa ? 1 : 0);
  return static_cast<uint32_t>(min(max(scale, 0), 254 - kExponent));
}

// 2^(127 - scale), which multiplies values before they are rounded. A scale of 255 only comes with NaN.
__device__ __forceinline__ float inverse_scale(uint32_t scale) { return __uint_as_float((254u - scale) << 23); }

// Rounding of a block to a format, whichever lanes hold it: `largest` over all of its elements, then a Rounding of
// that, then its elements in any order. Nothing else in the family rounds to these formats.
//
// MXFP8 has NaN: it does not count for the maximum of a block with numbers, and stays NaN itself.
struct Mxfp8Rounding {
  using Eight = uint2;  // elements

  uint32_t scale;  // UE8M0
  float inverse;

  explicit __device__ __forceinline__ Mxfp8Rounding(float amax)
      : scale(block_scale<8, 0x600000>(amax)), inverse(inverse_scale(scale)) {}  // e4m3 reaches 448

  static __device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }
  static __device__ __forceinline__ float largest(float amax, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
    return amax;
  }
  __device__ __forceinline__ uint16_t pair(float low, float high) const {
    return ptx::f32x2_to_e4m3x2(low * inverse, high * inverse);
  }
  // The same as the bfloat16 that they equal.
  __device__ __forceinline__ uint32_t pair_as_bf16(float low, float high) const {
    return ptx::e4m3x2_to_bf16x2(pair(low, high), ptx::ue8m0_to_f32<0>(scale));
  }
  __device__ __forceinline__ Eight eight(const float (&x)[8]) const {
    uint16_t two[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) two[i] = pair(x[2 * i], x[2 * i + 1]);
    return make_uint2(two[0] | static_cast<uint32_t>(two[1]) << 16, two[2] | static_cast<uint32_t>(two[3]) << 16);
  }
};

// MXFP4 has no NaN. Here NaN counts as larger than every number, so a block with one has UE8M0's NaN as its scale.
struct Mxfp4Rounding {
  using Eight = uint32_t;  // element 0 is the lowest nibble

  uint32_t scale;
  float inverse;

  explicit __device__ __forceinline__ Mxfp4Rounding(float amax)
      : scale(block_scale<2, 0x400000>(amax)), inverse(inverse_scale(scale)) {}  // e2m1 reaches 6

  static __device__ __forceinline__ float larger(float a, float b) {
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
  }
  static __device__ __forceinline__ float largest(float amax, const float (&x)[8]) {
    uint32_t bits = __float_as_uint(amax);
#pragma unroll
    for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
    return __uint_as_float(bits);
  }
  __device__ __forceinline__ Eight eight(const float (&x)[8]) const {
    uint32_t nibbles = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) nibbles |= ptx::f32_to_e2m1(x[i] * inverse) << (4 * i);
    return nibbles;
  }
};

// Eight consecutive elements of this lane; lanes 4i..4i+3 hold one block. All four call.
template <class Rounding, bool kBf16>
__device__ __forceinline__ typename Rounding::Eight quantize_eight(const uint4& packed, unsigned lanes,
                                                                   uint32_t& scale) {
  float x[8];
  unpack_eight<kBf16>(packed, x);
  float amax = Rounding::largest(0.0f, x);
  amax = Rounding::larger(amax, __shfl_xor_sync(lanes, amax, 1));
  amax = Rounding::larger(amax, __shfl_xor_sync(lanes, amax, 2));
  const Rounding rounding(amax);
  scale = rounding.scale;
  return rounding.eight(x);
}

// One row by the threads of a block. `scales` gets 4 * scale_words(k) bytes, the padding zero.
template <class Rounding, bool kBf16>
__device__ __forceinline__ void quantize_row(const void* row, int k, uint8_t* values, uint8_t* scales) {
  const uint4* source = static_cast<const uint4*>(row);
  const int eights = k / 8;  // a multiple of 4
  for (int i = threadIdx.x; i < eights; i += blockDim.x) {
    const unsigned lanes = 0xFu << (threadIdx.x % 32 & ~3u);
    uint32_t scale;
    reinterpret_cast<typename Rounding::Eight*>(values)[i] = quantize_eight<Rounding, kBf16>(source[i], lanes, scale);
    if (i % 4 == 0) scales[i / 4] = static_cast<uint8_t>(scale);
  }
  const int blocks = k / kScaleBlock;
  const int padded = kScaleChunkBlocks * scale_words(k);
  for (int i = blocks + threadIdx.x; i < padded; i += blockDim.x) scales[i] = 0;
}

}  // namespace flashinfer::sm12x
