// SPDX-License-Identifier: Apache-2.0
//
// From a kernel template to a registered instance. Included by the rendered sources only.
#pragma once

#include <algorithm>

#include "../sm12x_arch_config.h"
#include "flashinfer/sm12x/split_k/dense.cuh"
#include "flashinfer/sm12x/split_k/fused_moe.cuh"
#include "flashinfer/sm12x/tile/gemm.cuh"

namespace flashinfer::sm12x {

template <class Config>
struct KernelLauncher {
  static constexpr Role kRole = Config::kRole;
  using Sm12xStorage = SharedStorage<Config, true>;
  static_assert(Sm12xStorage::bytes(kMaxLocalExperts) <= Sm12xLimits::kSharedBytesPerBlock,
                "an instance must fit a block of an SM12x, whatever the layer");
  static_assert(Config::kBlocksPerSm * (Sm12xStorage::bytes(128) + Sm12xLimits::kSharedBytesReservedPerBlock) <=
                    Sm12xLimits::kSharedBytesPerSm,
                "the planned number of blocks must fit an SM12x (128 local experts)");

  static int shared_bytes(bool sm12x, int num_experts) {
    return sm12x ? Sm12xStorage::bytes(num_experts) : SharedStorage<Config, false>::bytes(num_experts);
  }

  static cudaError_t blocks_per_sm(const LaunchOptions& options, int num_experts, int* blocks) {
    const int bytes = shared_bytes(options.sm12x, num_experts);
    if (bytes > options.shared_bytes) return cudaErrorInvalidValue;
    if (const cudaError_t error = grant_shared_memory(grouped_gemm_kernel<Config>, options)) return error;
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, grouped_gemm_kernel<Config>, Config::kThreads, bytes);
  }

  static cudaError_t launch(const GroupedGemmParams<kRole>& params, int blocks, const LaunchOptions& options) {
    return launch_kernel(grouped_gemm_kernel<Config>, params, blocks, Config::kThreads,
                         shared_bytes(options.sm12x, params.num_experts), options);
  }
};

// A rendered MoE source instantiates this: both GEMMs of one tile configuration.
template <Element kActivation, Element kComputeType, Element kWeights, int kBlockN, int kBlockK, int kStages,
          int kBlocksPerSm>
struct MoeInstance {
  template <Role kRole>
  using Gemm =
      KernelLauncher<GemmConfig<kRole, kActivation, kComputeType, kBlockN, kBlockK, kStages, kBlocksPerSm, kWeights>>;
  using Fc1 = Gemm<Role::kFc1>;
  using Fc2 = Gemm<Role::kFc2>;

  static constexpr bool agrees_with_table(int stages, int shared_bytes) {
    // Half-precision MMAs in place of block-scaled ones need float scales in shared memory, too.
    const bool more = Fc1::Sm12xStorage::kNeedsFloatScales;
    const int bytes = Fc1::Sm12xStorage::bytes(128);
    return stages == kStages && (more ? bytes > shared_bytes : bytes == shared_bytes);
  }

  static cudaError_t blocks_per_sm(Role role, const LaunchOptions& options, int num_experts, int* blocks) {
    return role == Role::kFc1 ? Fc1::blocks_per_sm(options, num_experts, blocks)
                              : Fc2::blocks_per_sm(options, num_experts, blocks);
  }
  static Instance describe(int index) {
    Instance instance = {index, kActivation, kComputeType, kWeights, kBlockN, kBlockK};
    instance.fc1 = Fc1::launch;
    instance.fc2 = Fc2::launch;
    instance.blocks_per_sm = blocks_per_sm;
    return instance;
  }
};

template <Element kActivation, int kBlockN, int kBlockK, int kStages, int kBlocksPerSm,
          Element kWeights = Element::kE2m1>
struct GroupGemmInstance {
  using Store = KernelLauncher<
      GemmConfig<Role::kStore, kActivation, kActivation, kBlockN, kBlockK, kStages, kBlocksPerSm, kWeights>>;

