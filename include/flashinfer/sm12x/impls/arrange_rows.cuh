// SPDX-License-Identifier: Apache-2.0
//
// What a dense layer's GEMM of bfloat16 needs before it starts: token rows of any format as bfloat16, which holds each of
// their values exactly, arranged for its MMAs.
#pragma once

#include "../ptx/sync.cuh"
#include "row_loader.cuh"

namespace flashinfer::sm12x {

struct ArrangeRowsParams {
  TokenRows rows;
  int num_rows;
  WeightFormat weights;  // that the rows are to meet
  uint8_t* arranged;  // [words][num_rows][kArrangedRowBytes] (token_blocks.cuh)
  int* counters;  // to zero
  int num_counters;
};

constexpr int kArrangeRowsThreads = 256;

// A thread takes a block of 32 elements, whatever its format (moe_arrange_kernel: eight, since a layer's few tokens go to
// several places each); blocks beyond K, up to a whole word, become zeros.
__global__ void __launch_bounds__(kArrangeRowsThreads)
    arrange_rows_kernel(const __grid_constant__ ArrangeRowsParams p) {
  ptx::wait_for_prerequisite_grids();
  ptx::launch_dependent_grids();
  const int blocks = kScaleChunkBlocks * scale_words(p.rows.k);
  const int first = static_cast<int>(blockIdx.x) * kArrangeRowsThreads + static_cast<int>(threadIdx.x);
  const int stride = static_cast<int>(gridDim.x) * kArrangeRowsThreads;
  for (int i = first; i < p.num_counters; i += stride) p.counters[i] = 0;
  for (int64_t i = first; i < static_cast<int64_t>(p.num_rows) * blocks; i += stride) {
    const int row = static_cast<int>(i / blocks), k_block = static_cast<int>(i - static_cast<int64_t>(row) * blocks);
    uint4 eights[4];
    RowLoader{p.rows, row, k_block, k_block * kScaleBlock < p.rows.k}.load(eights);
    uint4* to = reinterpret_cast<uint4*>(p.arranged + arranged_offset(p.num_rows, row, k_block));
#pragma unroll
    for (int t = 0; t < 4; ++t) {
      if (p.weights == WeightFormat::kMxfp4) {
        to[t] = eights[t];  // lane t of an MMA has elements 8t..
      } else {
        // Elements 4t.. and 16 + 4t..: (0, 2), (1, 3) of each four.
        const uint4 &low = eights[t / 2], &high = eights[2 + t / 2];
        const int half = t % 2 == 0 ? 0x5410 : 0x7632;
        to[t] = make_uint4(__byte_perm(low.x, low.z, half), __byte_perm(low.y, low.w, half),
                           __byte_perm(high.x, high.z, half), __byte_perm(high.y, high.w, half));
      }
    }
  }
}

}  // namespace flashinfer::sm12x
