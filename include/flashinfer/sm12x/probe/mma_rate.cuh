// SPDX-License-Identifier: Apache-2.0
//
// How fast mma.sync is, and what it adds up to: each warp of a block multiplies one A with kMmaChains Bs, over and
// over, every product into the sums of its own chain,
//
//   d[block][warp][chain][row][column] = c[row][column] + iterations * sum over k of a[row][k] * b[chain][column][k]
//
// times the block scales where the kind has them. Chains are independent, so that an MMA need not wait for the one
// before: eight of them in each of the four warps of a scheduler keep it supplied at latencies of up to 32 MMAs.
//
// A row of A or a column of B is 32 bytes of K in each kind: 16 halves, 32 e4m3 or e2m1 in 8-bit containers, 64 e2m1.
// So one loader serves all (PTX ISA 9.0, 9.7.14.5.8 to 9.7.14.5.11): lane 4g + t holds words t and 4 + t of rows g and
// g + 8 of A and of column g of B, and sums of rows g and g + 8, columns 2t and 2t + 1.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "../ptx/mma.cuh"
#include "../types.h"
#include "clocks.cuh"

namespace flashinfer::sm12x::probe {

enum class MmaKind : int { kBf16, kF16, kMxf8f6f4, kMxf4 };

constexpr int kMmaKinds = 4;
constexpr int kMmaChains = 8;
constexpr int kMmaMaxWarps = 16;
constexpr int kMmaRows = 16, kMmaColumns = 8;
constexpr int kMmaRowWords = 8;  // of 32 bits

// Both kinds with block scales exist on SM12x only.
constexpr bool needs_sm12x(MmaKind kind) { return kind == MmaKind::kMxf8f6f4 || kind == MmaKind::kMxf4; }

struct MmaRateParams {
  const uint32_t* a;  // [kMmaRows, kMmaRowWords]
  const uint32_t* b;  // [kMmaChains, kMmaColumns, kMmaRowWords]
  const float* c;  // [kMmaRows, kMmaColumns]
  float* d;  // [blocks, warps, kMmaChains, kMmaRows, kMmaColumns]
  int64_t* times;  // [blocks, 4]: cycles before and behind, nanoseconds before and behind
  uint32_t scale_a;  // UE8M0 scales of all rows, that of the first 32 elements of K in the lowest byte
  uint32_t scale_b;  // the same of all columns
  int iterations;
};

template <MmaKind kKind>
__device__ __forceinline__ void multiply(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                         uint32_t scale_a, uint32_t scale_b) {
  if constexpr (kKind == MmaKind::kBf16 || kKind == MmaKind::kF16) {
    ptx::mma_16816<kKind == MmaKind::kBf16>(sums, a, b, sums);
#if FLASHINFER_SM12X_DEVICE
  } else if constexpr (kKind == MmaKind::kMxf8f6f4) {
    ptx::mma_block_scaled<0, Element::kE2m1, Element::kE4m3>(sums, a, b, scale_a, scale_b);
  } else if constexpr (kKind == MmaKind::kMxf4) {
    ptx::mma_block_scaled<0, Element::kE2m1, Element::kE2m1>(sums, a, b, scale_a, scale_b);
#endif
  } else {
    __trap();  // the binding launches no such kind elsewhere
  }
}

template <MmaKind kKind>
__global__ void __launch_bounds__(32 * kMmaMaxWarps) mma_rate_kernel(const MmaRateParams params) {
  const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
  uint32_t a[4], b[kMmaChains][2];
  float sums[kMmaChains][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = params.a[(g + 8 * (i % 2)) * kMmaRowWords + t + 4 * (i / 2)];
#pragma unroll
  for (int chain = 0; chain < kMmaChains; ++chain) {
#pragma unroll
    for (int i = 0; i < 2; ++i) b[chain][i] = params.b[(chain * kMmaColumns + g) * kMmaRowWords + t + 4 * i];
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[chain][i] = params.c[(g + 8 * (i / 2)) * kMmaColumns + 2 * t + i % 2];
  }

  __syncthreads();
  const int64_t first_cycle = clock64(), first_nanosecond = nanoseconds();
#pragma unroll 4
  for (int iteration = 0; iteration < params.iterations; ++iteration) {
#pragma unroll
    for (int chain = 0; chain < kMmaChains; ++chain) {
      multiply<kKind>(sums[chain], a, b[chain], params.scale_a, params.scale_b);
    }
  }
  __syncthreads();
  const int64_t last_cycle = clock64(), last_nanosecond = nanoseconds();

  if (threadIdx.x == 0) {
    int64_t* times = params.times + 4 * static_cast<int64_t>(blockIdx.x);
    times[0] = first_cycle;
    times[1] = last_cycle;
    times[2] = first_nanosecond;
    times[3] = last_nanosecond;
  }
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
#pragma unroll
  for (int chain = 0; chain < kMmaChains; ++chain) {
    float* d = params.d + (warp * kMmaChains + chain) * kMmaRows * kMmaColumns;
#pragma unroll
    for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * kMmaColumns + 2 * t + i % 2] = sums[chain][i];
  }
}

}  // namespace flashinfer::sm12x::probe
