// SPDX-License-Identifier: Apache-2.0
//
// The 128x4 ("swizzled", SFA/SFB) layout of UE8M0 block scales, seen as 32-bit words: a word holds one row's scales of
// four consecutive K-blocks, byte i for block 4w + i. Rows are padded to 128, K-blocks to 4.
#pragma once

#include <cstdint>

#include "arch.h"

#if defined(__CUDACC__)
#define FLASHINFER_SM12X_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLASHINFER_SM12X_HOST_DEVICE inline
#endif

namespace flashinfer::sm12x {

FLASHINFER_SM12X_HOST_DEVICE constexpr int ceil_div(int value, int divisor) { return (value + divisor - 1) / divisor; }

FLASHINFER_SM12X_HOST_DEVICE constexpr int round_up(int value, int multiple) {
  return ceil_div(value, multiple) * multiple;
}

enum class WeightFormat : int { kMxfp4 = 0, kMxfp8 = 1 };

// Bytes of the 32 weights of one scale, and of the 128 of a word of scales.
FLASHINFER_SM12X_HOST_DEVICE constexpr int weight_block_bytes(WeightFormat format) {
  return format == WeightFormat::kMxfp4 ? kScaleBlock / 2 : kScaleBlock;
}
FLASHINFER_SM12X_HOST_DEVICE constexpr int weight_word_bytes(WeightFormat format) {
  return kScaleChunkBlocks * weight_block_bytes(format);
}

FLASHINFER_SM12X_HOST_DEVICE constexpr int weight_row_bytes(WeightFormat format, int k) {
  return k / kScaleBlock * weight_block_bytes(format);
}

// Words along K of a matrix with k elements a row.
FLASHINFER_SM12X_HOST_DEVICE constexpr int scale_words(int k) { return ceil_div(k, kScaleChunkElements); }

// Word of `row` inside its 128-row chunk.
FLASHINFER_SM12X_HOST_DEVICE constexpr int word_in_chunk(int row) {
  return (row % 32) * 4 + (row % kScaleChunkRows) / 32;
}

// Where a row's words lie: word w at `base + w * stride`.
struct ScaleRow {
  int64_t base;
  int stride;
};

FLASHINFER_SM12X_HOST_DEVICE ScaleRow swizzled_scale_row(int64_t row, int words) {
  return {(row / kScaleChunkRows) * words * kScaleChunkRows + word_in_chunk(static_cast<int>(row % kScaleChunkRows)),
          kScaleChunkRows};
}

// Byte of block `k_block` of a row.
FLASHINFER_SM12X_HOST_DEVICE int64_t swizzled_scale_place(int64_t row, int k_block, int words) {
  const ScaleRow at = swizzled_scale_row(row, words);
  const int64_t word = at.base + static_cast<int64_t>(k_block / kScaleChunkBlocks) * at.stride;
  return kScaleChunkBlocks * word + k_block % kScaleChunkBlocks;
}

FLASHINFER_SM12X_HOST_DEVICE ScaleRow linear_scale_row(int64_t row, int pitch_words) { return {row * pitch_words, 1}; }

// Bytes of one matrix's scales in the 128x4 layout.
FLASHINFER_SM12X_HOST_DEVICE constexpr int64_t swizzled_scale_bytes(int rows, int k) {
  return static_cast<int64_t>(round_up(rows, kScaleChunkRows)) * scale_words(k) * kScaleChunkBlocks;
}

}  // namespace flashinfer::sm12x
