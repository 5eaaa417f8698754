// SPDX-License-Identifier: Apache-2.0
//
// FC1's epilogue: global scale, bias, SwiGLU, and what FC2 reads: MXFP8 values with their scales, the same widened to bf16,
// or bf16 (W4A16).
// Half 0 of the row tile are 64 up rows, half 1 the matching gate rows, so that both operands of SwiGLU meet in a thread.
#pragma once

#include <cmath>

#include "../impls/mainloop.cuh"
#include "../impls/token_blocks.cuh"
#include "scalar.cuh"

namespace flashinfer::sm12x::epilogue {

constexpr int kConsumerBarrier = 1;

struct SwigluParameters {
  float alpha, beta, limit;
};

// gpt-oss' SwiGLU. NaN passes the clamps, as a value and as the limit.
__device__ __forceinline__ float swiglu(float up, float gate, const SwigluParameters& s) {
  gate = ptx::min_or_nan(gate, s.limit);
  up = ptx::min_or_nan(up, s.limit);
  up = ptx::max_or_nan(up, -s.limit);
  const float sigmoid = 1.0f / (1.0f + expf(-s.alpha * gate));
  return gate * sigmoid * (up + s.beta);
}

template <class Config>
class Fc1Finish {
  static constexpr int kValues = 4;

 public:
  static __device__ __forceinline__ void run(const GroupedGemmParams<Role::kFc1>& p,
                                             const SharedStorage<Config>& shared, const scheduler::Unit& unit, int warp,
                                             int lane, Accumulators<Config>& accumulators) {
    activate(p, unit, warp, lane, accumulators);
    if constexpr (Config::kActivation == Activation::kBf16) {
      ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);  // the last tile has left the staging area
      round_to_bf16(shared, warp, lane, accumulators);
    } else {
      quantize(p, shared, unit, warp, lane, accumulators);
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);
    store(p, shared, unit, 32 * warp + lane);
  }

 private:
  // Row within the half, and token within the tile, of accumulator `value` of token step `step`.
  static __device__ __forceinline__ int row_of(int warp, int lane, int value) {
    return 16 * (warp % 4) + lane / 4 + 8 * (value / 2);
  }
  static __device__ __forceinline__ int token_of(int warp, int lane, int step, int value) {
    return Config::kWarpTokens * (warp / 4) + 8 * step + 2 * (lane % 4) + value % 2;
  }

