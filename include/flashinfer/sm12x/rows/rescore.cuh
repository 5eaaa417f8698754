// SPDX-License-Identifier: Apache-2.0
//
// Rescoring of logits. A coarse weight has given all logits of a token. The weight's rows belong to groups: tiles of 16
// rows go to the groups in turn. In each group the largest logits are computed again from a fine weight, and replace
// the coarse ones.
//
// One block for each group and token, in five steps:
//
//   scan      each thread holds its share of the group; a warp's four subsets of lanes have a largest logit each
//   bound     the `wanted`-th of the 64 subsets' largest: at least so many logits reach it
//   collect   all logits that reach it, of random ones 18 to 30; their fine rows are prefetched into L2
//   order     each of those counts how many are larger
//   rescore   16 rows are an M16 fragment; each warp multiplies it over a range of K
//
// Latencies add up here, so each step issues all of its loads first. Ranks (rank.cuh) of a group's logits differ,
// so that the result does not depend on the order of threads. The order of a rescored logit's sum depends on k alone.
#pragma once

#include <type_traits>

#include "../launch.h"
#include "../ptx/convert.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/sync.cuh"
#include "quantize.cuh"
#include "rank.cuh"
#include "scalar.cuh"
#include "top_k.cuh"

namespace flashinfer::sm12x {

constexpr int kRescoreThreads = 512;
constexpr int kRescoreWarps = kRescoreThreads / 32;
constexpr int kRescoreTileRows = 16;
constexpr int kMaxRescored = 16;  // of a group: the M side of an MMA
constexpr int kMaxWanted = kMaxRescored + kMaxRowTopK;
constexpr int kLogitsOfThread = 12;
constexpr int kMaxGroupRows = 6'144;
constexpr int kSubsetsOfWarp = 4;
constexpr int kSubsets = kSubsetsOfWarp * kRescoreWarps;
constexpr int kMaxFound = kMaxWanted * (kMaxGroupRows / kSubsets);  // all of as many subsets as are wanted
constexpr int kMaxRescoredK = 14'336;  // a token lies in shared memory, of which every device gives 48 KB
static_assert(kMaxGroupRows == kLogitsOfThread * kRescoreThreads && kMaxGroupRows % kSubsets == 0);
static_assert(kMaxWanted <= kSubsets && kSubsets % 32 == 0);

// Rows of the largest group, the first, counting the last tile as whole.
constexpr int64_t group_rows(int n, int groups) {
  return static_cast<int64_t>(ceil_div(ceil_div(n, kRescoreTileRows), groups)) * kRescoreTileRows;
}

struct RescoreParams {
  void* logits;  // [num_tokens, n]
  ScalarType type;
  int num_tokens, n, k, groups, rescored;
  const uint4* tokens;  // bfloat16 [num_tokens, k]
  const uint8_t* fine;  // bfloat16, or MXINT8's values [n, k]
  const uint8_t* fine_scales;  // MXINT8's, 128x4; null: bfloat16
  const void* bias;  // [n] or null
  ScalarType bias_type;
  uint64_t* ranks;  // null, or [num_tokens][groups][top_k]: ranks of a group's largest logits after rescoring
  int top_k;  // 0 without ranks
};

// A thread's share of a group's logits: each 512th row of the group.
struct LogitsShare {
  int first, stride, n;  // rows
  float values[kLogitsOfThread];

  __device__ __forceinline__ LogitsShare(const RescoreParams& p, int group, int token) : n(p.n) {
    const int thread = static_cast<int>(threadIdx.x);
    first = (thread / kRescoreTileRows * p.groups + group) * kRescoreTileRows + thread % kRescoreTileRows;
    stride = static_cast<int>(min(int64_t{kRescoreThreads} * p.groups, int64_t{n}));
    // The token's first logit: offsets of the others have 32 bits.
    const void* logits =
        static_cast<const uint8_t*>(p.logits) + (p.type == ScalarType::kF32 ? 4 : 2) * (int64_t{token} * n);
    switch (p.type) {
      case ScalarType::kBf16: load<ScalarType::kBf16>(logits); break;
      case ScalarType::kF16: load<ScalarType::kF16>(logits); break;
      default: load<ScalarType::kF32>(logits);
    }
  }

  // Rank of the largest; 0 where there is none.
  __device__ __forceinline__ uint64_t largest() const {
    float most = 0.0f;
    int place = -1;
#pragma unroll
    for (int i = 0; i < kLogitsOfThread; ++i) {
      const int row = first + i * stride;
      if (row >= n) break;
      // Of equal ones the first, and of NaN.
      if (place < 0 || values[i] > most || (values[i] != values[i] && most == most)) {
        most = values[i];
        place = row;
      }
    }
    return place < 0 ? 0 : rank_of(most, place);
  }

