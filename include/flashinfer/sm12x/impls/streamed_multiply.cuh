// SPDX-License-Identifier: Apache-2.0
//
// The MMA warps of the streamed layer: FC1's units and FC2's, with the tokens of each tile in registers.
#pragma once

#include "streamed_tokens.cuh"

namespace flashinfer::sm12x {

template <class Config>
class StreamMultiplier {
 public:
  __device__ __forceinline__ StreamMultiplier(const StreamBlock& block, int warp, int lane)
      : shared(block), warp_(warp), lane_(lane) {}

  // Each GEMM begins with a rehearsal: FC1 with a slab of zeros (as narrow tiles take it), while routing and the arranging of
  // tokens are under way, FC2 without, while other blocks are at FC1. Both without tokens: what counts is that code is
  // fetched, which behind a ring full of weights would take microseconds. It must be this loop, not a copy of its code.
  __device__ __forceinline__ void run(const StreamedLayerParams& p) {
    enter(p.gemm[0]);
    int gemm = 0;
    bool rehearsal = true;
    TokenTile tile = {};  // no tokens
    StreamWalk walk;
    StreamWalk::Run run = {0, prepare_rehearsal() ? 1 : 0};
    place_ = {shared.stages - 1, 1};  // a phase that counts as complete, and whose successor is the ring's first
#pragma unroll 1
    for (;;) {
      if (slab_.works()) load_tokens(p, gemm, tile);
      if (!rehearsal || gemm == 0) multiply(run, tile.count());
      if (rehearsal && gemm == 1) {
        rehearsal = false;
        ptx::mbarrier_wait(shared.act_ready(), 0);
        tile = shared.tiles()[walk.tile];
        continue;
      }
      if (rehearsal) {
        rehearsal = false;
        place_ = {};
        releases_ = true;
        __syncwarp();
        if (lane_ == 0) ptx::mbarrier_arrive(shared.rehearsed());
        ptx::named_barrier_sync<Config::kThreads>(kRoutedBarrier);  // tokens are arranged, too
      }

      run = walk.next_run(p, shared);
      if (walk.ended()) break;
      if (walk.gemm == 1 && gemm == 0) {
        gemm = 1;
        rehearsal = true;
        tile = {};
        enter(p.gemm[1]);
      } else {
        tile = shared.tiles()[walk.tile];
      }
    }
  }

 private:
  using Tokens = TokenFragments<Config>;

  __device__ __forceinline__ void load_tokens(const StreamedLayerParams& p, int gemm, const TokenTile& tile) {
    if (gemm == 0) {
      Tokens::load_input(slab_.tokens, p, slab_.first_word(), lane_, tile.count(), [&](int token) {
        return static_cast<int>(shared.order()[tile.first() + token] / static_cast<unsigned>(p.top_k));
      });
    } else {
      Tokens::load_act(slab_.tokens, p, slab_.first_word(), lane_, tile.count(), tile.first());
    }
  }

  // Zeros for one slab in the last stage, which is filled behind the rehearsal; not where routing works.
  __device__ __forceinline__ bool prepare_rehearsal() const {
    const uint32_t stage = (shared.stages - 1) * shared.stage_bytes;
    if (!slab_.works() || stage < StreamStorage::kRouting) return false;
    slab_.clear(stage);
    return true;
  }

  __device__ __forceinline__ void enter(const StreamedGemm& g) { slab_.enter(g, shared.stage(0), warp_, lane_); }

  // Units of one run, whose tile has `count` tokens.
  __device__ __forceinline__ void multiply(const StreamWalk::Run& run, int count) {
    uint32_t row = slab_.first_row(run.unit);
    for (int left = run.units; left > 0; --left, row += slab_.unit_rows()) {
      ptx::mbarrier_wait(shared.full(place_.stage), place_.parity);
      if (slab_.works()) slab_.multiply(place_.stage * shared.stage_bytes, row, count);
      release();
    }
  }

  // The warp is through with a stage.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (releases_) ptx::mbarrier_arrive(shared.done(place_.stage));
    place_.advance(shared.stages);
  }

  const StreamBlock& shared;
  int warp_, lane_;
  bool releases_ = false;  // every lane for itself: racecheck follows a barrier only so. Not in the rehearsal
  RingPlace place_;
  SlabMultiplier<Config> slab_;
};

}  // namespace flashinfer::sm12x
