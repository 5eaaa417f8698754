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

// One warp: entries by expert, then their tiles, whose numbers it returns. A stable counting sort over the local experts of
// all entries, which the whole block has left in shared memory.
template <class Config>
__device__ __forceinline__ TileCounts route_many(const StreamedLayerParams& p, const StreamBlock& shared, int lane) {
  constexpr int kTile = Config::kTokenTile;
  int* counts = shared.routing_counts();
  int* offsets = counts + kMaxLocalExperts;
  const int* experts = shared.routing_experts();
  auto expert_of = [&](int entry) { return entry < p.num_entries ? experts[entry] : -1; };
  for (int e = lane; e < p.num_experts; e += 32) counts[e] = 0;
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < p.num_entries; base += 32) scheduler::count_chunk(expert_of(base + lane), counts, lane);
  auto wide_tiles = [](int count) {
    return kTile <= kNarrowTokens ? 0 : count / kTile + (count % kTile > kNarrowTokens ? 1 : 0);
  };
  TileCounts tiles = {0, 0};
  for (int e = lane; e < p.num_experts; e += 32) tiles.wide += wide_tiles(counts[e]);
  tiles.wide = __reduce_add_sync(kAllLanes, tiles.wide);
  int before_entries = 0, before_wide = 0, before_narrow = tiles.wide;
#pragma unroll 1
  for (int base = 0; base < p.num_experts; base += 32) {
    const int expert = base + lane;
    const int count = expert < p.num_experts ? counts[expert] : 0;
    const int wide = wide_tiles(count), narrow = ceil_div(count, kTile) - wide;
    const int first = before_entries + scheduler::inclusive_scan(count, lane) - count;
    const int first_wide = before_wide + scheduler::inclusive_scan(wide, lane) - wide;
    const int first_narrow = before_narrow + scheduler::inclusive_scan(narrow, lane) - narrow;
    for (int i = 0; i < wide + narrow; ++i) {
      shared.tiles()[i < wide ? first_wide + i : first_narrow + i - wide] =
          TokenTile::make(expert, first + i * kTile, min(kTile, count - i * kTile));
    }
    if (expert < p.num_experts) {
      offsets[expert] = first;
      counts[expert] = 0;
    }
    before_entries = __shfl_sync(kAllLanes, first + count, 31);
    before_wide = __shfl_sync(kAllLanes, first_wide + wide, 31);
    before_narrow = __shfl_sync(kAllLanes, first_narrow + narrow, 31);
  }
  tiles.all = before_narrow;
  __syncwarp();
#pragma unroll 1
  for (int base = 0; base < p.num_entries; base += 32) {
    const int expert = expert_of(base + lane);
    const int place = scheduler::count_chunk(expert, counts, lane);
    if (expert >= 0) shared.order()[offsets[expert] + place] = static_cast<uint16_t>(base + lane);
  }
  return tiles;
}

// The same for up to 32 entries, one a lane: every lane counts those that come before its own. At one token, routing is
// part of what nothing hides.
template <class Config>
__device__ __forceinline__ TileCounts route_few(const StreamedLayerParams& p, const StreamBlock& shared, int expert,
                                                int lane) {
  constexpr unsigned kAll = kAllLanes;
  int place = 0, of_expert = 0, before_in_expert = 0;
  for (int other = 0; other < p.num_entries; ++other) {
    const int theirs = __shfl_sync(kAll, expert, other);
    place += theirs >= 0 && (theirs < expert || (theirs == expert && other < lane));
    of_expert += theirs == expert;
    before_in_expert += theirs == expert && other < lane;
  }
  const bool heads = expert >= 0 && before_in_expert % Config::kTokenTile == 0;  // a tile's first token
  const int count = min(Config::kTokenTile, of_expert - before_in_expert);
  const bool wide = heads && count > kNarrowTokens;
  const int order = heads ? (wide ? place : 32 + place) : INT_MAX;
  int tile = 0;
  for (int other = 0; other < p.num_entries; ++other) tile += __shfl_sync(kAll, order, other) < order;
  if (expert >= 0) shared.order()[place] = static_cast<uint16_t>(lane);
  if (heads) shared.tiles()[tile] = TokenTile::make(expert, place, count);
  return {__popc(__ballot_sync(kAll, heads)), __popc(__ballot_sync(kAll, wide))};
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1)
    streamed_layer_kernel(const __grid_constant__ StreamedLayerParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const StreamBlock shared(dynamic_shared, p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  ptx::launch_dependent_grids();
  const int turn = warp - Config::kMmaWarps;  // of a keeper
  auto expert_of = [&](int entry) {
    return entry < p.num_entries ? scheduler::local_expert(p.ids[entry], p.first_expert, p.num_experts) : -1;
  };
  const bool few = p.num_entries <= 32;
  if (turn == 1) {
    for (int stage = lane; stage < shared.stages; stage += 32) {
      ptx::mbarrier_init(shared.full(stage), 1);
      ptx::mbarrier_init(shared.done(stage), 32 * Config::kMmaWarps);
    }
    if (lane == 0) {
      ptx::mbarrier_init(shared.act_ready(), 1);
      ptx::mbarrier_init(shared.rehearsed(), Config::kMmaWarps);
      // By one lane: a lane for each map would make this a loop over lanes, whose addresses differ.
      ptx::prefetch_tensor_map(&p.gemm[0].scales);
      ptx::prefetch_tensor_map(&p.gemm[1].scales);
    }
    ptx::fence_barrier_init();
  }
  if (!few) {
    ptx::wait_for_prerequisite_grids();  // ids are there
    for (int i = threadIdx.x; i < p.num_entries; i += Config::kThreads) shared.routing_experts()[i] = expert_of(i);
  }
  __syncthreads();

  if (turn < 0) {
    StreamMultiplier<Config>(shared, warp, lane).run(p);
    return;
  }
  ptx::wait_for_prerequisite_grids();  // ids are there, tokens arranged, and the grid barrier's counters are zero
  if (turn == 0) {
    const TileCounts tiles =
        few ? route_few<Config>(p, shared, expert_of(lane), lane) : route_many<Config>(p, shared, lane);
    if (lane < 2) shared.shares()[lane] = StreamShare::of_block(tiles, Config::kWideFifths, p.gemm[lane].units);
  }
  ptx::named_barrier_sync<32 * kKeeperWarps>(kKeeperBarrier);
  ptx::named_barrier_arrive<Config::kThreads>(kRoutedBarrier);
  epilogue::StreamKeeper<Config>(p, shared, turn, lane).run();
}

}  // namespace flashinfer::sm12x