  // take(rank) for each of at least `least`.
  template <class Take>
  __device__ __forceinline__ void for_each(uint64_t least, const Take& take) const {
#pragma unroll
    for (int i = 0; i < kLogitsOfThread; ++i) {
      const int row = first + i * stride;
      if (row >= n) break;
      const uint64_t rank = rank_of(values[i], row);
      if (rank >= least) take(rank);
    }
  }

 private:
  template <ScalarType kType>
  __device__ __forceinline__ void load(const void* logits) {
#pragma unroll
    for (int i = 0; i < kLogitsOfThread; ++i) {
      const int row = first + i * stride;
      values[i] = row < n ? load_scalar(logits, row, kType) : 0.0f;
    }
  }
};

// Eight elements of a row of the fine weight; zeros where they are not wanted.
template <bool kMxint8>
struct FineEight {
  std::conditional_t<kMxint8, uint2, uint4> packed;
  uint32_t scale;  // MXINT8's

  __device__ __forceinline__ void load(const RescoreParams& p, int row, int eighth, bool wanted) {
    packed = {};
    const int64_t at = static_cast<int64_t>(row) * (p.k / 8) + eighth;
    if (wanted) packed = reinterpret_cast<const decltype(packed)*>(p.fine)[at];
    if constexpr (kMxint8) {
      scale = wanted ? p.fine_scales[swizzled_scale_place(row, eighth / 4, scale_words(p.k))] : 0;
    }
  }

