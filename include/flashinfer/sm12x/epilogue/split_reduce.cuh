// SPDX-License-Identifier: Apache-2.0
//
// Units that a share boundary cuts (scheduler/tile_scheduler.cuh): every block leaves its part in global memory; the
// last to arrive adds the parts in K order and goes on with the epilogue.
#pragma once

#include "../impls/mainloop.cuh"
#include "swiglu_quantize.cuh"

namespace flashinfer::sm12x::epilogue {

// `unit` is one of those that are shared. Returns whether this block has the whole sum.
template <class Config>
__device__ __forceinline__ bool reduce_split(float4* partials, int* arrivals, const SharedStorage<Config>& shared,
                                             const scheduler::Shares& shares, int unit, int thread,
                                             Accumulators<Config>& accumulators) {
  constexpr int kVectors = 2 * Config::kTokenSteps;  // float4 of one thread
  const int first = (unit - shares.first_shared_unit()) * shares.k_tiles;
  const int first_block = shares.owner(first), last_block = shares.owner(first + shares.k_tiles - 1);
  // A block has at most two parts: one of a unit that began before its share, one of a unit that goes on behind it.
  auto slot = [&](int block) {
    return partials +
           (static_cast<int64_t>(2 * block + (block == first_block ? 1 : 0)) * kVectors) * Config::kConsumerThreads +
           thread;
  };
  float4* mine = slot(blockIdx.x);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
      const auto& a = accumulators[half][step];
      mine[(half * Config::kTokenSteps + step) * Config::kConsumerThreads] = make_float4(a[0], a[1], a[2], a[3]);
    }
  }
  ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
  if (thread == 0) {
    const bool last = ptx::count_at_gpu_counter(arrivals + first_block) == last_block - first_block;
    // By the thread that saw the count, and in front of the barrier: only so what the others wrote is ordered for all.
    if (last) __threadfence();
    *shared.flag() = last;
  }
  ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
  const bool last_to_arrive = *shared.flag() != 0;
  if (!last_to_arrive) return false;

  // Several parts are fetched at once: one after the other, their latencies would be the tail of a small layer.
  constexpr int kBatch = kVectors <= 4 ? 4 : 1;
  float4 sum[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) sum[v] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int base = first_block; base <= last_block; base += kBatch) {
    float4 part[kBatch][kVectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float4* from = slot(min(base + i, last_block));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) part[i][v] = __ldcg(from + v * Config::kConsumerThreads);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + i > last_block) break;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        sum[v].x += part[i][v].x;
        sum[v].y += part[i][v].y;
        sum[v].z += part[i][v].z;
        sum[v].w += part[i][v].w;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
      const float4 total = sum[half * Config::kTokenSteps + step];
      auto& a = accumulators[half][step];
      a[0] = total.x;
      a[1] = total.y;
      a[2] = total.z;
      a[3] = total.w;
    }
  }
  return true;
}

}  // namespace flashinfer::sm12x::epilogue
