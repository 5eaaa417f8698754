// SPDX-License-Identifier: Apache-2.0
//
// Decode attention of gpt-oss over a paged KV cache, with rope and the append of new keys and values in the same
// launch. Heads of 64, eight query heads to a KV head, sinks, sliding window, a cache of bf16 or e4m3.
//
// A block works for one KV head of one sequence, on a split of its positions; a warp on chunks of 16 positions with an
// online softmax of its own. Both GEMMs have the cache as the MMA's A, and the eight query heads as its N, so that
// nothing is padded:
//
//   scores[16 positions, 8 heads] = keys[16, 64] * queries[64, 8]       four k-steps
//   output[64 dims, 8 heads] += values[16 positions, 64 dims]^T * weights[16, 8]     four tiles of 16 dims
//
// The order of K in a lane's registers is free, as long as A and B agree. So lane (g, t) = (lane / 4, lane % 4) takes
// dims 8t..8t+7 and 32+8t..32+8t+7 of key rows g and g+8: whole vectors of memory, and both halves of each pair that
// rope turns. From values it takes dims 8g..8g+7 of rows 2t, 2t+1, 2t+8, 2t+9; two byte permutations make fragments of
// A from them. The weights become B by a transposition in registers. Nothing goes through shared memory before the
// warps' results do.
//
// The warps' results are merged in shared memory, the splits' in the workspace, where the block that comes last adds
// them up in the order of splits: results do not depend on which one that is.
#pragma once

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "launch.h"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"
#include "rows/quantize.cuh"
#include "types.h"

