// SPDX-License-Identifier: Apache-2.0
//
// A router of a mixture of experts for few tokens, with the RMSNorm in front of it, in two launches:
//
//   router_logits_kernel  sum = hidden + residual, normed = RMSNorm(sum), logits = normed * weight^T + bias
//   router_top_k_kernel   the largest logits' experts, and the softmax over them
//
// A warp computes one expert's logits for a tile of tokens. The row of weights goes to its registers before the launch waits
// for the tokens: a router's bytes are few, and are on their way while the layer in front still runs. Each block norms the
// tile's rows for itself, rather than wait for a launch that does.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "../common/arch.h"
#include "../common/launch.h"
#include "../common/quantize.cuh"
#include "../common/rank.cuh"
#include "../ptx/convert.cuh"
#include "../ptx/copy.cuh"
#include "../ptx/sync.cuh"

namespace flashinfer::sm12x {

constexpr int kRouterWarps = 4;
constexpr int kRouterThreads = 32 * kRouterWarps;
constexpr int kRouterTokens = 8;  // of a tile, at most
constexpr int kRouterChunk = 8;  // elements of 16 bytes
constexpr int kRouterHeldChunks = 12;  // of a lane, of the weights: K up to 3,072 in registers
constexpr int kRouterTileBytes = 88 * 1024;  // of shared memory, for a tile of tokens
constexpr int kRouterMaxExperts = 512;
constexpr int kRouterExpertsPerLane = kRouterMaxExperts / 32;

struct RouterParams {
  const __nv_bfloat16* hidden;  // [num_tokens, k]
  const __nv_bfloat16* residual;  // [num_tokens, k], or null
  const __nv_bfloat16* norm_weight;  // [k], or null: no norm
  const __nv_bfloat16* weight;  // [num_experts, k]
  const __nv_bfloat16* bias;  // [num_experts], or null
  __nv_bfloat16* sum;  // [num_tokens, k], null without residual
  __nv_bfloat16* normed;  // [num_tokens, k], null without norm
  float* logits;  // [num_tokens, num_experts]
  float* top_k_weights;  // [num_tokens, top_k]
  int32_t* top_k_ids;  // [num_tokens, top_k]
  float epsilon;
  int num_tokens, k, num_experts, top_k;
  int tile;  // tokens of a block
  bool constant_weights;  // nothing in front of the launch writes `weight`
};

namespace detail {

__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

}  // namespace detail

// A token's row to shared memory as the experts see it, by one warp; `writes`: to global memory too.
__device__ __forceinline__ void norm_row(const RouterParams& p, int64_t token, uint4* shared, bool writes, int lane) {
  const int chunks = p.k / kRouterChunk;
  const int64_t first = token * chunks;
  float squares = 0.0f;
  for (int chunk = lane; chunk < chunks; chunk += 32) {
    uint4 row = ptx::load_16_bytes_if(true, reinterpret_cast<const uint4*>(p.hidden) + first + chunk);
    float x[kRouterChunk];
    unpack_eight<true>(row, x);
    if (p.residual != nullptr) {
      float other[kRouterChunk];
      unpack_eight<true>(ptx::load_16_bytes_if(true, reinterpret_cast<const uint4*>(p.residual) + first + chunk),
                         other);
#pragma unroll
      for (int i = 0; i < kRouterChunk; ++i) x[i] += other[i];
      row = pack_eight_bf16(x);
      unpack_eight<true>(row, x);  // the norm is of what the next layer adds to
      if (writes) reinterpret_cast<uint4*>(p.sum)[first + chunk] = row;
    }
#pragma unroll
    for (int i = 0; i < kRouterChunk; ++i) squares = fmaf(x[i], x[i], squares);
    shared[chunk] = row;
  }
  if (p.norm_weight == nullptr) return;
  const float factor = rsqrtf(detail::warp_sum(squares) / static_cast<float>(p.k) + p.epsilon);
  for (int chunk = lane; chunk < chunks; chunk += 32) {
    float x[kRouterChunk], scale[kRouterChunk];
    unpack_eight<true>(shared[chunk], x);
    unpack_eight<true>(ptx::load_16_bytes_if(true, reinterpret_cast<const uint4*>(p.norm_weight) + chunk), scale);
#pragma unroll
    for (int i = 0; i < kRouterChunk; ++i) x[i] *= factor * scale[i];
    const uint4 row = pack_eight_bf16(x);
    shared[chunk] = row;
    if (writes) reinterpret_cast<uint4*>(p.normed)[first + chunk] = row;
  }
}

__global__ void __launch_bounds__(kRouterThreads) router_logits_kernel(const __grid_constant__ RouterParams p) {
  extern __shared__ uint4 shared[];  // [tile, k]
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int chunks = p.k / kRouterChunk;
  const int expert_blocks = (p.num_experts + kRouterWarps - 1) / kRouterWarps;
  const int expert = static_cast<int>(blockIdx.x) % expert_blocks * kRouterWarps + warp;
  const int first_token = static_cast<int>(blockIdx.x) / expert_blocks * p.tile;
  const int count = min(p.tile, p.num_tokens - first_token);
  const bool works = expert < p.num_experts;
  const auto* row = reinterpret_cast<const uint4*>(p.weight) + static_cast<int64_t>(works ? expert : 0) * chunks;

  ptx::launch_dependent_grids();
  if (!p.constant_weights) ptx::wait_for_prerequisite_grids();
  uint4 held[kRouterHeldChunks];
#pragma unroll
  for (int i = 0; i < kRouterHeldChunks; ++i) {
    const int chunk = lane + 32 * i;
    held[i] = ptx::load_16_bytes_if(works && chunk < chunks, row + (chunk < chunks ? chunk : 0));
  }
  ptx::wait_for_prerequisite_grids();

  const bool writes = expert < kRouterWarps;  // the tile's first block
  for (int token = warp; token < count; token += kRouterWarps) {
    norm_row(p, first_token + token, shared + token * chunks, writes, lane);
  }
  __syncthreads();
  if (!works) return;

  float sums[kRouterTokens] = {};
  auto multiply = [&](const uint4& weights, int chunk) {
    float w[kRouterChunk], x[kRouterChunk];
    unpack_eight<true>(weights, w);
#pragma unroll
    for (int token = 0; token < kRouterTokens; ++token) {
      if (token >= count) break;
      unpack_eight<true>(shared[token * chunks + chunk], x);
#pragma unroll
      for (int i = 0; i < kRouterChunk; ++i) sums[token] = fmaf(w[i], x[i], sums[token]);
    }
  };
#pragma unroll
  for (int i = 0; i < kRouterHeldChunks; ++i) {
    if (lane + 32 * i < chunks) multiply(held[i], lane + 32 * i);
  }
  for (int chunk = lane + 32 * kRouterHeldChunks; chunk < chunks; chunk += 32) {
    multiply(ptx::load_16_bytes_if(true, row + chunk), chunk);
  }
  const float bias = p.bias != nullptr ? __bfloat162float(p.bias[expert]) : 0.0f;
#pragma unroll
  for (int token = 0; token < kRouterTokens; ++token) {
    const float logit = detail::warp_sum(sums[token]) + bias;
    if (lane == 0 && token < count)
      p.logits[static_cast<int64_t>(first_token + token) * p.num_experts + expert] = logit;
  }
}

// A warp a token. NaN comes first, so that the ids are valid whatever the logits are.
__global__ void __launch_bounds__(kRouterThreads) router_top_k_kernel(const __grid_constant__ RouterParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x) * kRouterWarps + static_cast<int>(threadIdx.x) / 32;
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  if (token >= p.num_tokens) return;
  const float* logits = p.logits + static_cast<int64_t>(token) * p.num_experts;
  uint64_t ranks[kRouterExpertsPerLane];
#pragma unroll
  for (int i = 0; i < kRouterExpertsPerLane; ++i) {
    const int expert = lane + 32 * i;
    ranks[i] = expert < p.num_experts ? rank_of(logits[expert], expert) : 0;
  }
  float largest = 0.0f, own = 0.0f, total = 0.0f;  // own: this lane's of the chosen
  int own_id = 0;
  for (int place = 0; place < p.top_k; ++place) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kRouterExpertsPerLane; ++i) best = max(best, ranks[i]);
    best = largest_of_lanes(best);
