// SPDX-License-Identifier: Apache-2.0
//
// bf16/fp16 activations to MXFP8 or MXFP4: e4m3 or e2m1 values and one UE8M0 scale per 32 elements of a row (OCP MX v1.0,
// section 6.3; scale = amax / 448 or / 6 rounded up to a power of two). Four lanes share a block, eight elements (16 bytes) each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "../ptx/convert.cuh"
#include "layouts.h"

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

// Eight consecutive elements of this lane; lanes 4i..4i+3 hold one block. All four call. NaN does not count for the
// block's maximum and stays NaN itself.
template <bool kBf16>
__device__ __forceinline__ void quantize_eight(const uint4& packed, unsigned lanes, uint2& values, uint32_t& scale) {
  float x[8];
  unpack_eight<kBf16>(packed, x);
  float amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
  amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, 1));
  amax = fmaxf(amax, __shfl_xor_sync(lanes, amax, 2));
  scale = ptx::mxfp8_scale(amax);
  const float inverse = ptx::inverse_scale(scale);
  uint16_t pair[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = ptx::f32x2_to_e4m3x2(x[2 * i] * inverse, x[2 * i + 1] * inverse);
  values.x = pair[0] | static_cast<uint32_t>(pair[1]) << 16;
  values.y = pair[2] | static_cast<uint32_t>(pair[3]) << 16;
}

// The larger one of a magnitude and those of eight values; NaN is larger than all.
__device__ __forceinline__ float largest_magnitude(float amax, const float (&x)[8]) {
  uint32_t bits = __float_as_uint(amax);
#pragma unroll
  for (int i = 0; i < 8; ++i) bits = max(bits, __float_as_uint(x[i]) & 0x7FFFFFFFu);
  return __uint_as_float(bits);
}

// Times `inverse`, a power of two, as e2m1; element 0 is the lowest nibble.
__device__ __forceinline__ uint32_t to_eight_nibbles(const float (&x)[8], float inverse) {
  uint32_t nibbles = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) nibbles |= ptx::f32_to_e2m1(x[i] * inverse) << (4 * i);
  return nibbles;
}

// The same to MXFP4, which has no NaN: a block with one has the scale that is.
template <bool kBf16>
__device__ __forceinline__ void quantize_eight(const uint4& packed, unsigned lanes, uint32_t& values, uint32_t& scale) {
  float x[8];
  unpack_eight<kBf16>(packed, x);
  uint32_t amax = __float_as_uint(largest_magnitude(0.0f, x));
  amax = max(amax, __shfl_xor_sync(lanes, amax, 1));
  amax = max(amax, __shfl_xor_sync(lanes, amax, 2));
  scale = ptx::mxfp4_scale(__uint_as_float(amax));
  values = to_eight_nibbles(x, ptx::inverse_scale(scale));
}

// One row by the threads of a block, to MXFP8 (Eight: uint2) or MXFP4 (uint32_t). `scales` gets 4 * scale_words(k) bytes, the
// padding zero.
template <bool kBf16, class Eight>
__device__ __forceinline__ void quantize_row(const void* row, int k, uint8_t* values, uint8_t* scales) {
  const uint4* source = static_cast<const uint4*>(row);
  const int pieces = k / 8;  // a multiple of 4
  for (int i = threadIdx.x; i < pieces; i += blockDim.x) {
    const unsigned lanes = 0xFu << (threadIdx.x % 32 & ~3u);
    Eight eight;
    uint32_t scale;
    quantize_eight<kBf16>(source[i], lanes, eight, scale);
    reinterpret_cast<Eight*>(values)[i] = eight;
    if (i % 4 == 0) scales[i / 4] = static_cast<uint8_t>(scale);
  }
  const int blocks = k / kScaleBlock;
  const int padded = kScaleChunkBlocks * scale_words(k);
  for (int i = blocks + threadIdx.x; i < padded; i += blockDim.x) scales[i] = 0;
}

}  // namespace flashinfer::sm12x
