// SPDX-License-Identifier: Apache-2.0
//
// A persistent split-K GEMM for few tokens: its sizes, how the warps of a block share K, and the layout of a stage
// of the pipeline. dense.cuh and fused_moe.cuh add the source of tokens and the destination of sums.
//
// DenseParams and FusedMoeParams are the kernel parameters of a dense layer and of a MoE layer.
#pragma once

#include <cuda.h>

#include "../launch.h"
#include "../tile/params.h"
#include "../types.h"

namespace flashinfer::sm12x {

constexpr int kFragmentRows = 16;  // the M side of an MMA
constexpr int kMaxGroups = 4;  // a work tile's rows of a part, at most 64, lie in one scale chunk
constexpr int kMaxSplitKStages = 16;
constexpr int kEpilogueWarps = 4;  // of a thread block: fill stages and finish outputs
constexpr int kNarrowTokens = 8;  // the N side of an MMA

// Weights are one matrix or several, row by row. An M16 fragment is 16 rows and all of K. A group of MMA warps
// multiplies an M16 fragment, each of its warps a range of K. A work tile is one M16 fragment for each group. It fills
// one stage of the pipeline, or, where an M16 fragment is large, `slices` stages: each holds a range of K, for the
// warps that multiply it.
//
// A matrix has one part, or two of equal size, up and gate. Then an M16 fragment takes 8 rows of each, so that a lane
// has up and gate of one output.
struct SplitKGemm {
  CUtensorMap scales;  // [matrices x row chunks][scale words along K][128 words]; a box has all scale words of a stage
  const uint8_t* weights;  // [matrices][parts][out][row_bytes]
  int64_t weight_pitch;  // bytes of a matrix
  int scale_pitch;  // row chunks of a matrix
  int parts;
  int out;  // rows of a part
  int k;
  int row_bytes;
  int k_blocks;  // of a row
  int scale_words;  // of a row
  int k_warps;  // MMA warps that share K, `Shape::kKBlocks` K blocks each
  int stage_warps;  // of those, the warps that share a stage
  int stage_k_blocks;
  int stage_scale_words;
  int slices;  // stages of a work tile
  int slice_bytes;  // of a row in a stage; the last slice may have fewer
  int groups;  // of MMA warps, and M16 fragments of a work tile: 1, 2 or 4
  int work_tiles;  // that one tile of tokens needs
  int pitch;  // bytes from row to row of a stage: row_bytes, or padded, or of a slice, where rows are copied one by one
  uint32_t high_row_offset;  // bytes from row g of an M16 fragment to row g + 8
  int scale_box_rows;  // rows of a work tile's part, at most the chunk's quarter of 32; a power of two
  int scale_offset;  // in a stage, behind the weights: a scale box for each part
  int bias_offset;  // in a stage, behind the scales: biases of each part
  int tail_offset;  // in a stage, behind the biases: partial sums of lanes whose scale block lies beyond K
  const float* global_scale;  // [matrices] or null: 1
  const void* bias;  // [matrices][parts][out] or null
  ScalarType bias_type;

  FLASHINFER_SM12X_HOST_DEVICE constexpr int fragment_outputs() const {
    return parts == 2 ? kFragmentRows / 2 : kFragmentRows;
  }
  // Of a work tile
  FLASHINFER_SM12X_HOST_DEVICE constexpr int part_rows() const { return fragment_outputs() * groups; }
  FLASHINFER_SM12X_HOST_DEVICE int bias_bytes() const { return bias_type == ScalarType::kF32 ? 4 : 2; }
  // Bytes of a scale box, which is one copy.
  FLASHINFER_SM12X_HOST_DEVICE constexpr int scale_box_bytes() const { return stage_scale_words * scale_box_rows * 16; }
};

// Epilogue warps that keep a pipeline of such work tiles filled; never more than its work tiles. With more, a warp
// could wait for a phase of a stage's `empty` before another warp's work tile there has completed the phase before it,
// whose parity it would take for its own.
FLASHINFER_SM12X_HOST_DEVICE int epilogue_warps_of(int stages, int slices) {
  return stages / slices < kEpilogueWarps ? stages / slices : kEpilogueWarps;
}

// The parameters that are fixed at compile time. Each warp of a group takes kKBlocks K blocks of an M16 fragment and
// keeps that range of the tile's tokens in registers: 16 of them for 8 tokens and one K block.
//
// kSliced_: a GEMM of one matrix of one part with any number of rows; a work tile may fill several stages. Otherwise
// every work tile is whole, fills one stage and brings its biases.
template <Element kWeights_, int kBlockN_, int kKBlocks_, int kMmaWarps_, bool kSliced_>
struct SplitKShape {
  static constexpr bool kSliced = kSliced_;
  static constexpr Element kWeights = kWeights_;
  static constexpr int kBlockN = kBlockN_;
  static constexpr int kKBlocks = kKBlocks_;
  static constexpr int kMmaWarps = kMmaWarps_;
  static constexpr int kThreads = 32 * (kMmaWarps + kEpilogueWarps);
  static constexpr int kTokenSteps = kBlockN / kNarrowTokens;
  static constexpr int kBlockBytes = block_bytes(kWeights);
  static constexpr int kKBlockBytes = k_block_bytes(kWeights);
  static constexpr int kScaleWords = scale_words_of_k_block(kWeights);
  // MXFP6's K blocks have two planes; the first is laid out as MXFP4 is.
  static constexpr bool kTwoPlanes = kWeights == Element::kE2m3;
  static constexpr int kFirstPlaneBytes = kTwoPlanes ? kNibbleBytes : kBlockBytes;  // of a scale block

