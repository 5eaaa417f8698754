// SPDX-License-Identifier: Apache-2.0
//
// The order of a block's work in the fused MoE kernel, and its shared memory. Every role of a block follows the same
// sequence: its range of FC1's work tiles, then its range of FC2's. A work tile is one stage of the pipeline.
//
// Routing makes the tiles of tokens on the way: route_many, route_few.
#pragma once

#include <climits>

#include "../moe/choose_experts.cuh"
#include "../moe/routing.cuh"
#include "../rows/scalar.cuh"
#include "gemm.cuh"

namespace flashinfer::sm12x {

// Named barriers of a block; 0 is __syncthreads.
constexpr int kEpilogueBarrier = 1;  // the epilogue warps
constexpr int kRoutedBarrier = 2;  // all: epilogue warps arrive, MMA warps wait

// Up to kBlockN tokens of one expert, in 32 bits of shared memory.
struct TokenTile {
  uint32_t packed;

  static_assert(kMaxLocalExperts <= 1 << 16 && kFusedMoeRoutedRows <= 1 << 11, "fields of 16, 11 and 5 bits");
  static __device__ __forceinline__ TokenTile make(int expert, int first, int count) {
    return {static_cast<uint32_t>(expert) | static_cast<uint32_t>(first) << 16 | static_cast<uint32_t>(count) << 27};
  }
  __device__ __forceinline__ int expert() const { return static_cast<int>(packed & 0xFFFFu); }
  __device__ __forceinline__ int first() const { return static_cast<int>(packed >> 16 & 0x7FFu); }  // in permuted order
  __device__ __forceinline__ int count() const { return static_cast<int>(packed >> 27); }
};

// Tiles of a launch. The wide ones, which hold more tokens than one step of MMAs takes, come first.
struct TileCounts {
  int all, wide;
};

// Work tiles [begin, end) of one GEMM, counted tile by tile, that a block computes, and the tile of the first.
struct BlockRange {
  int begin, end, first_tile;

  // Ranges of equal time. A wide tile's work tiles take `wide_fifths` / 5 of the others' time, and come first. Fits 32
  // bits: kFusedMoeTiles tiles of at most 576 work tiles (outputs of one GEMM are K of the other, and so bounded), and
  // a GPU's SMs.
  static_assert(int64_t{kFusedMoeTiles} * 576 * 6 * 512 < int64_t{1} << 32, "of up to 512 SMs");
  static __device__ __forceinline__ BlockRange of_block(const TileCounts& tiles, int wide_fifths,
                                                        int work_tiles_per_token_tile) {
    const unsigned work_tiles = work_tiles_per_token_tile, wide_time = tiles.wide * work_tiles * wide_fifths;
    const unsigned time = wide_time + (tiles.all - tiles.wide) * work_tiles * 5;
    auto first_work_tile = [&](unsigned block) {
      const unsigned start = time * block / gridDim.x;
      return start < wide_time ? start / wide_fifths : tiles.wide * work_tiles + (start - wide_time) / 5;
    };
    const unsigned begin = first_work_tile(blockIdx.x);
    return {static_cast<int>(begin), static_cast<int>(first_work_tile(blockIdx.x + 1)),
            static_cast<int>(begin / work_tiles)};
  }
};

// A block's shared memory (FusedMoeStorage).
struct FusedMoeShared : SplitKPipeline<FusedMoeStorage::kPipeline> {
  using Storage = FusedMoeStorage;

  __device__ __forceinline__ FusedMoeShared(char* dynamic, const FusedMoeParams& p)
      : SplitKPipeline{dynamic, p.stages, p.stage_bytes} {}

  __device__ __forceinline__ TokenTile* tiles() const { return at<TokenTile>(Storage::kTiles); }
  // FC1's, FC2's.
  __device__ __forceinline__ BlockRange* block_ranges() const {
    static_assert(sizeof(BlockRange) == Storage::kBlockRangeBytes);
    return at<BlockRange>(Storage::kBlockRanges);
  }
  // Experts and weights of a few routed rows.
  __device__ __forceinline__ int32_t* few_ids() const { return at<int32_t>(Storage::kFewIds); }
  __device__ __forceinline__ float* few_weights() const { return at<float>(Storage::kFewWeights); }
  __device__ __forceinline__ uint16_t* order() const { return at<uint16_t>(Storage::kOrder); }
  // While there is nothing in the pipeline: two numbers for each expert, one for each routed row.
  __device__ __forceinline__ int* routing_counts() const { return at<int>(Storage::kPipeline); }
  __device__ __forceinline__ int* routing_experts() const { return routing_counts() + 2 * kMaxLocalExperts; }
  // FC1's results of all blocks can be read.
  __device__ __forceinline__ uint64_t* intermediate_ready() const { return barrier(2 * kMaxSplitKStages); }
  // The MMA warps have prewarmed in the last stage.
  __device__ __forceinline__ uint64_t* prewarmed() const { return barrier(2 * kMaxSplitKStages + 1); }

