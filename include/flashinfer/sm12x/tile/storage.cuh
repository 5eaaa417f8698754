// SPDX-License-Identifier: Apache-2.0
//
// Compile-time configuration of a grouped GEMM and its shared memory.
#pragma once

#include "../mma/policy.cuh"
#include "../rows/load.cuh"
#include "params.h"

namespace flashinfer::sm12x {

// Whether kernels are compiled for SM12x or for Hopper; launchers ask the device.
constexpr bool kForSm12x = FLASHINFER_SM12X_DEVICE;

// kActivation_ is what activations are rounded to, kComputeType_ the type in which they are kept and multiplied.
template <Role kRole_, Element kActivation_, Element kComputeType_, int kBlockN_, int kBlockK_, int kStages_,
          int kBlocksPerSm_, Element kWeights_ = Element::kE2m1>
struct GemmConfig {
  static constexpr Role kRole = kRole_;
  static constexpr Element kActivation = kActivation_;
  static constexpr Element kComputeType = kComputeType_;
  static constexpr Element kWeights = kWeights_;
  using Policy = mma::Policy<kComputeType, kWeights>;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kBlockK = kBlockK_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;

  static constexpr bool kEightWarps = kBlockN == 128;
  static constexpr int kConsumerWarps = kEightWarps ? 8 : 4;
  static constexpr int kConsumerThreads = 32 * kConsumerWarps;
  static constexpr int kThreads = kConsumerThreads + 32;
  static constexpr int kWarpTokens = kEightWarps ? kBlockN / 2 : kBlockN;  // a warp's tile: 2 x 16 rows, these tokens
  static constexpr int kTokenSteps = kWarpTokens / 8;

  // Cap registers so that GPUs with more shared memory than a GB10 can hold more blocks, unless SM12x would spill.
  static constexpr bool kBf16 = kComputeType == Element::kBf16;
  // For bf16 rows on Hopper, measured with MXFP4; other formats' dequantizations spill in wide tiles of three.
  static constexpr bool kDequantizesCheaply = kWeights == Element::kE2m1 || kWeights == Element::kE4m3;
  static constexpr int kHopperBlocks = kBlockN <= 24 ? 4 : kBlockN <= 40 || kDequantizesCheaply ? 3 : 2;
  static constexpr int kSm12xBlocks = kBlockN <= 8 ? 4 : kBlockN <= 16 && !kBf16 ? 3 : kBlocksPerSm;
  static constexpr int kMinBlocks = kBf16 && !kForSm12x ? kHopperBlocks : kSm12xBlocks;

  static constexpr bool kTokenScales = !kBf16;
  static constexpr int kBlockBytes = block_bytes(kComputeType);
  static constexpr int kTokenBytes = kBlockK / kScaleBlock * kBlockBytes;
  // Rows of MXFP8 and MXFP4 are shifted against the 128-byte period of the banks, so that a load of all lanes, 8 or 4
  // bytes, has no bank conflict; packed rows lie K block by K block.
  static constexpr int kTokenPadding = 4 * Policy::kLaneTokenBytes;
  static constexpr int kTokenPitch = kTokenScales ? kTokenBytes + kTokenPadding : kPackedRowBytes;
  static constexpr int kWeightBytes = row_bytes(kWeights, kBlockK);  // of a weight row in a stage
  // MXFP6's planes lie apart in a stage, each swizzled: else eight rows of 96 bytes would meet in half of the banks.
  static constexpr bool kTwoPlanes = kWeights == Element::kE2m3;
  static constexpr int kSecondPitch = kTwoPlanes ? kBlockK / kScaleBlock * kPairBytes : 0;
  static constexpr int kFirstPitch = kWeightBytes - kSecondPitch;
  static constexpr int kKBlocks = kBlockK / kKBlock;  // of a stage
  static constexpr int kScaleWords = kKBlocks * scale_words_of_k_block(kWeights);  // of a weight row in a stage
  static constexpr int kScaleChunks = kRole == Role::kFc1 ? 3 : 1;  // up; gate, which may straddle two

  static constexpr int kFirstPlane = kBlockM * kFirstPitch;
  static constexpr int kWeightStage = kBlockM * kWeightBytes;
  static constexpr int kScaleStage = kScaleChunks * kScaleWords * kScaleChunkBytes;
  static constexpr int kTokenStage = kBlockN * kTokenPitch * (kTokenScales ? 1 : kKBlocks);
  static constexpr int kTokenScaleStage = kTokenScales ? 4 * kKBlocks * kBlockN : 0;

  // FC1 leaves its intermediate tile (64 values a token) here before it goes to memory in 16-byte pieces.
  static constexpr int kStagingPitch = kM64Rows / kScaleBlock * kBlockBytes + 16;
  static constexpr int kStagingBytes = kRole == Role::kFc1 ? kBlockN * kStagingPitch : 0;

  // On Hopper the pipeline of bf16 rows takes what its blocks leave of shared memory; rows of 8 bits keep their stages.
  static constexpr int kStageBytes = kWeightStage + kScaleStage + kTokenStage + kTokenScaleStage;
  static constexpr int kOutsidePipeline = kStagingBytes + 16 * kBlockN + 4096;  // barriers, routing tables, alignment
  static constexpr int kHopperBlockBytes =
      HopperLimits::kSharedBytesPerSm / kHopperBlocks - HopperLimits::kSharedBytesReservedPerBlock;
  static constexpr int kHopperStages = kBf16 ? (kHopperBlockBytes - kOutsidePipeline) / kStageBytes : kStages;

