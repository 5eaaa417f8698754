// SPDX-License-Identifier: Apache-2.0
//
// A dense layer for few tokens, out = tokens * weights^T, as one persistent kernel with in-block split-K (K is split
// over the MMA warps of a thread block): the smallest use of gemm.cuh, and the place to begin reading. The fused MoE
// kernel (fused_moe.cuh) is two such GEMMs with routing before them and a grid barrier between them.
//
// One block per SM. Block b computes work tiles b, b + blocks, ... of the weight rows, once for each tile of tokens.
// Three roles:
//
//   epilogue warps   take turns at the work tiles: fill the pipeline's stages with weights as long as
//                    there are free ones; when the MMA warps are through with a work tile, add their
//                    partial sums in K order, fill its stages again, and store the outputs
//   MMA warps        each holds its range of K of a tile's tokens in registers, and multiplies it
//                    with the same range of every weight row that comes through the pipeline
//   pipeline         stages in shared memory. `full`: copies have landed. `empty`: partial sums
//                    stand where weights were
//
//   knob               value                where it is set
//   tokens a tile      8 or 16              instances.py, a row each
//   K of an MMA warp   256 or 384           there, `block_k`
//   MMA warps          12, which share K    there, `mma_warps`
//   epilogue warps     4                    kEpilogueWarps (params.h)
//   stages             up to 16             pipeline_stages (gemm/dense_mx_sm120.cuh), by shared memory
//   weight rows        16, 32 or 64         SplitKGemmPlan (params.h): an M16 fragment for each group of MMA warps
//
// bfloat16 tokens of a narrow tile may be normed as they are loaded (RowNorm). A warp that has no more stages to fill
// prefetches for the next launch (L2Prefetch).
//
// Tokens come as bfloat16 (W4A16, W8A16), are rounded to MXFP8 or MXFP4 here, or come so. Weights and tokens are exact
// in bfloat16 whatever the format (NVFP4's global scale is `alpha`), so that one kind of MMA serves all.
#pragma once

#include "../rows/load.cuh"
#include "../rows/rank.cuh"
#include "../rows/scalar.cuh"
#include "gemm.cuh"

namespace flashinfer::sm12x {

struct DensePipeline : SplitKPipeline<DenseStorage::kPipeline> {
  // Sums of squares of the tokens, one from each of the warps that share K.
  __device__ __forceinline__ float* squares() const { return reinterpret_cast<float*>(base + DenseStorage::kSquares); }
};

// A scale block as RowLoader gives it, in the order of dequantized weights of the format: pairs of elements i and i + 4
// of eight, or i and i + 2 of four.
template <Element kWeights>
__device__ __forceinline__ void pack_block(const uint4 (&eights)[4], TokenBlock& to) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    uint4 k = eights[q];
    if (!lanes_take_eights(kWeights)) {
      k = make_uint4(__byte_perm(k.x, k.z, 0x5410), __byte_perm(k.y, k.w, 0x5410), __byte_perm(k.x, k.z, 0x7632),
                     __byte_perm(k.y, k.w, 0x7632));
    }
    set_eight(to, q, k);
  }
}

// The token and scale block of a lane's `i`-th block among the tokens that its warp holds.
template <class Shape>
struct LaneBlock {
  int token, scale_block;
  bool wanted;  // there is such a token, and such a K

  __device__ __forceinline__ LaneBlock(const WarpMma<Shape>& warp_mma, int i, int count, int k, int lane)
      : token(8 * (i / Shape::kKBlocks) + lane / 4),
        scale_block((warp_mma.first_k_block() + i % Shape::kKBlocks) * kScaleChunkBlocks + lane % 4),
        wanted(warp_mma.works() && token < count && scale_block * kScaleBlock < k) {}

