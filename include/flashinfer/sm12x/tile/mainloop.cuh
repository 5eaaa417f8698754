// SPDX-License-Identifier: Apache-2.0
//
// One K tile of one warp: 2 x 16 weight rows (16 of each M64 half of the M tile) against the warp's tokens.
#pragma once

#include <type_traits>

#include "../mma/policy.cuh"
#include "scheduler.cuh"
#include "storage.cuh"

namespace flashinfer::sm12x {

template <class Config>
using Accumulators = float[2][Config::kTokenSteps][4];

// Where this lane finds its operands in a stage; fixed for a work tile.
template <class Config>
struct OperandOffsets {
  uint32_t weights[2];      // shared-memory byte offset of this lane's ldmatrix row, per M64 half
  uint32_t swizzle;         // XOR for the index of the 16-byte vector of that row
  int scale_row[2][2];      // scale word of rows g and g + 8, per M64 half
  int first_token;          // the warp's first, within the tile
  uint32_t tokens[2];       // byte offset of the lane's elements of even and of odd scale blocks of its first token
};

template <class Config>
__device__ __forceinline__ OperandOffsets<Config> operand_offsets(const GroupedGemmParams<Config::kRole>& p,
                                                                  const WorkTile& work_tile, int warp, int lane) {
  using Policy = typename Config::Policy;
  OperandOffsets<Config> at;
  const int row_group = 16 * (warp % 4);
  const int matrix_row = row_group + lane % 16;
#pragma unroll
  for (int m64 = 0; m64 < 2; ++m64) {
    at.weights[m64] = (m64 * kM64Rows + matrix_row) * Config::kFirstPitch;
    const int start = m64_row<Config>(p, work_tile.m_tile, m64);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = start % kScaleChunkRows + row_group + lane / 4 + 8 * i;  // may reach into the next chunk
      const int chunk = (gated<Config>(p) ? m64 : 0) + row / kScaleChunkRows;
      at.scale_row[m64][i] = chunk * Config::kScaleWords * kScaleChunkRows + word_in_chunk(row);
    }
  }
  // The TMA swizzle: 64-byte rows XOR the vector with address bits 7..8, 128-byte rows with bits 7..9.
  at.swizzle = Config::kFirstPitch == 64 ? (matrix_row >> 1) & 3 : matrix_row & 7;
  at.first_token = Config::kWarpTokens * (warp / 4);
  const int token = at.first_token + lane / 4;
  // Odd rows in permuted order have neighbouring scale blocks swapped.
  const int swapped = Config::kTokenScales ? 0 : (work_tile.first_token + token) & 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    at.tokens[i] =
        token * Config::kTokenPitch + (i ^ swapped) * Config::kBlockBytes + Policy::kLaneTokenBytes * (lane % 4);
  }
  return at;
}

// Scales that a warp shares through shared memory where sums are scaled: those of its 32 rows (16 of each M64 half) and
// of its tokens, for the four scale blocks of a K block.
template <class Config>
struct WarpScales {
  float4* rows;
  float4* tokens;

  __device__ __forceinline__ WarpScales(const SharedStorage<Config>& shared, int warp)
      : rows(shared.float_scales(warp)), tokens(rows + 32) {}

  __device__ __forceinline__ void convert(const uint32_t* row_words, const int (&scale_row)[2][2],
                                          const uint32_t* token_words, int lane) const {
    __syncwarp();  // the last use is over
    // Quad g of this warp knows the scale words of rows g and g + 8 of both M64 halves; its lane t converts one of the
    // four.
    const int t = lane % 4;
    const int word =
        t < 2 ? (t == 0 ? scale_row[0][0] : scale_row[0][1]) : (t == 2 ? scale_row[1][0] : scale_row[1][1]);
    rows[8 * t + lane / 4] = ptx::ue8m0x4_to_f32x4(row_words[word]);
#pragma unroll
    for (int i = 0; i < Config::kWarpTokens; i += 32) {
      if (i + lane < Config::kWarpTokens) tokens[i + lane] = ptx::ue8m0x4_to_f32x4(token_words[i + lane]);
    }
    __syncwarp();
  }

