// SPDX-License-Identifier: Apache-2.0
//
// The MMA warps of the streamed layer. A warp owns kWords words of 128 along K of one slab of each stage and holds
// its part of the tile's tokens in registers.
#pragma once

#include "../mma/expand.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/shared.cuh"
#include "streamed_tokens.cuh"

namespace flashinfer::sm12x {

template <class Config>
class StreamMultiplier {
  static constexpr int kSteps = Config::kTokenSteps, kWords = Config::kWords;

  // Where a lane finds one word's operands in the first stage: weights of row g, and their scale but for the row's quarter of
  // the chunk. Those of row g + 8 lie the same distance behind, whatever the word.
  struct Operands {
    uint32_t weights, scale;
  };

 public:
  __device__ __forceinline__ StreamMultiplier(const StreamBlock& block, int warp, int lane)
      : shared(block), warp_(warp), lane_(lane) {}

  // Each GEMM begins with a rehearsal: FC1 with a slab of zeros (as narrow tiles take it), while routing and the arranging of
  // tokens are under way, FC2 without, while other blocks are at FC1. Both without tokens: what counts is that code is
  // fetched, which behind a ring full of weights would take microseconds. It must be this loop, not a copy of its code.
  __device__ __forceinline__ void run(const StreamedLayerParams& p) {
    enter_gemm(p.gemm[0], true);
    int gemm = 0;
    bool rehearsal = true;
    TokenTile tile = {};  // no tokens
    StreamWalk walk;
    StreamWalk::Run run = {0, prepare_rehearsal() ? 1 : 0};
    place_ = {shared.stages - 1, 1};  // a phase that counts as complete, and whose successor is the ring's first
#pragma unroll 1
    for (;;) {
      if (works_) load_tokens(p, gemm, tile);
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
        ptx::named_barrier_sync<Config::kThreads>(kRoutedBarrier);
        ptx::wait_for_prerequisite_grids();  // tokens are arranged
      }

      run = walk.next_run(p, shared);
      if (walk.ended()) break;
      if (walk.gemm == 1 && gemm == 0) {
        gemm = 1;
        rehearsal = true;
        tile = {};
        enter_gemm(p.gemm[1], false);
      } else {
        tile = shared.tiles()[walk.tile];
      }
    }
  }

 private:
  __device__ __forceinline__ void load_tokens(const StreamedLayerParams& p, int gemm, const TokenTile& tile) {
    if (gemm == 0) {
      tokens_.load_input(p, group_warp_, lane_, tile.count(), [&](int token) {
        return static_cast<int>(shared.order()[tile.first() + token] / static_cast<unsigned>(p.top_k));
      });
    } else {
      tokens_.load_act(p, group_warp_, lane_, tile.count(), tile.first());
    }
  }

