// SPDX-License-Identifier: Apache-2.0
//
// The split-K GEMM on the device, for dense.cuh and fused_moe.cuh: the pipeline of stages, the copies that fill a
// stage, the multiply of one M16 fragment, and the sum over the warps that share K.
//
// Lane 4g + t of an MMA warp holds scale block t of a K block, of weight rows g and g + 8 and of tokens g. The order of
// K inside a block is free as long as both operands agree.
#pragma once

#include <type_traits>

#include "../mma/dequantize.cuh"
#include "../ptx/memory.cuh"
#include "../ptx/mma.cuh"
#include "../ptx/sync.cuh"
#include "../rows/scalar.cuh"
#include "params.h"

namespace flashinfer::sm12x {

// A lane's scale block of one token as bfloat16 pairs, in the order of dequantized weights: pair 2q + h is for MMA 2q +
// h of a K block.
using TokenBlock = uint32_t[8][2];

// Elements 8q.. of a block, packed (rows/load.cuh).
__device__ __forceinline__ void set_eight(TokenBlock& to, int q, const uint4& eight) {
  to[2 * q][0] = eight.x;
  to[2 * q][1] = eight.y;
  to[2 * q + 1][0] = eight.z;
  to[2 * q + 1][1] = eight.w;
}

// Makes room for a block behind the others: a loop through which the registers shift is little code, which is fetched
// once and not for every block.
template <int kBlocks>
__device__ __forceinline__ void shift_blocks(TokenBlock* blocks) {
#pragma unroll
  for (int i = 0; i + 1 < kBlocks; ++i) {
#pragma unroll
    for (int v = 0; v < 16; ++v) blocks[i][v / 2][v % 2] = blocks[i + 1][v / 2][v % 2];
  }
}

// Barriers of the stages at the start of a block's shared memory, the pipeline `kOffset` bytes behind it.
template <int kOffset>
struct SplitKPipeline {
  char* base;
  int stages;
  int stage_bytes;

  static constexpr int kBarrierBytes = 8 * 2 * kMaxSplitKStages;
  static_assert(kOffset >= kBarrierBytes && kOffset % 128 == 0, "copies of tensor maps go to multiples of 128 bytes");

  __device__ __forceinline__ uint8_t* stage(int i) const {
    return reinterpret_cast<uint8_t*>(base + kOffset + i * stage_bytes);
  }
  // A stage's copies have landed; its partial sums are complete.
  __device__ __forceinline__ uint64_t* full(int stage) const { return barrier(stage); }
  __device__ __forceinline__ uint64_t* empty(int stage) const { return barrier(kMaxSplitKStages + stage); }

 protected:
  __device__ __forceinline__ uint64_t* barrier(int i) const { return reinterpret_cast<uint64_t*>(base) + i; }
};

// A place in the pipeline, and the parity of the phase that it is in.
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  __device__ __forceinline__ void advance(int steps, int stages) {
    stage += steps;
    while (stage >= stages) {
      stage -= stages;
      parity ^= 1;
    }
  }
};

// Fills a stage with a work tile of a matrix: weights, their scales and biases. One thread calls it when no warp uses
// the stage any more; it arrives at `full`, and the rest of its warp must.
template <class Pipeline>
__device__ __forceinline__ void load_stage(const SplitKGemm& g, const Pipeline& pipeline, int stage, int matrix,
                                           int work_tile) {
  const int rows = g.part_rows(), bytes = rows * g.row_bytes, box_bytes = g.scale_box_bytes();
  const int bias_bytes = g.bias != nullptr ? rows * g.bias_bytes() : 0;
  uint8_t* to = pipeline.stage(stage);
  uint64_t* full = pipeline.full(stage);

  ptx::fence_async_proxy();  // partial sums were written and read where the copies go
  ptx::mbarrier_arrive_expect(full, g.parts * (bytes + box_bytes + bias_bytes));
  for (int part = 0; part < g.parts; ++part) {
    const int row = work_tile * rows + part * g.out;
    ptx::bulk_copy(to + part * bytes, g.weights + matrix * g.weight_pitch + static_cast<int64_t>(row) * g.row_bytes,
                   bytes, full);
    // From the box's first row within a quarter of the chunk: four words, one a quarter, for each row.
    ptx::tensor_copy_3d(to + g.scale_offset + part * box_bytes, &g.scales, (row % 32 & ~(g.scale_box_rows - 1)) * 4, 0,
                        matrix * g.scale_pitch + row / kScaleChunkRows, full);
    if (bias_bytes != 0) {
      const int64_t at = static_cast<int64_t>(matrix) * g.parts * g.out + row;
      ptx::bulk_copy(to + g.bias_offset + part * bias_bytes, static_cast<const uint8_t*>(g.bias) + at * g.bias_bytes(),
                     bias_bytes, full);
    }
  }
}