  // Leaves act values in accumulators[0]; rows beyond inter_size become 0.
  static __device__ __forceinline__ void activate(const GroupedGemmParams<Role::kFc1>& p, const scheduler::Unit& unit,
                                                  int warp, int lane, Accumulators<Config>& accumulators) {
    const int inter = p.rows / 2;
    const Fc1Epilogue& e = p.epilogue;
    const float scale = Config::Policy::kAccumulatorScale * load_or(e.global_scale, unit.expert, 1.0f);
    const SwigluParameters parameters = {load_or(e.alpha, unit.expert, 1.0f), load_or(e.beta, unit.expert, 0.0f),
                                         load_or(e.limit, unit.expert, INFINITY)};
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
      const int row = unit.row_tile * kRowHalf + row_of(warp, lane, 2 * upper);
      const bool exists = row < inter;
      float bias_up = 0.0f, bias_gate = 0.0f;
      if (exists && e.bias != nullptr) {
        const int64_t first = static_cast<int64_t>(unit.expert) * p.rows;
        bias_up = load_scalar(e.bias, first + row, e.bias_type);
        bias_gate = load_scalar(e.bias, first + inter + row, e.bias_type);
      }
#pragma unroll
      for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
        for (int value = 2 * upper; value < 2 * upper + 2; ++value) {
          const float up = fmaf(accumulators[0][step][value], scale, bias_up);
          const float gate = fmaf(accumulators[1][step][value], scale, bias_gate);
          accumulators[0][step][value] = exists ? swiglu(up, gate, parameters) : 0.0f;
        }
      }
    }
  }

  // A 32-block of act is the 16 rows of two neighbouring warps.
  static __device__ __forceinline__ void quantize(const GroupedGemmParams<Role::kFc1>& p,
                                                  const SharedStorage<Config>& shared, const scheduler::Unit& unit,
                                                  int warp, int lane, Accumulators<Config>& act) {
    float* amax = shared.template scratch<float>();  // [4][kTokenTile]
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        float largest = fmaxf(fabsf(act[0][step][parity]), fabsf(act[0][step][parity + 2]));
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) {
          largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, distance));
        }
        if (lane < 4) amax[(warp % 4) * Config::kTokenTile + token_of(warp, lane, step, parity)] = largest;
      }
    }
    ptx::named_barrier_sync<Config::kConsumerThreads>(kConsumerBarrier);

    const int first_block = unit.row_tile * (kRowHalf / kScaleBlock);
    const int blocks = p.rows / 2 / kScaleBlock;
    const int pitch = kScaleChunkBlocks * scale_words(p.rows / 2);
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int token = token_of(warp, lane, step, parity);
        const float* of_warp = amax + (warp % 4 & ~1) * Config::kTokenTile + token;
        const uint32_t scale = ptx::mxfp8_scale(fmaxf(of_warp[0], of_warp[Config::kTokenTile]));
        const float inverse = ptx::inverse_scale(scale);
        const uint16_t pair = ptx::f32x2_to_e4m3x2(act[0][step][parity] * inverse, act[0][step][parity + 2] * inverse);
        if constexpr (Config::kOperand == Activation::kBf16) {
          const uint32_t widened = ptx::e4m3x2_to_bf16x2(pair, ptx::ue8m0_to_f32<0>(scale));
          stage_bf16(shared, token, row_of(warp, lane, 0), static_cast<uint16_t>(widened));
          stage_bf16(shared, token, row_of(warp, lane, 2), static_cast<uint16_t>(widened >> 16));
          continue;
        }
        uint8_t* staged = shared.staging() + token * Config::kStagingPitch + row_of(warp, lane, 0);
        staged[0] = static_cast<uint8_t>(pair);
        staged[8] = static_cast<uint8_t>(pair >> 8);
        if (lane < 4 && warp % 2 == 0 && token < unit.num_tokens) {
          const int block = first_block + warp % 4 / 2;
          uint8_t* scales = p.epilogue.act_scales + static_cast<int64_t>(unit.first_token + token) * pitch;
          if (block < blocks) scales[block] = static_cast<uint8_t>(scale);
          if (block == blocks - 1) {  // FC2 reads whole words: define their padding
            for (int pad = blocks; pad < pitch; ++pad) scales[pad] = 0;
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void stage_bf16(const SharedStorage<Config>& shared, int token, int row,
                                                    uint16_t value) {
    uint8_t* staged = shared.staging() + token * Config::kStagingPitch;
    reinterpret_cast<uint16_t*>(staged)[arranged_place(row)] = value;
  }

  static __device__ __forceinline__ void round_to_bf16(const SharedStorage<Config>& shared, int warp, int lane,
                                                       const Accumulators<Config>& act) {
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
#pragma unroll
      for (int value = 0; value < kValues; ++value) {
        stage_bf16(shared, token_of(warp, lane, step, value), row_of(warp, lane, value),
                   __bfloat16_as_ushort(__float2bfloat16_rn(act[0][step][value])));
      }
    }
  }

  // Staged rows to memory, 16 bytes a thread; inter_size is a multiple of 32, so a piece is inside or outside as a whole.
  static __device__ __forceinline__ void store(const GroupedGemmParams<Role::kFc1>& p,
                                               const SharedStorage<Config>& shared, const scheduler::Unit& unit,
                                               int thread) {
    constexpr int kBlockPieces = Config::kBlockBytes / 16;
    constexpr int kTileBlocks = kRowHalf / kScaleBlock;
    const int inter = p.rows / 2, first_block = unit.row_tile * kTileBlocks;
    // FC2 copies whole words of arranged rows: the last tile writes their padding.
    const int last_block = Config::kTokenScales ? inter / kScaleBlock : kScaleChunkBlocks * scale_words(inter);
    const bool last_tile = (unit.row_tile + 1) * kRowHalf >= inter;
    const int blocks = last_tile ? last_block - first_block : kTileBlocks;
    for (int i = thread; i < unit.num_tokens * blocks * kBlockPieces; i += Config::kConsumerThreads) {
      const int token = i / (blocks * kBlockPieces), piece = i - token * (blocks * kBlockPieces);
      const int block = first_block + piece / kBlockPieces, byte = 16 * (piece % kBlockPieces);
      const int position = unit.first_token + token;
      const uint4 value =
          piece < kTileBlocks * kBlockPieces
              ? *reinterpret_cast<const uint4*>(shared.staging() + token * Config::kStagingPitch + 16 * piece)
              : make_uint4(0, 0, 0, 0);
      const int64_t at = Config::kTokenScales ? static_cast<int64_t>(position) * inter + block * kScaleBlock
                                              : arranged_offset(p.num_entries, position, block);
      *reinterpret_cast<uint4*>(p.epilogue.act + at + byte) = value;
    }
  }
};

}  // namespace flashinfer::sm12x::epilogue
