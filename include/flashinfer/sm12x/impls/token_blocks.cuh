// SPDX-License-Identifier: Apache-2.0
//
// Token rows as bfloat16, 32 elements (a scale block) at a time, arranged as bf16 MMAs want them. e4m3 * 2^s is exact in
// bfloat16, so that W4A8 is computed exactly by bf16 MMAs, on SM12x and Hopper by the same instructions.
//
// Of every eight elements the order is 0, 4, 1, 5, 2, 6, 3, 7: the pairs that expand_to_bf16 makes of a 32-bit word of weights.
//
// In memory arranged rows lie word by word, [words of 128 along K][rows][256 bytes], so that a tile's tokens are one piece
// of each word; odd rows have neighbouring blocks swapped, so that fragment loads of eight rows meet no bank twice.
#pragma once

#include "../ptx/convert.cuh"
#include "grouped_gemm_params.cuh"
#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/sm12x_activation_quantizer.cuh"

namespace flashinfer::sm12x {

constexpr int kArrangedBlockBytes = kScaleBlock * element_bytes(Activation::kBf16);
constexpr int kArrangedRowBytes = kScaleChunkBlocks * kArrangedBlockBytes;  // of one word

// Byte offset of block `k_block` of row `row` of `rows` arranged rows.
__device__ __forceinline__ int64_t arranged_offset(int rows, int row, int k_block) {
  const int word = k_block / kScaleChunkBlocks, block = k_block % kScaleChunkBlocks ^ (row & 1);
  return (static_cast<int64_t>(word) * rows + row) * kArrangedRowBytes + block * kArrangedBlockBytes;
}

// Where element `i` of a row stands once it is arranged.
__device__ __forceinline__ int arranged_place(int i) { return (i & ~7) | ((i & 3) << 1) | ((i >> 2) & 1); }

// block[2q] = elements 8q + (0, 4), (1, 5); block[2q + 1] = 8q + (2, 6), (3, 7).
using TokenBlock = uint32_t[8][2];

namespace detail {

__device__ __forceinline__ void from_eight_bytes(const uint2& eight, float scale, uint32_t (&even)[2],
                                                 uint32_t (&odd)[2]) {
  const uint32_t first = __byte_perm(eight.x, eight.y, 0x5140);  // elements 0, 4, 1, 5
  const uint32_t second = __byte_perm(eight.x, eight.y, 0x7362);  // elements 2, 6, 3, 7
  even[0] = ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(first), scale);
  even[1] = ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(first >> 16), scale);
  odd[0] = ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(second), scale);
  odd[1] = ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(second >> 16), scale);
}

// Eight floats to MXFP8 and back.
__device__ __forceinline__ void requantize_eight(const float (&x)[8], float inverse, float scale, uint32_t (&even)[2],
                                                 uint32_t (&odd)[2]) {
  even[0] = ptx::e4m3x2_to_bf16x2(ptx::f32x2_to_e4m3x2(x[0] * inverse, x[4] * inverse), scale);
  even[1] = ptx::e4m3x2_to_bf16x2(ptx::f32x2_to_e4m3x2(x[1] * inverse, x[5] * inverse), scale);
  odd[0] = ptx::e4m3x2_to_bf16x2(ptx::f32x2_to_e4m3x2(x[2] * inverse, x[6] * inverse), scale);
  odd[1] = ptx::e4m3x2_to_bf16x2(ptx::f32x2_to_e4m3x2(x[3] * inverse, x[7] * inverse), scale);
}

template <bool kBf16>
__device__ __forceinline__ void unpack_eight(const uint4& packed, float (&x)[8]) {
  unpack_pair<kBf16>(packed.x, x[0], x[1]);
  unpack_pair<kBf16>(packed.y, x[2], x[3]);
  unpack_pair<kBf16>(packed.z, x[4], x[5]);
  unpack_pair<kBf16>(packed.w, x[6], x[7]);
}

template <bool kBf16>
__device__ __forceinline__ void quantize_block(const uint4 (&packed)[4], TokenBlock& block) {
  float amax = 0.0f, x[8];
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    unpack_eight<kBf16>(packed[q], x);
#pragma unroll
    for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
  }
  const uint32_t exponent = ptx::mxfp8_scale(amax);
  const float inverse = ptx::mxfp8_inverse_scale(exponent), scale = ptx::ue8m0_to_f32<0>(exponent);
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    unpack_eight<kBf16>(packed[q], x);
    requantize_eight(x, inverse, scale, block[2 * q], block[2 * q + 1]);
  }
}

__device__ __forceinline__ void take_bf16_block(const uint4 (&packed)[4], TokenBlock& block) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint4& k = packed[q];
    block[2 * q][0] = __byte_perm(k.x, k.z, 0x5410);
    block[2 * q][1] = __byte_perm(k.x, k.z, 0x7632);
    block[2 * q + 1][0] = __byte_perm(k.y, k.w, 0x5410);
    block[2 * q + 1][1] = __byte_perm(k.y, k.w, 0x7632);
  }
}

}  // namespace detail

// Block `k_block` of row `token` of the layer's input, as W4A8 (kE4m3) or W4A16 (kBf16) rounds it.
template <Activation kActivation>
__device__ __forceinline__ void load_input_block(const InputRows& rows, int64_t token, int k_block, TokenBlock& block) {
  const int64_t element = token * rows.k + k_block * kScaleBlock;
  const bool sixteen_bit =
      kActivation == Activation::kBf16 || rows.source == TokenSource::kBf16 || rows.source == TokenSource::kF16;
  if (sixteen_bit) {
    const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(rows.data) + element);
    const uint4 packed[4] = {from[0], from[1], from[2], from[3]};
    if constexpr (kActivation == Activation::kBf16) {
      detail::take_bf16_block(packed, block);
    } else if (rows.source == TokenSource::kBf16) {
      detail::quantize_block<true>(packed, block);
    } else {
      detail::quantize_block<false>(packed, block);
    }
    return;
  }
  int64_t at = token * (rows.k / kScaleBlock) + k_block;
  if (rows.source == TokenSource::kMxfp8Swizzled) {
    const ScaleRow row = swizzled_scale_row(token, scale_words(rows.k));
    at = 4 * (row.base + k_block / kScaleChunkBlocks * row.stride) + k_block % kScaleChunkBlocks;
  }
  const uint4* from = reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(rows.data) + element);
  const uint4 packed[2] = {from[0], from[1]};
  const float factor = ptx::ue8m0_to_f32<0>(rows.scales[at]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    detail::from_eight_bytes(make_uint2(packed[i].x, packed[i].y), factor, block[4 * i], block[4 * i + 1]);
    detail::from_eight_bytes(make_uint2(packed[i].z, packed[i].w), factor, block[4 * i + 2], block[4 * i + 3]);
  }
}

}  // namespace flashinfer::sm12x