  // Four eights of bfloat16 rows, from number `eight` on; zeros where the block is not wanted, or there are no rows.
  __device__ __forceinline__ void load(const void* rows, int64_t eight, uint4 (&to)[4]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      to[q] =
          ptx::load_16_bytes_if(wanted && rows != nullptr, static_cast<const uint4*>(rows) + (wanted ? eight : 0) + q);
    }
  }
};

// Loads the warp's range of K of a tile's tokens; zeros where there is no token, or no K. A narrow tile's bfloat16
// tokens are all in flight at once. Others are loaded one scale block at a time: registers are few, and the code stays
// short.
template <class Shape>
__device__ __forceinline__ void load_tokens(const DenseParams& p, WarpMma<Shape>& warp_mma, int first, int count,
                                            int lane) {
  constexpr int kBlocks = Shape::kTokenSteps * Shape::kKBlocks;
  TokenBlock* const blocks = &warp_mma.tokens[0][0];
  if constexpr (Shape::kTokenSteps == 1) {
    if (p.tokens.format == TokenFormat::kBf16) {
      uint4 rows[kBlocks][4];
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const LaneBlock<Shape> block(warp_mma, i, count, p.gemm.k, lane);
        const int64_t element = static_cast<int64_t>(first + block.token) * p.gemm.k + block.scale_block * kScaleBlock;
        block.load(p.tokens.data, element / 8, rows[i]);
      }
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int q = 0; q < 4; ++q) rows[i][q] = detail::from_eight_bf16(rows[i][q]);
        pack_block<Shape::kWeights>(rows[i], blocks[i]);
      }
      return;
    }
  }
#pragma unroll 1
  for (int i = 0; i < kBlocks; ++i) {
    shift_blocks<kBlocks>(blocks);
    const LaneBlock<Shape> block(warp_mma, i, count, p.gemm.k, lane);
    uint4 eights[4];
    RowLoader{p.tokens, first + block.token, block.scale_block, block.wanted}.load(eights);
    pack_block<Shape::kWeights>(eights, blocks[kBlocks - 1]);
  }
}

// Loads a narrow tile's tokens normed, without their scales (RowNorm). A warp of the first group leaves its sum of
// squares of each token in `squares`, which is null for other groups. Block 0's first group writes the rows' sums.
template <class Shape>
__device__ __forceinline__ void load_normed_tokens(const DenseParams& p, WarpMma<Shape>& warp_mma, int count,
                                                   float* squares, int lane) {
  static_assert(Shape::kTokenSteps == 1, "beside more tokens there are no registers for their addends and weights");
  static_assert(Shape::kMmaWarps <= DenseStorage::kMostWarps, "each warp that shares K has squares of its own");
  constexpr int kBlocks = Shape::kKBlocks;
  TokenBlock* const blocks = &warp_mma.tokens[0][0];
  float square = 0.0f;
#pragma unroll 1
  for (int i = 0; i < kBlocks; ++i) {
    shift_blocks<kBlocks>(blocks);
    const LaneBlock<Shape> block(warp_mma, i, count, p.gemm.k, lane);
    const bool writes = p.norm.sum != nullptr && blockIdx.x == 0 && squares != nullptr && block.wanted;
    const int eight = block.scale_block * (kScaleBlock / 8), at = block.token * (p.gemm.k / 8) + eight;
    uint4 eights[4], addends[4], weights[4];
    block.load(p.tokens.data, at, eights);
    block.load(p.norm.addend, at, addends);
    block.load(p.norm.weight, eight, weights);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float x[8], other[8];
      unpack_eight<true>(eights[q], x);
      unpack_eight<true>(addends[q], other);
#pragma unroll
      for (int v = 0; v < 8; ++v) x[v] += other[v];
      const uint4 sum = pack_eight_bf16(x);  // the norm is of what the next layer adds to
      if (writes) static_cast<uint4*>(p.norm.sum)[at + q] = sum;
      unpack_eight<true>(sum, x);
      unpack_eight<true>(weights[q], other);
#pragma unroll
      for (int v = 0; v < 8; ++v) {
        square = fmaf(x[v], x[v], square);
        x[v] *= other[v];
      }
      eights[q] = detail::from_eight_bf16(pack_eight_bf16(x));
    }
    pack_block<Shape::kWeights>(eights, blocks[kBlocks - 1]);
  }
  square += __shfl_xor_sync(kAllLanes, square, 1);
  square += __shfl_xor_sync(kAllLanes, square, 2);
  if (squares != nullptr && lane % 4 == 0) squares[lane / 4] = square;
}

