// SPDX-License-Identifier: Apache-2.0
//
// A dense layer for few tokens, out = tokens * weights^T, as one stream of weights: the smallest use of the streamed GEMM
// (streamed_gemm.cuh), and the place to begin reading. The MoE layer (streamed_layer.cuh) is two such streams with routing
// in front and a meeting of all blocks between them.
//
// One block per SM. Block b computes units b, b + blocks, ... of the weight rows, once for each tile of tokens. Three roles:
//
//   keepers     four warps, taking turns at the units: fill the ring's stages with weights as long as there are free ones;
//               when the MMA warps are through with a unit, add their partial sums in K order, fill its stages again, and
//               store the outputs
//   MMA warps   each holds its part of K of a tile's tokens in registers, and multiplies it with the same part of every
//               weight row that comes through the ring
//   ring        stages in shared memory. `full`: copies have landed. `done`: partial sums stand where weights were
//
// Tokens come as bfloat16 (W4A16, W8A16), are quantized to MXFP8 here, or come as MXFP8 or MXFP4. Weights and tokens are exact
// in bfloat16 whatever the format, so that one kind of MMA serves all.
#pragma once

#include "../common/quantize.cuh"
#include "../epilogue/scalar.cuh"
#include "../ptx/convert.cuh"
#include "dense_params.cuh"
#include "streamed_gemm.cuh"

namespace flashinfer::sm12x {

constexpr int kDenseFixedBytes = 256;  // of shared memory, beside the ring
using DenseRing = StreamRing<kDenseFixedBytes>;
constexpr int kDenseKeeperBarrier = 1;

// A block of 32 elements as bfloat16, in natural order; zeros where it is not wanted.
struct RowLoader {
  const DenseRows& rows;
  int64_t row;
  int k_block;
  bool wanted;

  __device__ __forceinline__ const uint8_t* at(int bytes_of_block) const {
    const int64_t block = row * (rows.k / kScaleBlock) + k_block;
    return static_cast<const uint8_t*>(rows.data) + (wanted ? block * bytes_of_block : 0);
  }

  __device__ __forceinline__ float scale() const {
    int64_t place = row * (rows.k / kScaleBlock) + k_block;
    if (rows.format != DenseTokens::kMxfp8Linear) {
      const ScaleRow words = swizzled_scale_row(row, scale_words(rows.k));
      place = 4 * (words.base + static_cast<int64_t>(k_block / kScaleChunkBlocks) * words.stride) +
              k_block % kScaleChunkBlocks;
    }
    return ptx::ue8m0_to_f32<0>(wanted ? rows.scales[place] : 0);
  }

  __device__ __forceinline__ void load(uint4 (&eights)[4]) const {
    switch (rows.format) {
      case DenseTokens::kBf16: return load_16_bit(eights);
      case DenseTokens::kQuantizeBf16: load_16_bit(eights); return quantize<true>(eights);
      case DenseTokens::kQuantizeF16: load_16_bit(eights); return quantize<false>(eights);
      case DenseTokens::kMxfp4Swizzled: return load_mxfp4(eights);
      default: return load_mxfp8(eights);
    }
  }

 private:
  __device__ __forceinline__ void load_16_bit(uint4 (&eights)[4]) const {
    const uint8_t* from = at(2 * kScaleBlock);
#pragma unroll
    for (int q = 0; q < 4; ++q) eights[q] = ptx::load_16_bytes_if(wanted, from + 16 * q);
  }

