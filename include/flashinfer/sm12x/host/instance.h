// SPDX-License-Identifier: Apache-2.0
//
// A compiled member of the family, and the table of those of a library (csrc/sm12x_registry.cu). The rendered sources
// register theirs when the library is loaded. Plain CUDA, no framework.
#pragma once

#include "../launch.h"
#include "../split_k/params.h"
#include "../tile/params.h"
#include "../types.h"

namespace flashinfer::sm12x {

template <Role kRole>
using GemmLaunch = cudaError_t (*)(const GroupedGemmParams<kRole>& params, int blocks, const LaunchOptions& options);

// Tiled grouped GEMMs have some of fc1, fc2 and store, and blocks_per_sm; split-K kernels have `prepare`, and launch a
// MoE layer or a dense one. Other pointers are null.
struct Instance {
  int index;  // index in instances.INSTANCES
  Element activation;  // type that activations are rounded to
  Element compute_type;  // type in which they are multiplied
  Element weights;
  int block_n;
  int block_k;  // elements along K: a stage's, or in a split-K kernel an MMA warp's

  GemmLaunch<Role::kFc1> fc1;
  GemmLaunch<Role::kFc2> fc2;
  GemmLaunch<Role::kStore> store;
  // Blocks of one kernel that an SM of the current device holds; an error where its shared memory is not granted.
  cudaError_t (*blocks_per_sm)(Role role, const LaunchOptions& options, int num_experts, int* blocks);

  int mma_warps;  // of a split-K kernel's thread block
  cudaError_t (*prepare)(const LaunchOptions& options);  // before anything is launched
  cudaError_t (*fused_moe)(const FusedMoeParams& params, int shared_bytes, const LaunchOptions& options);
  cudaError_t (*split_k_dense)(const DenseParams& params, int blocks, int shared_bytes, const LaunchOptions& options);

  bool has_two_kernels() const { return fc1 != nullptr; }
  bool is_fused_moe() const { return fused_moe != nullptr; }
};

constexpr int kMaxInstances = 64;

// The table, by index; threads may register and look up at once. Null: none of that index has been registered.
const Instance* find_instance(int index);

// The grouped GEMM's instance for e5m2 rows is registered so far after the one for e4m3 rows of the same tile.
constexpr int kE5m2Tactics = 32;
void register_instance(const Instance* instance);

struct Registration {
  explicit Registration(const Instance& instance) { register_instance(&instance); }
};

}  // namespace flashinfer::sm12x
