// SPDX-License-Identifier: Apache-2.0
//
// A router of a mixture of experts for few tokens, with the RMSNorm in front of it, in two launches:
//
//   router_logits_kernel  sum = hidden + residual, normed = RMSNorm(sum), logits = normed * weight^T + bias
//   router_top_k_kernel   the largest logits' experts, and the softmax over them
//
// A warp computes one expert's logits for a tile of tokens. The row of weights goes to its registers before the launch waits
// for the tokens: a router's bytes are few, and are on their way while the layer in front still runs. Each block norms the
// tile's rows for itself, rather than wait for a launch that does. A decode step pays for this kernel's latency, not for its
// work: all that it loads behind the wait is on its way at once, and a row is the whole block's.
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
constexpr int kRouterTokens = 4;  // of a tile, at most: more tokens are more blocks, which read weights from L2
constexpr int kRouterChunk = 8;  // elements of 16 bytes
constexpr int kRouterHeldChunks = 12;  // of a lane, of the weights: K up to 3,072 in registers
constexpr int kRouterMaxK = 16 * 1024;
constexpr int kRouterSharedBytes = 3 * 2 * kRouterMaxK;  // one row, its residual and the norm's weights, or more rows
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

// The tile's rows in shared memory as the experts see them, and, where `writes`, in global memory. Behind the rows lie their
// residuals, the norm's weights and sums of squares. A thread copies, adds and norms the same chunks of every row, so that
// the block waits only for the sums. Ends without a barrier.
__device__ __forceinline__ void norm_tile(const RouterParams& p, int64_t first_token, int count, uint4* rows,
                                          bool writes) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int chunks = p.k / kRouterChunk;
  const bool adds = p.residual != nullptr, norms = p.norm_weight != nullptr;
  const int64_t first = first_token * chunks;
  uint4* residual = rows + p.tile * chunks;
  uint4* scales = residual + (adds ? p.tile * chunks : 0);
  auto* squares = reinterpret_cast<float*>(scales + (norms ? chunks : 0));  // [tile, warp]
  for (int chunk = thread; chunk < chunks; chunk += kRouterThreads) {
    for (int at = chunk; at < count * chunks; at += chunks) {
      ptx::copy_16_bytes_if(true, rows + at, reinterpret_cast<const uint4*>(p.hidden) + first + at);
      ptx::copy_16_bytes_if(adds, residual + at, reinterpret_cast<const uint4*>(p.residual) + first + at);
    }
    ptx::copy_16_bytes_if(norms, scales + chunk, reinterpret_cast<const uint4*>(p.norm_weight) + chunk);
  }
  ptx::wait_for_copies();

  float x[kRouterChunk], other[kRouterChunk];
  for (int token = 0; (adds || norms) && token < count; ++token) {
    float sum = 0.0f;
    for (int chunk = thread; chunk < chunks; chunk += kRouterThreads) {
      const int at = token * chunks + chunk;
      unpack_eight<true>(rows[at], x);
      if (adds) {
        unpack_eight<true>(residual[at], other);
#pragma unroll
        for (int i = 0; i < kRouterChunk; ++i) x[i] += other[i];
        const uint4 row = pack_eight_bf16(x);
        unpack_eight<true>(row, x);  // the norm is of what the next layer adds to
        rows[at] = row;
        if (writes) reinterpret_cast<uint4*>(p.sum)[first + at] = row;
      }
#pragma unroll
      for (int i = 0; i < kRouterChunk; ++i) sum = fmaf(x[i], x[i], sum);
    }
    sum = detail::warp_sum(sum);
    if (lane == 0) squares[token * kRouterWarps + warp] = sum;
  }
  if (!norms) return;
  __syncthreads();
  for (int token = 0; token < count; ++token) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kRouterWarps; ++i) sum += squares[token * kRouterWarps + i];
    const float factor = rsqrtf(sum / static_cast<float>(p.k) + p.epsilon);
    for (int chunk = thread; chunk < chunks; chunk += kRouterThreads) {
      const int at = token * chunks + chunk;
      unpack_eight<true>(rows[at], x);
      unpack_eight<true>(scales[chunk], other);
#pragma unroll
      for (int i = 0; i < kRouterChunk; ++i) x[i] *= factor * other[i];
      const uint4 row = pack_eight_bf16(x);
      rows[at] = row;
      if (writes) reinterpret_cast<uint4*>(p.normed)[first + at] = row;
    }
  }
}

__global__ void __launch_bounds__(kRouterThreads) router_logits_kernel(const __grid_constant__ RouterParams p) {
  extern __shared__ uint4 shared[];  // [tile, k], and what norm_tile puts behind
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

  norm_tile(p, first_token, count, shared, expert < kRouterWarps);  // the tile's first block writes
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
  const int per_lane = (p.num_experts + 31) / 32;
  uint64_t ranks[kRouterExpertsPerLane];
#pragma unroll
  for (int i = 0; i < kRouterExpertsPerLane; ++i) {
    if (i >= per_lane) break;
    const int expert = lane + 32 * i;
    ranks[i] = expert < p.num_experts ? rank_of(logits[expert], expert) : 0;
  }
  float largest = 0.0f, own = 0.0f, total = 0.0f;  // own: this lane's of the chosen
  int own_id = 0;
  for (int place = 0; place < p.top_k; ++place) {
    uint64_t best = 0;
#pragma unroll
    for (int i = 0; i < kRouterExpertsPerLane; ++i) {
      if (i >= per_lane) break;
      best = max(best, ranks[i]);
    }
    best = largest_of_lanes(best);
#pragma unroll
    for (int i = 0; i < kRouterExpertsPerLane; ++i) {
      if (i >= per_lane) break;
      ranks[i] = ranks[i] == best ? 0 : ranks[i];
    }
    const float logit = rank_number(best);
    if (place == 0) largest = logit;
    const float share = logit == largest ? 1.0f : expf(logit - largest);  // of infinities too
    total += share;
    if (lane == place) {
      own = share;
      own_id = rank_place(best);
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
  const int row_bytes = 2 * params.k * (params.residual != nullptr ? 2 : 1);
  const int scale_bytes = params.norm_weight != nullptr ? 2 * params.k : 0;
  params.tile =
      std::clamp((kRouterSharedBytes - scale_bytes) / row_bytes, 1, std::min(kRouterTokens, params.num_tokens));
  const int squares_bytes = params.tile * kRouterWarps * static_cast<int>(sizeof(float));
  const int shared_bytes = params.tile * row_bytes + scale_bytes + squares_bytes;
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