  __device__ __forceinline__ mma::FloatRowScales of_rows(int m64, int block, int lane) const {
    const float* scales = reinterpret_cast<const float*>(rows + 16 * m64 + lane / 4) + block;
    return {scales[0], scales[4 * 8]};
  }
  __device__ __forceinline__ mma::FloatTokenScales of_tokens(int step, int block, int lane) const {
    const float* scales = reinterpret_cast<const float*>(tokens + 8 * step + 2 * (lane % 4)) + block;
    return {scales[0], scales[4]};
  }
};

// Scales of a stage in the policy's form. of_rows and of_tokens are those of the K block that began last.
template <class Config>
class StageScales {
  using Policy = typename Config::Policy;
  static constexpr mma::Scaling kScaling = Policy::kScaling;
  static constexpr int kOfBlock = kScaleBlock / elements_per_scale(Config::kWeights);  // scales of 32 weights

 public:
  // `valid_blocks`: scale blocks that remain of K; nothing was copied beyond them.
  __device__ __forceinline__ StageScales(const SharedStorage<Config>& shared, int stage,
                                         const OperandOffsets<Config>& at, int valid_blocks, int warp, int lane)
      : at_(at),
        row_words_(reinterpret_cast<const uint32_t*>(shared.scales(stage))),
        token_words_(shared.token_scales(stage) + at.first_token),
        float_scales_(shared, warp),
        lane_(lane) {
    if constexpr (kScaling == mma::Scaling::kInWeights) {
#pragma unroll
      for (int i = 0; i < 4 * Config::kScaleWords; ++i) {
        uint32_t& held = held_[i / 4][i % 4];
        const bool copied = Config::kScaleWords == 1 || i / 4 * kScaleChunkBlocks < valid_blocks * kOfBlock;
        held = copied ? row_words_[i / 4 * kScaleChunkRows + at.scale_row[i % 4 / 2][i % 2]] : 0;
        // A scale block has two scales; the shift brings that of the lane's elements 8t.. first.
        if constexpr (kOfBlock == 2) held >>= lane % 4 / 2 * 8;
      }
    }
  }

  // Whether the policy can fold all of this warp's row scales into its dequantization of weights.
  __device__ __forceinline__ bool fold() const {
    if constexpr (kScaling != mma::Scaling::kInWeights || kOfBlock == 2) return true;
    uint32_t exceeding = 0;
#pragma unroll
    for (int i = 0; i < 4 * Config::kKBlocks; ++i) exceeding |= mma::exceeds_folded_scale(held_[i / 4][i % 4]);
    return __all_sync(kAllLanes, exceeding == 0);
  }

  __device__ __forceinline__ void begin_k_block(int k_block) const {
    if constexpr (kScaling == mma::Scaling::kInSums) {
      float_scales_.convert(row_words_ + k_block * kScaleChunkRows, at_.scale_row,
                            token_words_ + k_block * Config::kBlockN, lane_);
    }
  }
  __device__ __forceinline__ typename Policy::RowScales of_rows(int k_block, int m64, int block) const {
    if constexpr (kScaling == mma::Scaling::kInMma) {
      return Policy::row_scales(row_words_ + k_block * kScaleChunkRows, at_.scale_row[m64][0], at_.scale_row[m64][1],
                                lane_);
    } else if constexpr (kScaling == mma::Scaling::kInSums) {
      return float_scales_.of_rows(m64, block, lane_);
    } else {
      const auto& held = held_[k_block * kOfBlock + block * kOfBlock / kScaleChunkBlocks];
      return {held[2 * m64], held[2 * m64 + 1]};
    }
  }
  __device__ __forceinline__ typename Policy::TokenScales of_tokens(int k_block, int step, int block) const {
    if constexpr (kScaling == mma::Scaling::kInMma) {
      return Policy::token_scales(token_words_ + k_block * Config::kBlockN + 8 * step, lane_);
    } else if constexpr (kScaling == mma::Scaling::kInSums) {
      return float_scales_.of_tokens(step, block, lane_);
    } else {
      return {};
    }
  }

 private:
  const OperandOffsets<Config>& at_;
  const uint32_t* row_words_;
  const uint32_t* token_words_;
  WarpScales<Config> float_scales_;
  int lane_;
  uint32_t held_[Config::kScaleWords][4];  // scale words of rows g and g + 8 of each M64 half
};

