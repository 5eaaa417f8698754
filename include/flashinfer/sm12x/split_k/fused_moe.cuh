// SPDX-License-Identifier: Apache-2.0
//
// The MoE layer as one persistent kernel, for few tokens: routing, FC1, activation, FC2 and the top-k sum in one launch
// of one block per SM. A small one in front packs the input of W4A8 and zeroes the counters of the grid barriers
// (rows/pack.cuh); W4A16, with counters that a caller keeps, needs none. A token's experts come as ids, or the layer
// chooses those of a few tokens by their router's logits. MMAs are bfloat16's, W4A8 too: within bfloat16's range its
// values are exact. A block streams its range of FC1's work tiles and, without a gap, its range of FC2's, up to a
// shared memory full of them under way. A work tile is rows of one expert over all of K, contiguous in memory (in FC1
// two parts, up and gate, where there are gate rows); an expert with several tiles of tokens is streamed for each.
// FC2's arithmetic waits until all blocks are through with FC1; its weights do not.
//
// The wait needs all blocks to be resident together: a cooperative launch.
//
//   knob               value                where it is set
//   tokens a tile      8, on Hopper 8 or 16  instances.py, a row each
//   K of an MMA warp   256 or 384           there, `block_k`
//   MMA warps          12, in groups whose  there, `mma_warps`
//                      warps share K
//   epilogue warps     4, of which 2 to 4   kEpilogueWarps, epilogue_warps_of (params.h)
//                      fill the pipeline
//   stages             2 to 16              what fits shared memory (the launcher); at most kMaxSplitKStages
//   work tile's rows   16, 32 or 64         SplitKGemmPlan (params.h): an M16 fragment for each group of MMA warps
//
// 512 threads: warps 0 to 11 multiply, 12 to 15 are the epilogue's, E0 to E3. Arrivals at a barrier: full 32 (the
// producer warp), empty and prewarmed 384 (all MMA threads), intermediate_ready 1, kRoutedBarrier 512, kEpilogueBarrier
// 128.
//
//   E1 initializes the barriers. With more than kFewRoutedRows routed rows all threads wait for the launch in front,
//   then write each row's expert into the pipeline, whose memory routing uses until the first stage is loaded.
//   __syncthreads
//
//   MMA warps                                epilogue warps
//   multiply an M16 fragment of zeros,       wait for the launch in front; E0 routes
//     which fetches code, unless routing       (by logits all choose, and meet first);
//     may need its stage; arrive at          kEpilogueBarrier; arrive at kRoutedBarrier
//     prewarmed
//   wait at kRoutedBarrier                   fill the first stages: one a warp, another when that one is full; the
//                                              pipeline's last one after prewarmed
//   each work tile of the block:             every producer warp, each work tile that it finishes:
//     of another tile than before: tokens      wait for empty[stage]
//       from global memory into registers,     of each M16 fragment: read its biases; add the partial sums of the
//       FC2's of W4A8 rounded to MXFP8           warps that share K; behind the last M16 fragment's
//     wait for full[stage]                         fill the stage -> full[stage];
//     multiply; leave partial sums over          global scale, bias, activation or routing weight; store
//       the weights just read (gemm.cuh)
//     arrive at empty[stage], warps without
//       work for this K too
//   FC1's end: fetch the code that loads     FC1's end: grid barrier; E0 arrives at intermediate_ready
//     FC2's tokens; wait for intermediate_ready
//                                            FC2's end: grid barrier; the top-k sum
//
// A grid barrier is kEpilogueBarrier, E0's arrival at a counter in global memory and its wait for all blocks', and
// kEpilogueBarrier again. FC1's counter begins at zero, and block 0 makes it so again behind FC2's barrier, when all
// are through with FC1's; FC2's may begin anywhere.
//
// A warp that has no more stages to fill prefetches for the next launch (L2Prefetch).
//
// A stage holds a work tile's weight rows, their scales and biases, and a tail for the sums of lanes beyond K. A
// block's work tile u has stage u % stages. Warp w of the F producers finishes work tiles w, w + F, ...; it then
// refills the emptied stage with work tile u + stages, which may be another warp's to finish.
//
// Below, from top to bottom: token fragments, the MMA warps, the epilogue warps, the kernel.
#pragma once