namespace flashinfer::sm12x {

// Knobs.
constexpr int kDecodeHead = 64;  // elements
constexpr int kDecodeGroup = 8;  // query heads of a KV head
constexpr int kDecodeChunk = 16;  // positions
constexpr int kDecodeWarps = 8;
constexpr int kDecodeThreads = 32 * kDecodeWarps;
constexpr int kDecodeBlocksPerSm = 2;  // at most; more tokens of a block take more registers
constexpr int kDecodeRow = kDecodeHead + 4;  // floats of a head's output in shared memory: fewer bank conflicts
constexpr int kDecodeMaxTokens = 4;  // tokens of a sequence that one block works for, at most
constexpr int kDecodeMaxQLen = 64;  // new tokens of a sequence
constexpr int kDecodeAlignment = 256;  // bytes, of the partials in the workspace
constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr float kLog2E = 1.4426950408889634f;
static_assert(kDecodeWarps == kDecodeGroup && kDecodeHead == 2 * 32, "merging: a warp a head, a lane two dims");
static_assert(kDecodeMaxQLen < (kDecodeWarps - 1) * kDecodeChunk, "no warp has two chunks with new positions");

// A split leaves this in the workspace for one token: unnormalized output, and for each head the maximum of the scores
// (base 2) and the sum of weights.
struct DecodePartial {
  float output[kDecodeGroup][kDecodeHead];
  float largest[kDecodeGroup];
  float sum[kDecodeGroup];
};

struct DecodeAttentionParams {
  const __nv_bfloat16* query;  // [tokens, 8 * num_kv_heads, 64]; tokens are q_len of each sequence
  const __nv_bfloat16* key;  // [tokens, num_kv_heads, 64], to be appended; null: the cache holds them
  const __nv_bfloat16* value;  // likewise
  int64_t query_stride, key_stride, value_stride;  // elements from token to token
  void* key_cache;  // pages of [num_kv_heads, page_size, 64] or [page_size, num_kv_heads, 64]
  void* value_cache;
  int64_t page_stride, head_stride, position_stride;  // elements, of both
  const int32_t* block_tables;  // [num_sequences, table_stride]
  const int32_t* seq_lens;  // [num_sequences], new tokens included
  const void* rope_table;  // [positions, 64]: 32 cosines, 32 sines; bf16, or float32; null: no rope
  const float* sinks;  // [8 * num_kv_heads], or null
  __nv_bfloat16* out;  // [tokens, 8 * num_kv_heads, 64]
  DecodePartial* partials;  // [groups * splits, N tile]
  int* arrivals;  // [groups], zero before and after a launch
  float score_scale;  // from a dot product to a score in base 2
  float key_scale, value_scale;  // factors of the cache's keys and values
  int num_sequences, num_kv_heads, q_len;
  int window_left;  // positions seen before a token's own; negative: all
  int page_shift;  // log2 of chunks in a page
  int64_t table_stride;
  int splits;
  bool rope_is_float32;
  bool constant_cache;  // tables, lengths and what is not new in the cache were written by launches that have completed
};

namespace decode {

template <bool kFp8>
using Eight = std::conditional_t<kFp8, uint2, uint4>;  // elements of a row of the cache

// A lane's part of a chunk, in the cache's format.
template <bool kFp8>
struct Chunk {
  Eight<kFp8> keys[2][2];  // rows g, g + 8; dims from 8t and from 32 + 8t
  Eight<kFp8> values[4];  // rows 2t, 2t + 1, 2t + 8, 2t + 9; dims from 8g
};

__device__ __forceinline__ int key_row(int g, int i) { return g + 8 * i; }
__device__ __forceinline__ int value_row(int t, int i) { return 2 * t + i % 2 + 8 * (i / 2); }

__device__ __forceinline__ float exp2_approx(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Four words of bf16 pairs, exactly; NaN stays NaN.
template <bool kFp8>
__device__ __forceinline__ uint4 to_bf16(const Eight<kFp8>& row) {
  if constexpr (kFp8) {
    auto pair = [](uint32_t bytes) { return ptx::e4m3x2_to_bf16x2(static_cast<uint16_t>(bytes), 1.0f); };
    return make_uint4(pair(row.x), pair(row.x >> 16), pair(row.y), pair(row.y >> 16));
  } else {
    return row;
  }
}

// As the cache keeps eight bf16 elements: themselves, or their quotient by `scale` in e4m3.
template <bool kFp8>
__device__ __forceinline__ Eight<kFp8> to_cache(const uint4& row, float scale) {
  if constexpr (kFp8) {
    float x[8];
    unpack_eight<true>(row, x);
    auto pair = [&](int i) -> uint32_t {
      return ptx::f32x2_to_e4m3x2(__fdiv_rn(x[i], scale), __fdiv_rn(x[i + 1], scale));
    };
    return make_uint2(pair(0) | pair(2) << 16, pair(4) | pair(6) << 16);
  } else {
    return row;
  }
}

// Eight pairs of the table's row of `position`, from element `first`.
__device__ __forceinline__ void load_table(const DecodeAttentionParams& p, int position, int first, float (&to)[8]) {
  const int64_t at = static_cast<int64_t>(position) * kDecodeHead + first;
  if (p.rope_is_float32) {
    const auto* from = reinterpret_cast<const float4*>(static_cast<const float*>(p.rope_table) + at);
    const float4 low = from[0], high = from[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else {
    unpack_eight<true>(*reinterpret_cast<const uint4*>(static_cast<const __nv_bfloat16*>(p.rope_table) + at), to);
  }
}

// Turns dims 8t..8t+7 with 32+8t..32+8t+7, in float32, rounded to bf16. Written out, so that it is the same in every
// kernel.
__device__ __forceinline__ void rope(const DecodeAttentionParams& p, int position, int t, uint4 (&halves)[2]) {
  if (p.rope_table == nullptr) return;
  float cosines[8], sines[8], x[8], y[8], turned[8];
  load_table(p, position, 8 * t, cosines);
  load_table(p, position, kDecodeHead / 2 + 8 * t, sines);
  unpack_eight<true>(halves[0], x);
  unpack_eight<true>(halves[1], y);
#pragma unroll
  for (int i = 0; i < 8; ++i) turned[i] = fmaf(x[i], cosines[i], -__fmul_rn(y[i], sines[i]));
  halves[0] = pack_eight_bf16(turned);
#pragma unroll
  for (int i = 0; i < 8; ++i) turned[i] = fmaf(y[i], cosines[i], __fmul_rn(x[i], sines[i]));
  halves[1] = pack_eight_bf16(turned);
}

// One KV head of one sequence in the cache, for a warp's lane.
template <bool kFp8>
struct Pages {
  using Element = std::conditional_t<kFp8, uint8_t, __nv_bfloat16>;
  Element *keys, *values;  // the head's, in page 0
  int64_t page_stride, position_stride;
  int page_shift;

  __device__ __forceinline__ Pages(const DecodeAttentionParams& p, int head)
      : keys(static_cast<Element*>(p.key_cache) + head * p.head_stride),
        values(static_cast<Element*>(p.value_cache) + head * p.head_stride),
        page_stride(p.page_stride),
        position_stride(p.position_stride),
        page_shift(p.page_shift) {}

  // Where a chunk's first position begins.
  __device__ __forceinline__ int64_t offset(int page, int chunk) const {
    const int in_page = chunk & ((1 << page_shift) - 1);
    return page * page_stride + in_page * kDecodeChunk * position_stride;
  }

  // Rows from `low` to `limit`; the others are zero, whatever lies there.
  __device__ __forceinline__ Chunk<kFp8> load(int page, int chunk, int low, int limit, int g, int t) const {
    const int64_t at = offset(page, chunk);
    Chunk<kFp8> loaded = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = key_row(g, i), position = chunk * kDecodeChunk + row;
      const auto* from = reinterpret_cast<const Eight<kFp8>*>(keys + at + row * position_stride);
      if (position >= low && position < limit) {
        loaded.keys[i][0] = from[t];
        loaded.keys[i][1] = from[4 + t];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = value_row(t, i), position = chunk * kDecodeChunk + row;
      const auto* from = reinterpret_cast<const Eight<kFp8>*>(values + at + row * position_stride);
      if (position >= low && position < limit) loaded.values[i] = from[g];
    }
    return loaded;
  }

  // Fills a chunk's rows from `first_new` on with the new tokens', and writes these to the cache if this block is to.
  __device__ __forceinline__ void append(const DecodeAttentionParams& p, Chunk<kFp8>& to, int page, int chunk,
                                         int first_new, int length, int64_t first_token, int head, bool writes, int g,
                                         int t) const {
    const int64_t at = offset(page, chunk);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = key_row(g, i), position = chunk * kDecodeChunk + row;
      if (position < max(first_new, 0) || position >= length) continue;
      const auto* from = reinterpret_cast<const uint4*>(p.key + (first_token + position - first_new) * p.key_stride +
                                                        head * kDecodeHead);
      uint4 halves[2] = {from[t], from[4 + t]};
      rope(p, position, t, halves);
      auto* cached = reinterpret_cast<Eight<kFp8>*>(keys + at + row * position_stride);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        to.keys[i][half] = to_cache<kFp8>(halves[half], p.key_scale);
        if (writes) cached[4 * half + t] = to.keys[i][half];
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = value_row(t, i), position = chunk * kDecodeChunk + row;
      if (position < max(first_new, 0) || position >= length) continue;
      const auto* from = reinterpret_cast<const uint4*>(
          p.value + (first_token + position - first_new) * p.value_stride + head * kDecodeHead);
      to.values[i] = to_cache<kFp8>(from[g], p.value_scale);
      if (writes) reinterpret_cast<Eight<kFp8>*>(values + at + row * position_stride)[g] = to.values[i];
    }
  }
};

// A chunk as bf16. Rows of keys are MMA fragments as they lie. Values become A of the second GEMM, a tile of 16 dims
// each: a register of A pairs two positions, while a register of a row pairs two dims.
template <bool kFp8>
__device__ __forceinline__ void dequantize(const Chunk<kFp8>& chunk, uint4 (&keys)[2][2], uint32_t (&values)[4][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    keys[0][half] = to_bf16<kFp8>(chunk.keys[0][half]);
    keys[1][half] = to_bf16<kFp8>(chunk.keys[1][half]);
  }
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const uint4 even = to_bf16<kFp8>(chunk.values[2 * pair]), odd = to_bf16<kFp8>(chunk.values[2 * pair + 1]);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      auto word = [&](const uint4& row) { return reinterpret_cast<const uint32_t*>(&row)[j]; };
      values[j][2 * pair] = __byte_perm(word(even), word(odd), 0x5410);
      values[j][2 * pair + 1] = __byte_perm(word(even), word(odd), 0x7632);
    }
  }
}

// The online softmax of one token, for the two heads 2t and 2t+1 of a lane, and their output of dims 8g..8g+7.
struct State {
  float largest[2] = {kMinusInfinity, kMinusInfinity};  // the same in all lanes of a t
  float sum[2] = {0.0f, 0.0f};  // over this lane's positions
  float output[4][4] = {};  // [j]: dims 8g+2j (0: head 2t, 1: head 2t+1), 8g+2j+1 (2, 3)