  static constexpr FLASHINFER_SM12X_HOST_DEVICE bool two_parts(const SplitKGemm& g) { return !kSliced && g.parts == 2; }

  static_assert(kBlockN == 8 || kBlockN == 16, "partial sums replace a lane's two rows of weights");
};

// How such a GEMM runs on warps that take `warp_k_blocks` K blocks each. make() returns no groups if K is too long.
struct SplitKGemmPlan {
  Element format;
  int warp_k_blocks;
  int mma_warps;
  int block_n;
  int parts;
  int out;
  int k;
  int slices;
  bool sliced;  // SplitKShape::kSliced

  constexpr SplitKGemm make() const {
    SplitKGemm g = {};
    g.parts = parts;
    g.out = out;
    g.k = k;
    g.row_bytes = row_bytes(format, k);
    g.k_blocks = k_blocks_of(k);
    g.scale_words = sm12x::scale_words(format, k);
    g.k_warps = ceil_div(g.k_blocks, warp_k_blocks);
    g.stage_warps = ceil_div(g.k_warps, slices);
    g.slices = ceil_div(g.k_warps, g.stage_warps);
    g.stage_k_blocks = g.slices == 1 ? g.k_blocks : g.stage_warps * warp_k_blocks;
    g.stage_scale_words = g.slices == 1 ? g.scale_words : g.stage_k_blocks * scale_words_of_k_block(format);
    g.slice_bytes = g.slices == 1 ? g.row_bytes : g.stage_k_blocks * k_block_bytes(format);
    for (int groups = g.slices == 1 ? kMaxGroups : 1; groups > 0 && g.groups == 0; groups /= 2) {
      const bool whole = sliced || out % (groups * g.fragment_outputs()) == 0;
      if (groups * g.stage_warps * g.slices <= mma_warps && whole) g.groups = groups;
    }
    if (g.groups == 0) return g;
    g.work_tiles = ceil_div(out, g.part_rows());
    g.weight_pitch = static_cast<int64_t>(parts) * out * g.row_bytes;
    g.scale_pitch = ceil_div(parts * out, kScaleChunkRows);
    g.pitch = g.row_bytes;
    // Shared memory serves eight lanes together: four scale blocks of two rows. Where whole rows would conflict in its
    // 128-byte period, a pitch sets them apart: by half a period where lanes take 16 bytes of a block, by 16 bytes
    // where they take 32 in two loads.
    const bool sixteen = lanes_take_eights(format);
    if (sliced && (g.slices > 1 || !sixteen || g.row_bytes % 128 == 0)) {
      g.pitch = round_up(g.stage_k_blocks * k_block_bytes(format), 128) + (sixteen ? 64 : 16);
    }
    g.high_row_offset = static_cast<uint32_t>((parts == 2 ? g.part_rows() : 8) * g.pitch);
    g.scale_box_rows = g.part_rows() < 32 ? g.part_rows() : 32;
    g.scale_offset = round_up(kFragmentRows * g.groups * g.pitch, 128);
    g.bias_offset = g.scale_offset + parts * g.scale_box_bytes();
    g.tail_offset = g.bias_offset;
    if (!sliced) g.tail_offset += kFragmentRows * g.groups * static_cast<int>(sizeof(float));
    g.tail_offset = round_up(g.tail_offset, 16);
    return g;
  }

  constexpr int stage_bytes(const SplitKGemm& g) const {
    const int tail = g.k_blocks * kKBlock > g.k ? g.groups * block_n / kNarrowTokens * 32 * 16 : 0;
    return round_up(g.tail_offset + tail, 128);
  }
};

// A GEMM of the fused MoE kernel: FC1, of two parts if it has gate rows, or FC2. `block_k`: elements along K that a
// warp takes.
constexpr SplitKGemmPlan fused_moe_gemm_plan(Element weights, int block_k, int mma_warps, int block_n, int parts,
                                             int out, int k) {
  return {weights, block_k / kKBlock, mma_warps, block_n, parts, out, k, 1, false};
}

// 128x4 scales as [matrices x row chunks][scale words along K][128 words]; a box has the scale words of a stage for
// `scale_box_rows` of the 32 rows of each quarter of a chunk.
inline Status encode_scales(const uint8_t* scales, int matrices, SplitKGemm* g) {
  const cuuint64_t words = static_cast<cuuint64_t>(g->scale_words);
  const cuuint64_t sizes[3] = {kScaleChunkRows, words, static_cast<cuuint64_t>(matrices) * g->scale_pitch};
  const cuuint64_t strides[2] = {kScaleChunkBytes, words * kScaleChunkBytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(g->scale_box_rows * kScaleChunkBlocks),
                             static_cast<cuuint32_t>(g->stage_scale_words), 1};
  return encode_tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT32, scales, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE, "cuTensorMapEncodeTiled refused the scales", &g->scales);
}

