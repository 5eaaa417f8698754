// SPDX-License-Identifier: Apache-2.0
//
// Token rows as bfloat16, eight elements at a time, arranged as bf16 MMAs want them. e4m3 * 2^s is exact in
// bfloat16, so that bf16 MMAs multiply W4A8 without rounding, on SM12x and Hopper by the same instructions.
//
// Of every eight elements the order is 0, 4, 1, 5, 2, 6, 3, 7: the pairs that expand_to_bf16 makes of a 32-bit word of weights.
//
// In memory arranged rows lie word by word, [words of 128 along K][rows][256 bytes], so that a tile's tokens are one piece
// of each word; odd rows have neighbouring blocks swapped, so that fragment loads of eight rows meet no bank twice.
#pragma once

#include "../common/quantize.cuh"
#include "../ptx/convert.cuh"
#include "grouped_gemm_params.cuh"

namespace flashinfer::sm12x {

constexpr int kArrangedBlockBytes = block_bytes(Activation::kBf16);
constexpr int kArrangedRowBytes = kScaleChunkBlocks * kArrangedBlockBytes;  // of one word

// Byte offset of block `k_block` of row `row` of `rows` arranged rows.
__device__ __forceinline__ int64_t arranged_offset(int rows, int row, int k_block) {
  const int word = k_block / kScaleChunkBlocks, block = k_block % kScaleChunkBlocks ^ (row & 1);
  return (static_cast<int64_t>(word) * rows + row) * kArrangedRowBytes + block * kArrangedBlockBytes;
}

// Where element `i` of a row stands once it is arranged.
__device__ __forceinline__ int arranged_place(int i) { return (i & ~7) | ((i & 3) << 1) | ((i >> 2) & 1); }

namespace detail {

__device__ __forceinline__ uint4 from_eight_bytes(const uint2& eight, float scale) {
  const uint32_t first = __byte_perm(eight.x, eight.y, 0x5140);  // elements 0, 4, 1, 5
  const uint32_t second = __byte_perm(eight.x, eight.y, 0x7362);  // elements 2, 6, 3, 7
  return make_uint4(ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(first), scale),
                    ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(first >> 16), scale),
                    ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(second), scale),
                    ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(second >> 16), scale));
}

__device__ __forceinline__ uint4 from_eight_bf16(const uint4& k) {
  return make_uint4(__byte_perm(k.x, k.z, 0x5410), __byte_perm(k.x, k.z, 0x7632), __byte_perm(k.y, k.w, 0x5410),
                    __byte_perm(k.y, k.w, 0x7632));
}

}  // namespace detail

// A block of 32 to MXFP8 and back, by a lane that has all of it: load(q, x) gives elements 8q.., twice, rather than 32 of them
// are held until their largest is known; take(q, eight) gets them arranged.
template <class Load, class Take>
__device__ __forceinline__ void requantize_block(const Load& load, const Take& take) {
  float amax = 0.0f, x[8];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    load(q, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
  }
  const uint32_t exponent = ptx::mxfp8_scale(amax);
  const float inverse = ptx::inverse_scale(exponent), scale = ptx::ue8m0_to_f32<0>(exponent);
  auto pair = [&](int i) {
    return ptx::e4m3x2_to_bf16x2(ptx::f32x2_to_e4m3x2(x[i] * inverse, x[i + 4] * inverse), scale);
  };
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    load(q, x);
    take(q, make_uint4(pair(0), pair(1), pair(2), pair(3)));
  }
}

// Elements 8 * eighth.. of row `token` of the layer's input, arranged; not of MXFP4. Lanes 4i..4i + 3 hold one block and call
// together.
__device__ __forceinline__ uint4 load_input_eight(const TokenRows& rows, int64_t token, int eighth) {
  const int64_t at = token * (rows.k / 8) + eighth;
  if (rows.format < TokenFormat::kMxfp8Swizzled) {
    const uint4 packed = static_cast<const uint4*>(rows.data)[at];
    if (rows.format == TokenFormat::kBf16) return detail::from_eight_bf16(packed);
    const unsigned lanes = 0xFu << (threadIdx.x % 32 & ~3u);
    uint2 eight;
    uint32_t scale;
    if (rows.format == TokenFormat::kQuantizeBf16) {
      quantize_eight<true>(packed, lanes, eight, scale);
    } else {
      quantize_eight<false>(packed, lanes, eight, scale);
    }
    return detail::from_eight_bytes(eight, ptx::ue8m0_to_f32<0>(scale));
  }
  const int k_block = eighth / 4;
  int64_t scale_at = token * (rows.k / kScaleBlock) + k_block;
  if (rows.format == TokenFormat::kMxfp8Swizzled) {
    scale_at = swizzled_scale_place(token, k_block, scale_words(rows.k));
  }
  const uint2 eight = static_cast<const uint2*>(rows.data)[at];
  return detail::from_eight_bytes(eight, ptx::ue8m0_to_f32<0>(rows.scales[scale_at]));
}

}  // namespace flashinfer::sm12x