  // `scores`: of positions g (0, 1) and g + 8 (2, 3), minus infinity where nothing is seen.
  __device__ __forceinline__ void add(const float (&scores)[4], const uint32_t (&values)[4][4]) {
    float weights[4];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float most = fmaxf(scores[head], scores[2 + head]);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, distance));
      }
      most = fmaxf(most, largest[head]);
      const float base = most == kMinusInfinity ? 0.0f : most;
      const float shrink = exp2_approx(largest[head] - base);
      largest[head] = most;
      weights[head] = exp2_approx(scores[head] - base);
      weights[2 + head] = exp2_approx(scores[2 + head] - base);
      sum[head] = fmaf(sum[head], shrink, weights[head] + weights[2 + head]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        output[j][head] *= shrink;
        output[j][2 + head] *= shrink;
      }
    }
    const uint32_t b[2] = {ptx::transpose_8x8(ptx::f32x2_to_bf16x2(weights[0], weights[1])),
                           ptx::transpose_8x8(ptx::f32x2_to_bf16x2(weights[2], weights[3]))};
#pragma unroll
    for (int j = 0; j < 4; ++j) ptx::mma_16816<true>(output[j], values[j], b, output[j]);
  }
};

// Two dims of a head's output, as merged so far.
struct Merged {
  float largest = kMinusInfinity, sum = 0.0f;
  float2 output = {0.0f, 0.0f};

