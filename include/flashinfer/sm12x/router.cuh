// SPDX-License-Identifier: Apache-2.0
//
// A router of a mixture of experts for few tokens, with the RMSNorm in front of it, in two launches:
//
//   router_logits_kernel  sum = hidden + residual, normed = RMSNorm(sum), logits = normed * weight^T + bias
//   router_top_k_kernel   the experts of the largest logits, and the softmax over them; padding gets none. Not launched
//                         where the MoE layer chooses by the logits itself (split_k/fused_moe.cuh)
//
// A block computes the logits of a tile of up to eight tokens for eight experts, or for several times eight where
// blocks for eight would not all be on the device at once: by m16n8k16 MMAs whose rows are tokens and whose columns are
// experts, K shared out among the warps. Eight rows of weights go to the block's registers before the launch waits for
// the tokens: a router's bytes are few, and are on their way while the layer in front still runs. Each block norms the
// tile's rows for itself, rather than wait for a launch that does. A decode step pays for this kernel's latency, not
// for its work: all that it loads behind the wait is on its way at once, and all warps take part in the norm, however
// few the rows are.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>

#include "launch.h"
#include "moe/choose_experts.cuh"
#include "ptx/convert.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "rows/quantize.cuh"
#include "types.h"

namespace flashinfer::sm12x {

// Knobs.
constexpr int kRouterWarps = 16;
constexpr int kRouterThreads = 32 * kRouterWarps;
constexpr int kRouterTokens = 8;  // of a tile at most; the other eight rows of an MMA are zeros
constexpr int kRouterExperts = 8;  // that a block multiplies at a time: an MMA's columns
constexpr int kRouterVector = 8;  // elements of 16 bytes
constexpr int kRouterStep = 4;  // vectors of two MMAs
constexpr int kRouterHeldSteps = 6;  // steps of weights that a warp keeps in registers: K up to 3,072
constexpr int kRouterMaxK = 16384;
constexpr int kRouterTopKWarps = 4;

// Vectors from one row of the tile to the next: whole steps, and the rows of an MMA have no bank conflict.
FLASHINFER_SM12X_HOST_DEVICE constexpr int router_pitch(int vectors) { return ceil_div(vectors - 4, 8) * 8 + 4; }

// A tile's rows; behind them residuals, the norm's weights and sums of squares, and later, in their place, partial
// logits.
constexpr int router_shared_bytes(int tile, int k, bool adds, bool norms) {
  const int vectors = k / kRouterVector, row = 16 * router_pitch(vectors);
  const int for_norm = (adds ? tile * row : 0) + (norms ? 16 * vectors : 0) + 4 * kRouterWarps;
  const int for_partials = 4 * kRouterWarps * kRouterTokens * kRouterExperts;
  return tile * row + (for_norm > for_partials ? for_norm : for_partials);
}
static_assert(kRouterTokens <= kRouterWarps);
static_assert(router_shared_bytes(1, kRouterMaxK, true, true) <= Sm12xLimits::kSharedBytesPerBlock);

struct RouterParams {
  const __nv_bfloat16* hidden;  // [num_tokens, k]
  const __nv_bfloat16* residual;  // [num_tokens, k], or null
  const __nv_bfloat16* norm_weight;  // [k], or null: no norm
  const __nv_bfloat16* weight;  // [num_experts, k]
  const __nv_bfloat16* bias;  // [num_experts], or null
  const bool* is_padding;  // [num_tokens], or null
  __nv_bfloat16* sum;  // [num_tokens, k], null without residual
  __nv_bfloat16* normed;  // [num_tokens, k], null without norm
  float* logits;  // [num_tokens, num_experts]
  float* top_k_weights;  // [num_tokens, top_k]
  int32_t* top_k_ids;  // [num_tokens, top_k]
  float epsilon;
  int num_tokens, k, num_experts, top_k;  // top_k 0: logits alone
  int tile;  // tokens of a block
  int team;  // threads that norm a row: whole warps, a power of two
  int groups;  // groups of eight experts that a block computes, one after the other
  int blocks_of_tile;
  bool rounds_logits;  // to bfloat16
  bool constant_weights;  // nothing in front of the launch writes `weight`
};

// The tile's rows in shared memory as the experts see them, and, where `writes`, in global memory. Behind the rows lie
// their residuals, the norm's weights and sums of squares. Each row is a team of warps' own: a thread copies, adds and
// norms the same vectors of it, so that the block waits only for the sums. Ends without a barrier.
__device__ __forceinline__ void norm_tile(const RouterParams& p, int64_t first_token, int count, uint4* rows,
                                          bool writes) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int vectors = p.k / kRouterVector, pitch = router_pitch(vectors);
  const bool adds = p.residual != nullptr, norms = p.norm_weight != nullptr;
  const int team = p.team, token = thread >> (31 - __clz(team)), own = thread & (team - 1);
  const bool has_token = token < count;
  uint4* const row = rows + token * pitch;
  uint4* const residual = row + p.tile * pitch;
  uint4* const scales = rows + p.tile * pitch * (adds ? 2 : 1);
  auto* squares = reinterpret_cast<float*>(scales + (norms ? vectors : 0));  // one a warp
  const int64_t at = (first_token + token) * vectors;
  const int end = has_token ? vectors : 0;
  for (int vector = own; vector < end; vector += team) {
    ptx::copy_16_bytes_if(true, row + vector, reinterpret_cast<const uint4*>(p.hidden) + at + vector);
    ptx::copy_16_bytes_if(adds, residual + vector, reinterpret_cast<const uint4*>(p.residual) + at + vector);
  }
  for (int vector = thread; norms && vector < vectors; vector += kRouterThreads) {
    ptx::copy_16_bytes_if(true, scales + vector, reinterpret_cast<const uint4*>(p.norm_weight) + vector);
  }
  // The last step of a row may reach beyond it: zeros times zeros.
  if (has_token && vectors + own < ceil_div(vectors, kRouterStep) * kRouterStep) row[vectors + own] = {};
  ptx::wait_for_copies();

