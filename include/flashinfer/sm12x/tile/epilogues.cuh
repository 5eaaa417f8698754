// SPDX-License-Identifier: Apache-2.0
//
// Epilogues, which consume a work tile's accumulators: the sum of a work tile that was split along K, FC1's, FC2's, and
// a plain store.
#pragma once

#include <cmath>

#include "../moe/activation.cuh"
#include "../moe/top_k_sum.cuh"
#include "../rows/load.cuh"
#include "../rows/scalar.cuh"
#include "mainloop.cuh"

namespace flashinfer::sm12x {

constexpr int kConsumerBarrier = 1;

// Work tiles that are split along K (scheduler.cuh): every block leaves its partial sum in global memory; the last to
// arrive adds them in K order and goes on with the epilogue.
//
// `work_tile` is one that was split. Returns whether this block has the whole sum.
template <class Config>
__device__ __forceinline__ bool reduce_split(float4* partials, int* arrivals, const SharedStorage<Config>& shared,
                                             const WorkSplit& work, int work_tile, int thread,
                                             Accumulators<Config>& accumulators) {
  constexpr int kVectors = 2 * Config::kTokenSteps;  // float4 of one thread
  auto& own = reinterpret_cast<float (&)[kVectors][4]>(accumulators);
  const int first = (work_tile - work.first_split_work_tile()) * work.k_tiles;
  const int first_block = work.owner(first), last_block = work.owner(first + work.k_tiles - 1);
  // A block has at most two partial sums: of a work tile that began before its K tiles, and of one that continues after
  // them.
  auto slot = [&](int block) {
    return partials +
           (static_cast<int64_t>(2 * block + (block == first_block ? 1 : 0)) * kVectors) * Config::kConsumerThreads +
           thread;
  };
  float4* mine = slot(blockIdx.x);
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    mine[v * Config::kConsumerThreads] = make_float4(own[v][0], own[v][1], own[v][2], own[v][3]);
  }
  ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
  if (thread == 0) *shared.flag() = ptx::is_last_to_arrive(arrivals + first_block, last_block - first_block + 1);
  ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
  const bool last_to_arrive = *shared.flag() != 0;
  if (!last_to_arrive) return false;

  // Several partial sums are fetched at once: in sequence, their latencies would be the tail of a small layer.
  constexpr int kBatch = kVectors <= 4 ? 4 : 1;
  float4 sum[kVectors] = {};
  for (int base = first_block; base <= last_block; base += kBatch) {
    float4 partial[kBatch][kVectors];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const float4* from = slot(min(base + i, last_block));
#pragma unroll
      for (int v = 0; v < kVectors; ++v) partial[i][v] = __ldcg(from + v * Config::kConsumerThreads);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (base + i > last_block) break;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) add_to(sum[v], partial[i][v]);
    }
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    own[v][0] = sum[v].x;
    own[v][1] = sum[v].y;
    own[v][2] = sum[v].z;
    own[v][3] = sum[v].w;
  }
  return true;
}

// A token's values for FC2's epilogue, loaded while the mainloop runs.
struct OwnToken {
  int routed_row;  // (token, slot) number
  float weight;
};

// FC2: the routed row that this thread's token of the tile came from.
template <class Config>
__device__ __forceinline__ OwnToken own_token(const GroupedGemmParams<Config::kRole>& p,
                                              const SharedStorage<Config>& shared, const WorkTile& work_tile,
                                              int thread) {
  if constexpr (Config::kRole == Role::kFc2) {
    if (thread < work_tile.num_tokens) {
      const int position = work_tile.first_token + thread;
      const int routed_row = p.order != nullptr ? p.order[position] : static_cast<int>(shared.order()[position]);
      return {routed_row, load_or(p.epilogue.routing_weights, routed_row, 1.0f)};
    }
  }
  return {};
}

// A work tile's epilogue, by the consumer warps, whose accumulators hold its sums.
template <class Config>
struct Epilogue {
  const GroupedGemmParams<Config::kRole>& p;
  const SharedStorage<Config>& shared;
  const WorkTile& work_tile;
  Accumulators<Config>& accumulators;

  // `own` is the thread's own token of the tile (threads below num_tokens).
  __device__ __forceinline__ void finish(int warp, int lane, const OwnToken& own) const {
    if constexpr (Config::kRole == Role::kFc1) {
      finish_fc1(warp, lane);
    } else if constexpr (Config::kRole == Role::kFc2) {
      finish_fc2(warp, lane, own);
    } else {
      store_output(warp, lane);
    }
  }