  __device__ __forceinline__ void add(float other_largest, float other_sum, const float2& other) {
    const float most = fmaxf(largest, other_largest), base = most == kMinusInfinity ? 0.0f : most;
    const float mine = exp2_approx(largest - base), theirs = exp2_approx(other_largest - base);
    largest = most;
    sum = sum * mine + other_sum * theirs;
    output.x = output.x * mine + other.x * theirs;
    output.y = output.y * mine + other.y * theirs;
  }

  // The quotient, the sink's weight in its sum; NaN where the scores leave none.
  __device__ __forceinline__ uint32_t finish(float sink, float scale) const {
    const float most = fmaxf(largest, sink);
    const float mine = exp2_approx(largest - most);
    const float factor = __fdiv_rn(mine * scale, fmaf(sum, mine, exp2_approx(sink - most)));
    return ptx::f32x2_to_bf16x2(output.x * factor, output.y * factor);
  }
};

struct Shared {
  float output[kDecodeWarps][kDecodeGroup][kDecodeRow];
  float largest[kDecodeWarps][kDecodeGroup];
  float sum[kDecodeWarps][kDecodeGroup];
  int is_last;
};

}  // namespace decode

template <int kTokens>
constexpr int kDecodeBlocksOfTokens = kTokens == 1 ? kDecodeBlocksPerSm : 1;  // on an SM, by their registers

