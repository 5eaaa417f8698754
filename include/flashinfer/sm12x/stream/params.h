// SPDX-License-Identifier: Apache-2.0
//
// A GEMM for few tokens as a stream of weights: its sizes, how the warps of a block share K, and what a stage of the
// ring holds. Who uses it adds where tokens come from and where sums go.
//
// DenseParams and StreamedLayerParams are what a launch of a dense layer and of a MoE layer is told.
#pragma once

#include <cuda.h>

#include "../launch.h"
#include "../tile/params.h"
#include "../types.h"

namespace flashinfer::sm12x {

constexpr int kSlabRows = 16;  // the M side of an MMA
constexpr int kMaxGroups = 4;  // at most 64 rows of a part, of one chunk of scales
constexpr int kMaxStreamStages = 16;
constexpr int kEpilogueWarps = 4;  // of a block: fill stages and finish outputs
constexpr int kNarrowTokens = 8;  // the N side of an MMA

// Weights are matrices of whole rows, one or many; a slab is 16 rows, all of K. A unit of work is the slabs of all
// groups of warps; it is one stage of the ring, or, where a slab is large, `slices` of them along K, each for the warps
// whose K it holds.
//
// A matrix has one part, or two of equal size, of which a slab takes 8 rows each: a lane has up and gate of a SwiGLU.
struct StreamedGemm {
  CUtensorMap scales;  // words [matrix x row chunk][word along K][128], a box is one piece of every word of a stage
  const uint8_t* weights;  // [matrices][parts][out][row_bytes]
  int64_t weight_pitch;  // bytes of a matrix
  int scale_pitch;  // row chunks of a matrix
  int parts;
  int out;  // rows of a part
  int k;
  int row_bytes;
  int words;  // of 128 along K
  int scale_words;  // of four scales along K
  int k_warps;  // MMA warps that share K, `Shape::kWords` words each
  int stage_warps;  // of them, those that share a stage
  int stage_words;  // of a stage
  int stage_scale_words;
  int slices;  // stages of a unit
  int slice_bytes;  // of a row in a stage; the last slice's may be fewer
  int groups;  // of warps, and slabs of a unit: 1, 2 or 4
  int units;  // that one tile of tokens needs
  int pitch;  // bytes from row to row of a stage: row_bytes, or padded, or of a slice, where rows are copied one by one
  uint32_t next_weights;  // bytes from row g of a slab to row g + 8
  int piece_rows;  // of 32 that a scale piece holds: those of a unit's part. A power of two
  int scale_offset;  // in a stage, behind the weights: a piece for each part
  int bias_offset;  // in a stage, behind the scales: biases of each part
  int tail_offset;  // in a stage, behind the biases: partial sums of lanes whose block of 32 lies beyond K
  const float* global_scale;  // [matrices] or null: 1
  const void* bias;  // [matrices][parts][out] or null
  ScalarType bias_type;

  FLASHINFER_SM12X_HOST_DEVICE constexpr int slab_outputs() const { return parts == 2 ? kSlabRows / 2 : kSlabRows; }
  FLASHINFER_SM12X_HOST_DEVICE constexpr int part_rows() const { return slab_outputs() * groups; }  // of a unit
  FLASHINFER_SM12X_HOST_DEVICE int bias_bytes() const { return bias_type == ScalarType::kF32 ? 4 : 2; }
  // Bytes of a stage's scale pieces, of one copy.
  FLASHINFER_SM12X_HOST_DEVICE constexpr int piece_bytes() const { return stage_scale_words * piece_rows * 16; }
};

// Warps that keep a ring of such units filled. Never more than stages: a warp could wait at a stage for a phase of
// `done` before another warp's unit there has completed the one in front, whose parity would be taken for it.
FLASHINFER_SM12X_HOST_DEVICE int epilogue_warps_of(int stages, int slices) {
  return stages / slices < kEpilogueWarps ? stages / slices : kEpilogueWarps;
}

// The parameters that are fixed at compile time. A slab's K is shared out among warps, kWords words of 128 to each, and
// a warp keeps its part of the tile's tokens in registers: 16 of them for 8 tokens and one word.
//
// kSliced_: one matrix of one part, of any number of rows, whose units may be several stages; else units are whole, of
// one stage each, with their biases.
template <Element kWeights_, int kTokenTile_, int kWords_, int kMmaWarps_, bool kSliced_>
struct StreamShape {
  static constexpr bool kSliced = kSliced_;
  static constexpr Element kWeights = kWeights_;
  static constexpr int kTokenTile = kTokenTile_;
  static constexpr int kWords = kWords_;
  static constexpr int kMmaWarps = kMmaWarps_;
  static constexpr int kThreads = 32 * (kMmaWarps + kEpilogueWarps);
  static constexpr int kTokenSteps = kTokenTile / kNarrowTokens;
  static constexpr int kBlockBytes = block_bytes(kWeights);
  static constexpr int kWordBytes = word_bytes(kWeights);
  static constexpr int kScaleWords = words_of_scales(kWeights);  // of a word of 128
  // MXFP6's blocks are in two planes, of which the first is laid out as MXFP4 is.
  static constexpr bool kTwoPlanes = kWeights == Element::kE2m3;
  static constexpr int kFirstPlaneBytes = kTwoPlanes ? kNibbleBytes : kBlockBytes;  // of a block