#include "../moe/activation.cuh"
#include "../moe/top_k_sum.cuh"
#include "../ptx/memory.cuh"
#include "../rows/load.cuh"
#include "../rows/scalar.cuh"
#include "moe_scheduler.cuh"

namespace flashinfer::sm12x {

template <Element kActivation_, Element kWeights, int kBlockN, int kKBlocks, int kMmaWarps>
struct FusedMoeConfig : SplitKShape<kWeights, kBlockN, kKBlocks, kMmaWarps, false> {
  static constexpr Element kActivation = kActivation_;
  // A tile of more than eight tokens is wide: a work tile of it takes this many fifths of the time of others (on an
  // H200).
  static constexpr int kWideFifths = 6;
};

// Token rows as MMA fragments in registers. Lane 4g + t holds scale block t of a K block of token g, so that quantizing
// to MXFP8 needs no other lane. Eight MMAs multiply a K block; number 2q + h takes
// elements 8q + {2h, 2h + 4} and 8q + {2h + 1, 2h + 5} of every lane's block.
//
// All tokens of a tile that a warp multiplies with; zero where there is no token, or no K.
template <class Config>
class TokenFragments {
  static constexpr int kSteps = Config::kTokenSteps, kKBlocks = Config::kKBlocks, kBlocks = kSteps * kKBlocks;
  using Blocks = TokenBlock[kSteps][kKBlocks];
  // Where registers are short, a scale block's values are not held while the next one's arrive, and values that become
  // MXFP8 are loaded twice, since their maximum comes first.
  static constexpr bool kHold = kSteps == 1;

