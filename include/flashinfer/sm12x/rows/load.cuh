// SPDX-License-Identifier: Apache-2.0
//
// Token rows as bfloat16, eight elements at a time, packed as bf16 MMAs want them. e4m3 * 2^s is exact in
// bfloat16, so that bf16 MMAs multiply W4A8 without rounding, on SM12x and Hopper by the same instructions.
//
// Every eight elements lie in the order 0, 4, 1, 5, 2, 6, 3, 7: the pairs that dequantize_to_bf16 makes of a 32-bit
// word of weights.
//
// In memory packed rows lie K block by K block, [K blocks][rows][256 bytes], so that a tile's tokens are contiguous in
// each K block. Odd rows have neighbouring scale blocks swapped, so that fragment loads of eight rows have no bank
// conflict.
//
// RowLoader takes rows of any format, a scale block to a lane; load_input_eight takes a MoE layer's, eight elements to
// a lane.
#pragma once

#include "../mma/dequantize.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "quantize.cuh"

namespace flashinfer::sm12x {

constexpr int kPackedBlockBytes = block_bytes(Element::kBf16);
constexpr int kPackedRowBytes = kScaleChunkBlocks * kPackedBlockBytes;  // of one K block

// Byte offset of scale block `scale_block` of row `row` of `rows` packed rows.
__device__ __forceinline__ int64_t packed_offset(int rows, int row, int scale_block) {
  const int k_block = scale_block / kScaleChunkBlocks, block = scale_block % kScaleChunkBlocks ^ (row & 1);
  return (static_cast<int64_t>(k_block) * rows + row) * kPackedRowBytes + block * kPackedBlockBytes;
}

// Where element `i` of a row stands once it is packed.
__device__ __forceinline__ int packed_place(int i) { return (i & ~7) | ((i & 3) << 1) | ((i >> 2) & 1); }

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

// Rounds a scale block to MXFP8 and back, in one lane. load(q, x) gives elements 8q..; it is called twice, since the
// lane has no registers to hold 32 elements until their maximum is known. take(q, eight) gets them packed.
template <class Load, class Take>
__device__ __forceinline__ void requantize_block(const Load& load, const Take& take) {
  float amax = 0.0f, x[8];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    load(q, x);
    amax = Mxfp8Rounding::largest(amax, x);
  }
  const Mxfp8Rounding rounding(amax);
  auto pair = [&](int i) { return rounding.pair_as_bf16(x[i], x[i + 4]); };
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    load(q, x);
    take(q, make_uint4(pair(0), pair(1), pair(2), pair(3)));
  }
}

// Elements 8 * eighth.. of row `token` of the layer's input, packed; not of MXFP4. Lanes 4i..4i + 3 hold one block and
// call together.
__device__ __forceinline__ uint4 load_input_eight(const TokenRows& rows, int64_t token, int eighth) {
  const int64_t at = token * (rows.k / 8) + eighth;
  if (rows.format < TokenFormat::kMxfp8Swizzled) {
    const uint4 packed = static_cast<const uint4*>(rows.data)[at];
    if (rows.format == TokenFormat::kBf16) return detail::from_eight_bf16(packed);
    const unsigned lanes = 0xFu << (threadIdx.x % 32 & ~3u);
    uint32_t scale;
    const uint2 eight = rows.format == TokenFormat::kQuantizeBf16
                            ? quantize_eight<Mxfp8Rounding, true>(packed, lanes, scale)
                            : quantize_eight<Mxfp8Rounding, false>(packed, lanes, scale);
    return detail::from_eight_bytes(eight, ptx::ue8m0_to_f32<0>(scale));
  }
  const int scale_block = eighth / 4;
  int64_t scale_at = token * (rows.k / kScaleBlock) + scale_block;
  if (rows.format == TokenFormat::kMxfp8Swizzled) {
    scale_at = swizzled_scale_place(token, scale_block, scale_words(rows.k));
  }
  const uint2 eight = static_cast<const uint2*>(rows.data)[at];
  return detail::from_eight_bytes(eight, ptx::ue8m0_to_f32<0>(rows.scales[scale_at]));
}

// A scale block of a row of any format; zeros where it is not wanted.
struct RowLoader {
  const TokenRows& rows;
  int64_t row;
  int scale_block;
  bool wanted;

  // Packed: of every eight elements (0, 4), (1, 5), (2, 6), (3, 7), as at the top of this file.
  __device__ __forceinline__ void load(uint4 (&eights)[4]) const {
    switch (rows.format) {
      case TokenFormat::kBf16: return load_bf16(eights);
      case TokenFormat::kQuantizeBf16: return load_quantized<true>(eights);
      case TokenFormat::kQuantizeF16: return load_quantized<false>(eights);
      case TokenFormat::kMxfp4Swizzled: return load_mxfp4(eights);
      case TokenFormat::kQuantizeBf16ToMxfp4:
      case TokenFormat::kQuantizeF16ToMxfp4: return load_quantized_to_mxfp4(eights);
      case TokenFormat::kMxfp6Swizzled: return load_mxfp6(eights);
      case TokenFormat::kMxint8Swizzled: return load_mxint8(eights);
      case TokenFormat::kNvfp4Swizzled: return load_nvfp4(eights);
      default: return load_mxfp8(eights);
    }
  }

 private:
  __device__ __forceinline__ const uint8_t* at(int bytes_of_block) const {
    const int64_t block = row * (rows.k / kScaleBlock) + scale_block;
    return static_cast<const uint8_t*>(rows.data) + (wanted ? block * bytes_of_block : 0);
  }

