// SPDX-License-Identifier: Apache-2.0
//
// Whether mbarrier.arrive orders what it should. Pairs of warps hand stages of a short pipeline over through mbarriers,
// as the producer and the MMA warps of every kernel of the family do: the producer's data must not come later than its
// arrival, and the consumer's reads not later than its own, which gives the stage back. GB10 does not reliably honour
// either without a fence (ptx/sync.cuh); this kernel counts the words that were wrong, with the fence and without it.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../ptx/memory.cuh"
#include "../ptx/sync.cuh"
#include "../types.h"

namespace flashinfer::sm12x::probe {

static_assert(!ptx::kFenceArrivals,
              "compile with -DFLASHINFER_SM12X_FENCE_ARRIVALS=0: the fences here are the kernel's");

// How a stage is filled.
enum class Handover : int {
  kStores,  // by all lanes of the producer, each of which arrives
  kCopies,  // by a bulk copy that one lane of the producer issues
};

constexpr int kOrderPairs = 8;  // of warps in a block
constexpr int kOrderStages = 2;  // as few as there can be, so that every hand-over is waited for
constexpr int kOrderVectors = 32;
constexpr int kOrderStageWords = 128;
static_assert(kOrderStageWords == 4 * kOrderVectors);
constexpr int kOrderStageBytes = 4 * kOrderStageWords;
constexpr int kOrderSourceRounds = 64;  // rounds with contents of their own

static_assert(kOrderSourceRounds % kOrderStages != 1 && kOrderSourceRounds > 2 * kOrderStages,
              "what a stage held before differs from what it is to hold");
static_assert(kOrderStageBytes % 16 == 0, "bulk copies");

struct ArrivalOrderParams {
  const uint32_t* source;  // [kOrderSourceRounds, kOrderStageWords] of order_word(), the source of bulk copies
  uint32_t* counts;  // [blocks, kOrderPairs, 2]: words compared, words wrong
  int rounds;
};

__device__ __forceinline__ uint32_t order_word(int round, int word) {
  return static_cast<uint32_t>(round % kOrderSourceRounds) * 0x9E3779B1u + static_cast<uint32_t>(word) * 0x85EBCA6Bu;
}

template <bool kFenced>
__device__ __forceinline__ void fence() {
  if constexpr (kFenced) __threadfence_block();
}

template <bool kFenced, Handover kHandover>
__global__ void __launch_bounds__(64 * kOrderPairs) arrival_order_kernel(const ArrivalOrderParams params) {
  __shared__ alignas(128) uint4 pipeline[kOrderPairs][kOrderStages][kOrderVectors];
  __shared__ uint64_t full[kOrderPairs][kOrderStages], empty[kOrderPairs][kOrderStages];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int pair = warp / 2;
  const bool produces = warp % 2 == 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kOrderPairs * kOrderStages; ++i) {
      ptx::mbarrier_init(&full[0][0] + i, kHandover == Handover::kStores ? 32 : 1);
      ptx::mbarrier_init(&empty[0][0] + i, 32);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();

  uint32_t compared = 0, wrong = 0;
  for (int round = 0; round < params.rounds; ++round) {
    const int stage = round % kOrderStages;
    const uint32_t turn = static_cast<uint32_t>(round / kOrderStages) % 2;
    if (produces) {
      if (round >= kOrderStages) ptx::mbarrier_wait(&empty[pair][stage], turn ^ 1);
      if constexpr (kHandover == Handover::kStores) {
        pipeline[pair][stage][lane] = make_uint4(order_word(round, 4 * lane), order_word(round, 4 * lane + 1),
                                                 order_word(round, 4 * lane + 2), order_word(round, 4 * lane + 3));
        fence<kFenced>();
        ptx::mbarrier_arrive(&full[pair][stage]);
      } else if (lane == 0) {
        fence<kFenced>();
        ptx::mbarrier_arrive_expect(&full[pair][stage], kOrderStageBytes);
        ptx::bulk_copy(&pipeline[pair][stage][0], params.source + round % kOrderSourceRounds * kOrderStageWords,
                       kOrderStageBytes, &full[pair][stage]);
      }
    } else {
      ptx::mbarrier_wait(&full[pair][stage], turn);
      const uint4 seen = pipeline[pair][stage][lane];
      fence<kFenced>();
      ptx::mbarrier_arrive(&empty[pair][stage]);
      // Behind the arrival: nothing but the arrival's own order makes the load come before it.
      const uint32_t words[4] = {seen.x, seen.y, seen.z, seen.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) wrong += words[i] != order_word(round, 4 * lane + i);
      compared += 4;
    }
  }
  if (produces) return;
  compared = __reduce_add_sync(kAllLanes, compared);
  wrong = __reduce_add_sync(kAllLanes, wrong);
  if (lane == 0) {
    uint32_t* counts = params.counts + 2 * (static_cast<int64_t>(blockIdx.x) * kOrderPairs + pair);
    counts[0] = compared;
    counts[1] = wrong;
  }
}

}  // namespace flashinfer::sm12x::probe