#pragma unroll
    for (int i = 0; i < kRouterExpertsPerLane; ++i) ranks[i] = ranks[i] == best ? 0 : ranks[i];
    const int expert = rank_place(best);
    const float logit = logits[expert];
    if (place == 0) largest = logit;
    const float share = logit == largest ? 1.0f : expf(logit - largest);  // of infinities too
    total += share;
    if (lane == place) {
      own = share;
      own_id = expert;
    }
  }
  if (lane < p.top_k) {
    const int64_t at = static_cast<int64_t>(token) * p.top_k + lane;
    p.top_k_weights[at] = own / total;
    p.top_k_ids[at] = own_id;
  }
}

// Sizes and pointers have been checked: k a multiple of 8, rows aligned to 16 bytes, top_k at most 32 and num_experts.
inline Status run_router(RouterParams params, const LaunchOptions& options) {
  if (params.num_tokens == 0) return {};
  params.tile = std::max(1, std::min({kRouterTokens, params.num_tokens, kRouterTileBytes / (2 * params.k)}));
  const int shared_bytes = 2 * params.tile * params.k;
  const int tiles = (params.num_tokens + params.tile - 1) / params.tile;
  const int expert_blocks = (params.num_experts + kRouterWarps - 1) / kRouterWarps;
  cudaError_t error = shared_bytes > 48 * 1024 ? grant_shared_memory(router_logits_kernel, options) : cudaSuccess;
  if (error != cudaSuccess) return {error, "shared memory of the router"};
  error = launch_kernel(router_logits_kernel, params, tiles * expert_blocks, kRouterThreads, shared_bytes, options);
  if (error != cudaSuccess) return {error, "launch of the router's logits"};
  const int top_k_blocks = (params.num_tokens + kRouterWarps - 1) / kRouterWarps;
  error = launch_kernel(router_top_k_kernel, params, top_k_blocks, kRouterThreads, 0, options);
  return {error, "launch of the router's top-k"};
}

}  // namespace flashinfer::sm12x