// The norm's scales of a lane's tokens 2t and 2t + 1, once the MMA warps have left their squares; without a norm 1.
struct NormScales {
  float of[2] = {1.0f, 1.0f};

  __device__ __forceinline__ void read(const DenseParams& p, const float* squares, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = 0.0f;
      for (int warp = 0; warp < p.gemm.k_warps; ++warp) sum += squares[warp * kNarrowTokens + 2 * (lane % 4) + i];
      of[i] = rsqrtf(sum / static_cast<float>(p.gemm.k) + p.norm.epsilon);
    }
  }
};

// A block's work: `work_tiles` of the weights for each tile of tokens, `steps` in all, work tiles of the first tile
// first.
struct DenseWork {
  int work_tiles, tiles, steps;

  __device__ __forceinline__ DenseWork(const DenseParams& p, int block_n)
      : work_tiles(ceil_div(p.gemm.work_tiles - static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x))),
        tiles(ceil_div(p.num_tokens, block_n)),
        steps(work_tiles * tiles) {}
};

// Where a block is in it.
struct DenseStep {
  int work_tile, tile;  // the block's work_tile-th

  __device__ __forceinline__ DenseStep(const DenseWork& work, int step) : work_tile(step), tile(0) { settle(work); }
  __device__ __forceinline__ void advance(const DenseWork& work, int steps) {
    work_tile += steps;
    settle(work);
  }
  __device__ __forceinline__ bool ended(const DenseWork& work) const { return tile >= work.tiles; }
  // This work tile's number among the weight's.
  __device__ __forceinline__ int weight_work_tile() const {
    return static_cast<int>(blockIdx.x) + work_tile * static_cast<int>(gridDim.x);
  }

 private:
  __device__ __forceinline__ void settle(const DenseWork& work) {
    for (; work_tile >= work.work_tiles && tile < work.tiles; ++tile) work_tile -= work.work_tiles;
  }
};

template <class Shape>
__device__ __forceinline__ void multiply_work_tiles(const DenseParams& p, const DensePipeline& pipeline, int warp,
                                                    int lane) {
  WarpMma<Shape> warp_mma;
  warp_mma.enter(p.gemm, pipeline.stage(0), warp, lane);
  if (!warp_mma.belongs()) return;
  PipelineState state;
  state.advance(warp_mma.slice(), pipeline.stages);
  ptx::wait_for_prerequisite_grids();  // tokens are there
  for (int first = 0; first < p.num_tokens; first += Shape::kBlockN) {
    const int count = min(Shape::kBlockN, p.num_tokens - first);
    bool loaded = false;
    if constexpr (Shape::kTokenSteps == 1) {
      loaded = p.norm.weight != nullptr;
      if (loaded && warp_mma.works()) {
        const bool of_first_group = warp < p.gemm.stage_warps * p.gemm.slices;
        float* squares =
            of_first_group ? pipeline.squares() + warp_mma.first_k_block() / Shape::kKBlocks * kNarrowTokens : nullptr;
        load_normed_tokens<Shape>(p, warp_mma, count, squares, lane);
      }
    }
    if (!loaded) load_tokens<Shape>(p, warp_mma, first, count, lane);
    for (int work_tile = static_cast<int>(blockIdx.x); work_tile < p.gemm.work_tiles; work_tile += ptx::grid_blocks()) {
      const uint32_t row = warp_mma.first_row(work_tile, p.gemm.part_rows());
      ptx::mbarrier_wait(pipeline.full(state.stage), state.parity);
      if (warp_mma.works()) warp_mma.multiply(state.stage * pipeline.stage_bytes, row, count, p.gemm.high_row_offset);
      __syncwarp();
      ptx::mbarrier_arrive(pipeline.empty(state.stage));
      state.advance(p.gemm.slices, pipeline.stages);
    }
  }
}