// The same for a slice of a work tile, of one matrix of one part; row by row where a stage pads rows. One warp calls
// it.
template <class Pipeline>
__device__ __forceinline__ void load_slice(const SplitKGemm& g, const Pipeline& pipeline, int stage, int work_tile,
                                           int slice, int lane) {
  const int rows = g.part_rows(), first = work_tile * rows, valid = min(rows, g.out - first);
  const int bytes = min(g.slice_bytes, g.row_bytes - slice * g.slice_bytes);
  uint8_t* to = pipeline.stage(stage);
  uint64_t* full = pipeline.full(stage);

  // The last work tile: rows that are not there are multiplied too, and never stored.
  for (int i = valid * g.pitch + 16 * lane; i < rows * g.pitch; i += 16 * 32) {
    *reinterpret_cast<uint4*>(to + i) = make_uint4(0, 0, 0, 0);
  }
  // Every lane arrives for what it writes and copies itself: racecheck sees no order otherwise.
  const uint8_t* from = g.weights + static_cast<int64_t>(first) * g.row_bytes + slice * g.slice_bytes;
  const bool whole = g.slices == 1 && g.pitch == g.row_bytes;  // a slice's pitch may be as many bytes by chance
  const bool elected = ptx::elect_one();
  const int lanes_rows = whole ? (elected ? valid : 0) : (valid - lane + 31) / 32;
  ptx::fence_async_proxy();  // partial sums were written and read where the copies go
  ptx::mbarrier_arrive_expect(full, lanes_rows * bytes + (elected ? g.scale_box_bytes() : 0));
  if (elected) {
    ptx::tensor_copy_3d(to + g.scale_offset, &g.scales, (first % 32 & ~(g.scale_box_rows - 1)) * 4,
                        slice * g.stage_scale_words, first / kScaleChunkRows, full);
    if (whole) ptx::bulk_copy(to, from, valid * bytes, full);
  }
  for (int row = lane; !whole && row < valid; row += 32) {
    ptx::bulk_copy(to + row * g.pitch, from + static_cast<int64_t>(row) * g.row_bytes, bytes, full);
  }
}

// Prefetches share `share` of `shares` of what the next launch reads; each producer warp takes one. All lanes
// call.
__device__ __forceinline__ void prefetch_next(const L2Prefetch& next, int share, int shares) {
  const int64_t sixteens = next.bytes / 16;
  const int64_t begin = sixteens * share / shares, end = sixteens * (share + 1) / shares;
  if (begin < end && ptx::elect_one()) {
    ptx::bulk_prefetch_to_l2(static_cast<const uint8_t*>(next.data) + 16 * begin,
                             static_cast<uint32_t>(16 * (end - begin)));
  }
}

// The row of an M16 fragment's eight that MMA row g multiplies. Shared memory serves eight lanes together: four scale
// blocks of two rows. For 16-byte scale blocks, pair rows that lie half the banks' 128-byte period apart, if there are
// any.
template <class Shape>
__device__ __forceinline__ int fragment_row(int g, int pitch) {
  if (!lanes_take_eights(Shape::kWeights)) return g;
  const int sixteens = pitch % 128 / 16;
  if (sixteens % 2 != 0) return (g >> 1) | (g & 1) << 2;  // rows r and r + 4
  if (sixteens % 4 != 0) return (g & 4) | (g & 2) >> 1 | (g & 1) << 1;  // rows r and r + 2
  return g;
}

// Where a lane's two rows of an M16 fragment (g and g + 8 of the MMA) lie in a stage.
template <class Shape>
struct LaneRows {
  int low, high;  // byte offsets of the stage's first M16 fragment
  int next_fragment;  // from an M16 fragment to the next