  static __device__ __forceinline__ uint4 from_e4m3(uint2 eight, float scale) {
    return make_uint4(ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(eight.x), scale),
                      ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(eight.x >> 16), scale),
                      ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(eight.y), scale),
                      ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(eight.y >> 16), scale));
  }

  __device__ __forceinline__ void load_mxfp8(uint4 (&eights)[4]) const {
    const uint8_t* from = at(kScaleBlock);
    const uint4 low = ptx::load_16_bytes_if(wanted, from), high = ptx::load_16_bytes_if(wanted, from + 16);
    const float s = scale();
    eights[0] = from_e4m3(make_uint2(low.x, low.y), s);
    eights[1] = from_e4m3(make_uint2(low.z, low.w), s);
    eights[2] = from_e4m3(make_uint2(high.x, high.y), s);
    eights[3] = from_e4m3(make_uint2(high.z, high.w), s);
  }

  __device__ __forceinline__ void load_mxfp4(uint4 (&eights)[4]) const {
    const uint4 block = ptx::load_16_bytes_if(wanted, at(kScaleBlock / 2));
    const uint32_t words[4] = {block.x, block.y, block.z, block.w};
    const uint32_t factor = ptx::f32x2_to_bf16x2(scale(), scale());
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t pair[4];  // elements i, i + 4
      mma::expand_to_bf16(words[q], mma::kTwoTo126Pair, pair);
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::bf16x2_multiply(pair[i], factor);
      eights[q] = make_uint4(__byte_perm(pair[0], pair[1], 0x5410), __byte_perm(pair[2], pair[3], 0x5410),
                             __byte_perm(pair[0], pair[1], 0x7632), __byte_perm(pair[2], pair[3], 0x7632));
    }
  }

  // To MXFP8 and back: a lane holds a whole block. Unpacked twice, rather than held in twice the registers.
  template <bool kIsBf16>
  static __device__ __forceinline__ void quantize(uint4 (&eights)[4]) {
    float amax = 0.0f;
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float x[8];
      unpack_eight<kIsBf16>(eights[q], x);
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(x[i]));
    }
    const uint32_t exponent = ptx::mxfp8_scale(amax);
    const float inverse = ptx::mxfp8_inverse_scale(exponent), scale = ptx::ue8m0_to_f32<0>(exponent);
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      float x[8];
      unpack_eight<kIsBf16>(eights[q], x);
      uint32_t pair[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) pair[i] = ptx::f32x2_to_e4m3x2(x[2 * i] * inverse, x[2 * i + 1] * inverse);
      eights[q] = from_e4m3(make_uint2(pair[0] | pair[1] << 16, pair[2] | pair[3] << 16), scale);
    }
  }
};

// The order in which expanded weights of the format come: pairs of elements i and i + 4 of eight, or i and i + 2 of four.
template <WeightFormat kWeights>
__device__ __forceinline__ void arrange(const uint4 (&eights)[4], TokenBlock& to) {
#pragma unroll
  for (int q = 0; q < 4; ++q) {
    const uint4& k = eights[q];
    const bool fours = kWeights == WeightFormat::kMxfp8;
    const uint32_t first = fours ? k.y : k.z, second = fours ? k.z : k.y;
    to[2 * q][0] = __byte_perm(k.x, first, 0x5410);
    to[2 * q][1] = __byte_perm(k.x, first, 0x7632);
    to[2 * q + 1][0] = __byte_perm(second, k.w, 0x5410);
    to[2 * q + 1][1] = __byte_perm(second, k.w, 0x7632);
  }
}

// A tile's tokens, as far as they meet the warp's K; zeros where there is no token, or no K.
template <class Shape>
__device__ __forceinline__ void load_tokens(const DenseParams& p, SlabMultiplier<Shape>& slab, int first, int count,
                                            int lane) {
  constexpr int kBlocks = Shape::kTokenSteps * Shape::kWords;
  TokenBlock* const blocks = &slab.tokens[0][0];
  auto load = [&](int i, TokenBlock& to) {
    const int token = 8 * (i / Shape::kWords) + lane / 4;
    const int k_block = (slab.first_word() + i % Shape::kWords) * kScaleChunkBlocks + lane % 4;
    const bool wanted = slab.works() && token < count && k_block * kScaleBlock < p.gemm.k;
    uint4 eights[4];
    RowLoader{p.tokens, first + token, k_block, wanted}.load(eights);
    arrange<Shape::kWeights>(eights, to);
  };
  // In a loop through which the registers shift: converting is more code than it is worth fetching for every block.
#pragma unroll 1
  for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
    for (int b = 0; b + 1 < kBlocks; ++b) {
#pragma unroll
      for (int v = 0; v < 16; ++v) blocks[b][v / 2][v % 2] = blocks[b + 1][v / 2][v % 2];
    }
    load(i, blocks[kBlocks - 1]);
  }
}

