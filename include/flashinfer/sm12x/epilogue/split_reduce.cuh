// SPDX-License-Identifier: Apache-2.0
//
// Units that a share boundary cuts (scheduler/tile_scheduler.cuh): every block leaves its part in global memory; the
// last to arrive adds the parts in K order and goes on with the epilogue.
#pragma once

#include "../impls/mainloop.cuh"
#include "swiglu_quantize.cuh"

namespace flashinfer::sm12x::epilogue {

// Tiles [first, last] of the sequence make up the unit. Returns whether this block has the whole sum.
template <class Config>
__device__ __forceinline__ bool reduce_split(float4* partials, int* arrivals, const SharedStorage<Config>& shared,
                                             const scheduler::Shares& shares, int first, int last, int thread,
                                             Accumulators<Config>& accumulators) {
  constexpr int kVectors = 2 * Config::kTokenSteps;  // float4 of one thread
  const int first_block = shares.owner(first), last_block = shares.owner(last);
  // A block has at most two parts: one of a unit that began before its share, one of a unit that goes on behind it.
  auto slot = [&](int block) {
    return partials + (static_cast<int64_t>(2 * block + (block == first_block ? 1 : 0)) * kVectors) *
                          Config::kConsumerThreads + thread;
  };
  float4* mine = slot(blockIdx.x);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
      const float(&a)[4] = accumulators[half][step];
      mine[(half * Config::kTokenSteps + step) * Config::kConsumerThreads] = make_float4(a[0], a[1], a[2], a[3]);
    }
  }
  __threadfence();
  ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
  if (thread == 0) *shared.flag() = atomicAdd(arrivals + first_block, 1) == last_block - first_block;
  ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
  const bool last_to_arrive = *shared.flag() != 0;
  if (!last_to_arrive) return false;
  __threadfence();

#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
      float(&a)[4] = accumulators[half][step];
#pragma unroll
      for (int value = 0; value < 4; ++value) a[value] = 0.0f;
      for (int block = first_block; block <= last_block; ++block) {
        const float4 part = __ldcg(slot(block) + (half * Config::kTokenSteps + step) * Config::kConsumerThreads);
        a[0] += part.x;
        a[1] += part.y;
        a[2] += part.z;
        a[3] += part.w;
      }
    }
  }
  return true;
}

}  // namespace flashinfer::sm12x::epilogue