  static constexpr FLASHINFER_SM12X_HOST_DEVICE bool two_parts(const StreamedGemm& g) {
    return !kSliced && g.parts == 2;
  }

  static_assert(kTokenTile == 8 || kTokenTile == 16, "partial sums replace a lane's two rows of weights");
};

// How such a stream runs on warps of `words` words each; no groups: K is too long for them.
struct StreamedGemmPlan {
  Element format;
  int words;
  int mma_warps;
  int token_tile;
  int parts;
  int out;
  int k;
  int slices;
  bool sliced;  // StreamShape::kSliced

  constexpr StreamedGemm make() const {
    StreamedGemm g = {};
    g.parts = parts;
    g.out = out;
    g.k = k;
    g.row_bytes = row_bytes(format, k);
    g.words = scale_words(k);
    g.scale_words = sm12x::scale_words(format, k);
    g.k_warps = ceil_div(g.words, words);
    g.stage_warps = ceil_div(g.k_warps, slices);
    g.slices = ceil_div(g.k_warps, g.stage_warps);
    g.stage_words = g.slices == 1 ? g.words : g.stage_warps * words;
    g.stage_scale_words = g.slices == 1 ? g.scale_words : g.stage_words * words_of_scales(format);
    g.slice_bytes = g.slices == 1 ? g.row_bytes : g.stage_words * word_bytes(format);
    for (int groups = g.slices == 1 ? kMaxGroups : 1; groups > 0 && g.groups == 0; groups /= 2) {
      const bool whole = sliced || out % (groups * g.slab_outputs()) == 0;
      if (groups * g.stage_warps * g.slices <= mma_warps && whole) g.groups = groups;
    }
    if (g.groups == 0) return g;
    g.units = ceil_div(out, g.part_rows());
    g.weight_pitch = static_cast<int64_t>(parts) * out * g.row_bytes;
    g.scale_pitch = ceil_div(parts * out, kScaleChunkRows);
    g.pitch = g.row_bytes;
    // Eight lanes, two rows of four blocks, are served together by shared memory. Where whole rows do not lie well in
    // its 128-byte period, they are set apart: by half of it where lanes take 16 bytes of a block, by 16 where they
    // take 32 and leave such gaps.
    const bool sixteen = lanes_take_eights(format);
    if (sliced && (g.slices > 1 || !sixteen || g.row_bytes % 128 == 0)) {
      g.pitch = round_up(g.stage_words * word_bytes(format), 128) + (sixteen ? 64 : 16);
    }
    g.next_weights = static_cast<uint32_t>((parts == 2 ? g.part_rows() : 8) * g.pitch);
    g.piece_rows = g.part_rows() < 32 ? g.part_rows() : 32;
    g.scale_offset = round_up(kSlabRows * g.groups * g.pitch, 128);
    g.bias_offset = g.scale_offset + parts * g.piece_bytes();
    g.tail_offset = g.bias_offset;
    if (!sliced) g.tail_offset += kSlabRows * g.groups * static_cast<int>(sizeof(float));
    g.tail_offset = round_up(g.tail_offset, 16);
    return g;
  }