  __device__ __forceinline__ LaneRows(const SplitKGemm& g, int row) {
    low = row * g.pitch;
    high = low + (Shape::two_parts(g) ? g.part_rows() : 8) * g.pitch;
    next_fragment = g.fragment_outputs() * g.pitch;
  }
};

// The partial sums of a lane replace weights of its own block of K; lanes whose block lies beyond K use the stage's
// tail. Those have read another lane's weights, of their own warp, which is through with them all (__syncwarp).
template <class Shape>
struct PartialPlace {
  static constexpr int kTailStep = 32 * 16;  // bytes of a token step in the tail

  int offset[Shape::kTokenSteps];  // in the stage's first M16 fragment
  int next_fragment;

  // `warp` is one of the stage's warps, `first_k_block` the stage's first.
  __device__ __forceinline__ PartialPlace(const SplitKGemm& g, const LaneRows<Shape>& rows, int first_k_block, int warp,
                                          int lane) {
    const int k_block = warp * Shape::kKBlocks, t = lane % 4;
    const bool within = ((first_k_block + k_block) * kScaleChunkBlocks + t) * kScaleBlock < g.k;
    const int tail = g.tail_offset + lane * 16;
    const int column = k_block * Shape::kKBlockBytes + t * Shape::kFirstPlaneBytes;
    next_fragment = within ? rows.next_fragment : Shape::kTokenSteps * kTailStep;
#pragma unroll
    for (int step = 0; step < Shape::kTokenSteps; ++step) {
      offset[step] = within ? (step == 0 ? rows.low : rows.high) + column : tail + step * kTailStep;
    }
  }
};

// An MMA warp's share of each work tile: kKBlocks K blocks of one M16 fragment.
template <class Shape>
class WarpMma {
  static constexpr int kSteps = Shape::kTokenSteps, kKBlocks = Shape::kKBlocks;
  using Dequantizer = mma::Dequantizer<Shape::kWeights, mma::Saves::kInstructions>;
  using Block = uint32_t[Shape::kBlockBytes / 4];

  // Where a lane finds a K block's operands in the first stage: weights of row g, and their scales without the offset
  // of the row's quarter of the chunk. Those of row g + 8 lie the same distance behind in every K block.
  struct Operands {
    uint32_t weights, scale;
  };

 public:
  static constexpr float kAccumulatorScale = Dequantizer::kAccumulatorScale;

  TokenBlock tokens[kSteps][kKBlocks];

  // Where the lane's operands lie; `first_stage` is its address. Warps beyond those that K and the groups need have no
  // work.
  __device__ __forceinline__ void enter(const SplitKGemm& g, const void* first_stage, int warp, int lane) {
    const unsigned work_tile_warps = Shape::kSliced ? g.stage_warps * g.slices : g.k_warps;
    const unsigned group = static_cast<unsigned>(warp) / work_tile_warps;
    const int group_warp = warp - group * work_tile_warps;
    slice_ = Shape::kSliced ? static_cast<unsigned>(group_warp) / static_cast<unsigned>(g.stage_warps) : 0;
    const int stage_warp = Shape::kSliced ? group_warp - slice_ * g.stage_warps : group_warp;
    const int slice_k_block = Shape::kSliced ? slice_ * g.stage_k_blocks : 0;
    belongs_ = group < static_cast<unsigned>(g.groups);
    works_ = belongs_ && group_warp < g.k_warps;
    first_k_block_ = slice_k_block + stage_warp * kKBlocks;
    const int row = fragment_row<Shape>(lane / 4, g.pitch);
    const uint32_t base = ptx::shared_address(first_stage);
    const LaneRows<Shape> rows(g, row);
    const PartialPlace<Shape> partial(g, rows, slice_k_block, stage_warp, lane);
    first_partial_ = base + partial.offset[0] + group * partial.next_fragment;
    first_row_ = group * g.fragment_outputs();
    second_part_ = Shape::two_parts(g) ? g.out : 0;
    const uint32_t in_box =
        16 * (first_row_ & (g.scale_box_rows - 1));  // where the M16 fragment's first row stands in its quarter
#pragma unroll
    for (int kb = 0; kb < kKBlocks; ++kb) {
      // A lane whose scale block lies beyond K takes the first of this K block, or of the warp's first: its tokens are
      // 0.
      int k_block = stage_warp * kKBlocks + kb;
      if (slice_k_block + k_block >= g.k_blocks) k_block -= kb;
      const int first_block = (slice_k_block + k_block) * kScaleChunkBlocks;
      const int t = (first_block + lane % 4) * kScaleBlock < g.k ? lane % 4 : 0;
      const uint32_t column = base + group * rows.next_fragment + k_block * Shape::kKBlockBytes + rows.low;
      operands_[kb].weights = column + t * Shape::kFirstPlaneBytes;
      if constexpr (Shape::kTwoPlanes) {
        const int blocks = min(kScaleChunkBlocks, g.k / kScaleBlock - first_block);  // of the K block
        const int distance = blocks * kNibbleBytes + t * kPairBytes - t * Shape::kFirstPlaneBytes;
        second_plane_ |= distance << (8 * kb);
      }
      const int scale = t * Shape::kScaleWords;  // the lane's first in the K block
      const int scale_word = k_block * Shape::kScaleWords + scale / kScaleChunkBlocks;
      operands_[kb].scale =
          base + g.scale_offset + in_box + 16 * (scale_word * g.scale_box_rows + row) + scale % kScaleChunkBlocks;
    }
    next_scale_ = Shape::two_parts(g) ? g.scale_box_bytes() : 8 * 16;
  }

