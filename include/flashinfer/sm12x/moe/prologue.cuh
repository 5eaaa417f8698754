// SPDX-License-Identifier: Apache-2.0
//
// Prepares what FC1 reads: arrival counters, quantized activations, scales in whole scale words, zero rows for tokens
// without a local expert, and, where there are too many routed rows for the GEMM kernels to sort by themselves, the
// routing. With programmatic dependent launch FC1's producer already streams weights meanwhile, unless it needs that
// routing.
#pragma once

#include "../mma/dequantize.cuh"
#include "../ptx/sync.cuh"
#include "../rows/quantize.cuh"
#include "../rows/scalar.cuh"
#include "routing.cuh"

namespace flashinfer::sm12x {

struct PrologueParams {
  int num_tokens;
  int hidden;
  // How `input`, [tokens, hidden], is converted: kQuantize*: rounded; kMxfp4Swizzled: e4m3 of packed e2m1, whose
  // scales are the caller's; kMxfp8Linear: `input` is scales, [tokens, hidden / 32], whose rows are padded
  // to whole scale words.
  // kBf16: nothing.
  TokenFormat format;
  const void* input;
  uint8_t* quantized;  // [tokens, hidden] e4m3, or packed e2m1
  uint8_t* quantized_scales;  // [tokens, 4 * scale_words(hidden)]

  const int32_t* ids;  // null: no routing at all (grouped GEMM, dense layer)
  int num_routed_rows;
  int top_k;
  int first_expert;
  int num_experts;
  int32_t* offsets;  // [E + 1], null: the GEMM kernels route
  int32_t* order;  // [routed_rows] in permuted order
  int32_t* positions;  // [routed_rows] null, or where each routed row stands in that order, -1 without a local expert

  int* split_arrivals;  // counters to zero
  int num_split_arrivals;
  int* token_arrivals;  // [tokens, m_tiles]: starts at the slots that no local expert serves
  int m_tiles;
  void* output;  // [tokens, hidden]
  ScalarType output_type;
};

constexpr int kPrologueThreads = 512;
constexpr int kPrologueWarps = kPrologueThreads / 32;

// Stable counting sort of all routed rows by expert. One block; `counts` is [kPrologueWarps][E] in shared memory,
// `totals` [E + 1]. Every warp counts a contiguous range of the routed rows, then writes it behind those of the warps
// before it.
__device__ __forceinline__ void sort_routed_rows(const PrologueParams& p, int* counts, int* totals) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_routed_rows = ceil_div(ceil_div(p.num_routed_rows, kPrologueWarps), 32) * 32;
  const int begin = warp * warp_routed_rows, end = min(begin + warp_routed_rows, p.num_routed_rows);
  int* mine = counts + warp * p.num_experts;

  for (int i = threadIdx.x; i < kPrologueWarps * p.num_experts; i += kPrologueThreads) counts[i] = 0;
  __syncthreads();
  auto expert_of = [&](int i) { return i < end ? local_expert(p.ids[i], p.first_expert, p.num_experts) : -1; };
  for (int base = begin; base < end; base += 32) count_routed_rows(expert_of(base + lane), mine, lane);
  __syncthreads();
  for (int e = threadIdx.x; e < p.num_experts; e += kPrologueThreads) {
    int before = 0;
    for (int w = 0; w < kPrologueWarps; ++w) {
      const int count = counts[w * p.num_experts + e];
      counts[w * p.num_experts + e] = before;
      before += count;
    }
    totals[e] = before;
  }
  __syncthreads();
  if (warp == 0) exclusive_offsets(totals, totals, p.num_experts, lane);
  __syncthreads();
  for (int e = threadIdx.x; e <= p.num_experts; e += kPrologueThreads) p.offsets[e] = totals[e];
  for (int base = begin; base < end; base += 32) {
    const int expert = expert_of(base + lane);
    const int place = count_routed_rows(expert, mine, lane);
    const int position = expert >= 0 ? totals[expert] + place : -1;
    if (expert >= 0) p.order[position] = base + lane;
    if (p.positions != nullptr && base + lane < end) p.positions[base + lane] = position;
  }
}

