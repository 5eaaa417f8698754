// SPDX-License-Identifier: Apache-2.0
//
// The same bytes as streaming_read.cuh reads, by the layers' access pattern: one block an SM, a producer warp that
// issues bulk copies into a pipeline of three stages, and consumer warps that add up what has landed. If a GPU reads
// fewer bytes a second this way than by plain loads, the layers are slower by as much.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../ptx/memory.cuh"
#include "../ptx/sync.cuh"
#include "../types.h"
#include "streaming_read.cuh"

namespace flashinfer::sm12x::probe {

constexpr int kBulkReadStages = 3;
constexpr int kBulkReadWarps = 8;  // consumers
constexpr int kBulkReadThreads = 32 * (kBulkReadWarps + 1);
constexpr int kBulkReadStageBytes = kReadVectors * sizeof(uint4);
constexpr int kBulkReadSharedBytes = kBulkReadStages * (kBulkReadStageBytes + 2 * sizeof(uint64_t));

static_assert(kBulkReadSharedBytes <= 99 << 10, "one block of a GB10's SM");

struct BulkReadParams {
  const uint4* const* pieces;  // [count], 16-byte aligned
  const int32_t* vectors;  // [count], of 16 bytes each, from 1 to kReadVectors
  uint32_t* sums;  // [blocks, kBulkReadWarps], modulo 2^32
  int count;
};

// The module is compiled without fences before arrivals, so that arrival_order.cuh can leave them out: they are
// written out here, as ptx/sync.cuh has them for a GB10.
__global__ void __launch_bounds__(kBulkReadThreads) bulk_read_kernel(const BulkReadParams params) {
  extern __shared__ __align__(128) uint4 stages[];  // [kBulkReadStages, kReadVectors], then the barriers
  uint64_t* full = reinterpret_cast<uint64_t*>(stages + kBulkReadStages * kReadVectors);
  uint64_t* empty = full + kBulkReadStages;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kBulkReadStages; ++stage) {
      ptx::mbarrier_init(&full[stage], 1);
      ptx::mbarrier_init(&empty[stage], 32 * kBulkReadWarps);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  const int step = static_cast<int>(gridDim.x);
  if (warp == kBulkReadWarps) {
    if (lane != 0) return;
    int turn = 0;
    for (int piece = static_cast<int>(blockIdx.x); piece < params.count; piece += step, ++turn) {
      const int stage = turn % kBulkReadStages;
      const auto phase = static_cast<uint32_t>(turn / kBulkReadStages) % 2;
      if (turn >= kBulkReadStages) ptx::mbarrier_wait(&empty[stage], phase ^ 1);
      const auto bytes = static_cast<uint32_t>(params.vectors[piece]) * static_cast<uint32_t>(sizeof(uint4));
      __threadfence_block();
      ptx::mbarrier_arrive_expect(&full[stage], bytes);
      ptx::bulk_copy(stages + stage * kReadVectors, params.pieces[piece], bytes, &full[stage]);
    }
    return;
  }

  uint32_t sum = 0;
  int turn = 0;
  for (int piece = static_cast<int>(blockIdx.x); piece < params.count; piece += step, ++turn) {
    const int stage = turn % kBulkReadStages, count = params.vectors[piece];
    ptx::mbarrier_wait(&full[stage], static_cast<uint32_t>(turn / kBulkReadStages) % 2);
    for (int at = static_cast<int>(threadIdx.x); at < count; at += 32 * kBulkReadWarps) {
      const uint4 words = stages[stage * kReadVectors + at];
      sum += words.x + words.y + words.z + words.w;
    }
    __threadfence_block();
    ptx::mbarrier_arrive(&empty[stage]);
  }
  sum = __reduce_add_sync(kAllLanes, sum);
  if (lane == 0) params.sums[static_cast<int64_t>(blockIdx.x) * kBulkReadWarps + warp] = sum;
}

}  // namespace flashinfer::sm12x::probe
