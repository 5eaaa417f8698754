// SPDX-License-Identifier: Apache-2.0
//
// The grouped GEMM of the family: for every expert, [rows, k] MXFP4 weights (of a dense layer also MXFP8) times the
// token rows routed to it.
//
// Weights are the MMA's M operand and stay packed up to the registers; tokens are its N operand, so that eight of them
// already fill an MMA. One producer warp keeps a pipeline of stages full, the other warps consume it. Schedules: with N
// tiles up to 64 a block has four consumer warps, and where two blocks fit an SM one's epilogue hides behind the
// other's mainloop (multi-block: the SM's warp schedulers decide); a tile of 128 tokens takes eight consumer warps
// (8-warp).
//
//   knob            value                    where it is set
//   tokens a tile   8 to 64, or 128          instances.py, a row each
//   K a stage       128 or 256               there, `block_k`
//   stages          2 to 6                   there, `stages` (bf16 rows on Hopper: as many as fit)
//   blocks an SM    1 or 2 at least          there, `blocks_per_sm`; __launch_bounds__: kMinBlocks (storage.cuh)
//   weight rows     128, in two M64 halves   kBlockM (types.h)
//   warps           4 or 8 consumers, then   GemmConfig (storage.cuh)
//                   1 producer
//
// Arrivals at a barrier: full 1, or 33 where token rows have scales; empty and kConsumerBarrier all consumers' threads.
//
//   all warps: with `offsets`, wait for the launches in front. Warp 0 reads the offsets, or routes, or has one group of
//   all rows; the last warp initializes the barriers; all clear the tokens' stages. __syncthreads. A block without work
//   waits for the launches in front and ends.
//
//   producer (the last warp)                consumers
//   weights of the first stages -> full     wait for the launches in front
//   wait for the launches in front          each K tile:
//   each K tile:                              wait for full[stage]
//     after the first round of the pipeline:  MMAs: 16 rows of each M64 half a warp; of 128 tokens, half
//       wait for empty[stage], then           every thread arrives at empty[stage]
//       weights -> full[stage]              each tile of the output:
//     token rows -> full[stage]               if K is split among blocks: this one's sums to memory; the last
//                                               block to arrive adds all, others take their next tile
//                                             the epilogue
//
// A stage holds 128 weight rows of `block_k` elements, for each K block one scale chunk (FC1: up to three),
// token rows and, unless they are bf16, their scales. Weights, their scales and bf16 rows come by bulk copies: full's
// one arrival, with the weights, announces the bytes of all three. Other rows and their scales come by copies of each
// lane, which arrives too. Consumers wait for each other at kConsumerBarrier: where K is split, and in FC1's and FC2's
// epilogues.
#pragma once

#include "../moe/routing.cuh"
#include "epilogues.cuh"
#include "mainloop.cuh"
#include "producer.cuh"
#include "scheduler.cuh"

