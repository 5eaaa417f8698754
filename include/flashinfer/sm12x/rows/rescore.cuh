// SPDX-License-Identifier: Apache-2.0
//
// Rescoring of logits. A coarse weight has given all logits of a token. The weight's rows belong to groups: tiles of 16
// rows go to the groups in turn. In each group the largest logits are computed again from a fine weight, and replace
// the coarse ones.
//
// One block for each group and token, in five steps:
//
//   scan      each thread finds the largest logit of its share of the group
//   bound     of the threads' largest, sorted by warps, the `wanted`-th: at least so many logits reach it
//   collect   the threads that reach the bound, `wanted` of them, read their share again: all logits that reach it
//   order     those are few; each counts how many are larger
//   rescore   a warp for each row: the dot product with the fine row
//
// Ranks (rank.cuh) of a group's logits differ, so that the result does not depend on the order of threads. A rescored
// logit is a sum in fixed order: of a lane's scale blocks, one behind the other, then over the lanes.
#pragma once

#include "../launch.h"
#include "load.cuh"
#include "rank.cuh"
#include "scalar.cuh"
#include "top_k.cuh"

namespace flashinfer::sm12x {

constexpr int kRescoreThreads = 512;
constexpr int kRescoreWarps = kRescoreThreads / 32;
constexpr int kRescoreTileRows = 16;
constexpr int kMaxRescored = kRescoreWarps;  // of a group
constexpr int kMaxWanted = kMaxRescored + kMaxRowTopK;
constexpr int kMaxGroupRows = 65'536;
static_assert(kMaxWanted < 32, "count_larger counts to 31 in a warp's list");

// Rows of the largest group, the first, counting the last tile as whole.
constexpr int64_t group_rows(int n, int groups) {
  return static_cast<int64_t>(ceil_div(ceil_div(n, kRescoreTileRows), groups)) * kRescoreTileRows;
}

struct RescoreParams {
  void* logits;  // [num_tokens, n]
  ScalarType type;
  int num_tokens, n, groups, rescored;
  TokenRows tokens;  // bfloat16
  TokenRows fine;  // bfloat16 or MXINT8 [n, k]
  const void* bias;  // [n] or null
  ScalarType bias_type;
  uint64_t* ranks;  // null, or [num_tokens][groups][top_k]: ranks of a group's largest logits after rescoring
  int top_k;  // 0 without ranks
};

// One group's logits of a token; `at` counts the group's rows.
struct GroupLogits {
  const RescoreParams& p;
  int64_t first;  // the token's first logit
  int group;

  __device__ __forceinline__ int row(int at) const {
    return (at / kRescoreTileRows * p.groups + group) * kRescoreTileRows + at % kRescoreTileRows;
  }

  // take(rank) for each logit of this thread's share. Eight loads are under way at a time.
  template <class Take>
  __device__ __forceinline__ void for_each(const Take& take) const {
    constexpr int kAtOnce = 8;
    for (int at = static_cast<int>(threadIdx.x); row(at) < p.n; at += kAtOnce * kRescoreThreads) {
      float logits[kAtOnce];
      switch (p.type) {
        case ScalarType::kBf16: load<ScalarType::kBf16>(at, logits); break;
        case ScalarType::kF16: load<ScalarType::kF16>(at, logits); break;
        default: load<ScalarType::kF32>(at, logits);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int place = row(at + i * kRescoreThreads);
        if (place < p.n) take(rank_of(logits[i], place));
      }
    }
  }

 private:
  template <ScalarType kType, int kAtOnce>
  __device__ __forceinline__ void load(int at, float (&logits)[kAtOnce]) const {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int place = row(at + i * kRescoreThreads);
      logits[i] = place < p.n ? load_scalar(p.logits, first + place, kType) : 0.0f;
    }
  }
};

// A bitonic sort over the lanes of a warp: lane 0 gets the largest.
__device__ __forceinline__ uint64_t sorted_by_lanes(uint64_t rank, int lane) {
#pragma unroll
  for (int size = 2; size <= 32; size *= 2) {
#pragma unroll
    for (int distance = size / 2; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(kAllLanes, rank, distance);
      const bool takes_larger = ((lane & size) == 0) == ((lane & distance) == 0);
      rank = takes_larger ? max(rank, other) : min(rank, other);
    }
  }
  return rank;
}

// How many of a falling list's 32 ranks are larger than `rank`, up to 31.
__device__ __forceinline__ int count_larger(const uint64_t* list, uint64_t rank) {
  int count = 0;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    if (list[count + step - 1] > rank) count += step;
  }
  return count;
}