  // As bfloat16, which holds them exactly.
  __device__ __forceinline__ uint4 as_bf16() const {
    if constexpr (kMxint8) {
      const float factor = ptx::ue8m0_to_f32<0>(scale) / 64.0f;
      const uint32_t words[2] = {packed.x ^ 0x80808080u, packed.y ^ 0x80808080u};  // elements plus 128
      float elements[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // an element plus 128 is the low byte of that plus 2^23
        const float sum = __uint_as_float(__byte_perm(words[i / 4], 0x4B000000u, 0x7440 + i % 4));
        elements[i] = (sum - (8'388'608.0f + 128.0f)) * factor;
      }
      return pack_eight_bf16(elements);
    } else {
      return packed;
    }
  }
};

__device__ __forceinline__ void prefetch_fine_row(const RescoreParams& p, int row) {
  const int bytes = p.fine_scales == nullptr ? 2 * p.k : p.k;
  ptx::bulk_prefetch_to_l2(p.fine + static_cast<int64_t>(row) * bytes, static_cast<uint32_t>(bytes));
}

// Dot products of the block's token with 16 rows of the fine weight over a warp's range of K, as an M16 fragment: lane
// 4g + t takes elements 8t.. of 32, of rows g and g + 8. Every column of the product is the token's. No branch stands
// between the loads: the compiler would move loads past it, and their latencies would add up.
template <bool kMxint8>
__device__ __forceinline__ void multiply_fine(const RescoreParams& p, const uint4* token, const int (&rows)[2],
                                              int first_block, int end_block, int lane, float (&sums)[4]) {
  constexpr int kAtOnce = kMxint8 ? 2 : 3;  // blocks of 32 elements whose loads are issued together
#pragma unroll 1
  for (int first = first_block; first < end_block; first += kAtOnce) {
    FineEight<kMxint8> fine[kAtOnce][2];
    uint4 x[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool wanted = first + i < end_block;
      const int eighth = 4 * (first + i) + lane % 4;
      fine[i][0].load(p, rows[0], eighth, wanted);
      fine[i][1].load(p, rows[1], eighth, wanted);
      x[i] = wanted ? token[eighth] : uint4{};
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint4 low = fine[i][0].as_bf16(), high = fine[i][1].as_bf16();
      ptx::mma_16816<true>(sums, {low.x, high.x, low.y, high.y}, {x[i].x, x[i].y}, sums);
      ptx::mma_16816<true>(sums, {low.z, high.z, low.w, high.w}, {x[i].z, x[i].w}, sums);
    }
  }
}

// Dynamic shared memory holds the token.
__global__ void __launch_bounds__(kRescoreThreads, 2) rescore_kernel(const __grid_constant__ RescoreParams p) {
  extern __shared__ __align__(128) char dynamic_shared[];
  __shared__ uint64_t subsets[kSubsets];  // the largest of each
  __shared__ uint64_t found[kMaxFound];
  __shared__ uint64_t chosen[kMaxWanted];  // falling; 0 where the group has fewer rows
  __shared__ float partials[kRescoreWarps][kMaxRescored];
  __shared__ uint64_t bound;
  __shared__ int num_found;
  uint4* const token_eights = reinterpret_cast<uint4*>(dynamic_shared);
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int group = static_cast<int>(blockIdx.x / static_cast<unsigned>(p.num_tokens));
  const int token = static_cast<int>(blockIdx.x) - group * p.num_tokens;
  const int wanted = p.rescored + p.top_k, eights = p.k / 8;
  ptx::launch_dependent_grids();
  if (thread < kMaxWanted) chosen[thread] = 0;
  if (thread == 0) {
    bound = 1;  // less than any rank
    num_found = 0;
  }
  ptx::wait_for_prerequisite_grids();

  const uint4* const x = p.tokens + static_cast<int64_t>(token) * eights;
  const uint4 eight = thread < eights ? x[thread] : uint4{};  // its load overlaps the logits'
  const LogitsShare share(p, group, token);
  const uint64_t largest = share.largest();
  const uint64_t of_subset = largest_of_lanes<kSubsetsOfWarp>(largest);
  if (lane < kSubsetsOfWarp) subsets[warp * kSubsetsOfWarp + lane] = of_subset;
  if (thread < eights) token_eights[thread] = eight;
#pragma unroll 1
  for (int i = thread + kRescoreThreads; i < eights; i += kRescoreThreads) token_eights[i] = x[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSubsetsOfWarp; ++i) {
    const uint64_t rank = subsets[warp * kSubsetsOfWarp + i];
    int larger = 0;
#pragma unroll
    for (int first = 0; first < kSubsets; first += 32) {
      larger += __popc(__ballot_sync(kAllLanes, subsets[first + lane] > rank));
    }
    if (lane == 0 && rank != 0 && larger == wanted - 1) bound = rank;
  }
  __syncthreads();
  const uint64_t least = bound;
  if (largest >= least) {
    share.for_each(least, [&](uint64_t rank) {
      found[ptx::take_number(&num_found)] = rank;
      prefetch_fine_row(p, rank_place(rank));
    });
  }
  __syncthreads();
  const int count = num_found;
  for (int i = warp; i < count; i += kRescoreWarps) {
    const uint64_t rank = found[i];
    int larger = 0;
    for (int first = 0; first < count; first += 32) {
      larger += __popc(__ballot_sync(kAllLanes, first + lane < count && found[first + lane] > rank));
    }
    if (lane == 0 && larger < wanted) chosen[larger] = rank;
  }
  __syncthreads();

  const int blocks = p.k / kScaleBlock, of_warp = ceil_div(blocks, kRescoreWarps);
  const int first_block = warp * of_warp, end_block = min(first_block + of_warp, blocks);
  int rows[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {  // in place of rows that are not there, whose products nobody reads, the first
    const uint64_t rank = chosen[lane / 4 + 8 * r];
    rows[r] = rank != 0 ? rank_place(rank) : 0;
  }
  float sums[4] = {};
  if (p.fine_scales == nullptr) {
    multiply_fine<false>(p, token_eights, rows, first_block, end_block, lane, sums);
  } else {
    multiply_fine<true>(p, token_eights, rows, first_block, end_block, lane, sums);
  }
  if (lane % 4 == 0) {
    partials[warp][lane / 4] = sums[0];
    partials[warp][lane / 4 + 8] = sums[2];
  }
  __syncthreads();
  if (warp < p.rescored && chosen[warp] != 0) {
    const int row = rank_place(chosen[warp]);
    float value = lane < kRescoreWarps ? partials[lane][warp] : 0.0f;
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
    if (p.bias != nullptr) value += load_scalar(p.bias, row, p.bias_type);
    __syncwarp();  // all lanes have read `chosen`
    if (lane == 0) {
      store_scalar(p.logits, static_cast<int64_t>(token) * p.n + row, p.type, value);
      chosen[warp] = rank_of(round_scalar(value, p.type), row);
    }
  }
  if (p.ranks == nullptr) return;
  __syncthreads();
  if (warp != 0) return;
  const uint64_t rank = lane < wanted ? chosen[lane] : 0;
  int larger = 0;
#pragma unroll 4
  for (int other = 0; other < kMaxWanted; ++other) larger += chosen[other] > rank ? 1 : 0;
  uint64_t* const ranks = p.ranks + (static_cast<int64_t>(token) * p.groups + group) * p.top_k;
  if (rank != 0 && larger < p.top_k) ranks[larger] = rank;
  const int there = __popc(__ballot_sync(kAllLanes, rank != 0));
  if (lane >= there && lane < p.top_k) ranks[lane] = 0;
}

// Of at least one token and one row; k is a multiple of 32. A group has at most kMaxGroupRows.
inline Status run_rescore(const RescoreParams& p, const LaunchOptions& options) {
  return {launch_kernel(rescore_kernel, p, p.num_tokens * p.groups, kRescoreThreads, 2 * p.k, options), "rescoring"};
}

}  // namespace flashinfer::sm12x