  __device__ __forceinline__ bool works() const { return works_; }
  // Whether the warp releases stages of a dense layer. In a MoE layer every warp does.
  __device__ __forceinline__ bool belongs() const { return belongs_; }
  // The stage of a work tile that holds the warp's K.
  __device__ __forceinline__ int slice() const { return slice_; }
  // The warp's first K block.
  __device__ __forceinline__ int first_k_block() const { return first_k_block_; }

  // An M16 fragment of zeros in the stage `stage` bytes behind the first, whose first row is row 0.
  __device__ __forceinline__ void clear(uint32_t stage, uint32_t high_row_offset) const {
    constexpr float kZeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int kb = 0; kb < kKBlocks; ++kb) {
#pragma unroll
      for (int i = 0; i < Shape::kBlockBytes; i += 16) {
        ptx::store_shared_vector(operands_[kb].weights + stage + i, kZeros);
        ptx::store_shared_vector(operands_[kb].weights + stage + high_row_offset + i, kZeros);
      }
#pragma unroll
      for (int i = 0; i < Shape::kScaleWords; ++i) {  // a block's scales
        ptx::store_shared_byte(operands_[kb].scale + stage + quarter(first_row_) + i, 0);
        ptx::store_shared_byte(operands_[kb].scale + stage + next_scale_ + quarter(first_row_ + second_part_) + i, 0);
      }
    }
    __syncwarp();
  }

  // First row of the warp's M16 fragment in a work tile of `work_tile_rows`. Callers ask before they wait for the work
  // tile's stage.
  __device__ __forceinline__ uint32_t first_row(uint32_t work_tile, uint32_t work_tile_rows) const {
    return work_tile * work_tile_rows + first_row_;
  }

  // The warp's M16 fragment from row `row` on, which lies `stage` bytes behind the first stage, with a tile of `count`
  // tokens. Leaves partial sums there. `high_row_offset`: SplitKGemm's; launches of one GEMM need not keep it in a
  // register.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t row, int count, uint32_t high_row_offset) const {
    if (kSteps == 1 || count > kNarrowTokens) {
      multiply_fragment<kSteps>(stage, row, high_row_offset);
    } else {
      multiply_fragment<1>(stage, row, high_row_offset);
    }
  }

 private:
  // Independent accumulators of a token step: one would have each MMA wait for the one before.
  template <int kActive>
  static constexpr int kChains = kActive == 1 ? 2 : 1;

  // A chunk of scales holds rows r, r + 32, r + 64 and r + 96 side by side.
  static __device__ __forceinline__ uint32_t quarter(uint32_t row) { return (row >> 3) & 12; }

  __device__ __forceinline__ void load_weights(int kb, uint32_t stage, uint32_t high_row_offset,
                                               Block (&rows)[2]) const {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t row = stage + r * high_row_offset;
#pragma unroll
      for (int i = 0; i < Shape::kFirstPlaneBytes / 16; ++i) {
        ptx::load_shared_vector(&rows[r][4 * i], operands_[kb].weights + row + 16 * i);
      }
      if constexpr (Shape::kTwoPlanes) {
        ptx::load_shared_pair(&rows[r][4], operands_[kb].weights + row + (second_plane_ >> (8 * kb) & 0xFFu));
      }
    }
  }

  // A block's scale, or its two.
  static __device__ __forceinline__ uint32_t load_scales(uint32_t address) {
    return Shape::kScaleWords == 2 ? ptx::load_shared_16_bits(address) : ptx::load_shared_byte(address);
  }

  // Where a token step's partial sums go in the first stage (PartialPlace): over weights of the first K block, or to
  // the tail. Computed where it is needed, since with sixteen tokens no register is free for a second address.
  __device__ __forceinline__ uint32_t partial(int step, uint32_t high_row_offset) const {
    const bool in_weights = first_partial_ == operands_[0].weights;
    return first_partial_ + step * (in_weights ? high_row_offset : PartialPlace<Shape>::kTailStep);
  }

  // kActive: token steps that hold tokens. `row`: the M16 fragment's first, in the first part.
  template <int kActive>
  __device__ __forceinline__ void multiply_fragment(uint32_t stage, uint32_t row, uint32_t high_row_offset) const {
    const uint32_t low_quarter = stage + quarter(row), high_quarter = stage + next_scale_ + quarter(row + second_part_);
    Block weights[kKBlocks][2];
    uint32_t scales[kKBlocks][2], nan[2] = {0, 0};
    // K blocks whose weights are loaded before scales are looked at: all where registers allow, else the first.
    constexpr int kAhead = kSteps == 1 && kKBlocks * Shape::kBlockBytes <= 64 ? kKBlocks : 1;
    // Scales are looked at together, to see whether they fold; NVFP4's, which do, come with their weights.
    constexpr int kScalesAhead = Shape::kScaleWords == 2 ? kAhead : kKBlocks;
    auto load_scales_of_k_block = [&](int kb) {
      scales[kb][0] = load_scales(operands_[kb].scale + low_quarter);
      scales[kb][1] = load_scales(operands_[kb].scale + high_quarter);
    };
#pragma unroll
    for (int kb = 0; kb < kKBlocks; ++kb) {
      if (kb < kAhead) load_weights(kb, stage, high_row_offset, weights[kb]);
      if (kb < kScalesAhead) load_scales_of_k_block(kb);
    }
    float chain[kActive][kChains<kActive>][4] = {};
    auto multiply_k_blocks = [&](auto large, const auto& to_scale) {
#pragma unroll
      for (int kb = 0; kb < kKBlocks; ++kb) {
        if (kb >= kAhead) load_weights(kb, stage, high_row_offset, weights[kb]);
        if (kb >= kScalesAhead) load_scales_of_k_block(kb);
        multiply_k_block<decltype(large)::value>(weights[kb], to_scale(scales[kb][0]), to_scale(scales[kb][1]), kb,
                                                 chain, nan);
      }
    };
    if constexpr (Shape::kScaleWords == 2) {
      multiply_k_blocks(std::false_type{}, [](uint32_t two) { return mma::nv_scales(two); });
    } else {
      uint32_t largest = 0;
#pragma unroll
      for (int kb = 0; kb < kKBlocks; ++kb) largest = max(largest, max(scales[kb][0], scales[kb][1]));
      if (__any_sync(kAllLanes, largest > Dequantizer::kLargestFoldedScale)) {
        multiply_k_blocks(std::true_type{}, [](uint32_t s) { return mma::scale_pair(s); });
      } else {
        multiply_k_blocks(std::false_type{}, [](uint32_t s) { return Dequantizer::folded_scale(s); });
      }
    }
    if (Dequantizer::kHasNan) spread_nan(nan, chain);
    __syncwarp();  // all lanes have read before partial sums replace weights
#pragma unroll
    for (int step = 0; step < kActive; ++step) {
      if constexpr (kChains<kActive> == 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) chain[step][0][i] += chain[step][1][i];
      }
      ptx::store_shared_vector(stage + partial(step, high_row_offset), chain[step][0]);
    }
  }

  // kLargeScales: they are the block scales alone, and undoing the dequantization's bias takes a multiplication of its
  // own.
  template <bool kLargeScales, class Scale, int kActive>
  __device__ __forceinline__ void multiply_k_block(const Block (&weights)[2], const Scale& low_scale,
                                                   const Scale& high_scale, int kb,
                                                   float (&chain)[kActive][kChains<kActive>][4],
                                                   uint32_t (&nan)[2]) const {
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t of_low[4], of_high[4];
      if constexpr (kLargeScales) {
        Dequantizer::eight(weights[0], q, Dequantizer::kUndo, of_low, nan[0]);
        Dequantizer::eight(weights[1], q, Dequantizer::kUndo, of_high, nan[1]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          of_low[i] = ptx::bf16x2_multiply(of_low[i], low_scale);
          of_high[i] = ptx::bf16x2_multiply(of_high[i], high_scale);
        }
      } else {
        Dequantizer::eight(weights[0], q, low_scale, of_low, nan[0]);
        Dequantizer::eight(weights[1], q, high_scale, of_high, nan[1]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t operand[4] = {of_low[2 * h], of_high[2 * h], of_low[2 * h + 1], of_high[2 * h + 1]};
#pragma unroll
        for (int step = 0; step < kActive; ++step) {
          auto& sum = chain[step][h % kChains<kActive>];
          ptx::mma_16816<true>(sum, operand, tokens[step][kb][2 * q + h], sum);
        }
      }
    }
  }

  // A row of weights with a NaN gives NaN for every token. `nan`: those that this lane saw in its two rows.
  template <int kActive>
  static __device__ __forceinline__ void spread_nan(const uint32_t (&nan)[2],
                                                    float (&chain)[kActive][kChains<kActive>][4]) {
    if (!__any_sync(kAllLanes, Dequantizer::is_nan(nan[0] | nan[1]))) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      uint32_t of_row = nan[r];
      of_row |= __shfl_xor_sync(kAllLanes, of_row, 1);
      of_row |= __shfl_xor_sync(kAllLanes, of_row, 2);
      if (!Dequantizer::is_nan(of_row)) continue;
#pragma unroll
      for (int step = 0; step < kActive; ++step) chain[step][0][2 * r] = chain[step][0][2 * r + 1] = NAN;
    }
  }

  int slice_ = 0, first_k_block_ = 0;
  bool belongs_ = false, works_ = false;
  Operands operands_[kKBlocks];
  uint32_t second_plane_ = 0;  // byte kb: from K block kb's weights to their second plane
  uint32_t next_scale_ = 0;  // from row g to row g + 8
  uint32_t first_partial_ = 0;  // address of the first token step's
  uint32_t first_row_ = 0;  // the M16 fragment's in the first work tile
  uint32_t second_part_ = 0;  // from a row to its row of the other part
};

