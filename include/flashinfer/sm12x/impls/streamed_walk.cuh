// SPDX-License-Identifier: Apache-2.0
//
// The order of a block's work in the streamed layer, and its shared memory. Every role of a block walks the same sequence:
// its share of FC1's units, then its share of FC2's. A unit is one stage of the ring.
#pragma once

#include "../ptx/sync.cuh"
#include "streamed_params.cuh"

namespace flashinfer::sm12x {

// Up to kTokenTile tokens of one expert, in a word of shared memory.
struct TokenTile {
  uint32_t packed;

  static_assert(kMaxLocalExperts <= 1 << 16 && kStreamEntries <= 1 << 11, "fields of 16, 11 and 5 bits");
  static __device__ __forceinline__ TokenTile make(int expert, int first, int count) {
    return {static_cast<uint32_t>(expert) | static_cast<uint32_t>(first) << 16 | static_cast<uint32_t>(count) << 27};
  }
  __device__ __forceinline__ int expert() const { return static_cast<int>(packed & 0xFFFFu); }
  __device__ __forceinline__ int first() const { return static_cast<int>(packed >> 16 & 0x7FFu); }  // in expert order
  __device__ __forceinline__ int count() const { return static_cast<int>(packed >> 27); }
};

// Tiles of a launch. The wide ones, which hold more tokens than one step of MMAs takes, come first.
constexpr int kNarrowTokens = 8;
struct TileCounts {
  int all, wide;
};

// Units [begin, end) of one GEMM, counted tile by tile, that a block computes, and the tile of the first.
struct StreamShare {
  int begin, end, first_tile;

  // Shares of equal time. A wide tile's units take `wide_fifths` / 5 of the others' time, and come first. Fits 32 bits:
  // kStreamEntries tiles of at most 384 units (outputs of one GEMM are K of the other, and so bounded), and a GPU's SMs.
  static __device__ __forceinline__ StreamShare of_block(const TileCounts& tiles, int wide_fifths, int units_per_tile) {
    const unsigned units = units_per_tile, wide_time = tiles.wide * units * wide_fifths;
    const unsigned time = wide_time + (tiles.all - tiles.wide) * units * 5;
    auto first_unit = [&](unsigned block) {
      const unsigned start = time * block / gridDim.x;
      return start < wide_time ? start / wide_fifths : tiles.wide * units + (start - wide_time) / 5;
    };
    const unsigned begin = first_unit(blockIdx.x);
    return {static_cast<int>(begin), static_cast<int>(first_unit(blockIdx.x + 1)), static_cast<int>(begin / units)};
  }
};

// A block's shared memory (StreamStorage), and how its ring is divided.
struct StreamBlock {
  using Storage = StreamStorage;

  char* base;
  int stages;
  int stage_bytes;

  __device__ __forceinline__ StreamBlock(char* dynamic, const StreamedLayerParams& p)
      : base(dynamic), stages(p.stages), stage_bytes(p.stage_bytes) {}

  __device__ __forceinline__ uint8_t* stage(int i) const { return at<uint8_t>(Storage::kRing + i * stage_bytes); }
  __device__ __forceinline__ TokenTile* tiles() const { return at<TokenTile>(Storage::kTiles); }
  __device__ __forceinline__ StreamShare* shares() const { return at<StreamShare>(Storage::kShares); }  // FC1's, FC2's
  __device__ __forceinline__ uint16_t* order() const { return at<uint16_t>(Storage::kOrder); }
  // While there is nothing in the ring: two numbers for each expert, one for each entry.
  __device__ __forceinline__ int* routing_counts() const { return at<int>(Storage::kRing); }
  __device__ __forceinline__ int* routing_experts() const { return routing_counts() + 2 * kMaxLocalExperts; }
  // A stage's copies have landed; its partial sums are complete.
  __device__ __forceinline__ uint64_t* full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ uint64_t* done(int stage) const { return barrier(kMaxStreamStages + stage); }
  // FC1's results of all blocks can be read.
  __device__ __forceinline__ uint64_t* act_ready() const { return barrier(2 * kMaxStreamStages); }
  // The MMA warps have rehearsed in the last stage.
  __device__ __forceinline__ uint64_t* rehearsed() const { return barrier(2 * kMaxStreamStages + 1); }

 private:
  template <class T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(base + offset);
  }
  __device__ __forceinline__ uint64_t* barrier(int i) const { return at<uint64_t>(Storage::kBarriers) + i; }
};

