// SPDX-License-Identifier: Apache-2.0
//
// Host code that launches of tile GEMMs share: pieces of the workspace, tensor maps, the size of the
// grid, the prologue. A launch allocates nothing and waits for nothing. For one source of a library: it brings the
// prologue's kernel.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "../moe/prologue.cuh"
#include "../rows/load.cuh"
#include "instance.h"

namespace flashinfer::sm12x {

constexpr int kMaxBlocksPerSm = 16;  // more than any instance's occupancy
constexpr size_t kPartialBytesPerSm = size_t{256} << 10;  // two partial sums of a tile for every resident block

// Hands out consecutive pieces of the workspace, aligned to 256 bytes; with a null base it only counts.
class Arena {
 public:
  explicit Arena(uint8_t* base) : base_(base) {}
  template <class T>
  T* take(size_t count) {
    T* piece = base_ == nullptr ? nullptr : reinterpret_cast<T*>(base_ + used_);
    used_ += (count * sizeof(T) + 255) / 256 * 256;
    return piece;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* base_;
  size_t used_ = 0;
};

struct SplitBuffers {
  float4* partials;
  int* arrivals;  // FC1's blocks, then FC2's
  int blocks;  // most that one launch has
};

inline SplitBuffers take_split_buffers(Arena& arena, int device_sms) {
  SplitBuffers split;
  split.blocks = device_sms * kMaxBlocksPerSm;
  split.partials = arena.take<float4>(device_sms * kPartialBytesPerSm / sizeof(float4));
  split.arrivals = arena.take<int>(2 * static_cast<size_t>(split.blocks));
  return split;
}

inline size_t packed_bytes(size_t rows, int k) { return rows * k_blocks_of(k) * kPackedRowBytes; }

// Packed weights as a 3-D tensor of bytes [experts][rows][bytes of a row]; a box is 64 rows of `swizzle_bytes`.
inline Status encode_weights(const uint8_t* weights, Element element, int experts, int rows, int k, int swizzle_bytes,
                             CUtensorMap* map) {
  const cuuint64_t bytes = static_cast<cuuint64_t>(row_bytes(element, k));
  const cuuint64_t sizes[3] = {bytes, static_cast<cuuint64_t>(rows), static_cast<cuuint64_t>(experts)};
  const cuuint64_t strides[2] = {bytes, bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(swizzle_bytes), kM64Rows, 1};
  const CUtensorMapSwizzle swizzle = swizzle_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : swizzle_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                           : CU_TENSOR_MAP_SWIZZLE_32B;
  return encode_tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT8, weights, sizes, strides, box, swizzle,
                           CU_TENSOR_MAP_L2_PROMOTION_L2_128B, "cuTensorMapEncodeTiled refused the weights", map);
}

// Where rows with scales are gathered from, kernels count 16-byte pieces in 32 bits.
inline Status check_activations(int64_t rows, int k) {
  if (rows * k / 16 > int64_t{UINT32_MAX}) return {cudaErrorInvalidValue, "activations of 64 GiB and more"};
  return {};
}

// Resident blocks of all SMs, at most as many as the split buffers serve.
inline Status grid_blocks(const Instance& instance, Role role, int num_experts, const LaunchOptions& options,
                          int* blocks) {
  int per_sm = 0;
  if (const cudaError_t error = instance.blocks_per_sm(role, options, num_experts, &per_sm); error != cudaSuccess) {
    return {error, "this device does not grant the instance's shared memory"};
  }
  if (per_sm == 0) return {cudaErrorLaunchOutOfResources, "the instance does not fit an SM of this device"};
  const size_t partial_bytes = 2 * sizeof(float) * kBlockM * instance.block_n;
  const int served = static_cast<int>(kPartialBytesPerSm / partial_bytes);
  *blocks = options.sm_count * std::min({per_sm, served, kMaxBlocksPerSm});
  return {};
}

// Fills in the fields that all roles have: a matrix [experts][rows][k], and where partial sums of its split work tiles
// go.
template <Role kRole>
Status fill_gemm(GroupedGemmParams<kRole>& gemm, const Instance& instance, const uint8_t* weights,
                 const uint8_t* scales, int experts, int rows, int k, const SplitBuffers& split) {
  gemm.weight_scales = scales;
  gemm.weight_scale_pitch = swizzled_scale_bytes(instance.weights, rows, k);
  gemm.rows = rows;
  gemm.k = k;
  gemm.num_experts = experts;
  gemm.partials = split.partials;
  gemm.split_arrivals = split.arrivals + (kRole == Role::kFc2 ? split.blocks : 0);
  const int blocks = instance.block_k / kScaleBlock;
  int swizzle_bytes = row_bytes(instance.weights, instance.block_k);
  if (instance.weights == Element::kE2m3) {
    Status r = encode_weights(weights, instance.weights, experts, rows, k, blocks * kPairBytes, &gemm.second_plane);
    if (r.error) return r;
    swizzle_bytes = blocks * kNibbleBytes;
  }
  return encode_weights(weights, instance.weights, experts, rows, k, swizzle_bytes, &gemm.weights);
}

inline Status launch_prologue(const PrologueParams& params, const LaunchOptions& options) {
  const bool sorts = params.offsets != nullptr;
  const int workers = std::min(std::max(params.num_tokens, 1), 4 * options.sm_count);
  const int sort_bytes = static_cast<int>(sizeof(int)) * ((kPrologueWarps + 1) * params.num_experts + 1);
  return {launch_kernel(moe_prologue_kernel, params, workers + (sorts ? 1 : 0), kPrologueThreads,
                        sorts ? sort_bytes : 0, options),
          "prologue"};
}

}  // namespace flashinfer::sm12x