 private:
  // Row within the half, and token within the tile, of accumulator `value` of token step `step`.
  static __device__ __forceinline__ int row_of(int warp, int lane, int value) {
    return 16 * (warp % 4) + lane / 4 + 8 * (value / 2);
  }
  static __device__ __forceinline__ int token_of(int warp, int lane, int step, int value) {
    return Config::kWarpTokens * (warp / 4) + 8 * step + 2 * (lane % 4) + value % 2;
  }

  // FC1: global scale, bias, activation, and what FC2 reads: MXFP8 values with their scales, the same dequantized to
  // bf16, or bf16 (W4A16). M64 half 0 of the M tile are 64 up rows, M64 half 1 the matching gate rows, so that a thread
  // has both operands of SwiGLU. Without gate rows the M64 halves are 128 neighbouring rows, which take turns as M64
  // half 0: the staging area holds 64.
  __device__ __forceinline__ void finish_fc1(int warp, int lane) const {
    int first = m64_row<Config>(p, work_tile.m_tile, 0);
#pragma unroll 1
    for (int turn = 0;; ++turn) {
      activate(warp, lane, first);
      if constexpr (Config::kActivation == Element::kBf16) {
        ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);  // the staging area is free again
        round_to_bf16(warp, lane);
      } else {
        quantize(warp, lane, first);
      }
      ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
      store_intermediate(warp, lane, first);
      first += kM64Rows;
      if (gated<Config>(p) || turn == 1 || first >= inter()) break;
#pragma unroll
      for (int i = 0; i < 4 * Config::kTokenSteps; ++i) accumulators[0][i / 4][i % 4] = accumulators[1][i / 4][i % 4];
    }
  }

  // FC1's results of a token.
  __device__ __forceinline__ int inter() const { return gated<Config>(p) ? p.rows / 2 : p.rows; }

  // Of the 64 rows from `first` on: leaves intermediate values in accumulators[0]; rows beyond inter_size become 0.
  __device__ __forceinline__ void activate(int warp, int lane, int first) const {
    const Fc1Epilogue& e = p.epilogue;
    const float scale = Config::Policy::kAccumulatorScale * load_or(e.global_scale, work_tile.expert, 1.0f);
    const Activation activation = Activation::of_expert(e.activation, work_tile.expert);
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = first + row_of(warp, lane, 2 * upper);
      const bool exists = row < inter();
      float bias_up = 0.0f, bias_gate = 0.0f;
      if (exists && e.bias != nullptr) {
        const int64_t at = static_cast<int64_t>(work_tile.expert) * p.rows + row;
        bias_up = load_scalar(e.bias, at, e.bias_type);
        if (e.activation.gated) bias_gate = load_scalar(e.bias, at + inter(), e.bias_type);
      }
#pragma unroll
      for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
        for (int value = 2 * upper; value < 2 * upper + 2; ++value) {
          const float up = fmaf(accumulators[0][step][value], scale, bias_up);
          const float gate = fmaf(accumulators[1][step][value], scale, bias_gate);
          const float intermediate = e.activation.gated ? activation(up, gate) : relu_squared(up);
          accumulators[0][step][value] = exists ? intermediate : 0.0f;
        }
      }
    }
  }

  // A scale block of the intermediate is the 16 rows of two neighbouring warps.
  __device__ __forceinline__ void quantize(int warp, int lane, int first) const {
    const auto& intermediate = accumulators[0];
    float* amax = shared.template scratch<float>();  // [4][kBlockN]
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        float largest = fmaxf(fabsf(intermediate[step][parity]), fabsf(intermediate[step][parity + 2]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
        }
        if (lane < 4) amax[(warp % 4) * Config::kBlockN + token_of(warp, lane, step, parity)] = largest;
      }
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);

    const int first_block = first / kScaleBlock;
    const int blocks = inter() / kScaleBlock;
    const int pitch = kScaleChunkBlocks * scale_words(inter());
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int token = token_of(warp, lane, step, parity);
        const float* of_warp = amax + (warp % 4 & ~1) * Config::kBlockN + token;
        const Mxfp8Rounding rounding(fmaxf(of_warp[0], of_warp[Config::kBlockN]));
        const float low = intermediate[step][parity], high = intermediate[step][parity + 2];
        if constexpr (Config::kComputeType == Element::kBf16) {
          const uint32_t dequantized = rounding.pair_as_bf16(low, high);
          stage_bf16(token, row_of(warp, lane, 0), static_cast<uint16_t>(dequantized));
          stage_bf16(token, row_of(warp, lane, 2), static_cast<uint16_t>(dequantized >> 16));
          continue;
        }
        const uint16_t pair = rounding.pair(low, high);
        uint8_t* staged = shared.staging() + token * Config::kStagingPitch + row_of(warp, lane, 0);
        staged[0] = static_cast<uint8_t>(pair);
        staged[8] = static_cast<uint8_t>(pair >> 8);
        if (lane < 4 && warp % 2 == 0 && token < work_tile.num_tokens) {
          const int block = first_block + warp % 4 / 2;
          uint8_t* scales =
              p.epilogue.intermediate_scales + static_cast<int64_t>(work_tile.first_token + token) * pitch;
          if (block < blocks) scales[block] = static_cast<uint8_t>(rounding.scale);
          if (block == blocks - 1) {  // FC2 reads whole scale words: define their padding
            for (int pad = blocks; pad < pitch; ++pad) scales[pad] = 0;
          }
        }
      }
    }
  }

  __device__ __forceinline__ void stage_bf16(int token, int row, uint16_t value) const {
    uint8_t* staged = shared.staging() + token * Config::kStagingPitch;
    reinterpret_cast<uint16_t*>(staged)[packed_place(row)] = value;
  }

  __device__ __forceinline__ void round_to_bf16(int warp, int lane) const {
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
      for (int value = 0; value < 4; ++value) {
        stage_bf16(token_of(warp, lane, step, value), row_of(warp, lane, value),
                   __bfloat16_as_ushort(__float2bfloat16_rn(accumulators[0][step][value])));
      }
    }
  }

  // Staged rows to memory, 16 bytes a thread; inter_size is a multiple of 32, so a piece is inside or outside as a
  // whole.
  __device__ __forceinline__ void store_intermediate(int warp, int lane, int first) const {
    constexpr int kBlockPieces = Config::kBlockBytes / 16;
    constexpr int kTileBlocks = kM64Rows / kScaleBlock;
    const int width = inter(), first_block = first / kScaleBlock;
    // FC2 copies whole K blocks of packed rows: the last rows' turn writes their padding.
    const int last_block = Config::kTokenScales ? width / kScaleBlock : kScaleChunkBlocks * k_blocks_of(width);
    const bool last = first + kM64Rows >= width;
    const int blocks = last ? last_block - first_block : kTileBlocks;
    for (int i = 32 * warp + lane; i < work_tile.num_tokens * blocks * kBlockPieces; i += Config::kConsumerThreads) {
      const int token = i / (blocks * kBlockPieces), piece = i - token * (blocks * kBlockPieces);
      const int block = first_block + piece / kBlockPieces, byte = 16 * (piece % kBlockPieces);
      const int position = work_tile.first_token + token;
      const uint4 value =
          piece < kTileBlocks * kBlockPieces
              ? *reinterpret_cast<const uint4*>(shared.staging() + token * Config::kStagingPitch + 16 * piece)
              : make_uint4(0, 0, 0, 0);
      const int64_t at = Config::kTokenScales ? static_cast<int64_t>(position) * width + block * kScaleBlock
                                              : packed_offset(p.num_routed_rows, position, block);
      *reinterpret_cast<uint4*>(p.epilogue.intermediate + at + byte) = value;
    }
  }

  // FC2: global scale, bias, routing weight, and the sum over a token's experts. Every expert's partial output goes to
  // its own row of a float32 buffer; the block that delivers a token's last partial output for an M tile adds all of
  // them in slot order and rounds once. So the sum does not depend on which block comes last.
  __device__ __forceinline__ void finish_fc2(int warp, int lane, const OwnToken& own) const {
    const int thread = 32 * warp + lane;
    int* routed_rows = shared.template scratch<int>();
    float* weights = shared.template scratch<float>() + Config::kBlockN;
    uint32_t* complete = shared.template scratch<uint32_t>() + 2 * Config::kBlockN;  // a bit for each token
    if (thread < work_tile.num_tokens) {
      routed_rows[thread] = own.routed_row;
      weights[thread] = own.weight;
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    store_partial_outputs(warp, lane, routed_rows, weights);

    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    const int m_tiles = ceil_div(p.rows, kBlockM);
    bool last = false;
    if (thread < work_tile.num_tokens) {
      // The prologue starts the count at the number of slots that no local expert serves.
      const int token = own.routed_row / p.top_k;
      const int64_t counter = static_cast<int64_t>(token) * m_tiles + work_tile.m_tile;
      last = ptx::is_last_to_arrive(p.epilogue.token_arrivals + counter, p.top_k);
    }
    if (32 * warp < Config::kBlockN) {
      const uint32_t mask = __ballot_sync(kAllLanes, last);
      if (lane == 0) complete[warp] = mask;
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    sum_complete(routed_rows, complete, thread);
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);  // the scratch area is free again
  }

  __device__ __forceinline__ void store_partial_outputs(int warp, int lane, const int* routed_rows,
                                                        const float* weights) const {
    const float scale = load_or(p.epilogue.global_scale, work_tile.expert, 1.0f);
    for_each_output(
        warp, lane, scale, static_cast<int64_t>(work_tile.expert) * p.rows, [&](int token, int row, float value) {
          p.epilogue.partial_outputs[static_cast<int64_t>(routed_rows[token]) * p.rows + row] = value * weights[token];
        });
  }

  // Sums of all tokens that are complete.
  __device__ __forceinline__ void sum_complete(const int* routed_rows, const uint32_t* complete, int thread) const {
    constexpr int kTogether = Config::kBlockN <= 16 ? 1 : 4;  // tokens summed at a time
    const int row = work_tile.m_tile * kBlockM + thread;
    if (thread >= kBlockM || row >= p.rows) return;
    for (int first = 0; first < work_tile.num_tokens; first += 32) {
      for (uint32_t left = complete[first / 32]; left != 0;) {
        int tokens[kTogether], count = 0;
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          tokens[j] = left != 0 ? routed_rows[first + __ffs(left) - 1] / p.top_k : tokens[0];
          count += left != 0;
          left &= left - 1;
        }
        float sum[kTogether] = {};
        sum_slots(p, p.ids, p.epilogue.partial_outputs, p.rows, row, tokens, sum);
#pragma unroll
        for (int j = 0; j < kTogether; ++j) {
          if (j >= count) break;
          store_scalar(p.epilogue.output, static_cast<int64_t>(tokens[j]) * p.rows + row, p.epilogue.output_type,
                       sum[j]);
        }
      }
    }
  }

  // The grouped GEMM's epilogue, and a dense layer's.
  __device__ __forceinline__ void store_output(int warp, int lane) const {
    const StoreEpilogue& e = p.epilogue;
    const float scale = load_or(e.alpha, 0, 1.0f);
    for_each_output(warp, lane, scale, 0, [&](int token, int row, float value) {
      const int64_t at = static_cast<int64_t>(work_tile.first_token + token) * p.rows + row;
      if (e.residual != nullptr) value += load_scalar(e.residual, at, e.output_type);
      store_scalar(e.output, at, e.output_type, value);
    });
  }

  // take(token of the tile, row, value) for each of a thread's outputs: its sum, scaled, and the row's bias.
  template <class Take>
  __device__ __forceinline__ void for_each_output(int warp, int lane, float scale, int64_t first_bias,
                                                  const Take& take) const {
#pragma unroll
    for (int m64 = 0; m64 < 2; ++m64) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int row = work_tile.m_tile * kBlockM + m64 * kM64Rows + row_of(warp, lane, 2 * upper);
        if (row >= p.rows) continue;
        const float bias =
            p.epilogue.bias != nullptr ? load_scalar(p.epilogue.bias, first_bias + row, p.epilogue.bias_type) : 0.0f;
#pragma unroll
        for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
          for (int parity = 0; parity < 2; ++parity) {
            const int token = token_of(warp, lane, step, parity);
            if (token >= work_tile.num_tokens) continue;
            const float sum = Config::Policy::kAccumulatorScale * accumulators[m64][step][2 * upper + parity];
            take(token, row, fmaf(sum, scale, bias));
          }
        }
      }
    }
  }
};

}  // namespace flashinfer::sm12x
