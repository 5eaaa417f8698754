// SPDX-License-Identifier: Apache-2.0
//
// The keeper warps of the streamed layer. They take turns at the block's units: fill a stage; when the MMA warps are
// through with it, add their partial sums in K order; fill the stage again with the unit that is due; and finish the
// outputs. All blocks' keepers meet twice: behind FC1, whose results FC2 reads, and behind FC2, whose contributions are
// then added.
#pragma once

#include "../impls/streamed_walk.cuh"
#include "scalar.cuh"
#include "swiglu_quantize.cuh"
#include "top_k_sum.cuh"

namespace flashinfer::sm12x::epilogue {

template <class Config>
class StreamKeeper {
  static constexpr int kSteps = Config::kTokenSteps;
  static constexpr int kWarps = kKeeperWarps, kThreads = 32 * kWarps;
  // From one keeper's first copies to the next one's: about half a microsecond, less than memory takes for a stage of every SM.
  static constexpr int kFirstFillCycles = 900;
  using Sums = float[kSteps][4];

 public:
  __device__ __forceinline__ StreamKeeper(const StreamedLayerParams& params, const StreamBlock& block, int turn,
                                          int lane)
      : p(params),
        shared(block),
        turn_(turn),
        lane_(lane),
        keepers_(keepers_of(block.stages, 1)),
        to_fill_(params, block, turn, keepers_),
        to_finish_(to_fill_) {
    place_.advance(turn, block.stages);
  }

  __device__ __forceinline__ void run() {
    const bool keeps = turn_ < keepers_;
    // At first one stage of each keeper is under way: enough to keep memory busy, and no queue in which what is needed
    // first, weights and code, would wait for what is not. Nor do these begin together, or they would all land when the last
    // one does.
    for (int stage = turn_; keeps && stage < shared.stages && !to_fill_.ended(); stage += keepers_) {
      if (stage < keepers_) {
        ptx::wait_cycles(turn_ * kFirstFillCycles);
      } else {
        ptx::mbarrier_wait(shared.full(stage - keepers_), 0);
      }
      if (stage == shared.stages - 1) ptx::mbarrier_wait(shared.rehearsed(), 0);
      fill(stage);
    }
    // What goes into the stages that this warp will empty: its own units' successors, a ring further on.
    to_fill_ = StreamStride(p, shared, turn_ + shared.stages, keepers_);

    for (; keeps && to_finish_.gemm() == 0; next()) finish<0>();
    meet(p.blocks_done);
    if (turn_ == 0 && lane_ == 0) ptx::mbarrier_arrive(shared.act_ready());
    for (; keeps && !to_finish_.ended(); next()) finish<1>();
    meet(p.blocks_done + 1);
    sum_outputs();
  }

 private:
  // The next of the units to fill with, if there is one.
  __device__ __forceinline__ void fill(int stage) {
    if (to_fill_.ended()) return;
    if (ptx::elect_one()) {
      fill_stage(p.gemm[to_fill_.gemm()], shared, stage, shared.tiles()[to_fill_.tile()].expert(), to_fill_.unit());
    }
    to_fill_.advance(p, shared);
  }

  __device__ __forceinline__ void next() {
    to_finish_.advance(p, shared);
    place_.advance(keepers_, shared.stages);
  }

  // The keepers of all blocks meet; afterwards everyone may read what anyone wrote before. More arrivals than blocks are
  // those of another launch that was given the same workspace at the same time: what it holds is not to be had any more.
  __device__ __forceinline__ void meet(unsigned* counter) {
    ptx::named_barrier_sync<kThreads>(kKeeperBarrier);
    if (turn_ == 0 && lane_ == 0) {
      ptx::arrive_at_gpu_counter(counter);
      unsigned arrived;
      while ((arrived = ptx::load_acquire_gpu(counter)) < gridDim.x) __nanosleep(32);
      if (arrived > gridDim.x) __trap();
    }
    ptx::named_barrier_sync<kThreads>(kKeeperBarrier);
  }