  float x[kRouterVector], other[kRouterVector], sum = 0.0f;
  for (int vector = own; (adds || norms) && vector < end; vector += team) {
    unpack_eight<true>(row[vector], x);
    if (adds) {
      unpack_eight<true>(residual[vector], other);
#pragma unroll
      for (int i = 0; i < kRouterVector; ++i) x[i] += other[i];
      const uint4 total = pack_eight_bf16(x);
      unpack_eight<true>(total, x);  // the norm is of what the next layer adds to
      row[vector] = total;
      if (writes) reinterpret_cast<uint4*>(p.sum)[at + vector] = total;
    }
#pragma unroll
    for (int i = 0; i < kRouterVector; ++i) sum = fmaf(x[i], x[i], sum);
  }
  if (!norms) return;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  if (lane == 0) squares[warp] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int i = 0; i < team / 32; ++i) sum += squares[(token * team) / 32 + i];
  const float factor = rsqrtf(sum / static_cast<float>(p.k) + p.epsilon);
  for (int vector = own; vector < end; vector += team) {
    unpack_eight<true>(row[vector], x);
    unpack_eight<true>(scales[vector], other);
#pragma unroll
    for (int i = 0; i < kRouterVector; ++i) x[i] *= factor * other[i];
    const uint4 normed = pack_eight_bf16(x);
    row[vector] = normed;
    if (writes) reinterpret_cast<uint4*>(p.normed)[at + vector] = normed;
  }
}

// A lane's part of eight experts' rows: vector `lane % 4` of expert `lane / 4`, in each of its warp's steps `warp`,
// `warp + kRouterWarps`, ...
struct RouterWeights {
  static constexpr int kStride = kRouterWarps * kRouterStep;  // vectors from one of its steps to the next

  const uint4* first;
  int vectors_left;  // in the row from `first` on; 0 without an expert
  uint4 held[kRouterHeldSteps];

  __device__ __forceinline__ uint4 load(int i) const {
    return ptx::load_16_bytes_if(kStride * i < vectors_left, first + kStride * i);
  }
  __device__ __forceinline__ void hold(const RouterParams& p, int group) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int expert = group * kRouterExperts + lane / 4, vector = kRouterStep * warp + lane % 4;
    const int vectors = p.k / kRouterVector;
    const bool exists = expert < p.num_experts;
    first = reinterpret_cast<const uint4*>(p.weight) + (exists ? int64_t{expert} * vectors : 0) + vector;
    vectors_left = exists ? vectors - vector : 0;
#pragma unroll
    for (int i = 0; i < kRouterHeldSteps; ++i) held[i] = load(i);
  }
};