 private:
  template <class T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
};

// The block's work tiles, work range by work range: a work range is consecutive work tiles of one GEMM and one tile.
// Only `gemm` and `tile` live on; the rest is computed anew at each work range, rather than held in registers.
class FusedMoeScheduler {
 public:
  int gemm = 0;  // 0: FC1, 1: FC2, 2: the end
  int tile = -1;

  struct WorkRange {
    int work_tile = 0;  // first
    int work_tiles = 0;
  };

  __device__ __forceinline__ bool ended() const { return gemm == 2; }

  __device__ __forceinline__ WorkRange next_work_range(const FusedMoeParams& p, const FusedMoeShared& shared) {
    for (++tile; gemm < 2; ++gemm, tile = -1) {
      const BlockRange range = shared.block_ranges()[gemm];
      const int work_tiles = p.gemm[gemm].work_tiles;
      tile = max(tile, range.first_tile);
      const int first = max(range.begin, tile * work_tiles), last = min(range.end, (tile + 1) * work_tiles);
      if (first < last) return {first - tile * work_tiles, last - first};
    }
    return {};
  }
};

// Every `stride`-th work tile of the block, from work tile `first` on.
class StridedWorkTiles {
 public:
  __device__ __forceinline__ StridedWorkTiles(const FusedMoeParams& p, const FusedMoeShared& shared, int first,
                                              int stride)
      : at_(first), stride_(stride) {
    range_ = scheduler_.next_work_range(p, shared);
    settle(p, shared);
  }
  __device__ __forceinline__ int gemm() const { return scheduler_.gemm; }
  __device__ __forceinline__ int tile() const { return scheduler_.tile; }
  __device__ __forceinline__ int work_tile() const { return range_.work_tile + at_; }
  __device__ __forceinline__ bool ended() const { return scheduler_.ended(); }
  __device__ __forceinline__ void advance(const FusedMoeParams& p, const FusedMoeShared& shared) {
    at_ += stride_;
    settle(p, shared);
  }

 private:
  __device__ __forceinline__ void settle(const FusedMoeParams& p, const FusedMoeShared& shared) {
    while (!scheduler_.ended() && at_ >= range_.work_tiles) {
      at_ -= range_.work_tiles;
      range_ = scheduler_.next_work_range(p, shared);
    }
  }

  FusedMoeScheduler scheduler_;
  FusedMoeScheduler::WorkRange range_;
  int at_;  // in the work range
  int stride_;
};

// Routed rows, wide tiles and narrow tiles of some experts, in one word: one scan of a warp sums all three.
template <int kBlockN>
class ExpertSums {
  static constexpr int kWide = 11, kNarrow = 21;  // their lowest bits
  static_assert(kFusedMoeRoutedRows < 1 << kWide && kFusedMoeTiles < 1 << (kNarrow - kWide),
                "fields of 11, 10 and 11 bits");

 public:
  uint32_t packed = 0;

