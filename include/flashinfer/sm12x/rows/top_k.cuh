// SPDX-License-Identifier: Apache-2.0
//
// The largest numbers of each row of logits and their places, of equal ones those that come first, in two launches:
//
//   chunk_top_k_kernel  of each chunk of a row, by one block
//   row_top_k_kernel    of a row, from the ranks that its chunks gave, or that a dense layer left (split_k/dense.cuh)
//
// No counters and no memory that must hold something before: the end of the first launch is the grid barrier.
#pragma once

#include "../launch.h"
#include "../ptx/sync.cuh"
#include "../types.h"
#include "rank.cuh"
#include "scalar.cuh"

namespace flashinfer::sm12x {

constexpr int kTopKThreads = 256;
constexpr int kTopKWarps = kTopKThreads / 32;
constexpr int kTopKChunk = 2048;  // logits of a row that one block searches
constexpr int kMaxRowTopK = 8;

struct RowTopKParams {
  const void* logits;  // [num_rows, n]
  ScalarType type;
  int num_rows, n, top_k;
  uint64_t* ranks;  // [num_rows, count]: the candidates of each row
  int count;
  int64_t first_index;  // index of a row's first logit
  float* values;  // [num_rows, top_k]
  int64_t* indices;  // [num_rows, top_k]
};

// The `top_k` largest of rank(0), ..., rank(count - 1), which differ, by one block: take(i, the i-th), by one thread; 0
// where there are fewer. They are read once for each of `top_k`.
template <class Rank, class Take>
__device__ __forceinline__ void take_largest(int count, int top_k, const Rank& rank, const Take& take) {
  __shared__ uint64_t of_warps[2][kTopKWarps];  // in turn: one barrier each
  const int thread = static_cast<int>(threadIdx.x);
  uint64_t last = 0;
  for (int i = 0; i < top_k; ++i) {
    uint64_t largest = 0;
    for (int at = thread; at < count; at += kTopKThreads) {
      const uint64_t one = rank(at);
      if (i == 0 || one < last) largest = max(largest, one);
    }
    largest = largest_of_lanes(largest);
    if (thread % 32 == 0) of_warps[i % 2][thread / 32] = largest;
    __syncthreads();
#pragma unroll
    for (int warp = 0; warp < kTopKWarps; ++warp) largest = max(largest, of_warps[i % 2][warp]);
    if (thread == 0) take(i, largest);
    last = largest;
  }
}

__global__ void __launch_bounds__(kTopKThreads) chunk_top_k_kernel(const __grid_constant__ RowTopKParams p) {
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  const int chunks = ceil_div(p.n, kTopKChunk);
  const int64_t row = static_cast<int>(blockIdx.x) / chunks;
  const int chunk = static_cast<int>(blockIdx.x) % chunks, first = chunk * kTopKChunk;
  take_largest(
      min(kTopKChunk, p.n - first), p.top_k,
      [&](int i) { return rank_of(load_scalar(p.logits, row * p.n + first + i, p.type), first + i); },
      [&](int i, uint64_t rank) { p.ranks[row * p.count + chunk * p.top_k + i] = rank; });
}

__global__ void __launch_bounds__(kTopKThreads) row_top_k_kernel(const __grid_constant__ RowTopKParams p) {
  ptx::launch_dependent_grids();
  ptx::wait_for_prerequisite_grids();
  const int64_t row = blockIdx.x;
  take_largest(
      p.count, p.top_k, [&](int i) { return p.ranks[row * p.count + i]; },
      [&](int i, uint64_t rank) {
        p.values[row * p.top_k + i] = rank_number(rank);
        p.indices[row * p.top_k + i] = p.first_index + rank_place(rank);
      });
}

// From ranks that exist, or that the launch in front writes.
inline Status run_top_k_of_ranks(const RowTopKParams& p, const LaunchOptions& options) {
  return {launch_kernel(row_top_k_kernel, p, p.num_rows, kTopKThreads, 0, options), "top-k of rows"};
}

// From logits; at least one row, and `top_k` of a row.
inline Status run_row_top_k(RowTopKParams p, const LaunchOptions& options) {
  const int chunks = ceil_div(p.n, kTopKChunk);
  p.count = chunks * p.top_k;
  const cudaError_t error = launch_kernel(chunk_top_k_kernel, p, p.num_rows * chunks, kTopKThreads, 0, options);
  if (error != cudaSuccess) return {error, "top-k of chunks"};
  return run_top_k_of_ranks(p, options);
}

}  // namespace flashinfer::sm12x