// The largest outputs of a tile that a epilogue warp has seen: a lane's rows of its tokens, 2t and 2t + 1 of each step.
template <class Shape>
struct LargestOutputs {
  uint64_t ranks[2 * Shape::kTokenSteps] = {};

  // `value` i of a lane's four of each step, output `out` of its token.
  __device__ __forceinline__ void add(int i, float value, int out) {
    uint64_t& rank = ranks[i / 4 * 2 + i % 2];
    rank = max(rank, rank_of(value, out));
  }
  // Those of all lanes, the tile's first token at `to`, each `pitch` behind the one before; and the next tile's begin.
  __device__ __forceinline__ void leave(uint64_t* to, int pitch, int count, int lane) {
#pragma unroll
    for (int i = 0; i < 2 * Shape::kTokenSteps; ++i) {
      const uint64_t largest = largest_of_lanes<4>(ranks[i]);
      const int token = i / 2 * 8 + 2 * (lane % 4) + i % 2;
      if (lane < 4 && token < count) to[static_cast<int64_t>(token) * pitch] = largest;
      ranks[i] = 0;
    }
  }
};

// `warp`: which of the epilogue warps it is.
template <class Shape>
__device__ __forceinline__ void run_epilogue_warp(const DenseParams& p, const DensePipeline& pipeline,
                                                  const DenseWork& work, int warp, int lane) {
  using Mma = WarpMma<Shape>;
  const SplitKGemm& g = p.gemm;
  const int pipeline_work_tiles = pipeline.stages / g.slices,
            epilogue_warps = epilogue_warps_of(pipeline.stages, g.slices);
  if (warp >= epilogue_warps) return;
  if (!p.weights_first) ptx::wait_for_prerequisite_grids();
  // Prime one stage per epilogue warp, so that later stages do not queue ahead of the first weights and of code. Not
  // where another epilogue warp might fill that stage again meanwhile, and end the phase that is waited for.
  const bool one_by_one = g.slices == 1 || epilogue_warps == 1;
  for (int stage = warp; stage < min(pipeline.stages, work.steps * g.slices); stage += epilogue_warps) {
    if (one_by_one && stage >= epilogue_warps) ptx::mbarrier_wait(pipeline.full(stage - epilogue_warps), 0);
    load_slice(g, pipeline, stage, DenseStep(work, stage / g.slices).weight_work_tile(), stage % g.slices, lane);
  }
  ptx::wait_for_prerequisite_grids();  // earlier launches have read what the outputs overwrite

  const int pitch = static_cast<int>(gridDim.x) * epilogue_warps;
  uint64_t* const ranks = p.ranks != nullptr ? p.ranks + static_cast<int>(blockIdx.x) * epilogue_warps + warp : nullptr;
  if (ranks != nullptr && work.work_tiles < epilogue_warps) {  // then a tile may have no work tile for this one
    for (int token = lane; token < p.num_tokens; token += 32) ranks[static_cast<int64_t>(token) * pitch] = 0;
    __syncwarp();
  }
  LargestOutputs<Shape> largest;
  NormScales norm_scales;
  bool normed = p.norm.weight == nullptr, ahead = false;  // scales are known; the next launch's data is prefetched

  const StoreEpilogue& e = p.epilogue;
  const float scale = load_or(e.alpha, 0, 1.0f);
  const int row = fragment_row<Shape>(lane / 4, g.pitch);
  PipelineState first_state;
  first_state.advance(warp * g.slices, pipeline.stages);
  for (DenseStep step(work, warp); !step.ended(work); step.advance(work, epilogue_warps)) {
    const int first_token = step.tile * Shape::kBlockN;
    const int count = min(Shape::kBlockN, p.num_tokens - first_token);
    for (int fragment = 0; fragment < g.groups; ++fragment) {
      // And the one 8 rows further on
      const int output = (step.weight_work_tile() * g.groups + fragment) * kFragmentRows + row;
      float bias[2] = {0.0f, 0.0f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (e.bias != nullptr && output + 8 * half < g.out) {
          bias[half] = load_scalar(e.bias, output + 8 * half, e.bias_type);
        }
      }
      float sums[Shape::kTokenSteps][4] = {};
      PipelineState state = first_state;
      for (int slice = 0; slice < g.slices; ++slice) {
        if (fragment == 0) ptx::mbarrier_wait(pipeline.empty(state.stage), state.parity);
        add_partials<Shape>(g, pipeline.stage(state.stage), slice, fragment, row, lane, count, sums);
        if (fragment == g.groups - 1) {
          __syncwarp();
          DenseStep next = step;
          next.advance(work, pipeline_work_tiles);
          if (!next.ended(work)) {
            load_slice(g, pipeline, state.stage, next.weight_work_tile(), slice, lane);
          } else if (!ahead) {
            ahead = true;
            prefetch_next(p.next, static_cast<int>(blockIdx.x) * epilogue_warps + warp, pitch);
          }
        }
        state.advance(pipeline.stages);
      }
      if (!normed) {  // the warps of all slices have arrived, behind their squares
        normed = true;
        norm_scales.read(p, pipeline.squares(), lane);
      }
#pragma unroll
      for (int i = 0; i < 4 * Shape::kTokenSteps; ++i) {
        const int token = i / 4 * 8 + 2 * (lane % 4) + i % 2, out = output + (i % 4 < 2 ? 0 : 8);
        if (token >= count || out >= g.out) continue;
        const int64_t at = static_cast<int64_t>(first_token + token) * g.out + out;
        const float norm_scale = Shape::kTokenSteps == 1 ? scale * norm_scales.of[i % 2] : scale;
        float value = fmaf(Mma::kAccumulatorScale * sums[i / 4][i % 4], norm_scale, bias[i % 4 / 2]);
        if (e.residual != nullptr) value += load_scalar(e.residual, at, e.output_type);
        if (ranks != nullptr) largest.add(i, round_scalar(value, e.output_type), out);
        if (e.output != nullptr) store_scalar(e.output, at, e.output_type, value);
      }
    }
    if (ranks != nullptr) {
      DenseStep next = step;
      next.advance(work, epilogue_warps);
      if (next.tile != step.tile) {
        largest.leave(ranks + static_cast<int64_t>(first_token) * pitch, pitch, count, lane);
      }
    }
    first_state.advance(epilogue_warps * g.slices, pipeline.stages);
  }
  if (!ahead) prefetch_next(p.next, static_cast<int>(blockIdx.x) * epilogue_warps + warp, pitch);
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) dense_layer_kernel(const __grid_constant__ DenseParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const DensePipeline pipeline = {dynamic_shared, p.stages, p.stage_bytes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::launch_dependent_grids();
  if (warp == Shape::kMmaWarps) {
    for (int stage = lane; stage < pipeline.stages; stage += 32) {
      ptx::mbarrier_init(pipeline.full(stage), 32);
      ptx::mbarrier_init(pipeline.empty(stage), 32 * p.gemm.stage_warps * p.gemm.groups);
    }
    if (lane == 0) ptx::prefetch_tensor_map(&p.gemm.scales);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  if (warp < Shape::kMmaWarps) {
    multiply_work_tiles<Shape>(p, pipeline, warp, lane);
  } else {  // epilogue warps
    run_epilogue_warp<Shape>(p, pipeline, DenseWork(p, Shape::kBlockN), warp - Shape::kMmaWarps, lane);
  }
}

}  // namespace flashinfer::sm12x
