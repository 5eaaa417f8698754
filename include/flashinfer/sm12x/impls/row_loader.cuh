// SPDX-License-Identifier: Apache-2.0
//
// Token rows of any format as bfloat16, which holds each value exactly, by lanes that take a block of 32 elements each.
#pragma once

#include "../mma/expand.cuh"
#include "../ptx/copy.cuh"
#include "token_blocks.cuh"

namespace flashinfer::sm12x {

// A lane's block; zeros where it is not wanted.
struct RowLoader {
  const TokenRows& rows;
  int64_t row;
  int k_block;
  bool wanted;

  // Arranged: of every eight elements (0, 4), (1, 5), (2, 6), (3, 7), token_blocks.cuh's order.
  __device__ __forceinline__ void load(uint4 (&eights)[4]) const {
    switch (rows.format) {
      case TokenFormat::kBf16: return load_bf16(eights);
      case TokenFormat::kQuantizeBf16: return load_quantized<true>(eights);
      case TokenFormat::kQuantizeF16: return load_quantized<false>(eights);
      case TokenFormat::kMxfp4Swizzled: return load_mxfp4(eights);
      case TokenFormat::kQuantizeBf16ToMxfp4:
      case TokenFormat::kQuantizeF16ToMxfp4: return load_quantized_to_mxfp4(eights);
      default: return load_mxfp8(eights);
    }
  }

 private:
  __device__ __forceinline__ const uint8_t* at(int bytes_of_block) const {
    const int64_t block = row * (rows.k / kScaleBlock) + k_block;
    return static_cast<const uint8_t*>(rows.data) + (wanted ? block * bytes_of_block : 0);
  }

  __device__ __forceinline__ float scale() const {
    int64_t place = row * (rows.k / kScaleBlock) + k_block;
    if (rows.format != TokenFormat::kMxfp8Linear) { place = swizzled_scale_place(row, k_block, scale_words(rows.k)); }
    return ptx::ue8m0_to_f32<0>(wanted ? rows.scales[place] : 0);
  }

  __device__ __forceinline__ void load_16_bit(uint4 (&eights)[4]) const {
    const uint8_t* from = at(2 * kScaleBlock);
#pragma unroll
    for (int q = 0; q < 4; ++q) eights[q] = ptx::load_16_bytes_if(wanted, from + 16 * q);
  }

  __device__ __forceinline__ void load_bf16(uint4 (&eights)[4]) const {
    load_16_bit(eights);
#pragma unroll
    for (int q = 0; q < 4; ++q) eights[q] = detail::from_eight_bf16(eights[q]);
  }

  __device__ __forceinline__ void load_mxfp8(uint4 (&eights)[4]) const {
    const uint8_t* from = at(kScaleBlock);
    const uint4 low = ptx::load_16_bytes_if(wanted, from), high = ptx::load_16_bytes_if(wanted, from + 16);
    const float s = scale();
    eights[0] = detail::from_eight_bytes(make_uint2(low.x, low.y), s);
    eights[1] = detail::from_eight_bytes(make_uint2(low.z, low.w), s);
    eights[2] = detail::from_eight_bytes(make_uint2(high.x, high.y), s);
    eights[3] = detail::from_eight_bytes(make_uint2(high.z, high.w), s);
  }

  __device__ __forceinline__ void load_mxfp4(uint4 (&eights)[4]) const {
    const uint4 block = ptx::load_16_bytes_if(wanted, at(kScaleBlock / 2));
    const uint32_t words[4] = {block.x, block.y, block.z, block.w};
    const float s = scale();
#pragma unroll
    for (int q = 0; q < 4; ++q) eights[q] = from_eight_nibbles(words[q], s);
  }

  static __device__ __forceinline__ uint4 from_eight_nibbles(uint32_t nibbles, float scale) {
    const uint32_t factor = ptx::f32x2_to_bf16x2(scale, scale);
    uint32_t pair[4];
    mma::expand_to_bf16<mma::Saves::kInstructions>(nibbles, mma::kTwoTo126Pair, pair);
    return make_uint4(ptx::bf16x2_multiply(pair[0], factor), ptx::bf16x2_multiply(pair[1], factor),
                      ptx::bf16x2_multiply(pair[2], factor), ptx::bf16x2_multiply(pair[3], factor));
  }

  template <bool kIsBf16>
  __device__ __forceinline__ void load_quantized(uint4 (&eights)[4]) const {
    load_16_bit(eights);
    requantize_block([&](int q, auto& x) { unpack_eight<kIsBf16>(eights[q], x); },
                     [&](int q, const uint4& eight) { eights[q] = eight; });
  }

  // One piece of code for both types: it stands in kernels of which few calls run it.
  __device__ __forceinline__ void load_quantized_to_mxfp4(uint4 (&eights)[4]) const {
    load_16_bit(eights);
    float amax = 0.0f, x[8];
    auto unpack = [&](int q) {
      if (rows.format == TokenFormat::kQuantizeBf16ToMxfp4) {
        unpack_eight<true>(eights[q], x);
      } else {
        unpack_eight<false>(eights[q], x);
      }
    };
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      unpack(q);
      amax = largest_magnitude(amax, x);
    }
    const uint32_t exponent = ptx::mxfp4_scale(amax);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      unpack(q);
      eights[q] = from_eight_nibbles(to_eight_nibbles(x, ptx::inverse_scale(exponent)), ptx::ue8m0_to_f32<0>(exponent));
    }
  }
};

}  // namespace flashinfer::sm12x