// kTokens: of a sequence, that a block works for. With more of them the blocks of the others read the cache again, from
// L2.
template <int kTokens, bool kFp8>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocksOfTokens<kTokens>)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p) {
  __shared__ __align__(16) decode::Shared shared;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int group = static_cast<int>(blockIdx.x) / p.splits, split = static_cast<int>(blockIdx.x) % p.splits;
  const int tiles = (p.q_len + kTokens - 1) / kTokens;
  const int tile = group % tiles, head = group / tiles % p.num_kv_heads, sequence = group / tiles / p.num_kv_heads;

  ptx::launch_dependent_grids();
  if (!p.constant_cache) ptx::wait_for_prerequisite_grids();
  const int length = p.seq_lens[sequence];
  const int first_new = length - p.q_len;  // its position
  const int first_position = first_new + tile * kTokens;  // position of this block's first token
  const int count = min(kTokens, p.q_len - tile * kTokens);
  const int low = p.window_left < 0 ? 0 : max(0, first_position - p.window_left);
  const int first_chunk = low / kDecodeChunk;
  const int chunks = max(0, (length + kDecodeChunk - 1) / kDecodeChunk - first_chunk);
  // Each warp of a split is to have a chunk; a grid is made for the longest sequences. Split 0 never leaves early, so
  // that the grid does not end before those that it depends on.
  const int splits = min(max(chunks / kDecodeWarps, 1), p.splits);
  if (split >= splits) return;
  const int begin = first_chunk + chunks * split / splits, end = first_chunk + chunks * (split + 1) / splits;
  const int cached = p.key != nullptr ? first_new : length;  // positions from here on are appended

  const decode::Pages<kFp8> pages(p, head);
  const int mine = begin + warp < end ? (end - begin - warp + kDecodeWarps - 1) / kDecodeWarps : 0;
  int page_of_lane = 0;  // page of this warp's chunk 32 * n + lane
  auto load = [&](int i, int& page) {
    const int32_t* table = p.block_tables + sequence * p.table_stride;
    if (i % 32 == 0 && i + lane < mine)
      page_of_lane = table[(begin + warp + kDecodeWarps * (i + lane)) >> p.page_shift];
    page = __shfl_sync(kAllLanes, page_of_lane, i % 32);
    return pages.load(page, begin + warp + kDecodeWarps * i, low, cached, g, t);
  };
  int next_page = 0;
  decode::Chunk<kFp8> next = {};
  if (mine > 0) next = load(0, next_page);
  ptx::wait_for_prerequisite_grids();

  // B of the first GEMM: head g, the dims that this lane has of keys.
  uint4 queries[kTokens][2] = {};
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    const int position = first_position + token;
    if (token >= count || position < 0) continue;
    const int64_t row = static_cast<int64_t>(sequence) * p.q_len + tile * kTokens + token;
    const auto* from =
        reinterpret_cast<const uint4*>(p.query + row * p.query_stride + (head * kDecodeGroup + g) * kDecodeHead);
    queries[token][0] = from[t];
    queries[token][1] = from[4 + t];
    decode::rope(p, position, t, queries[token]);
  }

  decode::State states[kTokens];
  for (int i = 0; i < mine; ++i) {
    const int chunk = begin + warp + kDecodeWarps * i, page = next_page;
    decode::Chunk<kFp8> now = next;
    next = {};
    if (i + 1 < mine) {
      next = load(i + 1, next_page);
    } else if (p.key != nullptr && (chunk + 1) * kDecodeChunk > first_new) {  // in a warp's last chunk, if anywhere
      const int64_t first_token = static_cast<int64_t>(sequence) * p.q_len;
      pages.append(p, now, page, chunk, first_new, length, first_token, head, tile == 0, g, t);
    }
    uint4 keys[2][2];
    uint32_t values[4][4];
    decode::dequantize<kFp8>(now, keys, values);
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      float scores[4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        auto words = [&](const uint4& eight) { return reinterpret_cast<const uint32_t*>(&eight) + 2 * (step % 2); };
        const uint32_t *low_row = words(keys[0][step / 2]), *high_row = words(keys[1][step / 2]);
        const uint32_t* query = words(queries[token][step / 2]);
        const uint32_t a[4] = {low_row[0], high_row[0], low_row[1], high_row[1]}, b[2] = {query[0], query[1]};
        ptx::mma_16816<true>(scores, a, b, scores);
      }
      const int own = first_position + token;
#pragma unroll
      for (int element = 0; element < 4; ++element) {
        const int position = chunk * kDecodeChunk + decode::key_row(g, element / 2);
        const bool seen = position <= own && (p.window_left < 0 || position >= own - p.window_left);
        scores[element] = seen ? scores[element] * p.score_scale : kMinusInfinity;
      }
      states[token].add(scores, values);
    }
  }

  // The warps' results to one: a warp has a head, a lane two dims of it.
  const int own_head = head * kDecodeGroup + warp;
  const float sink = p.sinks != nullptr ? p.sinks[own_head] * kLog2E : kMinusInfinity;
  const int64_t first_row = static_cast<int64_t>(sequence) * p.q_len + tile * kTokens;
  auto write = [&](int token, const decode::Merged& merged) {
    __nv_bfloat16* row = p.out + ((first_row + token) * p.num_kv_heads * kDecodeGroup + own_head) * kDecodeHead;
    // In a sequence shorter than the call's tokens the first have no position, and see none; others see their own.
    reinterpret_cast<uint32_t*>(row)[lane] = first_position + token < 0 ? 0 : merged.finish(sink, p.value_scale);
  };
  DecodePartial* partials = p.partials + static_cast<int64_t>(group) * p.splits * kTokens;