// Adds the sums of the lanes that share an output's K, of an M16 fragment in one stage, in the order of K, so that the
// result is the same on every run. Values `parity` and `parity + 2` of a step are those of token 2t + parity, for row g
// and row g + 8.
template <class Shape>
__device__ __forceinline__ void add_partials(const SplitKGemm& g, const uint8_t* stage, int slice, int fragment,
                                             int row, int lane, int count, float (&sums)[Shape::kTokenSteps][4]) {
  const LaneRows<Shape> rows(g, row);
  const int warps = Shape::kSliced ? min(g.stage_warps, g.k_warps - slice * g.stage_warps) : g.k_warps;
  const int first_k_block = Shape::kSliced ? slice * g.stage_k_blocks : 0;
  const PartialPlace<Shape> first(g, rows, first_k_block, 0, lane), last(g, rows, first_k_block, warps - 1, lane);
#pragma unroll
  for (int step = 0; step < Shape::kTokenSteps; ++step) {
    if (kNarrowTokens * step >= count) break;  // nothing was multiplied
    const uint8_t* from = stage + first.offset[step] + fragment * first.next_fragment;
    const float4 last_part =
        *reinterpret_cast<const float4*>(stage + last.offset[step] + fragment * last.next_fragment);
    auto& sum = sums[step];
#pragma unroll 11
    for (int warp = 0; warp < warps - 1; ++warp) {
      add_to(sum, *reinterpret_cast<const float4*>(from + warp * Shape::kKBlocks * Shape::kKBlockBytes));
    }
    add_to(sum, last_part);
  }
}

}  // namespace flashinfer::sm12x