namespace flashinfer::sm12x {

// Expert offsets, and N tile prefix sums, of this launch into shared memory. One warp.
template <class Config>
__device__ __forceinline__ void load_routing(const GroupedGemmParams<Config::kRole>& p,
                                             const SharedStorage<Config>& shared, int lane) {
  int* offsets = shared.offsets();
  int* tile_prefix = shared.tile_prefix(p.num_experts);
  if (p.offsets != nullptr) {
    for (int e = lane; e <= p.num_experts; e += 32) offsets[e] = p.offsets[e];
    __syncwarp();
  } else if (Config::kRole == Role::kStore) {  // one group of all rows
    if (lane < 2) offsets[lane] = lane * p.num_routed_rows;
    __syncwarp();
  } else {
    route_with_one_warp(p.ids, p.num_routed_rows, p.first_expert, p.num_experts, offsets, shared.order(), lane);
  }
  for (int e = lane; e < p.num_experts; e += 32) {
    tile_prefix[e] = ceil_div(offsets[e + 1] - offsets[e], Config::kBlockN);
  }
  __syncwarp();
  exclusive_offsets(tile_prefix, tile_prefix, p.num_experts, lane);
}

// Token columns that no copy fills are multiplied too (and never stored): give them a value.
template <class Config>
__device__ __forceinline__ void clear_token_stages(const SharedStorage<Config>& shared) {
  constexpr int kBytes = SharedStorage<Config>::kStages * (Config::kTokenStage + Config::kTokenScaleStage);
  static_assert(kBytes % 16 == 0);
  uint4* vectors = reinterpret_cast<uint4*>(shared.tokens(0));
  for (int i = threadIdx.x; i < kBytes / 16; i += Config::kThreads) vectors[i] = make_uint4(0, 0, 0, 0);
  ptx::fence_async_proxy();  // packed rows come by bulk copies, which are not ordered behind these writes otherwise
}

// A consumer warp: multiplies the block's K ranges, and finishes the work tiles whose sum the block has.
template <class Config>
__device__ __forceinline__ void consume(const GroupedGemmParams<Config::kRole>& p, const SharedStorage<Config>& shared,
                                        const WorkTileMap<Config::kBlockN>& work_tiles, const WorkSplit& work, int warp,
                                        int lane) {
  const int thread = 32 * warp + lane;
  const int blocks = p.k / kScaleBlock;
  ptx::wait_for_prerequisite_grids();

  int stage = 0;
  uint32_t phase = 0;
  TileScheduler scheduler(work);
  for (KRange range = scheduler.next(); range.tiles > 0; range = scheduler.next()) {
    const WorkTile work_tile = work_tiles.locate(range.work_tile);
    const OperandOffsets<Config> at = operand_offsets<Config>(p, work_tile, warp, lane);
    const OwnToken own = own_token<Config>(p, shared, work_tile, thread);

    Accumulators<Config> accumulators = {};
    mma::RowNans nans[2];
    for (int k_tile = range.first; k_tile < range.first + range.tiles; ++k_tile) {
      ptx::mbarrier_wait(shared.full(stage), phase);
      const int valid_blocks = blocks - k_tile * (Config::kBlockK / kScaleBlock);
      const StageScales<Config> scales(shared, stage, at, valid_blocks, warp, lane);
      if (valid_blocks >= Config::kBlockK / kScaleBlock && scales.fold()) {
        consume_tile<Config, true>(shared, stage, at, scales, valid_blocks, lane, accumulators, nans);
      } else {
        consume_tile<Config, false>(shared, stage, at, scales, valid_blocks, lane, accumulators, nans);
      }
      ptx::mbarrier_arrive(shared.empty(stage));  // every thread that read: racecheck sees no order otherwise
      if (++stage == SharedStorage<Config>::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
    spread_nan<Config>(nans, accumulators);
    if (range.tiles < work.k_tiles &&
        !reduce_split<Config>(p.partials, p.split_arrivals, shared, work, range.work_tile, thread, accumulators)) {
      continue;
    }
    Epilogue<Config>{p, shared, work_tile, accumulators}.finish(warp, lane, own);
  }
}

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kMinBlocks)
    grouped_gemm_kernel(const __grid_constant__ GroupedGemmParams<Config::kRole> p) {
  extern __shared__ char dynamic_shared[];
  const SharedStorage<Config> shared(dynamic_shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  ptx::launch_dependent_grids();  // those that route by themselves may stream weights; all wait for this grid's results
  if (p.offsets != nullptr) ptx::wait_for_prerequisite_grids();  // the prologue, or a caller, routes

  if (warp == 0) {
    load_routing<Config>(p, shared, lane);
  } else if (warp == Config::kConsumerWarps && lane == 0) {
    ptx::prefetch_tensor_map(&p.weights);
    if constexpr (Config::kTwoPlanes) ptx::prefetch_tensor_map(&p.second_plane);
    for (int stage = 0; stage < SharedStorage<Config>::kStages; ++stage) {
      // The producer's announcement, and one arrival of each of its lanes for the rows and scales that they copy.
      ptx::mbarrier_init(shared.full(stage), Config::kTokenScales ? 1 + 32 : 1);
      ptx::mbarrier_init(shared.empty(stage), Config::kConsumerThreads);
    }
    ptx::fence_barrier_init();
  }
  clear_token_stages<Config>(shared);
  __syncthreads();

  const int m_tiles = ceil_div(p.rows, kBlockM);
  const WorkTileMap<Config::kBlockN> work_tiles = {shared.offsets(), shared.tile_prefix(p.num_experts), p.num_experts,
                                                   m_tiles};
  const WorkSplit work(work_tiles.num_work_tiles(), ceil_div(p.k, Config::kBlockK), gridDim.x);
  if (static_cast<int>(blockIdx.x) >= work.blocks) {
    ptx::wait_for_prerequisite_grids();  // this grid must not count as complete before those it depends on
    return;
  }

  if (warp == Config::kConsumerWarps) {  // the producer warp
    Producer<Config>(p, shared, work_tiles, work, lane).produce();
  } else {  // consumer warps
    consume<Config>(p, shared, work_tiles, work, warp, lane);
  }
}

}  // namespace flashinfer::sm12x
