// SPDX-License-Identifier: Apache-2.0
//
// What a launch of the streamed layer is told, and the shape of its blocks.
#pragma once

#include "../scheduler/routing.cuh"
#include "grouped_gemm_params.cuh"
#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/sm12x_layout_sfa_utils.h"

namespace flashinfer::sm12x {

constexpr int kSlabRows = 16;                            // the M side of an MMA
constexpr int kMaxGroups = 4;  // FC1: 32 up rows lie within one chunk of scales, 32 gate rows too
constexpr int kMaxStreamStages = 16;
constexpr int kStreamEntries = 1024;  // (token, slot) pairs of a launch
constexpr int kWordBytes = weight_bytes(kScaleChunkElements);  // packed weights of a row that share a scale word

// One GEMM of the layer as a stream of stages: some slabs of 16 weight rows, all of K.
struct StreamedGemm {
  CUtensorMap scales;      // words [expert x row chunk][word along K][128], a box is one piece of every word of K
  const uint8_t* weights;  // [E][rows][k / 2]; FC1: up rows, then gate rows
  int64_t weight_pitch;    // bytes of an expert
  int scale_pitch;         // row chunks of an expert
  int out;                 // outputs of an expert: FC1 inter, FC2 hidden
  int k;
  int row_bytes;
  int words;                  // of 128 along K
  int group_warps;            // MMA warps that share K, `Config::kWords` words each
  int groups;                 // of warps, and slabs of a stage: 1, 2 or 4
  int units;                  // stages that one token tile needs, all of them whole
  int piece_rows;             // of 32 that a scale piece holds: those of a stage's (FC1: up) rows. A power of two
  int scale_offset;           // in a stage, behind the weights. FC1: pieces of up rows, then of gate rows
  int bias_offset;            // in a stage, behind the scales. FC1: biases of up rows, then of gate rows
  int tail_offset;            // in a stage, behind the biases: partial sums of lanes whose block of 32 lies beyond K
  const float* global_scale;  // [E] or null: 1
  const void* bias;           // [E, FC1: 2 * inter, FC2: hidden] or null; 16-byte aligned
  ScalarType bias_type;

  FLASHINFER_SM12X_HOST_DEVICE int bias_bytes() const { return bias_type == ScalarType::kF32 ? 4 : 2; }
  // Bytes of a stage's scale pieces, of one copy.
  FLASHINFER_SM12X_HOST_DEVICE int piece_bytes() const { return words * piece_rows * 16; }
};

struct StreamedLayerParams {
  StreamedGemm gemm[2];
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

// A slab's K is shared out among warps, kWords words of 128 to each, and a warp keeps its part of the tile's tokens in
// registers: 16 of them for 8 tokens and one word.
template <Activation kActivation_, int kTokenTile_, int kWords_, int kMmaWarps_>
struct StreamConfig {
  static constexpr Activation kActivation = kActivation_;
  static constexpr int kTokenTile = kTokenTile_;
  static constexpr int kWords = kWords_;
  static constexpr int kMmaWarps = kMmaWarps_;
  static constexpr int kKeeperWarps = 4;  // fill stages and finish outputs
  static constexpr int kThreads = 32 * (kMmaWarps + kKeeperWarps);
  static constexpr int kTokenSteps = kTokenTile / 8;
  // A tile of more than eight tokens is wide: a unit of it takes this many fifths of the time of others (on an H200).
  static constexpr int kWideFifths = 6;

  static_assert(kTokenTile == 8 || kTokenTile == 16, "partial sums replace a lane's two rows of weights");
};

// Outputs that a slab computes: FC1's hold 8 up rows and their gate rows.
FLASHINFER_SM12X_HOST_DEVICE constexpr int slab_outputs(bool fc1) { return fc1 ? kSlabRows / 2 : kSlabRows; }

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