  static __device__ __forceinline__ ExpertSums of_expert(int count) {
    const int tiles = ceil_div(count, kBlockN), rest = count % kBlockN;
    const int wide = kBlockN <= kNarrowTokens ? 0 : rest == 0 || rest > kNarrowTokens ? tiles : tiles - 1;
    return {static_cast<uint32_t>(count | wide << kWide) | static_cast<uint32_t>(tiles - wide) << kNarrow};
  }
  __device__ __forceinline__ int routed_rows() const { return static_cast<int>(packed & ((1u << kWide) - 1)); }
  __device__ __forceinline__ int wide() const {
    return static_cast<int>(packed >> kWide & ((1u << (kNarrow - kWide)) - 1));
  }
  __device__ __forceinline__ int narrow() const { return static_cast<int>(packed >> kNarrow); }
};

// One warp groups routed rows by expert, makes tiles of them and returns the tiles' numbers. A stable counting sort
// over the routed rows' local experts, which the whole block has left in shared memory. Lane 0's experts come first,
// then lane 1's: a tile is computed alike wherever it stands.
template <class Config>
__device__ __forceinline__ TileCounts route_many(const FusedMoeParams& p, const FusedMoeShared& shared, int lane) {
  constexpr int kTile = Config::kBlockN;
  using Sums = ExpertSums<kTile>;
  int* counts = shared.routing_counts();
  int* offsets = counts + kMaxLocalExperts;
  int* experts = shared.routing_experts();
  for (int e = lane; e < p.num_experts; e += 32) counts[e] = 0;
  __syncwarp();
  // A routed row's place among those of its expert, kept beside the expert.
  constexpr int kPlace = 16;
  static_assert(kMaxLocalExperts <= 1 << kPlace && kFusedMoeRoutedRows <= 1 << (31 - kPlace));
#pragma unroll 1
  for (int base = 0; base < p.num_routed_rows; base += 32) {
    const int routed_row = base + lane, expert = routed_row < p.num_routed_rows ? experts[routed_row] : -1;
    const int place = count_routed_rows(expert, counts, lane);
    if (expert >= 0) experts[routed_row] = expert | place << kPlace;
  }
  // A lane takes every 32nd expert: the warp scans once, and a lane reads a bank of its own.
  Sums own;
  for (int e = lane; e < p.num_experts; e += 32) own.packed += Sums::of_expert(counts[e]).packed;
  const Sums through = {static_cast<uint32_t>(inclusive_scan(static_cast<int>(own.packed), lane))};
  const Sums all = {__shfl_sync(kAllLanes, through.packed, 31)};
  Sums before = {through.packed - own.packed};
#pragma unroll 1
  for (int e = lane; e < p.num_experts; e += 32) {
    const int count = counts[e], first = before.routed_rows();
    const Sums sums = Sums::of_expert(count);
    for (int i = 0; i < sums.wide() + sums.narrow(); ++i) {
      const bool wide = i < sums.wide();
      shared.tiles()[wide ? before.wide() + i : all.wide() + before.narrow() + i - sums.wide()] =
          TokenTile::make(e, first + i * kTile, min(kTile, count - i * kTile));
    }
    offsets[e] = first;
    before.packed += sums.packed;
  }
  __syncwarp();
  for (int routed_row = lane; routed_row < p.num_routed_rows; routed_row += 32) {
    const int found = experts[routed_row];
    if (found < 0) continue;
    const int expert = found & ((1 << kPlace) - 1), place = found >> kPlace;
    shared.order()[offsets[expert] + place] = static_cast<uint16_t>(routed_row);
  }
  return {all.wide() + all.narrow(), all.wide()};
}

// Experts and weights of a few routed rows into shared memory: as the launch was given them, by the warp that routes,
// or by its router's logits, a token to an epilogue warp.
__device__ __forceinline__ void find_few_experts(const FusedMoeParams& p, const FusedMoeShared& shared, int warp,
                                                 int lane) {
  if (p.router.logits == nullptr) {
    if (warp == 0 && lane < p.num_routed_rows) {
      shared.few_ids()[lane] = p.ids[lane];
      shared.few_weights()[lane] = load_or(p.routing_weights, lane, 1.0f);
    }
    __syncwarp();
    return;
  }
  for (int token = warp; token < p.num_tokens; token += kEpilogueWarps) {
    int id;
    float weight;
    const int experts = p.router.num_experts_total;
    choose_experts(p.router.logits + static_cast<int64_t>(token) * experts, experts, p.top_k, lane, &id, &weight);
    if (lane >= p.top_k) continue;
    if (p.router.is_padding != nullptr && p.router.is_padding[token]) id = -1;
    shared.few_ids()[token * p.top_k + lane] = id;
    shared.few_weights()[token * p.top_k + lane] = weight;
  }
  ptx::named_barrier_sync<32 * kEpilogueWarps>(kEpilogueBarrier);
}

// The same as route_many for a few routed rows, one a lane, with experts in order: every lane counts those that come
// before its own. At one token, routing is part of what nothing hides.
template <class Config>
__device__ __forceinline__ TileCounts route_few(const FusedMoeParams& p, const FusedMoeShared& shared, int expert,
                                                int lane) {
  int place = 0, of_expert = 0, before_in_expert = 0;
  for (int other = 0; other < p.num_routed_rows; ++other) {
    const int theirs = __shfl_sync(kAllLanes, expert, other);
    place += theirs >= 0 && (theirs < expert || (theirs == expert && other < lane));
    of_expert += theirs == expert;
    before_in_expert += theirs == expert && other < lane;
  }
  const bool heads = expert >= 0 && before_in_expert % Config::kBlockN == 0;  // a tile's first token
  const int count = min(Config::kBlockN, of_expert - before_in_expert);
  const bool wide = heads && count > kNarrowTokens;
  const int order = heads ? (wide ? place : 32 + place) : INT_MAX;
  int tile = 0;
  for (int other = 0; other < p.num_routed_rows; ++other) tile += __shfl_sync(kAllLanes, order, other) < order;
  if (expert >= 0) shared.order()[place] = static_cast<uint16_t>(lane);
  if (heads) shared.tiles()[tile] = TokenTile::make(expert, place, count);
  return {__popc(__ballot_sync(kAllLanes, heads)), __popc(__ballot_sync(kAllLanes, wide))};
}

}  // namespace flashinfer::sm12x