  template <int kGemm>
  __device__ __forceinline__ void finish() {
    const StreamedGemm& g = p.gemm[kGemm];
    const TokenTile tile = shared.tiles()[to_finish_.tile()];
    const int unit = to_finish_.unit(), row = slab_row<Config>(lane_ / 4, g.pitch);
    constexpr int kOutputs = kGemm == 0 ? kSlabRows / 2 : kSlabRows;
    const float scale = load_or(g.global_scale, tile.expert(), 1.0f);
    SwigluParameters swiglu_parameters = {};
    if constexpr (kGemm == 0) {
      swiglu_parameters = {load_or(p.alpha, tile.expert(), 1.0f), load_or(p.beta, tile.expert(), 0.0f),
                           load_or(p.limit, tile.expert(), INFINITY)};
    }

    for (int slab = 0; slab < g.groups; ++slab) {
      const int first = (unit * g.groups + slab) * kOutputs;
      if (slab == 0) ptx::mbarrier_wait(shared.done(place_.stage), place_.parity);
      const uint8_t* stage = shared.stage(place_.stage);
      float bias[2] = {0.0f, 0.0f};
      if (g.bias != nullptr) {
        const int at = slab * kOutputs + row;
        bias[0] = load_scalar(stage + g.bias_offset, at, g.bias_type);
        bias[1] = load_scalar(stage + g.bias_offset, at + (kGemm == 0 ? g.groups * kOutputs : 8), g.bias_type);
      }
      Sums sums = {};
      add_partials<Config>(g, stage, 0, slab, row, lane_, tile.count(), sums);
      if (slab == g.groups - 1) {
        __syncwarp();
        fill(place_.stage);
      }
      if constexpr (kGemm == 0) {
        activate(tile, first + row, scale, bias, swiglu_parameters, sums);
      } else {
        contribute(tile, first + row, scale, bias, sums);
      }
    }
  }

  // The tokens whose sums this lane holds: values `parity` and `parity + 2` of a step are of token 2t + parity.
  template <class Function>
  __device__ __forceinline__ void for_each_token(const TokenTile& tile, const Sums& sums,
                                                 const Function& function) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int token = 8 * step + 2 * (lane_ % 4) + parity;
        if (token < tile.count()) function(tile.first() + token, sums[step][parity], sums[step][parity + 2]);
      }
    }
  }

  // Up and gate of one output meet in a lane.
  __device__ __forceinline__ void activate(const TokenTile& tile, int output, float scale, const float (&bias)[2],
                                           const SwigluParameters& parameters, const Sums& sums) const {
    for_each_token(tile, sums, [&](int position, float up, float gate) {
      p.act[static_cast<int64_t>(position) * p.gemm[0].out + output] =
          swiglu(fmaf(up, scale, bias[0]), fmaf(gate, scale, bias[1]), parameters);
    });
  }

  // Every expert's contribution goes to its own row.
  __device__ __forceinline__ void contribute(const TokenTile& tile, int row, float scale, const float (&bias)[2],
                                             const Sums& sums) const {
    for_each_token(tile, sums, [&](int position, float low, float high) {
      const int entry = shared.order()[position];
      const float weight = load_or(p.routing_weights, entry, 1.0f);
      float* to = p.contributions + static_cast<int64_t>(entry) * p.gemm[1].out + row;
      to[0] = fmaf(low, scale, bias[0]) * weight;
      to[8] = fmaf(high, scale, bias[1]) * weight;
    });
  }

  // This block's part of the outputs, rounded once.
  __device__ __forceinline__ void sum_outputs() const {
    const int thread = 32 * turn_ + lane_;
    const int hidden = p.gemm[1].out, vectors = hidden / 4;
    for (int i = blockIdx.x * kThreads + thread; i < p.num_tokens * vectors; i += gridDim.x * kThreads) {
      const int tokens[1] = {i / vectors}, column = 4 * (i - tokens[0] * vectors);
      float4 sum[1] = {};
      sum_slots(p, p.contributions, hidden, column, tokens, sum);
      const int64_t at = static_cast<int64_t>(tokens[0]) * hidden + column;
      store_scalar(p.output, at, p.output_type, sum[0].x);
      store_scalar(p.output, at + 1, p.output_type, sum[0].y);
      store_scalar(p.output, at + 2, p.output_type, sum[0].z);
      store_scalar(p.output, at + 3, p.output_type, sum[0].w);
    }
  }

  const StreamedLayerParams& p;
  const StreamBlock& shared;
  int turn_, lane_;
  int keepers_;
  RingPlace place_;
  StreamStride to_fill_, to_finish_;
};

}  // namespace flashinfer::sm12x::epilogue