// A block's work: `units` of the weights for each tile of tokens, `steps` in all, units of the first tile first.
struct DenseWork {
  int units, tiles, steps;

  __device__ __forceinline__ DenseWork(const DenseParams& p, int token_tile)
      : units(ceil_div(p.gemm.units - static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x))),
        tiles(ceil_div(p.num_tokens, token_tile)),
        steps(units * tiles) {}
};

// Where a block is in it.
struct DenseStep {
  int unit, tile;  // the block's unit-th

  __device__ __forceinline__ DenseStep(const DenseWork& work, int step) : unit(step), tile(0) { settle(work); }
  __device__ __forceinline__ void advance(const DenseWork& work, int steps) {
    unit += steps;
    settle(work);
  }
  __device__ __forceinline__ bool ended(const DenseWork& work) const { return tile >= work.tiles; }
  // Of the weights.
  __device__ __forceinline__ int weight_unit() const {
    return static_cast<int>(blockIdx.x) + unit * static_cast<int>(gridDim.x);
  }

 private:
  __device__ __forceinline__ void settle(const DenseWork& work) {
    for (; unit >= work.units && tile < work.tiles; ++tile) unit -= work.units;
  }
};

template <class Shape>
__device__ __forceinline__ void multiply_units(const DenseParams& p, const DenseRing& ring, const DenseWork& work,
                                               int warp, int lane) {
  SlabMultiplier<Shape> slab;
  slab.enter(p.gemm, ring.stage(0), warp, lane);
  if (!slab.belongs()) return;
  RingPlace place;
  place.advance(slab.chunk(), ring.stages);
  ptx::wait_for_prerequisite_grids();  // tokens are there
  for (int tile = 0; tile < work.tiles; ++tile) {
    const int first = tile * Shape::kTokenTile, count = min(Shape::kTokenTile, p.num_tokens - first);
    load_tokens<Shape>(p, slab, first, count, lane);
    uint32_t row = slab.first_row(blockIdx.x);
    for (int left = work.units; left > 0; --left, row += gridDim.x * slab.unit_rows()) {
      ptx::mbarrier_wait(ring.full(place.stage), place.parity);
      if (slab.works()) slab.multiply(place.stage * ring.stage_bytes, row, count);
      __syncwarp();
      ptx::mbarrier_arrive(ring.done(place.stage));
      place.advance(p.gemm.chunks, ring.stages);
    }
  }
}

