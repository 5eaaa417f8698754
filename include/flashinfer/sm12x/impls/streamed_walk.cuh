// SPDX-License-Identifier: Apache-2.0
//
// The order of a block's work in the streamed layer, and its shared memory. Every role of a block walks the same sequence:
// its share of FC1's units, then its share of FC2's. A unit is one stage of the ring.
#pragma once

#include "streamed_gemm.cuh"
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

// A block's shared memory (StreamStorage).
struct StreamBlock : StreamRing<StreamStorage::kRing> {
  using Storage = StreamStorage;

  __device__ __forceinline__ StreamBlock(char* dynamic, const StreamedLayerParams& p)
      : StreamRing{dynamic, p.stages, p.stage_bytes} {}

  __device__ __forceinline__ TokenTile* tiles() const { return at<TokenTile>(Storage::kTiles); }
  __device__ __forceinline__ StreamShare* shares() const { return at<StreamShare>(Storage::kShares); }  // FC1's, FC2's
  __device__ __forceinline__ uint16_t* order() const { return at<uint16_t>(Storage::kOrder); }
  // While there is nothing in the ring: two numbers for each expert, one for each entry.
  __device__ __forceinline__ int* routing_counts() const { return at<int>(Storage::kRing); }
  __device__ __forceinline__ int* routing_experts() const { return routing_counts() + 2 * kMaxLocalExperts; }
  // FC1's results of all blocks can be read.
  __device__ __forceinline__ uint64_t* act_ready() const { return barrier(2 * kMaxStreamStages); }
  // The MMA warps have rehearsed in the last stage.
  __device__ __forceinline__ uint64_t* rehearsed() const { return barrier(2 * kMaxStreamStages + 1); }

 private:
  template <class T>
  __device__ __forceinline__ T* at(int offset) const {
    return reinterpret_cast<T*>(base + offset);
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

}  // namespace flashinfer::sm12x