// A row of weights with a NaN gives NaN for every token. `nans`: those that this lane saw in its rows of each M64 half.
template <class Config>
__device__ __forceinline__ void spread_nan(const mma::RowNans (&nans)[2], Accumulators<Config>& accumulators) {
  if constexpr (Config::Policy::kCollectsNans) {
    using Dequantizer = typename Config::Policy::BlockDequantizer;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t of_row = i % 2 == 0 ? nans[i / 2].row : nans[i / 2].row_plus_8;
      of_row |= __shfl_xor_sync(kAllLanes, of_row, 1);
      of_row |= __shfl_xor_sync(kAllLanes, of_row, 2);
      if (!Dequantizer::is_nan(of_row)) continue;
#pragma unroll
      for (int step = 0; step < Config::kTokenSteps; ++step) {
        accumulators[i / 2][step][2 * (i % 2)] = accumulators[i / 2][step][2 * (i % 2) + 1] = NAN;
      }
    }
  }
}

// MXFP6: the pairs of the lane's eight elements of block `block`, rotated for place_e2m3<0>. ldmatrix gave lane t of a
// quad word t of a row, and a row holds the pairs of two blocks.
__device__ __forceinline__ uint32_t pairs_of_lane(uint32_t word, int block, int lane) {
  const int t = lane % 4;
  const uint32_t pairs = __shfl_sync(kAllLanes, word, (lane & ~3) + 2 * block + t / 2);
  return __funnelshift_r(pairs, pairs, t % 2 * 4);
}

