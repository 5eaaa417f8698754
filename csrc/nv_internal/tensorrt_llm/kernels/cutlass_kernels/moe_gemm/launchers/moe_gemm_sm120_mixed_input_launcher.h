// SPDX-License-Identifier: Apache-2.0
//
// Host side of the SM12x MXFP4 family: plain CUDA, no framework. A launch allocates nothing and waits for nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "flashinfer/sm12x/common/launch.h"
#include "flashinfer/sm12x/impls/dense_params.cuh"
#include "flashinfer/sm12x/impls/grouped_gemm_params.cuh"
#include "flashinfer/sm12x/impls/streamed_params.cuh"

namespace flashinfer::sm12x {

// One compiled member of the family. The rendered sources register theirs when the library is loaded.
template <Role kRole>
using GemmLaunch = cudaError_t (*)(const GroupedGemmParams<kRole>& params, int blocks, const LaunchOptions& options);

// A member that computes the whole layer in one launch.
struct StreamedInstance {
  cudaError_t (*prepare)(const LaunchOptions& options);  // before anything is launched
  cudaError_t (*launch)(const StreamedLayerParams& params, int shared_bytes, const LaunchOptions& options);
  int words;  // of 128 along K, that a warp takes
  int mma_warps;  // of a block
  int fixed_bytes;  // of shared memory, beside the ring of stages
};

// Either a pair of GEMM kernels (or one, the grouped GEMM's), or a streamed layer; the other's pointers are null.
struct GemmInstance {
  int index;  // tactic number
  Activation activation;  // what activations are rounded to,
  Activation operand;  // and as what they are multiplied
  WeightFormat weights;
  int token_tile;
  int k_tile;
  GemmLaunch<Role::kFc1> fc1;
  GemmLaunch<Role::kFc2> fc2;
  GemmLaunch<Role::kStore> store;
  // Blocks of one kernel that an SM of the current device holds; an error where its shared memory is not granted.
  cudaError_t (*blocks_per_sm)(Role role, const LaunchOptions& options, int num_experts, int* blocks);
  StreamedInstance streamed;
};

constexpr int kMaxInstances = 64;

// The process-wide table, by tactic number; threads may register and look up at once. Null: none of that number has
// been registered.
const GemmInstance* find_instance(int index);
void register_instance(const GemmInstance* instance);

enum class MoeMode : int { kMxfp8Input = 0, kQuantizeInput = 1, kBf16Activations = 2 };

struct MoeShape {
  int num_tokens;
  int hidden;
  int inter;
  int num_experts;  // on this rank
  int top_k;
  MoeMode mode;
  bool widens;  // room for MXFP8 activations as bfloat16
};

struct MoeArguments {
  MoeShape shape;
  const void* input;
  ScalarType input_type;  // kQuantizeInput: kBf16 or kF16
  const uint8_t* input_sf;  // kMxfp8Input
  bool swizzled_input_sf;
  const int32_t* ids;  // [tokens, top_k] global expert ids
  const float* routing_weights;  // null: 1
  int first_expert;
  const uint8_t* fc1_weights;
  const uint8_t* fc1_scales;
  const float* fc1_global;
  const void* fc1_bias;
  ScalarType fc1_bias_type;
  const uint8_t* fc2_weights;
  const uint8_t* fc2_scales;
  const float* fc2_global;
  const void* fc2_bias;
  ScalarType fc2_bias_type;
  const float* alpha;
  const float* beta;
  const float* limit;
  void* output;
  ScalarType output_type;
  uint8_t* workspace;
  size_t workspace_bytes;
  const GemmInstance* fc1_instance;
  const GemmInstance* fc2_instance;
};

// Enough for fewer tokens, too, and for any number of the device's SMs.
size_t moe_workspace_bytes(const MoeShape& shape, int device_sms);
// Whether the layer can run where `options` says: a streamed one needs all SMs of the device, since its blocks wait for each
// other.
bool takes_sms(const GemmInstance& instance, const LaunchOptions& options);
Status run_moe(const MoeArguments& arguments, const LaunchOptions& options);

struct GroupGemmArguments {
  int cum_m;
  int n;
  int k;
  int num_groups;
  const void* a;
  const uint8_t* a_scales;  // 128x4, every group from a multiple of 128 rows
  const uint8_t* b;
  const uint8_t* b_scales;
  const int32_t* m_indptr;  // [groups + 1]
  void* output;
  ScalarType output_type;
  uint8_t* workspace;
  size_t workspace_bytes;
  const GemmInstance* instance;
};

// A dense layer, out = tokens * weights^T, as a GEMM: of bfloat16, MXFP8 or MXFP4 tokens as the instance says.
struct DenseGemmArguments {
  int num_tokens;
  int n;
  int k;
  TokenRows tokens;
  const uint8_t* weights;        // [n, k / 2] or [n, k]
  const uint8_t* weight_scales;  // 128x4
  StoreEpilogue epilogue;
  uint8_t* workspace;
  size_t workspace_bytes;
  const GemmInstance* instance;
};

size_t dense_gemm_workspace_bytes(const GemmInstance& instance, int num_tokens, int k, TokenFormat format,
                                  int device_sms);
Status run_dense_gemm(const DenseGemmArguments& arguments, const LaunchOptions& options);

size_t group_gemm_workspace_bytes(int device_sms);
Status run_group_gemm(const GroupGemmArguments& arguments, const LaunchOptions& options);

}  // namespace flashinfer::sm12x