 public:
  // FC1: `count` rows of the layer's input; `row_of` tells which of them token i of the tile is.
  template <class RowOf>
  static __device__ __forceinline__ void load_input(Blocks& tokens, const FusedMoeParams& p, int first_k_block,
                                                    int lane, int count, const RowOf& row_of) {
    TokenBlock* const blocks = &tokens[0][0];
    auto load = [&](int i, TokenBlock& to) {
      const int token = 8 * (i / kKBlocks) + lane / 4, k_block = first_k_block + i % kKBlocks;
      const bool wanted = token < count && k_block < p.gemm[0].k_blocks;
      const int row = wanted ? row_of(token) : 0, scale_block = k_block * kScaleChunkBlocks + lane % 4;
      if constexpr (Config::kActivation == Element::kBf16) {
        const bool within = wanted && scale_block * kScaleBlock < p.gemm[0].k;
        const int64_t element = within ? static_cast<int64_t>(row) * p.gemm[0].k + scale_block * kScaleBlock : 0;
        const uint8_t* from = p.tokens + 2 * element;
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          set_eight(to, q, detail::from_eight_bf16(ptx::load_16_bytes_if(within, from + 16 * q)));
        }
      } else {
        const uint8_t* from = p.tokens + packed_offset(p.num_tokens, row, scale_block);
#pragma unroll
        for (int q = 0; q < 4; ++q) set_eight(to, q, ptx::load_16_bytes_if(wanted, from + 16 * q));
      }
    };
    if constexpr (kHold) {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) load(i, blocks[i]);
    } else {
#pragma unroll 1
      for (int i = 0; i < kBlocks; ++i) {
        shift_blocks<kBlocks>(blocks);
        load(i, blocks[kBlocks - 1]);
      }
    }
  }

  // FC2: `count` rows of the intermediate from row `first` on, which FC1 left in float32; as bfloat16, rounded to MXFP8
  // before (W4A8) or not (W4A16).
  //
  // This code runs once for each tile, so its main cost is the fetch of instructions: scale blocks are converted in a
  // loop through which the registers shift, not in unrolled code. If registers can hold a block (kHold), the next one's
  // values load into the registers of converted ones while the others are converted.
  static __device__ __forceinline__ void load_intermediate(Blocks& tokens, const FusedMoeParams& p, int first_k_block,
                                                           int lane, int count, int first) {
    const int first_block = first_k_block * kScaleChunkBlocks + lane % 4, k = p.gemm[1].k;
    TokenBlock* const blocks = &tokens[0][0];
    TokenBlock& last = blocks[kBlocks - 1];
    auto source = [&](int i) -> Source {
      const int token = 8 * (i / kKBlocks) + lane / 4, scale_block = first_block + i % kKBlocks * kScaleChunkBlocks;
      const bool wanted = token < count && scale_block * kScaleBlock < k;
      return {p.intermediate + (wanted ? static_cast<int64_t>(first + token) * k + scale_block * kScaleBlock : 0),
              wanted};
    };
    float eights[4][8];  // the block that is converted next
    if constexpr (kHold) {
      const Source from = source(0);
#pragma unroll
      for (int q = 0; q < 4; ++q) from.load_eight(q, eights[q]);
    }
#pragma unroll 1
    for (int i = 0; i < kBlocks; ++i) {
      shift_blocks<kBlocks>(blocks);
      if constexpr (kHold) {
        const Source next = i + 1 < kBlocks ? source(i + 1) : Source{p.intermediate, false};
        auto held = [&](int q, auto& x) {
#pragma unroll
          for (int v = 0; v < 8; ++v) x[v] = eights[q][v];
        };
        convert(held, [&](int q, const uint4& eight) {
          set_eight(last, q, eight);
          next.load_eight(q, eights[q]);
        });
      } else {
        const Source from = source(i);
        convert([&](int q, auto& x) { from.load_eight(q, x); },
                [&](int q, const uint4& eight) { set_eight(last, q, eight); });
      }
    }
  }

 private:
  // A block of the intermediate; zeros where it is not wanted.
  struct Source {
    const float* from;
    bool wanted;

    __device__ __forceinline__ void load_eight(int q, float (&x)[8]) const {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = ptx::load_16_bytes_if(wanted, from + 8 * q + 4 * half);
        x[4 * half] = __uint_as_float(four.x);
        x[4 * half + 1] = __uint_as_float(four.y);
        x[4 * half + 2] = __uint_as_float(four.z);
        x[4 * half + 3] = __uint_as_float(four.w);
      }
    }
  };

  // As requantize_block, or, of W4A16, without rounding to MXFP8.
  template <class Load, class Take>
  static __device__ __forceinline__ void convert(const Load& load, const Take& take) {
    if constexpr (Config::kActivation == Element::kBf16) {
      float x[8];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        load(q, x);
        take(q, make_uint4(ptx::f32x2_to_bf16x2(x[0], x[4]), ptx::f32x2_to_bf16x2(x[1], x[5]),
                           ptx::f32x2_to_bf16x2(x[2], x[6]), ptx::f32x2_to_bf16x2(x[3], x[7])));
      }
    } else {
      requantize_block(load, take);
    }
  }
};

// The MMA warps of the fused MoE kernel: FC1's work tiles and FC2's, with the tokens of each tile in registers.
template <class Config>
class FusedMoeMma {
 public:
  __device__ __forceinline__ FusedMoeMma(const FusedMoeShared& block, int warp, int lane)
      : shared(block), warp_(warp), lane_(lane) {}