// `turn`: which of the keepers the warp is.
template <class Shape>
__device__ __forceinline__ void keep_ring(const DenseParams& p, const DenseRing& ring, const DenseWork& work, int turn,
                                          int lane) {
  const StreamedGemm& g = p.gemm;
  // Units of two keepers never meet in one stage: the parity of `done` could be taken for that of the phase before.
  const int keepers = max(1, min(Shape::kKeeperWarps, ring.stages / g.chunks));
  if (turn >= keepers) return;
  if (!p.weights_first) ptx::wait_for_prerequisite_grids();
  // At first one stage of each keeper is under way: what is needed first, weights and code, does not queue behind the rest. Not
  // where another keeper might fill that stage again meanwhile, and end the phase that is waited for.
  const bool one_by_one = g.chunks == 1 || keepers == 1;
  for (int stage = turn; stage < min(ring.stages, work.steps * g.chunks); stage += keepers) {
    if (one_by_one && stage >= keepers) ptx::mbarrier_wait(ring.full(stage - keepers), 0);
    fill_chunk(g, ring, stage, DenseStep(work, stage / g.chunks).weight_unit(), stage % g.chunks, lane);
  }
  ptx::wait_for_prerequisite_grids();  // what the outputs replace has been read

  const StoreEpilogue& e = p.epilogue;
  const float scale = epilogue::load_or(e.alpha, 0, 1.0f);
  const int row = slab_row<Shape>(lane / 4, g.pitch);
  // A stage is filled again with what comes a ring later: so many steps and chunks.
  const int steps_ahead = ring.stages / g.chunks, chunks_ahead = ring.stages - steps_ahead * g.chunks;
  RingPlace first_place;
  first_place.advance(turn * g.chunks, ring.stages);
  for (DenseStep step(work, turn); !step.ended(work); step.advance(work, keepers)) {
    const int first_token = step.tile * Shape::kTokenTile;
    const int count = min(Shape::kTokenTile, p.num_tokens - first_token);
    for (int slab = 0; slab < g.groups; ++slab) {
      const int output = (step.weight_unit() * g.groups + slab) * kSlabRows + row;  // and the one 8 rows further on
      float bias[2] = {0.0f, 0.0f};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (e.bias != nullptr && output + 8 * half < g.out) {
          bias[half] = epilogue::load_scalar(e.bias, output + 8 * half, e.bias_type);
        }
      }
      float sums[Shape::kTokenSteps][4] = {};
      RingPlace place = first_place;
      for (int chunk = 0; chunk < g.chunks; ++chunk) {
        if (slab == 0) ptx::mbarrier_wait(ring.done(place.stage), place.parity);
        add_partials<Shape>(g, ring.stage(place.stage), chunk, slab, row, lane, count, sums);
        if (slab == g.groups - 1) {
          __syncwarp();
          DenseStep next = step;
          const bool wraps = chunk + chunks_ahead >= g.chunks;
          next.advance(work, steps_ahead + wraps);
          if (!next.ended(work)) {
            fill_chunk(g, ring, place.stage, next.weight_unit(), chunk + chunks_ahead - (wraps ? g.chunks : 0), lane);
          }
        }
        place.advance(ring.stages);
      }
#pragma unroll
      for (int i = 0; i < 4 * Shape::kTokenSteps; ++i) {
        const int token = i / 4 * 8 + 2 * (lane % 4) + i % 2, out = output + (i % 4 < 2 ? 0 : 8);
        if (token >= count || out >= g.out) continue;
        const int64_t at = static_cast<int64_t>(first_token + token) * g.out + out;
        float value = fmaf(sums[i / 4][i % 4], scale, bias[i % 4 / 2]);
        if (e.residual != nullptr) value += epilogue::load_scalar(e.residual, at, e.output_type);
        epilogue::store_scalar(e.output, at, e.output_type, value);
      }
    }
    first_place.advance(keepers * g.chunks, ring.stages);
  }
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1) dense_layer_kernel(const __grid_constant__ DenseParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  const DenseRing ring = {dynamic_shared, p.stages, p.stage_bytes};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  ptx::launch_dependent_grids();
  if (warp == Shape::kMmaWarps) {
    for (int stage = lane; stage < ring.stages; stage += 32) {
      ptx::mbarrier_init(ring.full(stage), 32);
      ptx::mbarrier_init(ring.done(stage), 32 * p.gemm.stage_warps * p.gemm.groups);
    }
    if (lane == 0) ptx::prefetch_tensor_map(&p.gemm.scales);
    ptx::fence_barrier_init();
  }
  __syncthreads();
  const DenseWork work(p, Shape::kTokenTile);
  if (warp < Shape::kMmaWarps) {
    multiply_units<Shape>(p, ring, work, warp, lane);
  } else {
    keep_ring<Shape>(p, ring, work, warp - Shape::kMmaWarps, lane);
  }
}

}  // namespace flashinfer::sm12x