  // Zeros for one slab in the last stage, which is filled behind the rehearsal; not where routing works.
  __device__ __forceinline__ bool prepare_rehearsal() const {
    const uint32_t stage = (shared.stages - 1) * shared.stage_bytes;
    if (!works_ || stage < StreamStorage::kRouting) return false;
    constexpr float kZeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      ptx::store_shared_vector(operands_[w].weights + stage, kZeros);
      ptx::store_shared_vector(operands_[w].weights + stage + next_weights_, kZeros);
      ptx::store_shared_byte(operands_[w].scale + stage + ((first_row_ >> 3) & 12), 0);
      ptx::store_shared_byte(operands_[w].scale + stage + next_scale_ + (((first_row_ + gate_) >> 3) & 12), 0);
    }
    __syncwarp();
    return true;
  }

  // Where the lane's operands of one GEMM lie.
  __device__ __forceinline__ void enter_gemm(const StreamedGemm& g, bool fc1) {
    const unsigned group = static_cast<unsigned>(warp_) / static_cast<unsigned>(g.group_warps);
    group_warp_ = warp_ - group * g.group_warps;
    works_ = group < static_cast<unsigned>(g.groups);
    const int row = slab_row(lane_ / 4, g.row_bytes);
    const uint32_t base = ptx::shared_address(shared.stage(0));
    const LaneRows rows(g, fc1, row);
    const PartialPlace<Config> partial(g, rows, group_warp_, lane_);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      partial_[step] = base + partial.offset[step] + group * partial.next_slab;
    }
    const int outputs = slab_outputs(fc1);
    first_row_ = group * outputs;
    unit_rows_ = g.groups * outputs;
    gate_ = fc1 ? g.out : 0;
    const uint32_t in_piece =
        16 * (first_row_ & (g.piece_rows - 1));  // of the slab's first row: where its quarter begins
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      // A lane whose block of 32 lies beyond K takes the word's first, or the first word's: what it multiplies with is 0.
      int word = group_warp_ * kWords + w;
      if (word >= g.words) word -= w;
      const int t = (word * kScaleChunkBlocks + lane_ % 4) * kScaleBlock < g.k ? lane_ % 4 : 0;
      const uint32_t column = base + group * rows.next_slab + word * kWordBytes + t * (kWordBytes / kScaleChunkBlocks);
      const uint32_t scale = base + g.scale_offset + in_piece + 16 * (word * g.piece_rows + row) + t;
      operands_[w] = {column + rows.low, scale};
    }
    next_weights_ = rows.high - rows.low;
    next_scale_ = fc1 ? g.piece_bytes() : 8 * 16;
  }

  // Units of one run, whose tile has `count` tokens.
  __device__ __forceinline__ void multiply(const StreamWalk::Run& run, int count) {
    uint32_t row = run.unit * unit_rows_ + first_row_;
    for (int left = run.units; left > 0; --left, row += unit_rows_) {
      ptx::mbarrier_wait(shared.full(place_.stage), place_.parity);
      if (works_) {
        const uint32_t stage = place_.stage * shared.stage_bytes;
        if (kSteps == 1 || count > kNarrowTokens) {
          multiply_slab<kSteps>(stage, row);
        } else {
          multiply_slab<1>(stage, row);
        }
      }
      release();
    }
  }

  // Independent accumulators of a token step: one would have each MMA wait for the one before.
  template <int kActive>
  static constexpr int kChains = kActive == 1 ? 2 : 1;

  // The warp is through with a stage.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (releases_) ptx::mbarrier_arrive(shared.done(place_.stage));
    place_.advance(shared.stages);
  }

  // kActive: token steps that hold tokens. `row`: the slab's first (FC1: up) row. A chunk of scales holds rows r, r + 32,
  // r + 64 and r + 96 side by side.
  template <int kActive>
  __device__ __forceinline__ void multiply_slab(uint32_t stage, uint32_t row) {
    const uint32_t low_quarter = stage + ((row >> 3) & 12),
                   high_quarter = stage + next_scale_ + (((row + gate_) >> 3) & 12);
    uint32_t weights[kWords][2][4], scales[kWords][2], largest = 0;
    auto load_weights = [&](int w) {
      ptx::load_shared_vector(weights[w][0], operands_[w].weights + stage);
      ptx::load_shared_vector(weights[w][1], operands_[w].weights + stage + next_weights_);
    };
    constexpr bool kTogether = kSteps == 1;  // else registers are short
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      if (kTogether) load_weights(w);
      scales[w][0] = ptx::load_shared_byte(operands_[w].scale + low_quarter);
      scales[w][1] = ptx::load_shared_byte(operands_[w].scale + high_quarter);
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w) largest = max(largest, max(scales[w][0], scales[w][1]));
    float chain[kActive][kChains<kActive>][4] = {};
    if (__any_sync(scheduler::kAllLanes, largest > mma::kLargestFoldedScale)) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (!kTogether) load_weights(w);
        multiply_word<true>(weights[w], mma::scale_pair(scales[w][0]), mma::scale_pair(scales[w][1]), w, chain);
      }
    } else {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        if (!kTogether) load_weights(w);
        multiply_word<false>(weights[w], mma::folded_factor(scales[w][0]), mma::folded_factor(scales[w][1]), w, chain);
      }
    }
    __syncwarp();  // all lanes have read before partial sums replace weights
#pragma unroll
    for (int step = 0; step < kActive; ++step) {
      if constexpr (kChains<kActive> == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) chain[step][0][i] += chain[step][1][i];
      }
      ptx::store_shared_vector(partial_[step] + stage, chain[step][0]);
    }
  }

  // kLargeScales: the factors are the scales alone, and the expansion's 2^126 is a multiplication of its own.
  template <bool kLargeScales, int kActive>
  __device__ __forceinline__ void multiply_word(const uint32_t (&weights)[2][4], uint32_t low_factor,
                                                uint32_t high_factor, int w,
                                                float (&chain)[kActive][kChains<kActive>][4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t of_low[4], of_high[4];
      mma::expand_to_bf16(weights[0][q], kLargeScales ? mma::kTwoTo126Pair : low_factor, of_low);
      mma::expand_to_bf16(weights[1][q], kLargeScales ? mma::kTwoTo126Pair : high_factor, of_high);
#pragma unroll
      for (int i = 0; kLargeScales && i < 4; ++i) {
        of_low[i] = ptx::bf16x2_multiply(of_low[i], low_factor);
        of_high[i] = ptx::bf16x2_multiply(of_high[i], high_factor);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t operand[4] = {of_low[2 * h], of_high[2 * h], of_low[2 * h + 1], of_high[2 * h + 1]};
#pragma unroll
        for (int step = 0; step < kActive; ++step) {
          float (&sum)[4] = chain[step][h % kChains<kActive>];
          ptx::mma_16816<true>(sum, operand, tokens_.block[step][w][2 * q + h], sum);
        }
      }
    }
  }

  const StreamBlock& shared;
  int warp_, lane_;
  int group_warp_ = 0;
  bool works_ = false;
  bool releases_ = false;  // every lane for itself: racecheck follows a barrier only so. Not in the rehearsal
  RingPlace place_;
  Operands operands_[kWords];
  uint32_t next_weights_ = 0, next_scale_ = 0;  // from row g to row g + 8
  uint32_t partial_[kSteps];
  uint32_t first_row_ = 0, unit_rows_ = 0;  // the slab's first row in the first unit, and from unit to unit
  uint32_t gate_ = 0;                       // from an up row to its gate row
  TokenFragments<Config> tokens_;
};

}  // namespace flashinfer::sm12x