  // Bits of a block's `i`-th scale.
  __device__ __forceinline__ uint32_t scale_bits(Element element, int i) const {
    const int of_block = kScaleBlock / elements_per_scale(element);
    const int64_t place = swizzled_scale_place(row, scale_block * of_block + i, scale_words(element, rows.k));
    return wanted ? rows.scales[place] : 0;
  }

  __device__ __forceinline__ float scale() const {
    int64_t place = row * (rows.k / kScaleBlock) + scale_block;
    if (rows.format != TokenFormat::kMxfp8Linear) {
      place = swizzled_scale_place(row, scale_block, scale_words(rows.k));
    }
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
    uint32_t pair[4];
    mma::dequantize_to_bf16<mma::Saves::kInstructions>(nibbles, mma::kTwoTo126Pair, pair);
    return times(pair, scale);
  }

  static __device__ __forceinline__ uint4 times(const uint32_t (&pair)[4], float scale) {
    const uint32_t scale_pair = ptx::f32x2_to_bf16x2(scale, scale);
    return make_uint4(ptx::bf16x2_multiply(pair[0], scale_pair), ptx::bf16x2_multiply(pair[1], scale_pair),
                      ptx::bf16x2_multiply(pair[2], scale_pair), ptx::bf16x2_multiply(pair[3], scale_pair));
  }

  // A K block, of which the row's last may be shorter, has two planes (types.h).
  __device__ __forceinline__ void load_mxfp6(uint4 (&eights)[4]) const {
    const int first = scale_block & ~(kScaleChunkBlocks - 1), block = scale_block - first;
    const int blocks = min(kScaleChunkBlocks, rows.k / kScaleBlock - first);
    const int64_t start = row * row_bytes(Element::kE2m3, rows.k) + first * block_bytes(Element::kE2m3);
    const uint8_t* k_block = static_cast<const uint8_t*>(rows.data) + (wanted ? start : 0);
    const uint4 nibbles = ptx::load_16_bytes_if(wanted, k_block + block * kNibbleBytes);
    const uint8_t* at_pairs = k_block + blocks * kNibbleBytes + block * kPairBytes;
    const uint2 pairs = wanted ? *reinterpret_cast<const uint2*>(at_pairs) : make_uint2(0, 0);
    const float s = ptx::ue8m0_to_f32<0>(scale_bits(Element::kE2m3, 0));
    const uint32_t of[6] = {nibbles.x, nibbles.y, nibbles.z, nibbles.w, pairs.x, pairs.y};
    load_eights<Element::kE2m3>(of, s, eights);
  }

  __device__ __forceinline__ void load_mxint8(uint4 (&eights)[4]) const {
    const uint8_t* from = at(kScaleBlock);
    const uint4 low = ptx::load_16_bytes_if(wanted, from), high = ptx::load_16_bytes_if(wanted, from + 16);
    const float s = ptx::ue8m0_to_f32<0>(scale_bits(Element::kInt8, 0));
    const uint32_t of[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    load_eights<Element::kInt8>(of, s, eights);
#pragma unroll
    for (int q = 0; q < 4; ++q) {  // (0, 2), (1, 3), (4, 6), (5, 7)
      const uint4 k = eights[q];
      eights[q] = make_uint4(__byte_perm(k.x, k.z, 0x5410), __byte_perm(k.y, k.w, 0x5410),
                             __byte_perm(k.x, k.z, 0x7632), __byte_perm(k.y, k.w, 0x7632));
    }
  }

  // Dequantizes the 32-bit words of a block; elements come in the order of the dequantization.
  template <Element kElement>
  static __device__ __forceinline__ void load_eights(const uint32_t* block, float scale, uint4 (&eights)[4]) {
    using Dequantizer = mma::Dequantizer<kElement, mma::Saves::kInstructions>;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t pair[4], nan = 0;
      Dequantizer::eight(block, q, Dequantizer::kUndo, pair, nan);
      eights[q] = times(pair, scale);
    }
  }

  __device__ __forceinline__ void load_nvfp4(uint4 (&eights)[4]) const {
    const uint4 block = ptx::load_16_bytes_if(wanted, at(kScaleBlock / 2));
    const uint32_t words[4] = {block.x, block.y, block.z, block.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t halves = ptx::e4m3x2_to_f16x2(scale_bits(Element::kNvE2m1, i) & 0x7F);
      const float s = __half2float(reinterpret_cast<const __half2&>(halves).x);
      eights[2 * i] = from_eight_nibbles(words[2 * i], s);
      eights[2 * i + 1] = from_eight_nibbles(words[2 * i + 1], s);
    }
  }

  template <bool kIsBf16>
  __device__ __forceinline__ void load_quantized(uint4 (&eights)[4]) const {
    load_16_bit(eights);
    requantize_block([&](int q, auto& x) { unpack_eight<kIsBf16>(eights[q], x); },
                     [&](int q, const uint4& eight) { eights[q] = eight; });
  }

  // Not specialized by type: many kernels contain this path, few calls take it.
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
      amax = Mxfp4Rounding::largest(amax, x);
    }
    const Mxfp4Rounding rounding(amax);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      unpack(q);
      eights[q] = from_eight_nibbles(rounding.eight(x), ptx::ue8m0_to_f32<0>(rounding.scale));
    }
  }
};

}  // namespace flashinfer::sm12x