  // Each GEMM begins with a prewarm without tokens, which only fetches code: behind a pipeline full of weights, that
  // fetch would take microseconds. FC1's multiplies an M16 fragment of zeros, as for a narrow tile, while routing and,
  // with few routed rows, the packing of tokens are under way. FC2's multiplies nothing; other blocks are at FC1
  // meanwhile. It must be this loop, not a copy of its code. Its passes: FC1's prewarm, FC1's work ranges, FC2's
  // prewarm, which ends at intermediate_ready, FC2's work ranges.
  __device__ __forceinline__ void multiply_work_tiles(const FusedMoeParams& p) {
    enter(p.gemm[0]);
    bool prewarm = true;
    TokenTile tile = {};  // no tokens
    FusedMoeScheduler scheduler;  // at FC1, before its first work range
    FusedMoeScheduler::WorkRange range = {0, prepare_prewarm() ? 1 : 0};
    state_ = {shared.stages - 1, 1};  // the M16 fragment of zeros' stage, in a phase that counts as complete
#pragma unroll 1
    for (;;) {
      if (warp_mma_.works()) load_tokens(p, scheduler.gemm, tile);
      if (!prewarm || scheduler.gemm == 0) multiply(range, tile.count(), !prewarm);
      if (prewarm && scheduler.gemm == 1) {
        prewarm = false;
        ptx::mbarrier_wait(shared.intermediate_ready(), 0);
        tile = shared.tiles()[scheduler.tile];
        continue;
      }
      if (prewarm) {
        state_ = {};
        ptx::mbarrier_arrive(shared.prewarmed());  // every lane, as at `empty`
        // Epilogue warps arrive behind their wait for the grid in front, which packed the tokens.
        ptx::named_barrier_sync<Config::kThreads>(kRoutedBarrier);
      }

      const int before = scheduler.gemm;
      range = scheduler.next_work_range(p, shared);
      if (scheduler.ended()) break;
      prewarm = scheduler.gemm != before;
      if (prewarm) {
        tile = {};
        enter(p.gemm[1]);
      } else {
        tile = shared.tiles()[scheduler.tile];
      }
    }
  }

 private:
  using Tokens = TokenFragments<Config>;

  __device__ __forceinline__ void load_tokens(const FusedMoeParams& p, int gemm, const TokenTile& tile) {
    if (gemm == 0) {
      Tokens::load_input(warp_mma_.tokens, p, warp_mma_.first_k_block(), lane_, tile.count(), [&](int token) {
        return static_cast<int>(shared.order()[tile.first() + token] / static_cast<unsigned>(p.top_k));
      });
    } else {
      Tokens::load_intermediate(warp_mma_.tokens, p, warp_mma_.first_k_block(), lane_, tile.count(), tile.first());
    }
  }

  // Zeros for one M16 fragment in the last stage, which is filled behind the prewarm; not where routing works.
  __device__ __forceinline__ bool prepare_prewarm() const {
    const uint32_t stage = (shared.stages - 1) * shared.stage_bytes;
    if (!warp_mma_.works() || stage < FusedMoeStorage::kRouting) return false;
    warp_mma_.clear(stage, high_row_offset_);
    return true;
  }

  __device__ __forceinline__ void enter(const SplitKGemm& g) {
    high_row_offset_ = g.high_row_offset;
    work_tile_rows_ = g.part_rows();
    warp_mma_.enter(g, shared.stage(0), warp_, lane_);
  }

  // Work tiles of one work range, whose tile has `count` tokens. `filled`: epilogue warps filled their stages, and will
  // again.
  __device__ __forceinline__ void multiply(const FusedMoeScheduler::WorkRange& range, int count, bool filled) {
    for (int i = 0; i < range.work_tiles; ++i) {
      const uint32_t row = warp_mma_.first_row(range.work_tile + i, work_tile_rows_);
      ptx::mbarrier_wait(shared.full(state_.stage), state_.parity);
      if (warp_mma_.works()) warp_mma_.multiply(state_.stage * shared.stage_bytes, row, count, high_row_offset_);
      // The warp is through with the stage. Every lane arrives: racecheck sees no order otherwise.
      __syncwarp();
      if (filled) ptx::mbarrier_arrive(shared.empty(state_.stage));
      state_.advance(shared.stages);
    }
  }

  const FusedMoeShared& shared;
  int warp_, lane_;
  PipelineState state_;
  uint32_t high_row_offset_ = 0, work_tile_rows_ = 0;  // of the current GEMM
  WarpMma<Config> warp_mma_;
};

