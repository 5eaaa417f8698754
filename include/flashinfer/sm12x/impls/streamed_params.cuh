// SPDX-License-Identifier: Apache-2.0
//
// What a launch of the streamed layer is told, and the shape of its blocks.
#pragma once

#include "streamed_gemm_params.cuh"

namespace flashinfer::sm12x {

constexpr int kStreamEntries = 1024;  // (token, slot) pairs of a launch

struct StreamedLayerParams {
  StreamedGemm gemm[2];  // FC1: up rows, then gate rows
  const uint8_t* tokens;         // [words][num_tokens][kArrangedRowBytes] (token_blocks.cuh)
  const int32_t* ids;            // [entries] global expert ids
  const float* routing_weights;  // [entries] or null: 1
  int num_tokens;
  int num_entries;
  int top_k;
  int first_expert;
  int num_experts;
  const float* alpha;  // [E] or null: 1, 0, infinity
  const float* beta;
  const float* limit;
  float* act;             // [entries, inter], in expert order
  float* contributions;   // [entries, hidden], by entry
  unsigned* blocks_done;  // [2] with FC1, with FC2; zeroed by moe_arrange_kernel
  void* output;           // [tokens, hidden]
  ScalarType output_type;
  int stages;
  int stage_bytes;
};

template <Activation kActivation_, int kTokenTile, int kWords, int kMmaWarps>
struct StreamConfig : StreamShape<WeightFormat::kMxfp4, kTokenTile, kWords, kMmaWarps, false> {
  static constexpr Activation kActivation = kActivation_;
  // A tile of more than eight tokens is wide: a unit of it takes this many fifths of the time of others (on an H200).
  static constexpr int kWideFifths = 6;
};

// Named barriers of a block; 0 is __syncthreads.
constexpr int kKeeperBarrier = 1;  // the keeper warps
constexpr int kRoutedBarrier = 2;  // all: keepers arrive, MMA warps wait

// Shared memory of a block: fixed parts, then the ring, which takes the rest.
struct StreamStorage {
  static constexpr int kBarriers = 0;  // full, done, then the single ones
  static constexpr int kTiles = kBarriers + 8 * (2 * kMaxStreamStages + 2);
  static constexpr int kOrder = kTiles + 4 * kStreamEntries;
  static constexpr int kShares = kOrder + 2 * kStreamEntries;
  static constexpr int kRing = round_up(kShares + 2 * 12, 128);
  static constexpr int kRouting =
      2 * 4 * kMaxLocalExperts + 4 * kStreamEntries;  // bytes of the ring that routing borrows
};

}  // namespace flashinfer::sm12x
