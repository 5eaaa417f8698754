// SPDX-License-Identifier: Apache-2.0
//
// What a launch of the dense layer is told.
#pragma once

#include "streamed_gemm_params.cuh"

namespace flashinfer::sm12x {

enum class DenseTokens : int {
  kBf16 = 0,             // as they are
  kQuantizeBf16 = 1,     // rounded to MXFP8
  kQuantizeF16 = 2,
  kMxfp8Swizzled = 3,    // e4m3, scales in the 128x4 layout
  kMxfp8Linear = 4,      // e4m3, scales [tokens, k / 32]
  kMxfp4Swizzled = 5,    // e2m1, scales in the 128x4 layout
};

struct DenseRows {
  const void* data;  // [rows, k]
  const uint8_t* scales;
  DenseTokens format;
  int k;
};

struct DenseParams {
  StreamedGemm gemm;
  DenseRows tokens;
  int num_tokens;
  bool weights_first;    // weights do not depend on the launch in front: they may be read before it ends
  StoreEpilogue epilogue;  // its output may be null where there are ranks
  uint64_t* ranks;  // [num_tokens][blocks][keepers], or null: of the largest output that each keeper has seen
  int stages;
  int stage_bytes;
};

}  // namespace flashinfer::sm12x