// The epilogue warps of the fused MoE kernel. Four, or as many as there are stages, take turns at the block's work
// tiles: fill a stage; when the MMA warps are through with it, add their partial sums in K order; fill the stage again
// with the work tile that is due; and finish the outputs. There are two grid barriers: behind FC1, whose results FC2
// reads, and behind FC2, whose partial outputs are then added by all of them.
template <class Config>
class FusedMoeEpilogue {
  static constexpr int kSteps = Config::kTokenSteps;
  static constexpr int kWarps = kEpilogueWarps, kThreads = 32 * kWarps;
  // From one epilogue warp's first copies to the next one's: about half a microsecond, less than memory takes for a
  // stage of every SM.
  static constexpr int kFirstLoadCycles = 900;
  using Sums = float[kSteps][4];

 public:
  __device__ __forceinline__ FusedMoeEpilogue(const FusedMoeParams& params, const FusedMoeShared& block, int warp,
                                              int lane)
      : p(params),
        shared(block),
        warp_(warp),
        lane_(lane),
        warps_(epilogue_warps_of(block.stages, 1)),
        to_load_(params, block, warp, warps_),
        to_finish_(to_load_) {
    state_.advance(warp, block.stages);
  }

  __device__ __forceinline__ void finish_work_tiles() {
    // No block reaches FC2's barrier before this one has arrived at FC1's, so this is the count before the launch.
    const unsigned done_before = warp_ == 0 && lane_ == 0 ? ptx::load_acquire_gpu(p.barrier_counters + 1) : 0;
    const bool has_stages = warp_ < warps_;
    // Prime one stage per epilogue warp: enough to keep memory busy, and later stages, each filled when one has landed,
    // do not queue ahead of the first weights and of code. The first copies begin one after the other, because loads
    // issued together complete together.
    for (int stage = warp_; has_stages && stage < shared.stages && !to_load_.ended(); stage += warps_) {
      if (stage < warps_) {
        ptx::wait_cycles(warp_ * kFirstLoadCycles);
      } else {
        ptx::mbarrier_wait(shared.full(stage - warps_), 0);
      }
      if (stage == shared.stages - 1) ptx::mbarrier_wait(shared.prewarmed(), 0);
      load(stage);
    }
    // This warp refills the stages that it empties with its own work tiles' successors, a pipeline further on.
    to_load_ = StridedWorkTiles(p, shared, warp_ + shared.stages, warps_);

    for (; has_stages && to_finish_.gemm() == 0; next()) finish<0>();
    grid_barrier(p.barrier_counters, 0);
    if (warp_ == 0 && lane_ == 0) ptx::mbarrier_arrive(shared.intermediate_ready());
    for (; has_stages && !to_finish_.ended(); next()) finish<1>();
    if (has_stages && !prefetched_) prefetch_for_next();
    grid_barrier(p.barrier_counters + 1, done_before);
    if (blockIdx.x == 0 && warp_ == 0 && lane_ == 0) *p.barrier_counters = 0;  // all are through with it
    sum_outputs();
  }

 private:
  // The next of the work tiles to fill with, if there is one.
  __device__ __forceinline__ void load(int stage) {
    if (to_load_.ended()) {
      if (!prefetched_) prefetch_for_next();
      return;
    }
    if (ptx::elect_one()) {
      load_stage(p.gemm[to_load_.gemm()], shared, stage, shared.tiles()[to_load_.tile()].expert(),
                 to_load_.work_tile());
    } else {
      ptx::mbarrier_arrive(shared.full(stage));  // for what this lane may have read there, as at `empty`
    }
    to_load_.advance(p, shared);
  }

  __device__ __forceinline__ void prefetch_for_next() {
    prefetched_ = true;
    prefetch_next(p.next, static_cast<int>(blockIdx.x) * warps_ + warp_, static_cast<int>(gridDim.x) * warps_);
  }

  __device__ __forceinline__ void next() {
    to_finish_.advance(p, shared);
    state_.advance(warps_, shared.stages);
  }