// One block.
__device__ __forceinline__ void prepare_token(const PrologueParams& p, int token) {
  const int64_t row = static_cast<int64_t>(token) * p.hidden;
  const int pitch = kScaleChunkBlocks * scale_words(p.hidden);
  uint8_t* scales = p.quantized_scales + static_cast<int64_t>(token) * pitch;
  const void* source = static_cast<const uint16_t*>(p.input) + row;
  switch (p.format) {
    case TokenFormat::kQuantizeBf16:
      return quantize_row<Mxfp8Rounding, true>(source, p.hidden, p.quantized + row, scales);
    case TokenFormat::kQuantizeF16:
      return quantize_row<Mxfp8Rounding, false>(source, p.hidden, p.quantized + row, scales);
    case TokenFormat::kQuantizeBf16ToMxfp4:
      return quantize_row<Mxfp4Rounding, true>(source, p.hidden, p.quantized + row / 2, scales);
    case TokenFormat::kQuantizeF16ToMxfp4:
      return quantize_row<Mxfp4Rounding, false>(source, p.hidden, p.quantized + row / 2, scales);
    case TokenFormat::kMxfp8Linear: {
      const int blocks = p.hidden / kScaleBlock;
      const uint8_t* from = static_cast<const uint8_t*>(p.input) + static_cast<int64_t>(token) * blocks;
      for (int i = threadIdx.x; i < pitch; i += kPrologueThreads) scales[i] = i < blocks ? from[i] : 0;
      return;
    }
    case TokenFormat::kMxfp4Swizzled: {
      const uint32_t* from = reinterpret_cast<const uint32_t*>(static_cast<const uint8_t*>(p.input) + row / 2);
      uint2* to = reinterpret_cast<uint2*>(p.quantized + row);
      for (int i = threadIdx.x; i < p.hidden / 8; i += kPrologueThreads) to[i] = mma::unpack_to_e4m3(from[i]);
      return;
    }
    default: return;
  }
}

// One warp.
__device__ __forceinline__ void count_elsewhere(const PrologueParams& p, int token, int lane) {
  int elsewhere = 0;
  for (int slot = lane; slot < p.top_k; slot += 32) {
    elsewhere += local_expert(p.ids[token * p.top_k + slot], p.first_expert, p.num_experts) < 0;
  }
  elsewhere = __reduce_add_sync(kAllLanes, elsewhere);
  for (int tile = lane; tile < p.m_tiles; tile += 32) {
    p.token_arrivals[static_cast<int64_t>(token) * p.m_tiles + tile] = elsewhere;
  }
  for (int i = elsewhere == p.top_k ? lane : p.hidden; i < p.hidden; i += 32) {
    store_scalar(p.output, static_cast<int64_t>(token) * p.hidden + i, p.output_type, 0.0f);
  }
}

// Grid: one block for the sort, if any, the others share the tokens.
__global__ void __launch_bounds__(kPrologueThreads) moe_prologue_kernel(const __grid_constant__ PrologueParams p) {
  extern __shared__ int sort_counts[];
  ptx::wait_for_prerequisite_grids();
  ptx::launch_dependent_grids();

  const bool sorts = p.offsets != nullptr;
  if (sorts && blockIdx.x == 0) {
    sort_routed_rows(p, sort_counts, sort_counts + kPrologueWarps * p.num_experts);
    return;
  }
  const int block = static_cast<int>(blockIdx.x) - (sorts ? 1 : 0),
            blocks = static_cast<int>(gridDim.x) - (sorts ? 1 : 0);
  for (int i = block * kPrologueThreads + threadIdx.x; i < p.num_split_arrivals; i += blocks * kPrologueThreads) {
    p.split_arrivals[i] = 0;
  }
  for (int token = block; p.format != TokenFormat::kBf16 && token < p.num_tokens; token += blocks) {
    prepare_token(p, token);
  }
  for (int token = block * kPrologueWarps + static_cast<int>(threadIdx.x) / 32;
       p.ids != nullptr && token < p.num_tokens; token += blocks * kPrologueWarps) {
    count_elsewhere(p, token, threadIdx.x % 32);
  }
}

}  // namespace flashinfer::sm12x