__global__ void __launch_bounds__(kRouterThreads) router_logits_kernel(const __grid_constant__ RouterParams p) {
  extern __shared__ uint4 shared[];  // [tile, pitch], and what norm_tile puts behind
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int vectors = p.k / kRouterVector, pitch = router_pitch(vectors), steps = ceil_div(vectors, kRouterStep);
  const int tile = static_cast<int>(blockIdx.x) / p.blocks_of_tile;
  const int block = static_cast<int>(blockIdx.x) - tile * p.blocks_of_tile, first_token = tile * p.tile;
  const int first_group = block * p.groups;
  const int end_group = min(first_group + p.groups, ceil_div(p.num_experts, kRouterExperts));
  const int count = min(p.tile, p.num_tokens - first_token);

  ptx::launch_dependent_grids();
  if (!p.constant_weights) ptx::wait_for_prerequisite_grids();
  RouterWeights weights;
  weights.hold(p, first_group);
  ptx::wait_for_prerequisite_grids();

  norm_tile(p, first_token, count, shared, block == 0);  // the tile's first block writes
  __syncthreads();

  auto* partials = reinterpret_cast<float*>(shared + p.tile * pitch);  // [warp, token, expert]
  const bool has_token = lane / 4 < count;
  const uint4* tokens = shared + lane / 4 * pitch + kRouterStep * warp + lane % 4;
  for (int group = first_group; group < end_group; ++group) {
    float sums[2][4] = {};  // rows 8.. of the MMA, which have no tokens, stay 0
    auto multiply = [&](int i, const uint4& w) {
      const uint4 x = has_token ? tokens[RouterWeights::kStride * i] : uint4{};
      ptx::mma_16816<true>(sums[0], {x.x, 0, x.y, 0}, {w.x, w.y}, sums[0]);
      ptx::mma_16816<true>(sums[1], {x.z, 0, x.w, 0}, {w.z, w.w}, sums[1]);
    };
#pragma unroll
    for (int i = 0; i < kRouterHeldSteps; ++i) {
      if (warp + kRouterWarps * i < steps) multiply(i, weights.held[i]);
    }
    for (int i = kRouterHeldSteps; warp + kRouterWarps * i < steps; ++i) multiply(i, weights.load(i));
    if (group + 1 < end_group) weights.hold(p, group + 1);
    float* own = partials + (warp * kRouterTokens + lane / 4) * kRouterExperts + 2 * (lane % 4);
    *reinterpret_cast<float2*>(own) = make_float2(sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]);
    __syncthreads();
    const int token = thread / kRouterExperts, expert = group * kRouterExperts + thread % kRouterExperts;
    if (token < count && expert < p.num_experts) {
      float logit = 0.0f;
#pragma unroll
      for (int i = 0; i < kRouterWarps; ++i) logit += partials[i * kRouterTokens * kRouterExperts + thread];
      if (p.bias != nullptr) logit += __bfloat162float(p.bias[expert]);
      if (p.rounds_logits) logit = __bfloat162float(__float2bfloat16_rn(logit));
      p.logits[static_cast<int64_t>(first_token + token) * p.num_experts + expert] = logit;
    }
    __syncthreads();  // partials have been read
  }
}

// A warp a token.
__global__ void __launch_bounds__(32 * kRouterTopKWarps) router_top_k_kernel(const __grid_constant__ RouterParams p) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int token = static_cast<int>(blockIdx.x) * kRouterTopKWarps + static_cast<int>(threadIdx.x) / 32;
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  if (token >= p.num_tokens) return;
  int id;
  float weight;
  choose_experts(p.logits + static_cast<int64_t>(token) * p.num_experts, p.num_experts, p.top_k, lane, &id, &weight);
  if (lane < p.top_k) {
    const int64_t at = static_cast<int64_t>(token) * p.top_k + lane;
    p.top_k_weights[at] = weight;
    p.top_k_ids[at] = p.is_padding != nullptr && p.is_padding[token] ? -1 : id;
  }
}

// Sizes and pointers have been checked: k a multiple of 8, rows aligned to 16 bytes, top_k at most 32 and num_experts.
inline Status run_router(RouterParams params, const LaunchOptions& options) {
  if (params.num_tokens == 0) return {};
  const bool adds = params.residual != nullptr, norms = params.norm_weight != nullptr;
  params.tile = std::min(kRouterTokens, params.num_tokens);
  while (router_shared_bytes(params.tile, params.k, adds, norms) > Sm12xLimits::kSharedBytesPerBlock) --params.tile;
  const int tiles = ceil_div(params.num_tokens, params.tile);
  params.tile = ceil_div(params.num_tokens, tiles);  // no tile much smaller than the others
  params.team = kRouterThreads;
  while (params.team * params.tile > kRouterThreads) params.team /= 2;
  const int shared_bytes = router_shared_bytes(params.tile, params.k, adds, norms);
  // A block for each group of eight experts, unless the blocks of all tiles would not fit the device at once: then a
  // block computes several for a tile that it norms once.
  const int all_groups = ceil_div(params.num_experts, kRouterExperts);
  params.groups = ceil_div(all_groups, std::clamp(options.sm_count / tiles, 1, all_groups));
  params.blocks_of_tile = ceil_div(all_groups, params.groups);
  cudaError_t error = shared_bytes > 48 * 1024 ? grant_shared_memory(router_logits_kernel, options) : cudaSuccess;
  if (error != cudaSuccess) return {error, "shared memory of the router"};
  error =
      launch_kernel(router_logits_kernel, params, tiles * params.blocks_of_tile, kRouterThreads, shared_bytes, options);
  if (error != cudaSuccess || params.top_k == 0) return {error, "launch of the router's logits"};
  const int top_k_blocks = ceil_div(params.num_tokens, kRouterTopKWarps);
  error = launch_kernel(router_top_k_kernel, params, top_k_blocks, 32 * kRouterTopKWarps, 0, options);
  return {error, "launch of the router's top-k"};
}

}  // namespace flashinfer::sm12x