// The dot product of a token with a row of the fine weight, by a warp; all lanes get it.
template <TokenFormat kFine>
__device__ __forceinline__ float fine_product(const RescoreParams& p, int token, int row, int lane) {
  constexpr int kAtOnce = 3;  // scale blocks of a lane under way
  TokenRows tokens = p.tokens, fine = p.fine;
  tokens.format = TokenFormat::kBf16;
  fine.format = kFine;
  const int blocks = p.fine.k / kScaleBlock;
  float sum = 0.0f;
  for (int first = lane; first - lane < blocks; first += 32 * kAtOnce) {
    uint4 weights[kAtOnce][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + 32 * i;
      RowLoader{fine, row, block, block < blocks}.load(weights[i]);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + 32 * i;
      if (block >= blocks) continue;
      uint4 values[4];
      RowLoader{tokens, token, block, true}.load(values);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        float w[8], x[8];
        unpack_eight<true>(weights[i][q], w);
        unpack_eight<true>(values[q], x);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum = fmaf(w[e], x[e], sum);
      }
    }
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
  return sum;
}

__global__ void __launch_bounds__(kRescoreThreads) rescore_kernel(const __grid_constant__ RescoreParams p) {
  __shared__ uint64_t lists[kRescoreWarps][32];  // each warp's largest, falling
  __shared__ uint64_t found[kMaxWanted * (kMaxGroupRows / kRescoreThreads)];
  __shared__ uint64_t chosen[kMaxWanted];  // falling; 0 where the group has fewer rows
  __shared__ uint64_t bound;
  __shared__ int num_found;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int group = static_cast<int>(blockIdx.x) / p.num_tokens, token = static_cast<int>(blockIdx.x) % p.num_tokens;
  const int wanted = p.rescored + p.top_k;
  const GroupLogits logits = {p, static_cast<int64_t>(token) * p.n, group};
  ptx::launch_dependent_grids();
  if (thread < kMaxWanted) chosen[thread] = 0;
  if (thread == 0) {
    bound = 1;  // less than any rank
    num_found = 0;
  }
  ptx::wait_for_prerequisite_grids();

  uint64_t largest = 0;
  logits.for_each([&](uint64_t rank) { largest = max(largest, rank); });
  const uint64_t sorted = sorted_by_lanes(largest, lane);
  lists[warp][lane] = sorted;
  __syncthreads();
  if (lane < wanted && sorted != 0) {
    int larger = 0;
    for (int other = 0; other < kRescoreWarps; ++other) larger += count_larger(lists[other], sorted);
    if (larger == wanted - 1) bound = sorted;
  }
  __syncthreads();
  const uint64_t least = bound;
  if (largest >= least) {
    logits.for_each([&](uint64_t rank) {
      if (rank >= least) found[atomicAdd(&num_found, 1)] = rank;
    });
  }
  __syncthreads();
  const int count = num_found;
  for (int i = thread; i < count; i += kRescoreThreads) {
    const uint64_t rank = found[i];
    int larger = 0;
    for (int other = 0; other < count; ++other) larger += found[other] > rank ? 1 : 0;
    if (larger < wanted) chosen[larger] = rank;
  }
  __syncthreads();

  if (warp < p.rescored && chosen[warp] != 0) {
    const int row = rank_place(chosen[warp]);
    float value = p.fine.format == TokenFormat::kBf16 ? fine_product<TokenFormat::kBf16>(p, token, row, lane)
                                                      : fine_product<TokenFormat::kMxint8Swizzled>(p, token, row, lane);
    if (p.bias != nullptr) value += load_scalar(p.bias, row, p.bias_type);
    if (lane == 0) {
      store_scalar(p.logits, logits.first + row, p.type, value);
      chosen[warp] = rank_of(round_scalar(value, p.type), row);
    }
  }
  if (p.ranks == nullptr) return;
  __syncthreads();
  if (warp == 0) {
    const uint64_t rank = sorted_by_lanes(lane < wanted ? chosen[lane] : 0, lane);
    if (lane < p.top_k) p.ranks[(static_cast<int64_t>(token) * p.groups + group) * p.top_k + lane] = rank;
  }
}

// Of at least one token and one row.
inline Status run_rescore(const RescoreParams& p, const LaunchOptions& options) {
  return {launch_kernel(rescore_kernel, p, p.num_tokens * p.groups, kRescoreThreads, 0, options), "rescoring"};
}

}  // namespace flashinfer::sm12x
