// SPDX-License-Identifier: Apache-2.0
//
// One k-tile of one warp: 2 x 16 weight rows (16 of either half of the row tile) against the warp's tokens.
#pragma once

#include <array>
#include <type_traits>

#include "../mma/policy.cuh"
#include "producer.cuh"
#include "shared_storage.cuh"

namespace flashinfer::sm12x {

template <class Config>
using Accumulators = float[2][Config::kTokenSteps][4];

// Where this lane finds its operands in a stage; fixed for a unit.
template <class Config>
struct OperandOffsets {
  uint32_t weights[2];      // shared-memory byte offset of this lane's ldmatrix row, per half
  uint32_t swizzle;         // XOR for the 16-byte chunk index of that row
  int scale_row[2][2];      // word of rows g and g + 8, per half
  int first_token;          // of the warp within the tile
};

template <class Config>
__device__ __forceinline__ OperandOffsets<Config> operand_offsets(int row_tile, int rows, int warp, int lane) {
  OperandOffsets<Config> at;
  const int row_group = 16 * (warp % 4);
  const int matrix_row = row_group + lane % 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    at.weights[half] = half * (Config::kWeightStage / 2) + matrix_row * Config::kWeightPitch;
    const int start = half_row<Config>(row_tile, half, rows);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = start % kScaleChunkRows + row_group + lane / 4 + 8 * i;  // may reach into the next chunk
      const int chunk = (Config::kRole == Role::kFc1 ? half : 0) + row / kScaleChunkRows;
      at.scale_row[half][i] = chunk * Config::kWords * kScaleChunkRows + word_in_chunk(row);
    }
  }
  // The TMA swizzle: 64-byte rows XOR the chunk with address bits 7..8, 128-byte rows with bits 7..9.
  at.swizzle = Config::kWeightPitch == 64 ? (matrix_row >> 1) & 3 : matrix_row & 7;
  at.first_token = Config::kWarpTokens * (warp / 4);
  return at;
}

// Factors that a warp shares through shared memory where the MMA does not take scales: of its 32 rows (16 of either half)
// and of its tokens, four 32-blocks each.
template <class Config>
struct WarpFactors {
  float4* rows;
  float4* tokens;

  __device__ __forceinline__ WarpFactors(const SharedStorage<Config>& shared, int warp)
      : rows(shared.factors(warp)), tokens(rows + 32) {}

  __device__ __forceinline__ void convert(const uint32_t* row_words, const int (&scale_row)[2][2],
                                          const uint32_t* token_words, int lane) const {
    __syncwarp();  // the last use is over
    // Quad g of this warp knows the words of rows g and g + 8 of both halves; its lane t converts one of the four.
    const int t = lane % 4;
    const int word =
        t < 2 ? (t == 0 ? scale_row[0][0] : scale_row[0][1]) : (t == 2 ? scale_row[1][0] : scale_row[1][1]);
    rows[8 * t + lane / 4] = ptx::ue8m0x4_to_f32x4(row_words[word]);
    if constexpr (Config::kTokenScales) {
#pragma unroll
      for (int i = 0; i < Config::kWarpTokens; i += 32) {
        if (i + lane < Config::kWarpTokens) tokens[i + lane] = ptx::ue8m0x4_to_f32x4(token_words[i + lane]);
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ mma::RowFactors of_rows(int half, int block, int lane) const {
    const float* factors = reinterpret_cast<const float*>(rows + 16 * half + lane / 4) + block;
    return {factors[0], factors[4 * 8]};
  }
  __device__ __forceinline__ mma::TokenFactors of_tokens(int step, int block, int lane) const {
    if constexpr (!Config::kTokenScales) return {};
    const float* factors = reinterpret_cast<const float*>(tokens + 8 * step + 2 * (lane % 4)) + block;
    return {factors[0], factors[4]};
  }
};

template <class Config, bool kWholeTile>
__device__ __forceinline__ void consume_tile(const SharedStorage<Config>& shared, int stage,
                                             const OperandOffsets<Config>& at, int valid_blocks, int warp, int lane,
                                             Accumulators<Config>& accumulators) {
  using Policy = mma::Policy<Config::kActivation>;
  const uint32_t weights = ptx::shared_address(shared.weights(stage));
  const uint8_t* tokens = shared.tokens(stage) + (at.first_token + lane / 4) * Config::kTokenPitch;
  const WarpFactors<Config> factors(shared, warp);

#pragma unroll
  for (int word = 0; word < Config::kWords; ++word) {
    const uint32_t* row_words = reinterpret_cast<const uint32_t*>(shared.scales(stage)) + word * kScaleChunkRows;
    const uint32_t* token_words = shared.token_scales(stage) + word * Config::kTokenTile + at.first_token;
    if constexpr (!Policy::kScalesInMma) factors.convert(row_words, at.scale_row, token_words, lane);
    const auto row_scales = [&](int half, int block) {
      if constexpr (Policy::kScalesInMma) {
        return Policy::row_scales(row_words, at.scale_row[half][0], at.scale_row[half][1], lane);
      } else {
        return factors.of_rows(half, block, lane);
      }
    };
    const auto token_scales = [&](int step, int block) {
      if constexpr (Policy::kScalesInMma) {
        return Policy::token_scales(token_words + 8 * step, lane);
      } else {
        return factors.of_tokens(step, block, lane);
      }
    };

    auto block_pair = [&](auto pair_constant) {
      constexpr int kPair = decltype(pair_constant)::value;
      uint32_t packed[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t chunk = (4 * word + 2 * kPair + lane / 16) ^ at.swizzle;
        ptx::load_matrix_x4(packed[half], weights + at.weights[half] + 16 * chunk);
      }
      auto block = [&](auto block_constant) {
        constexpr int kBlock = decltype(block_constant)::value;  // of the four that share a scale word
        if (!kWholeTile && 4 * word + kBlock >= valid_blocks) return;
        // Keeps ptxas from hoisting the next block's fragments above this one's, which would cost spills.
        if constexpr (Config::kCooperative) __syncwarp();
        typename Policy::Weights expanded[2];
        const std::array row_scale = {row_scales(0, kBlock), row_scales(1, kBlock)};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          expanded[half] = Policy::expand(packed[half][2 * (kBlock % 2)], packed[half][2 * (kBlock % 2) + 1]);
        }
#pragma unroll
        for (int step = 0; step < Config::kTokenSteps; ++step) {
          const auto operand = Policy::load_tokens(
              tokens + 8 * step * Config::kTokenPitch + (4 * word + kBlock) * kScaleBlock * Config::kElementBytes,
              lane);
          const auto scale = token_scales(step, kBlock);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Policy::template multiply<kBlock>(accumulators[half][step], expanded[half], operand, row_scale[half],
                                              scale);
          }
        }
      };
      block(std::integral_constant<int, 2 * kPair>{});
      block(std::integral_constant<int, 2 * kPair + 1>{});
    };
    block_pair(std::integral_constant<int, 0>{});
    block_pair(std::integral_constant<int, 1>{});
  }
}

}  // namespace flashinfer::sm12x