  static_assert(kComputeType == kActivation || kComputeType == Element::kBf16, "bfloat16 holds any scaled activation");
  static_assert(kBlockK % 128 == 0 && (kFirstPitch == 64 || kFirstPitch == 128),
                "a weight row of a stage is one 64- or 128-byte swizzle span");
  static_assert(!kTwoPlanes || kSecondPitch == 32, "and of MXFP6 one of 32 bytes besides");
  static_assert(kBlockN == 128 || (kBlockN % 8 == 0 && kBlockN <= 64), "registers of four consumer warps");
  static_assert(kStages >= 2 && kHopperStages >= 2, "the pipeline overlaps copies with arithmetic");
  static_assert(kWeightStage % 1024 == 0 && kScaleStage % 16 == 0 && kTokenStage % 16 == 0);
};

// Offsets into dynamic shared memory; only the routing tables depend on the number of experts.
template <class Config, bool kSm12x = kForSm12x>
struct SharedStorage {
  static constexpr int kStages = kSm12x ? Config::kStages : Config::kHopperStages;
  static constexpr int kWeights = 0;
  static constexpr int kScales = kWeights + kStages * Config::kWeightStage;
  static constexpr int kTokens = kScales + kStages * Config::kScaleStage;
  static constexpr int kTokenScales = kTokens + kStages * Config::kTokenStage;
  static constexpr int kStaging = kTokenScales + kStages * Config::kTokenScaleStage;
  // Float scales of a warp's rows and tokens, where tokens have scales that their MMA does not take.
  static constexpr int kWarpScales = 16 * (32 + Config::kWarpTokens);
  static constexpr bool kNeedsFloatScales =
      Config::kTokenScales && !(kSm12x && uses_block_scaled_mma(Config::kComputeType));
  static constexpr int kFloatScales = kStaging + Config::kStagingBytes;
  static constexpr int kScratch =
      kFloatScales + (kNeedsFloatScales ? Config::kConsumerWarps * kWarpScales : 0);  // 16 bytes a token
  static constexpr int kBarriers = kScratch + 16 * Config::kBlockN;  // full, empty
  static constexpr int kFlag = kBarriers + 2 * 8 * kStages;
  static constexpr int kOrder = kFlag + 16;
  static constexpr int kRouting = kOrder + 2 * kInKernelRoutedRows;
  static constexpr int kAlignment = 1024;  // bytes of the 128-byte swizzle's atom

  static_assert(kScratch % 16 == 0 && kBarriers % 8 == 0 && kRouting % 4 == 0);

  static constexpr int bytes(int num_experts) { return kAlignment + kRouting + 2 * 4 * (num_experts + 1); }

  char* base;

  __device__ __forceinline__ explicit SharedStorage(char* dynamic)
      : base(dynamic + ((kAlignment - (ptx::shared_address(dynamic) & (kAlignment - 1))) & (kAlignment - 1))) {}

  __device__ __forceinline__ uint8_t* weights(int stage) const { return at(kWeights + stage * Config::kWeightStage); }
  __device__ __forceinline__ uint8_t* scales(int stage) const { return at(kScales + stage * Config::kScaleStage); }
  __device__ __forceinline__ uint8_t* tokens(int stage) const { return at(kTokens + stage * Config::kTokenStage); }
  __device__ __forceinline__ uint32_t* token_scales(int stage) const {
    return reinterpret_cast<uint32_t*>(base + kTokenScales + stage * Config::kTokenScaleStage);
  }
  __device__ __forceinline__ float4* float_scales(int warp) const {
    return reinterpret_cast<float4*>(base + kFloatScales + warp * kWarpScales);
  }
  __device__ __forceinline__ uint8_t* staging() const { return at(kStaging); }
  template <class T>
  __device__ __forceinline__ T* scratch() const {
    return reinterpret_cast<T*>(base + kScratch);
  }
  __device__ __forceinline__ uint64_t* full(int stage) const {
    return reinterpret_cast<uint64_t*>(base + kBarriers) + stage;
  }
  __device__ __forceinline__ uint64_t* empty(int stage) const { return full(kStages + stage); }
  __device__ __forceinline__ int* flag() const { return reinterpret_cast<int*>(base + kFlag); }
  __device__ __forceinline__ uint16_t* order() const { return reinterpret_cast<uint16_t*>(base + kOrder); }
  __device__ __forceinline__ int* offsets() const { return reinterpret_cast<int*>(base + kRouting); }
  __device__ __forceinline__ int* tile_prefix(int num_experts) const { return offsets() + num_experts + 1; }

 private:
  __device__ __forceinline__ uint8_t* at(int offset) const { return reinterpret_cast<uint8_t*>(base + offset); }
};

// Whether the M64 halves of an M tile are up rows and the matching gate rows; else they are neighbouring rows.
template <class Config>
__device__ __forceinline__ bool gated(const GroupedGemmParams<Config::kRole>& p) {
  if constexpr (Config::kRole == Role::kFc1) return p.epilogue.activation.gated;
  return false;
}

// First weight row of half `m64` of an M tile.
template <class Config>
__device__ __forceinline__ int m64_row(const GroupedGemmParams<Config::kRole>& p, int m_tile, int m64) {
  if constexpr (Config::kRole == Role::kFc1) {
    if (gated<Config>(p)) return (m64 == 0 ? 0 : p.rows / 2) + m_tile * kM64Rows;
  }
  return m_tile * kBlockM + m64 * kM64Rows;
}

}  // namespace flashinfer::sm12x
