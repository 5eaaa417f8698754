// SPDX-License-Identifier: Apache-2.0
//
// What a launch of the dense layer is told.
#pragma once

#include "streamed_gemm_params.cuh"

namespace flashinfer::sm12x {

struct DenseParams {
  StreamedGemm gemm;
  TokenRows tokens;
  int num_tokens;
  bool weights_first;    // weights do not depend on the launch in front: they may be read before it ends
  StoreEpilogue epilogue;  // its output may be null where there are ranks
  uint64_t* ranks;  // [num_tokens][blocks][keepers], or null: of the largest output that each keeper has seen
  int stages;
  int stage_bytes;
};

}  // namespace flashinfer::sm12x
