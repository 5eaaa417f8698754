// SPDX-License-Identifier: Apache-2.0
//
// The copies that fill a stage of the streamed layer: whole weight rows, the scales of all of their K, their biases.
#pragma once

#include "../ptx/copy.cuh"
#include "streamed_walk.cuh"

namespace flashinfer::sm12x {

// One thread. `unit` is one of FC1's (up rows and their gate rows) or FC2's.
__device__ __forceinline__ void fill_stage(const StreamedLayerParams& p, const StreamBlock& shared, int stage, bool fc1,
                                           int expert, int unit) {
  const StreamedGemm& g = p.gemm[fc1 ? 0 : 1];
  const int rows = slab_outputs(fc1) * g.groups, parts = fc1 ? 2 : 1;
  const int bytes = rows * g.row_bytes, piece_bytes = g.piece_bytes();
  const int bias_bytes = g.bias != nullptr ? rows * g.bias_bytes() : 0;
  uint8_t* to = shared.stage(stage);
  uint64_t* full = shared.full(stage);

  ptx::fence_async_proxy();  // partial sums were written and read where the copies go
  ptx::mbarrier_arrive_expect(full, parts * (bytes + piece_bytes + bias_bytes));
  for (int part = 0; part < parts; ++part) {
    const int row = unit * rows + part * g.out;
    ptx::bulk_copy(to + part * bytes, g.weights + expert * g.weight_pitch + static_cast<int64_t>(row) * g.row_bytes,
                   bytes, full);
    ptx::tensor_copy_3d(to + g.scale_offset + part * piece_bytes, &g.scales, (row % 32 & ~(g.piece_rows - 1)) * 4, 0,
                        expert * g.scale_pitch + row / kScaleChunkRows, full);
    if (bias_bytes != 0) {
      const int64_t at = static_cast<int64_t>(expert) * parts * g.out + row;
      ptx::bulk_copy(to + g.bias_offset + part * bias_bytes, static_cast<const uint8_t*>(g.bias) + at * g.bias_bytes(),
                     bias_bytes, full);
    }
  }
}

}  // namespace flashinfer::sm12x
