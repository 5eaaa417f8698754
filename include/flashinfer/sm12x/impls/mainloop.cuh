// SPDX-License-Identifier: Apache-2.0
//
// One k-tile of one warp: 2 x 16 weight rows (16 of either half of the row tile) against the warp's tokens.
#pragma once

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

template <class Config, bool kWholeTile>
__device__ __forceinline__ void consume_tile(const SharedStorage<Config>& shared, int stage,
                                             const OperandOffsets<Config>& at, int valid_blocks, int lane,
                                             Accumulators<Config>& accumulators) {
  using Policy = mma::Policy<Config::kActivation>;
  const uint32_t weights = ptx::shared_address(shared.weights(stage));
  const uint8_t* tokens = shared.tokens(stage) + (at.first_token + lane / 4) * Config::kTokenPitch;

#pragma unroll
  for (int word = 0; word < Config::kWords; ++word) {
    const uint32_t* row_words = reinterpret_cast<const uint32_t*>(shared.scales(stage)) + word * kScaleChunkRows;
    const uint32_t* token_words = shared.token_scales(stage) + word * Config::kTokenTile + at.first_token;
    typename Policy::RowScales row_scales[2];
    typename Policy::TokenScales token_scales[Config::kTokenSteps];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row_scales[half] = Policy::row_scales(row_words, at.scale_row[half][0], at.scale_row[half][1], lane);
    }
#pragma unroll
    for (int step = 0; step < Config::kTokenSteps; ++step) {
      token_scales[step] = Policy::token_scales(token_words + 8 * step, lane);
    }

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
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          expanded[half] = Policy::expand(packed[half][2 * (kBlock % 2)], packed[half][2 * (kBlock % 2) + 1]);
        }
#pragma unroll
        for (int step = 0; step < Config::kTokenSteps; ++step) {
          const auto operand = Policy::load_tokens(
              tokens + 8 * step * Config::kTokenPitch + (4 * word + kBlock) * kScaleBlock * Config::kElementBytes, lane);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            Policy::template multiply<kBlock>(accumulators[half][step], expanded[half], operand, row_scales[half],
                                              token_scales[step]);
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