// RMSNorm of a dense layer's tokens, x + addend, in front of the product. MMAs multiply the sums times the norm's
// weight, rounded to bfloat16. The epilogue applies a token's scale, 1 / sqrt(mean(sum^2) + epsilon), so that no MMA
// waits for it. Up to eight bfloat16 tokens.
struct RowNorm {
  const void* weight;  // bfloat16 [k], or null: no norm
  const void* addend;  // bfloat16 [num_tokens, k], or null
  void* sum;  // bfloat16 [num_tokens, k]: rounded, with an addend; else null
  float epsilon;
};

// Shared memory of a dense layer's block beside the pipeline: barriers, and for a norm the sums of squares of a narrow
// tile's tokens, one from each warp that shares K, [warps][8].
struct DenseStorage {
  static constexpr int kMostWarps = 12;
  static constexpr int kSquares = 8 * 2 * kMaxSplitKStages;
  static constexpr int kPipeline = kSquares + 4 * kMostWarps * kNarrowTokens;
};
static_assert(DenseStorage::kPipeline % 128 == 0);

struct DenseParams {
  SplitKGemm gemm;
  TokenRows tokens;
  int num_tokens;
  bool weights_first;  // weights do not depend on the launch in front: they may be read before it ends
  RowNorm norm;
  L2Prefetch next;
  StoreEpilogue epilogue;  // its output may be null where there are ranks
  // [num_tokens][blocks][epilogue warps], or null: rank of the largest output that each epilogue warp has seen.
  uint64_t* ranks;
  int stages;
  int stage_bytes;
};

constexpr int kFusedMoeRoutedRows = 1536;  // most routed rows of a launch
// Most tiles of tokens: of each expert the last one may hold a single routed row.
constexpr int kFusedMoeTiles = kMaxLocalExperts + (kFusedMoeRoutedRows - kMaxLocalExperts) / kNarrowTokens;
constexpr int kFewRoutedRows = 32;  // most routed rows that one warp routes, a lane each

// A router's logits, by which the layer itself chooses a token's experts, and their weights (choose_experts).
struct RouterLogits {
  const float* logits;  // [num_tokens, num_experts_total], or null
  const bool* is_padding;  // [num_tokens], or null: rows that go to no expert
  int num_experts_total;
};

struct FusedMoeParams {
  SplitKGemm gemm[2];  // FC1: up rows, then gate rows if there are any
  const uint8_t* tokens;  // W4A16: bfloat16 [num_tokens, k]; W4A8: packed, [K blocks][num_tokens][kPackedRowBytes]
  const int32_t* ids;  // [routed_rows] global expert ids
  const float* routing_weights;  // [routed_rows] or null: 1
  RouterLogits router;  // in place of ids and routing_weights, for kFewRoutedRows at most
  int num_tokens;
  int num_routed_rows;
  int top_k;
  int first_expert;
  int num_experts;
  ActivationOfExperts activation;
  float* intermediate;  // [routed_rows, inter], in permuted order
  float* partial_outputs;  // [routed_rows, hidden], by routed row
  unsigned* barrier_counters;  // [2]: 0 with FC1, which block 0 makes 0 again; any number with FC2
  L2Prefetch next;
  void* output;  // [tokens, hidden]
  ScalarType output_type;
  int stages;
  int stage_bytes;
};

// Shared memory of a block: fixed parts, then the pipeline, which takes the rest.
struct FusedMoeStorage {
  static constexpr int kBlockRangeBytes = 12;
  static constexpr int kBarriers = 0;  // full, empty, then the single ones
  static constexpr int kTiles = kBarriers + 8 * (2 * kMaxSplitKStages + 2);
  static constexpr int kOrder = kTiles + 4 * kFusedMoeTiles;
  static constexpr int kBlockRanges = kOrder + 2 * kFusedMoeRoutedRows;
  static constexpr int kPipeline = round_up(kBlockRanges + 2 * kBlockRangeBytes, 128);
  // Ids and weights of a few routed rows, behind their order.
  static constexpr int kFewIds = kOrder + 2 * kFewRoutedRows;
  static constexpr int kFewWeights = kFewIds + 4 * kFewRoutedRows;
  static_assert(kFewWeights + 4 * kFewRoutedRows <= kBlockRanges);
  static constexpr int kRouting =
      2 * 4 * kMaxLocalExperts + 4 * kFusedMoeRoutedRows;  // bytes of the pipeline that routing borrows
};

}  // namespace flashinfer::sm12x