// kPlain: K does not end within the tile, and its scales fold.
template <class Config, bool kPlain>
__device__ __forceinline__ void consume_tile(const SharedStorage<Config>& shared, int stage,
                                             const OperandOffsets<Config>& at, const StageScales<Config>& scales,
                                             int valid_blocks, int lane, Accumulators<Config>& accumulators,
                                             mma::RowNans (&nans)[2]) {
  using Policy = typename Config::Policy;
  constexpr int kBlockBytes = Config::kBlockBytes;
  constexpr int kKBlockPitch =
      Config::kTokenScales ? kScaleChunkBlocks * kBlockBytes : Config::kBlockN * kPackedRowBytes;
  // Token steps whose operands are held together: enough MMAs in one call to hide their latency from the next.
  constexpr int kSteps = Config::kTokenSteps;
  constexpr int kHeldSteps = Policy::kCallsPerBlock == 1 ? 1 : kSteps % 4 == 0 ? 4 : kSteps % 3 == 0 ? 3 : kSteps;
  const uint32_t weights = ptx::shared_address(shared.weights(stage));
  const uint8_t* tokens[2] = {shared.tokens(stage) + at.tokens[0], shared.tokens(stage) + at.tokens[1]};

  // K blocks whose scales go through shared memory cannot overlap, so they are not unrolled: two of them spilled
  // registers.
  constexpr int kUnrolledKBlocks = Policy::kScaling == mma::Scaling::kInSums ? 1 : Config::kKBlocks;
#pragma unroll kUnrolledKBlocks
  for (int k_block = 0; k_block < Config::kKBlocks; ++k_block) {
    if (kPlain || kScaleChunkBlocks * k_block < valid_blocks) scales.begin_k_block(k_block);  // others were not copied
    // MXFP6's pairs, [m64]: rows g and g + 8 of the first two blocks, then of the other two. Rows of 32 bytes are
    // swizzled: the vector XOR address bit 7.
    uint32_t pairs[2][4];
    if constexpr (Config::kTwoPlanes) {
#pragma unroll
      for (int m64 = 0; m64 < 2; ++m64) {
        const uint32_t row = at.weights[m64] / Config::kFirstPitch;
        const uint32_t vector = (lane / 16) ^ (row >> 2 & 1);
        ptx::load_matrix_x4(pairs[m64], weights + Config::kFirstPlane + row * Config::kSecondPitch + 16 * vector);
      }
    }
    auto block_pair = [&](auto pair_constant) {
      constexpr int kPair = decltype(pair_constant)::value;
      constexpr int kWeightWords = Policy::kWeightWords;
      // A matrix of ldmatrix is 16 bytes of 8 rows: one scale block of MXFP4 or of MXFP6's nibbles, half of one of
      // MXFP8. row: [m64][multiply() call of the pair of blocks]
      constexpr bool kTwoPlanes = Config::kTwoPlanes;
      constexpr int kLoads = block_bytes(Config::kWeights) / 16;
      constexpr int kFirstWords = kTwoPlanes ? 1 : kWeightWords;
      uint32_t row[2][2 / Policy::kBlocksPerCall][kWeightWords],
          row_plus_8[2][2 / Policy::kBlocksPerCall][kWeightWords];
#pragma unroll
      for (int m64 = 0; m64 < 2; ++m64) {
#pragma unroll
        for (int load = 0; load < kLoads; ++load) {
          uint32_t matrices[4];
          const uint32_t vector = (kLoads * (4 * k_block + 2 * kPair) + 2 * load + lane / 16) ^ at.swizzle;
          ptx::load_matrix_x4(matrices, weights + at.weights[m64] + 16 * vector);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int matrix = 2 * load + i;
            row[m64][matrix / kFirstWords][matrix % kFirstWords] = matrices[2 * i];
            row_plus_8[m64][matrix / kFirstWords][matrix % kFirstWords] = matrices[2 * i + 1];
          }
        }
        if constexpr (kTwoPlanes) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            row[m64][i][1] = pairs_of_lane(pairs[m64][2 * kPair], i, lane);
            row_plus_8[m64][i][1] = pairs_of_lane(pairs[m64][2 * kPair + 1], i, lane);
          }
        }
      }
      auto block = [&](auto block_constant) {
        constexpr int kBlock = decltype(block_constant)::value;  // of the K block's four
        if (!kPlain && 4 * k_block + kBlock >= valid_blocks) return;
        // Where an MMA's second block lies beyond K, its weights are zero and its scales undefined, perhaps NaN.
        auto within_k = [&](auto both) {
          if constexpr (Policy::kBlocksPerCall == 2 && !kPlain) {
            if (4 * k_block + kBlock + 1 >= valid_blocks) both.word &= 0xFFu << (8 * kBlock);
          }
          return both;
        };
        // Keeps ptxas from hoisting the next block's fragments above this one's, which would cost spills.
        if constexpr (Config::kEightWarps) __syncwarp();
        typename Policy::Weights dequantized[2];
        typename Policy::RowScales row_scales[2];
#pragma unroll
        for (int m64 = 0; m64 < 2; ++m64) {
          row_scales[m64] = within_k(scales.of_rows(k_block, m64, kBlock));
          dequantized[m64] = Policy::template dequantize<kBlock, kPlain>(
              row[m64][kBlock % 2], row_plus_8[m64][kBlock % 2], row_scales[m64], nans[m64]);
        }
        auto multiply_steps = [&](int first_step, const auto& operands, auto call_constant) {
#pragma unroll
          for (int i = 0; i < kHeldSteps; ++i) {
            const int step = first_step + i;
            const auto token_scales = within_k(scales.of_tokens(k_block, step, kBlock));
#pragma unroll
            for (int m64 = 0; m64 < 2; ++m64) {
              Policy::template multiply<kBlock, decltype(call_constant)::value>(
                  accumulators[m64][step], dequantized[m64], operands[i], row_scales[m64], token_scales);
            }
          }
        };
#pragma unroll
        for (int first_step = 0; first_step < kSteps; first_step += kHeldSteps) {
          typename Policy::Tokens operands[kHeldSteps];
#pragma unroll
          for (int i = 0; i < kHeldSteps; ++i) {
            operands[i] =
                Policy::load_tokens(tokens[kBlock % 2] + k_block * kKBlockPitch + kBlock / 2 * 2 * kBlockBytes +
                                    8 * (first_step + i) * Config::kTokenPitch);
          }
          multiply_steps(first_step, operands, std::integral_constant<int, 0>{});
          if constexpr (Policy::kCallsPerBlock == 2)
            multiply_steps(first_step, operands, std::integral_constant<int, 1>{});
        }
      };
      block(std::integral_constant<int, 2 * kPair>{});
      if constexpr (Policy::kBlocksPerCall == 1) block(std::integral_constant<int, 2 * kPair + 1>{});
    };
    block_pair(std::integral_constant<int, 0>{});
    block_pair(std::integral_constant<int, 1>{});
  }
}

}  // namespace flashinfer::sm12x