// A place in the ring, and the parity of the phase that it is in.
struct RingPlace {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int steps, int stages) {
    stage += steps;
    while (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// A walk over the block's units, run by run: a run is a row of units of one GEMM and one tile. Only `gemm` and `tile` live
// on; the rest is computed anew at each run, rather than held in registers.
class StreamWalk {
 public:
  int gemm = 0;  // 0: FC1, 1: FC2, 2: the end
  int tile = -1;

  struct Run {
    int unit = 0;  // first
    int units = 0;  // 0 only at the end
  };

  __device__ __forceinline__ bool ended() const { return gemm == 2; }

  __device__ __forceinline__ Run next_run(const StreamedLayerParams& p, const StreamBlock& shared) {
    for (++tile; gemm < 2; ++gemm, tile = -1) {
      const StreamShare share = shared.shares()[gemm];
      const int units = p.gemm[gemm].units;
      tile = max(tile, share.first_tile);
      const int first = max(share.begin, tile * units), last = min(share.end, (tile + 1) * units);
      if (first < last) return {first - tile * units, last - first};
    }
    return {};
  }
};

// Every `stride`-th unit of the block, from unit `first` on.
class StreamStride {
 public:
  __device__ __forceinline__ StreamStride(const StreamedLayerParams& p, const StreamBlock& shared, int first,
                                          int stride)
      : at_(first), stride_(stride) {
    run_ = walk_.next_run(p, shared);
    settle(p, shared);
  }
  __device__ __forceinline__ int gemm() const { return walk_.gemm; }
  __device__ __forceinline__ int tile() const { return walk_.tile; }
  __device__ __forceinline__ int unit() const { return run_.unit + at_; }
  __device__ __forceinline__ bool ended() const { return walk_.ended(); }
  __device__ __forceinline__ void advance(const StreamedLayerParams& p, const StreamBlock& shared) {
    at_ += stride_;
    settle(p, shared);
  }

 private:
  __device__ __forceinline__ void settle(const StreamedLayerParams& p, const StreamBlock& shared) {
    while (!walk_.ended() && at_ >= run_.units) {
      at_ -= run_.units;
      run_ = walk_.next_run(p, shared);
    }
  }

  StreamWalk walk_;
  StreamWalk::Run run_;
  int at_;  // in the run
  int stride_;
};

// MMA row g as a row of the slab's eight. Eight lanes (two rows, 64 bytes each) are served together by shared memory:
// pair the rows whose distance is half the 128-byte period of the banks, if there is one.
__device__ __forceinline__ int slab_row(int g, int row_bytes) {
  const int pitch = row_bytes % 128 / 16;
  if (pitch % 2 != 0) return (g >> 1) | (g & 1) << 2;  // rows r and r + 4
  if (pitch % 4 != 0) return (g & 4) | (g & 2) >> 1 | (g & 1) << 1;  // rows r and r + 2
  return g;
}

// Where a lane's two rows of a slab (g and g + 8 of the MMA) lie in a stage. FC1: an up row and its gate row.
struct LaneRows {
  int low, high;  // byte offsets of the stage's first slab
  int next_slab;  // from a slab to the next

  __device__ __forceinline__ LaneRows(const StreamedGemm& gemm, bool fc1, int row) {
    low = row * gemm.row_bytes;
    high = low + (fc1 ? 8 * gemm.groups : 8) * gemm.row_bytes;
    next_slab = slab_outputs(fc1) * gemm.row_bytes;
  }
};

// The partial sums of a lane replace weights that it alone has read; lanes whose block lies beyond K use the stage's tail.
template <class Config>
struct PartialPlace {
  int offset[Config::kTokenSteps];  // in the stage's first slab
  int next_slab;

  __device__ __forceinline__ PartialPlace(const StreamedGemm& gemm, const LaneRows& rows, int group_warp, int lane) {
    const int word = group_warp * Config::kWords, t = lane % 4;
    const bool within = (word * kScaleChunkBlocks + t) * kScaleBlock < gemm.k;
    const int tail = gemm.tail_offset + lane * 16;
    const int column = word * kWordBytes + t * (kWordBytes / kScaleChunkBlocks);
    next_slab = within ? rows.next_slab : Config::kTokenSteps * 32 * 16;
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
      offset[step] = within ? (step == 0 ? rows.low : rows.high) + column : tail + step * 32 * 16;
    }
  }
};

}  // namespace flashinfer::sm12x
