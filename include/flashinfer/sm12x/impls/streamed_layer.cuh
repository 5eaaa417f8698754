// SPDX-License-Identifier: Apache-2.0
//
// The whole layer as one stream of weights, for few tokens: routing, FC1, SwiGLU, FC2 and the top-k sum in one launch of
// one block per SM. A block streams its share of FC1's weight rows and, without a gap, its share of FC2's: whole rows,
// contiguous in memory, up to a shared memory full of them under way. FC2's arithmetic waits until all blocks are through
// with FC1; its weights do not.
//
// The wait needs all blocks to be resident together: a cooperative launch.
#pragma once

#include <climits>

#include "../epilogue/streamed_finish.cuh"
#include "streamed_multiply.cuh"

namespace flashinfer::sm12x {

// One warp: entries by expert, then their tiles. A stable counting sort over the local experts of all entries, which the
// whole block has left in shared memory.
template <class Config>
__device__ __forceinline__ void route_many(const StreamedLayerParams& p, const StreamBlock& shared, int lane) {
  int* counts = shared.routing_counts();
  int* offsets = counts + kMaxLocalExperts;
  const int* experts = shared.routing_experts();
  auto expert_of = [&](int entry) { return entry < p.num_entries ? experts[entry] : -1; };
  for (int e = lane; e < p.num_experts; e += 32) counts[e] = 0;
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < p.num_entries; base += 32) scheduler::count_chunk(expert_of(base + lane), counts, lane);
  int before_entries = 0, before_tiles = 0;
#pragma unroll 1
  for (int base = 0; base < p.num_experts; base += 32) {
    const int expert = base + lane;
    const int count = expert < p.num_experts ? counts[expert] : 0;
    const int tiles = ceil_div(count, Config::kTokenTile);
    const int first = before_entries + scheduler::inclusive_scan(count, lane) - count;
    const int first_tile = before_tiles + scheduler::inclusive_scan(tiles, lane) - tiles;
    for (int i = 0; i < tiles; ++i) {
      shared.tiles()[first_tile + i] = TokenTile::make(expert, first + i * Config::kTokenTile,
                                                       min(Config::kTokenTile, count - i * Config::kTokenTile));
    }
    if (expert < p.num_experts) {
      offsets[expert] = first;
      counts[expert] = 0;
    }
    before_entries = __shfl_sync(scheduler::kAllLanes, first + count, 31);
    before_tiles = __shfl_sync(scheduler::kAllLanes, first_tile + tiles, 31);
  }
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < p.num_entries; base += 32) {
    const int expert = expert_of(base + lane);
    const int place = scheduler::count_chunk(expert, counts, lane);
    if (expert >= 0) shared.order()[offsets[expert] + place] = static_cast<uint16_t>(base + lane);
  }
  if (lane == 0) *shared.num_tiles() = before_tiles;
}

// The same for up to 32 entries, one a lane: every lane counts those that come before its own. At one token, routing is
// part of what nothing hides.
template <class Config>
__device__ __forceinline__ void route_few(const StreamedLayerParams& p, const StreamBlock& shared, int lane) {
  constexpr unsigned kAll = scheduler::kAllLanes;
  const int expert = lane < p.num_entries ? scheduler::local_expert(p.ids[lane], p.first_expert, p.num_experts) : -1;
  int place = 0, of_expert = 0, before_in_expert = 0;
  for (int other = 0; other < p.num_entries; ++other) {
    const int theirs = __shfl_sync(kAll, expert, other);
    place += theirs >= 0 && (theirs < expert || (theirs == expert && other < lane));
    of_expert += theirs == expert;
    before_in_expert += theirs == expert && other < lane;
  }
  const bool heads = expert >= 0 && before_in_expert % Config::kTokenTile == 0;  // a tile's first token
  int tile = 0;
  for (int other = 0; other < p.num_entries; ++other) {
    tile += __shfl_sync(kAll, heads ? place : INT_MAX, other) < place;
  }
  if (expert >= 0) shared.order()[place] = static_cast<uint16_t>(lane);
  if (heads)
    shared.tiles()[tile] = TokenTile::make(expert, place, min(Config::kTokenTile, of_expert - before_in_expert));
  const int tiles = __popc(__ballot_sync(kAll, heads));
  if (lane == 0) *shared.num_tiles() = tiles;
}

// All blocks together: FC1's token rows into L2 while routing is under way.
template <class Config>
__device__ __forceinline__ void prefetch_input(const StreamedLayerParams& p) {
  constexpr int kLine = 128;
  const bool eight_bit = p.input.source == TokenSource::kMxfp8Swizzled || p.input.source == TokenSource::kMxfp8Linear;
  const int64_t bytes = static_cast<int64_t>(p.num_tokens) * p.gemm[0].k * (eight_bit ? 1 : 2);
  for (int64_t i = (threadIdx.x * gridDim.x + blockIdx.x) * int64_t{kLine}; i < bytes;
       i += static_cast<int64_t>(gridDim.x) * Config::kThreads * kLine) {
    ptx::prefetch_to_l2(static_cast<const uint8_t*>(p.input.data) + i);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    streamed_layer_kernel(const __grid_constant__ StreamedLayerParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const StreamBlock shared(dynamic_shared, p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  ptx::launch_dependent_grids();
  prefetch_input<Config>(p);
  const int turn = warp - Config::kMmaWarps;  // of a keeper
  if (turn == 0) {
    for (int stage = lane; stage < shared.stages; stage += 32) {
      ptx::mbarrier_init(shared.full(stage), 1);
      ptx::mbarrier_init(shared.done(stage), 32 * Config::kMmaWarps);
    }
    if (lane == 0) {
      ptx::mbarrier_init(shared.act_ready(), 1);
      ptx::mbarrier_init(shared.tokens_ready(), Config::kMmaWarps);
    }
    ptx::fence_barrier_init();
  }
  const bool few = p.num_entries <= 32;
  for (int i = threadIdx.x; !few && i < p.num_entries; i += Config::kThreads) {
    shared.routing_experts()[i] = scheduler::local_expert(p.ids[i], p.first_expert, p.num_experts);
  }
  __syncthreads();

  if (turn < 0) {
    StreamMultiplier<Config>(shared, warp, lane).run(p);
    return;
  }
  if (turn == 0 && few) route_few<Config>(p, shared, lane);
  if (turn == 0 && !few) route_many<Config>(p, shared, lane);
  if (turn == 1 && lane < 2) ptx::prefetch_tensor_map(&p.gemm[lane].scales);
  ptx::named_barrier_sync<32 * Config::kKeeperWarps>(kKeeperBarrier);
  ptx::named_barrier_arrive<Config::kThreads>(kRoutedBarrier);
  epilogue::StreamKeeper<Config>(p, shared, turn, lane).run();
}

}  // namespace flashinfer::sm12x