#pragma unroll
  for (int token = 0; token < kTokens; ++token) {
    if (token >= count) break;
    const decode::State& state = states[token];
    if (token > 0) __syncthreads();  // the token before has been read
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = state.sum[i];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
      if (g == 0) {
        shared.largest[warp][2 * t + i] = state.largest[i];
        shared.sum[warp][2 * t + i] = sum;
      }
      auto* row = reinterpret_cast<float4*>(&shared.output[warp][2 * t + i][8 * g]);
      row[0] = make_float4(state.output[0][i], state.output[0][2 + i], state.output[1][i], state.output[1][2 + i]);
      row[1] = make_float4(state.output[2][i], state.output[2][2 + i], state.output[3][i], state.output[3][2 + i]);
    }
    __syncthreads();
    decode::Merged merged;
#pragma unroll
    for (int from = 0; from < kDecodeWarps; ++from) {
      merged.add(shared.largest[from][warp], shared.sum[from][warp],
                 *reinterpret_cast<const float2*>(&shared.output[from][warp][2 * lane]));
    }
    if (splits == 1) {
      write(token, merged);
      continue;
    }
    DecodePartial& partial = partials[split * kTokens + token];
    *reinterpret_cast<float2*>(&partial.output[warp][2 * lane]) = merged.output;
    if (lane == 0) {
      partial.largest[warp] = merged.largest;
      partial.sum[warp] = merged.sum;
    }
  }
  if (splits == 1) return;

  __syncthreads();
  if (thread == 0) {
    const bool last = ptx::is_last_to_arrive(p.arrivals + group, splits);
    if (last) p.arrivals[group] = 0;  // for the next launch
    shared.is_last = last;
  }
  __syncthreads();
  if (!shared.is_last) return;
  for (int token = 0; token < count; ++token) {
    decode::Merged merged;
#pragma unroll 4
    for (int from = 0; from < splits; ++from) {
      const DecodePartial& partial = partials[from * kTokens + token];
      merged.add(__ldcg(&partial.largest[warp]), __ldcg(&partial.sum[warp]),
                 __ldcg(reinterpret_cast<const float2*>(&partial.output[warp][2 * lane])));
    }
    write(token, merged);
  }
}

// A workspace, for any launch on a device of `sms`: arrivals, zero, then partials. Blocks that share a sequence's
// positions are no more than kDecodeBlocksPerSm for each SM; where there are more, no two of them share.
inline int64_t decode_arrival_bytes(int sms) {
  const int64_t bytes = static_cast<int64_t>(sms) * kDecodeBlocksPerSm * static_cast<int64_t>(sizeof(int));
  return (bytes + kDecodeAlignment - 1) / kDecodeAlignment * kDecodeAlignment;
}

inline int64_t decode_workspace_bytes(int sms) {
  return decode_arrival_bytes(sms) + static_cast<int64_t>(sms) * kDecodeBlocksPerSm * kDecodeMaxTokens *
                                         static_cast<int64_t>(sizeof(DecodePartial));
}

namespace decode {

template <int kTokens, bool kFp8>
Status run(DecodeAttentionParams params, void* workspace, const LaunchOptions& options) {
  const int groups = params.num_sequences * params.num_kv_heads * ((params.q_len + kTokens - 1) / kTokens);
  params.splits = std::max(options.device_sms * kDecodeBlocksOfTokens<kTokens> / groups, 1);
  params.arrivals = static_cast<int*>(workspace);
  params.partials =
      reinterpret_cast<DecodePartial*>(static_cast<char*>(workspace) + decode_arrival_bytes(options.device_sms));
  const cudaError_t error =
      launch_kernel(decode_attention_kernel<kTokens, kFp8>, params, groups * params.splits, kDecodeThreads, 0, options);
  return {error, "launch of decode attention"};
}

template <bool kFp8>
Status run(const DecodeAttentionParams& params, void* workspace, const LaunchOptions& options) {
  if (params.q_len == 1) return run<1, kFp8>(params, workspace, options);
  if (params.q_len == 2) return run<2, kFp8>(params, workspace, options);
  return run<kDecodeMaxTokens, kFp8>(params, workspace, options);
}

}  // namespace decode

// Sizes, strides and pointers have been checked; `workspace` has decode_workspace_bytes(), its arrivals zero.
inline Status run_decode_attention(const DecodeAttentionParams& params, bool fp8_cache, void* workspace,
                                   const LaunchOptions& options) {
  if (params.num_sequences == 0 || params.num_kv_heads == 0) return {};
  return fp8_cache ? decode::run<true>(params, workspace, options) : decode::run<false>(params, workspace, options);
}

}  // namespace flashinfer::sm12x