  constexpr int stage_bytes(const StreamedGemm& g) const {
    const int tail = g.words * kScaleChunkElements > g.k ? g.groups * token_tile / kNarrowTokens * 32 * 16 : 0;
    return round_up(g.tail_offset + tail, 128);
  }
};

// A stream of a MoE layer: FC1, with up and gate rows, or FC2. `k_tile`: what a warp takes of K.
constexpr StreamedGemmPlan moe_stream_plan(Element weights, int k_tile, int mma_warps, int token_tile, bool fc1,
                                           int out, int k) {
  return {weights, k_tile / kScaleChunkElements, mma_warps, token_tile, fc1 ? 2 : 1, out, k, 1, false};
}

// 128x4 scales as words [matrices x row chunks][words along K][128]; a box is `piece_rows` rows of the chunk's 32, all
// words of a stage.
inline Status encode_scales(const uint8_t* scales, int matrices, StreamedGemm* g) {
  const cuuint64_t words = static_cast<cuuint64_t>(g->scale_words);
  const cuuint64_t sizes[3] = {kScaleChunkRows, words, static_cast<cuuint64_t>(matrices) * g->scale_pitch};
  const cuuint64_t strides[2] = {kScaleChunkBytes, words * kScaleChunkBytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(g->piece_rows * kScaleChunkBlocks),
                             static_cast<cuuint32_t>(g->stage_scale_words), 1};
  return encode_tensor_map(CU_TENSOR_MAP_DATA_TYPE_UINT32, scales, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE,
                           CU_TENSOR_MAP_L2_PROMOTION_NONE, "cuTensorMapEncodeTiled refused the scales", &g->scales);
}

// RMSNorm of a dense layer's tokens, x + addend, in front of the product. The sums times the norm's weight, rounded to
// bfloat16, are what is multiplied; a token's factor, 1 / sqrt(mean(sum^2) + epsilon), waits for the epilogue, so that
// no MMA waits for it. Up to eight bfloat16 tokens.
struct RowNorm {
  const void* weight;  // bfloat16 [k], or null: no norm
  const void* addend;  // bfloat16 [num_tokens, k], or null
  void* sum;  // bfloat16 [num_tokens, k]: rounded, with an addend; else null
  float epsilon;
};

// Shared memory of a dense layer's block beside the ring: barriers, and the sums of squares that the warps that share K
// have of a narrow tile's tokens, [warps][8].
struct DenseStorage {
  static constexpr int kMostWarps = 12;
  static constexpr int kSquares = 8 * 2 * kMaxStreamStages;
  static constexpr int kRing = kSquares + 4 * kMostWarps * kNarrowTokens;
};
static_assert(DenseStorage::kRing % 128 == 0);

struct DenseParams {
  StreamedGemm gemm;
  TokenRows tokens;
  int num_tokens;
  bool weights_first;  // weights do not depend on the launch in front: they may be read before it ends
  RowNorm norm;
  ReadAhead next;
  StoreEpilogue epilogue;  // its output may be null where there are ranks
  uint64_t*
      ranks;  // [num_tokens][blocks][epilogue warps], or null: of the largest output that each epilogue warp has seen
  int stages;
  int stage_bytes;
};

constexpr int kStreamPairs = 1024;  // (token, slot) pairs of a launch

constexpr int kFewPairs = 32;  // of a launch, that one warp routes, a lane each

// A router's logits, by which the layer itself chooses a token's experts, and their weights (choose_experts).
struct RouterLogits {
  const float* logits;  // [num_tokens, num_experts], or null
  const bool* is_padding;  // [num_tokens], or null: rows that go to no expert
  int num_experts;  // of all ranks
};

struct StreamedLayerParams {
  StreamedGemm gemm[2];  // FC1: up rows, then gate rows
  const uint8_t* tokens;  // W4A16: bfloat16 [num_tokens, k]; W4A8: [words][num_tokens][kPackedRowBytes] (rows/load.cuh)
  const int32_t* ids;  // [pairs] global expert ids
  const float* routing_weights;  // [pairs] or null: 1
  RouterLogits router;  // of kFewPairs at most, in place of both
  int num_tokens;
  int num_pairs;
  int top_k;
  int first_expert;
  int num_experts;
  SwigluOfExperts swiglu;
  float* act;  // [pairs, inter], in expert order
  float* partial_outputs;  // [pairs, hidden], by pair
  unsigned* blocks_done;  // [2]: 0 with FC1, which block 0 makes 0 again; any number with FC2
  ReadAhead next;
  void* output;  // [tokens, hidden]
  ScalarType output_type;
  int stages;
  int stage_bytes;
};

// Shared memory of a block: fixed parts, then the ring, which takes the rest.
struct StreamStorage {
  static constexpr int kBarriers = 0;  // full, done, then the single ones
  static constexpr int kTiles = kBarriers + 8 * (2 * kMaxStreamStages + 2);
  static constexpr int kOrder = kTiles + 4 * kStreamPairs;
  static constexpr int kUnitRanges = kOrder + 2 * kStreamPairs;
  static constexpr int kRing = round_up(kUnitRanges + 2 * 12, 128);
  // Ids and weights of a few pairs, behind their order.
  static constexpr int kFewIds = kOrder + 2 * kFewPairs;
  static constexpr int kFewWeights = kFewIds + 4 * kFewPairs;
  static_assert(kFewWeights + 4 * kFewPairs <= kUnitRanges);
  static constexpr int kRouting =
      2 * 4 * kMaxLocalExperts + 4 * kStreamPairs;  // bytes of the ring that routing borrows
};

}  // namespace flashinfer::sm12x