  // Waits for the epilogue warps of all blocks; afterwards each may read what any of them wrote before. More arrivals
  // than blocks come from another launch that was given the same workspace at the same time and has overwritten it.
  __device__ __forceinline__ void grid_barrier(unsigned* counter, unsigned before) {
    ptx::named_barrier_sync<kThreads>(kEpilogueBarrier);
    if (warp_ == 0 && lane_ == 0) {
      ptx::arrive_at_gpu_counter(counter);
      unsigned arrived;
      while ((arrived = ptx::load_acquire_gpu(counter) - before) < gridDim.x) __nanosleep(32);
      if (arrived > gridDim.x) __trap();
    }
    ptx::named_barrier_sync<kThreads>(kEpilogueBarrier);
  }

  template <int kGemm>
  __device__ __forceinline__ void finish() {
    const SplitKGemm& g = p.gemm[kGemm];
    const TokenTile tile = shared.tiles()[to_finish_.tile()];
    const int work_tile = to_finish_.work_tile(), row = fragment_row<Config>(lane_ / 4, g.pitch);
    const int outputs = kGemm == 0 ? g.fragment_outputs() : kFragmentRows;
    const float scale = WarpMma<Config>::kAccumulatorScale * load_or(g.global_scale, tile.expert(), 1.0f);
    Activation activation = {};
    if constexpr (kGemm == 0) activation = Activation::of_expert(p.activation, tile.expert());
    for (int fragment = 0; fragment < g.groups; ++fragment) {
      const int first = (work_tile * g.groups + fragment) * outputs;
      if (fragment == 0) ptx::mbarrier_wait(shared.empty(state_.stage), state_.parity);
      const uint8_t* stage = shared.stage(state_.stage);
      float bias[2] = {0.0f, 0.0f};
      if (g.bias != nullptr) {
        const int at = fragment * outputs + row;
        bias[0] = load_scalar(stage + g.bias_offset, at, g.bias_type);
        bias[1] =
            load_scalar(stage + g.bias_offset, at + (kGemm == 0 && g.parts == 2 ? g.part_rows() : 8), g.bias_type);
      }
      Sums sums = {};
      add_partials<Config>(g, stage, 0, fragment, row, lane_, tile.count(), sums);
      if (fragment == g.groups - 1) {
        __syncwarp();
        load(state_.stage);
      }
      if constexpr (kGemm == 0) {
        activate(tile, first + row, scale, bias, activation, sums);
      } else {
        store_partial_outputs(tile, first + row, scale, bias, sums);
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

  // A lane has up and gate of one output, or, without gate rows, two outputs, eight rows apart.
  __device__ __forceinline__ void activate(const TokenTile& tile, int output, float scale, const float (&bias)[2],
                                           const Activation& activation, const Sums& sums) const {
    for_each_token(tile, sums, [&](int position, float low, float high) {
      float* to = p.intermediate + static_cast<int64_t>(position) * p.gemm[0].out + output;
      low = fmaf(low, scale, bias[0]);
      high = fmaf(high, scale, bias[1]);
      if (p.activation.gated) {
        to[0] = activation(low, high);
      } else {
        to[0] = relu_squared(low);
        to[8] = relu_squared(high);
      }
    });
  }

  // Every expert's partial output goes to its own row.
  __device__ __forceinline__ void store_partial_outputs(const TokenTile& tile, int row, float scale,
                                                        const float (&bias)[2], const Sums& sums) const {
    for_each_token(tile, sums, [&](int position, float low, float high) {
      const int routed_row = shared.order()[position];
      const bool few = p.num_routed_rows <= kFewRoutedRows;
      const float weight = few ? shared.few_weights()[routed_row] : load_or(p.routing_weights, routed_row, 1.0f);
      float* to = p.partial_outputs + static_cast<int64_t>(routed_row) * p.gemm[1].out + row;
      to[0] = fmaf(low, scale, bias[0]) * weight;
      to[8] = fmaf(high, scale, bias[1]) * weight;
    });
  }

  // This block's part of the outputs, rounded once.
  __device__ __forceinline__ void sum_outputs() const {
    const int thread = 32 * warp_ + lane_;
    const int hidden = p.gemm[1].out, vectors = hidden / 4;
    for (int i = blockIdx.x * kThreads + thread; i < p.num_tokens * vectors; i += gridDim.x * kThreads) {
      const int tokens[1] = {i / vectors}, column = 4 * (i - tokens[0] * vectors);
      float4 sum[1] = {};
      const int32_t* ids = p.num_routed_rows <= kFewRoutedRows ? shared.few_ids() : p.ids;
      sum_slots(p, ids, p.partial_outputs, hidden, column, tokens, sum);
      const int64_t at = static_cast<int64_t>(tokens[0]) * hidden + column;
      store_scalar(p.output, at, p.output_type, sum[0].x);
      store_scalar(p.output, at + 1, p.output_type, sum[0].y);
      store_scalar(p.output, at + 2, p.output_type, sum[0].z);
      store_scalar(p.output, at + 3, p.output_type, sum[0].w);
    }
  }

  const FusedMoeParams& p;
  const FusedMoeShared& shared;
  int warp_, lane_;
  int warps_;
  bool prefetched_ = false;  // the next launch's data has been prefetched
  PipelineState state_;
  StridedWorkTiles to_load_, to_finish_;
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 1) fused_moe_kernel(const __grid_constant__ FusedMoeParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const FusedMoeShared shared(dynamic_shared, p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  ptx::launch_dependent_grids();
  const int epilogue_warp = warp - Config::kMmaWarps;
  const bool few = p.num_routed_rows <= kFewRoutedRows;
  auto expert_of = [&](const int32_t* ids, int routed_row) {
    return routed_row < p.num_routed_rows ? local_expert(ids[routed_row], p.first_expert, p.num_experts) : -1;
  };
  if (epilogue_warp == 1) {
    for (int stage = lane; stage < shared.stages; stage += 32) {
      ptx::mbarrier_init(shared.full(stage), 32);  // lanes of the producer warp
      ptx::mbarrier_init(shared.empty(stage), 32 * Config::kMmaWarps);
    }
    if (lane == 0) {
      ptx::mbarrier_init(shared.intermediate_ready(), 1);
      ptx::mbarrier_init(shared.prewarmed(), 32 * Config::kMmaWarps);
      // By one lane: a lane for each map would make this a loop over lanes, whose addresses differ.
      ptx::prefetch_tensor_map(&p.gemm[0].scales);
      ptx::prefetch_tensor_map(&p.gemm[1].scales);
    }
    ptx::fence_barrier_init();
  }
  if (!few) {
    ptx::wait_for_prerequisite_grids();  // ids are there
    for (int i = threadIdx.x; i < p.num_routed_rows; i += Config::kThreads)
      shared.routing_experts()[i] = expert_of(p.ids, i);
  }
  __syncthreads();

  if (warp < Config::kMmaWarps) {  // MMA warps
    FusedMoeMma<Config>(shared, warp, lane).multiply_work_tiles(p);
    return;
  }
  // Epilogue warps.
  ptx::wait_for_prerequisite_grids();  // ids or logits are there, tokens, and the grid barrier's counters
  if (few) find_few_experts(p, shared, epilogue_warp, lane);
  if (epilogue_warp == 0) {
    const TileCounts tiles = few ? route_few<Config>(p, shared, expert_of(shared.few_ids(), lane), lane)
                                 : route_many<Config>(p, shared, lane);
    if (lane < 2)
      shared.block_ranges()[lane] = BlockRange::of_block(tiles, Config::kWideFifths, p.gemm[lane].work_tiles);
  }
  ptx::named_barrier_sync<32 * kEpilogueWarps>(kEpilogueBarrier);
  ptx::named_barrier_arrive<Config::kThreads>(kRoutedBarrier);
  FusedMoeEpilogue<Config>(p, shared, epilogue_warp, lane).finish_work_tiles();
}

}  // namespace flashinfer::sm12x