  static cudaError_t blocks_per_sm(Role, const LaunchOptions& options, int num_groups, int* blocks) {
    return Store::blocks_per_sm(options, num_groups, blocks);
  }
  static Instance describe(int index) {
    Instance instance = {index, kActivation, kActivation, kWeights, kBlockN, kBlockK};
    instance.store = Store::launch;
    instance.blocks_per_sm = blocks_per_sm;
    return instance;
  }
};

// The layer in one launch.
template <Element kActivation, Element kWeights, int kBlockN, int kKBlocks, int kMmaWarps>
struct FusedMoeInstance {
  using Config = FusedMoeConfig<kActivation, kWeights, kBlockN, kKBlocks, kMmaWarps>;
  static constexpr int kFixedBytes = FusedMoeStorage::kPipeline;
  static constexpr int kPipelineBytes = Sm12xLimits::kSharedBytesPerBlock - kFixedBytes;

  // Stage bytes of a GEMM with `parts` of `out` rows; 0: K is too long.
  static constexpr int stage_bytes(int parts, int out, int k) {
    const SplitKGemmPlan plan = fused_moe_gemm_plan(kWeights, kKBlocks * kKBlock, kMmaWarps, kBlockN, parts, out, k);
    const SplitKGemm gemm = plan.make();
    return gemm.groups == 0 ? 0 : plan.stage_bytes(gemm);
  }

  // Rows for one, two and four groups of warps, and every K: the launcher takes all that the tables promise.
  static constexpr bool takes_every_layer() {
    for (int k = kScaleBlock; k <= kMmaWarps * kKBlocks * kKBlock; k += kScaleBlock) {
      for (int parts = 1; parts <= 2; ++parts) {
        for (int out : {kScaleBlock, 2 * kScaleBlock}) {
          const int stage = stage_bytes(parts, out, k);
          const int stages = stage == 0 ? 0 : std::min(kPipelineBytes / stage, kMaxSplitKStages);
          if (stages < 2 || stages * stage < FusedMoeStorage::kRouting) return false;
        }
      }
    }
    return true;
  }
  static_assert(takes_every_layer(), "a pipeline must fit a block of an SM12x");

  // For both GEMMs of a gpt-oss layer.
  static constexpr bool agrees_with_table(int stages, int shared_bytes) {
    const int stage = std::max(stage_bytes(2, 2880, 2880), stage_bytes(1, 2880, 2880));
    return stages == kPipelineBytes / stage && shared_bytes == kFixedBytes + stages * stage;
  }

  static cudaError_t prepare(const LaunchOptions& options) {
    return grant_shared_memory(fused_moe_kernel<Config>, options);
  }

  static cudaError_t launch(const FusedMoeParams& params, int shared_bytes, const LaunchOptions& options) {
    return launch_kernel(fused_moe_kernel<Config>, params, options.sm_count, Config::kThreads, shared_bytes, options,
                         /*cooperative=*/true);
  }
  static Instance describe(int index) {
    Instance instance = {index, kActivation, Element::kBf16, kWeights, kBlockN, kKBlocks * kKBlock};
    instance.mma_warps = kMmaWarps;
    instance.prepare = prepare;
    instance.fused_moe = launch;
    return instance;
  }
};

// A dense layer as a split-K kernel.
template <Element kWeights, int kBlockN, int kKBlocks, int kMmaWarps>
struct SplitKDenseInstance {
  using Shape = SplitKShape<kWeights, kBlockN, kKBlocks, kMmaWarps, true>;

  static cudaError_t prepare(const LaunchOptions& options) {
    return grant_shared_memory(dense_layer_kernel<Shape>, options);
  }
  static cudaError_t launch(const DenseParams& params, int blocks, int shared_bytes, const LaunchOptions& options) {
    return launch_kernel(dense_layer_kernel<Shape>, params, blocks, Shape::kThreads, shared_bytes, options);
  }
  static Instance describe(int index) {
    Instance instance = {index, Element::kBf16, Element::kBf16, kWeights, kBlockN, kKBlocks * kKBlock};
    instance.mma_warps = kMmaWarps;
    instance.prepare = prepare;
    instance.split_k_dense = launch;
    return instance;
  }
};

}  // namespace flashinfer::sm12x
