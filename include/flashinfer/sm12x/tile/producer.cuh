// SPDX-License-Identifier: Apache-2.0
//
// The producer warp: keeps the pipeline of stages filled. A stage holds all that consumers need for a work tile's K
// tile: packed weights, weight scales, token rows and, unless those are bf16, token scales.
#pragma once

#include "../moe/routing.cuh"
#include "../ptx/memory.cuh"
#include "scheduler.cuh"
#include "storage.cuh"

namespace flashinfer::sm12x {

template <class Config>
class Producer {
  using Params = GroupedGemmParams<Config::kRole>;
  using Map = WorkTileMap<Config::kBlockN>;
  static constexpr int kRowsPerLane = (Config::kBlockN + 31) / 32;
  // Gathered rows: 16-byte pieces of a row in a stage, and the rows whose pieces one copy instruction takes.
  static constexpr int kPieceElements = 16 * kScaleBlock / Config::kBlockBytes;
  static constexpr int kPieces = Config::kTokenBytes / 16;
  static constexpr int kRowsTogether = 32 / kPieces;
  static constexpr int kCopies = Config::kTokenScales ? Config::kBlockN / kRowsTogether : 1;

 public:
  __device__ __forceinline__ Producer(const Params& params, const SharedStorage<Config>& storage, const Map& map,
                                      const WorkSplit& split, int lane)
      : p(params), shared(storage), work_tiles(map), work(split), lane(lane), k_blocks(k_blocks_of(params.k)) {}

  // Streams the block's K tiles. The first kStages stages' weights are on their way before the wait for the kernels
  // that this one depends on, if this kernel routes by itself: they depend on the routing alone. Where it comes from a
  // kernel in front (`offsets`), the block has waited already.
  __device__ __forceinline__ void produce() {
    const int tiles = work.tiles(blockIdx.x), ahead = min(SharedStorage<Config>::kStages, tiles);
    Cursor early(*this);
    for (int i = 0; i < ahead; ++i, early.advance()) issue_weights(i, early);

    ptx::wait_for_prerequisite_grids();

    Cursor cursor(*this);
    int stage = 0;
    uint32_t phase = 1;  // flips when the pipeline wraps; a first pass over the pipeline waits for nobody
    for (int i = 0; i < tiles; ++i, cursor.advance()) {
      if (i >= SharedStorage<Config>::kStages) {
        ptx::mbarrier_wait(shared.empty(stage), phase);
        issue_weights(stage, cursor);
      }
      issue_tokens(stage, cursor);
      if (++stage == SharedStorage<Config>::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }

 private:
  // Walks the K tiles; each lane keeps the source addresses of what it gathers for the current work tile.
  struct Cursor {
    const Producer& owner;
    TileScheduler scheduler;
    WorkTile work_tile;
    int k_tile, left;  // K tiles of the K range, this one included
    uint32_t piece[kCopies];  // number in `tokens` of the 16 bytes that each copy takes at K 0
    uint32_t scale_word[kRowsPerLane];  // index in `token_scales` of rows `lane`, `lane + 32`, ...

    __device__ __forceinline__ explicit Cursor(const Producer& producer) : owner(producer), scheduler(producer.work) {
      enter();
    }
    __device__ __forceinline__ void advance() {
      ++k_tile;
      if (--left == 0) enter();
    }
    __device__ __forceinline__ void enter() {
      const KRange range = scheduler.next();
      k_tile = range.first;
      left = range.tiles;
      if (left == 0) return;
      work_tile = owner.work_tiles.locate(range.work_tile);
      if constexpr (Config::kTokenScales) find_rows();
    }
    __device__ __forceinline__ void find_rows() {
      uint32_t before[kRowsPerLane];  // pieces before rows `lane`, `lane + 32`, ...
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        const int i = owner.lane + 32 * j;
        before[j] = scale_word[j] = 0;
        if (i >= work_tile.num_tokens) continue;
        const int row = owner.source_row(work_tile, i);
        before[j] = static_cast<uint32_t>(row) * static_cast<uint32_t>(owner.p.k / kPieceElements);
        scale_word[j] = static_cast<uint32_t>(owner.scale_row(work_tile, row).base);
      }
#pragma unroll
      for (int c = 0; c < kCopies; ++c) {
        const int i = c * kRowsTogether;
        piece[c] = owner.lane % kPieces + __shfl_sync(kAllLanes, before[i / 32], i % 32 + owner.lane / kPieces);
      }
    }
  };

  // Row of `tokens` of the i-th token of a work tile.
  __device__ __forceinline__ int source_row(const WorkTile& work_tile, int i) const {
    const int position = work_tile.first_token + i;
    if constexpr (Config::kRole == Role::kFc1) {
      return (p.order != nullptr ? p.order[position] : static_cast<int>(shared.order()[position])) / p.top_k;
    } else {
      return position;
    }
  }

  // Row of `token_scales`: the grouped GEMM's caller starts each group's scales at a multiple of 128 rows.
  __device__ __forceinline__ ScaleRow scale_row(const WorkTile& work_tile, int row) const {
    if constexpr (Config::kRole == Role::kStore) {
      const int group = work_tiles.offsets[work_tile.expert];
      const int aligned = (group + work_tile.expert * (kScaleChunkRows - 1)) / kScaleChunkRows * kScaleChunkRows;
      row += aligned - group;
    }
    return p.token_scale_pitch == 0 ? swizzled_scale_row(row, k_blocks) : linear_scale_row(row, p.token_scale_pitch);
  }

  __device__ __forceinline__ int valid_k(int k_tile) const {
    return min(Config::kBlockK, p.k - k_tile * Config::kBlockK);
  }

  // K blocks that a K tile holds.
  __device__ __forceinline__ int k_blocks_in(int k_tile) const {
    return min(Config::kKBlocks, k_blocks - k_tile * Config::kKBlocks);
  }

  __device__ __forceinline__ void issue_weights(int stage, const Cursor& at) const {
    if (lane == 0) {
      const int valid = valid_k(at.k_tile);
      const int scale_bytes = scale_words(Config::kWeights, valid) * kScaleChunkBytes;
      const int chunks = num_scale_chunks(at.work_tile.m_tile);
      const int token_bytes =
          Config::kTokenScales ? 0 : k_blocks_in(at.k_tile) * at.work_tile.num_tokens * kPackedRowBytes;
      ptx::mbarrier_arrive_expect(shared.full(stage), Config::kWeightStage + chunks * scale_bytes + token_bytes);
#pragma unroll
      for (int m64 = 0; m64 < 2; ++m64) {
        const int row = m64_row<Config>(p, at.work_tile.m_tile, m64), first = at.k_tile * Config::kWeightBytes;
        uint8_t* to = shared.weights(stage);
        ptx::tensor_copy_3d(to + m64 * kM64Rows * Config::kFirstPitch, &p.weights, first, row, at.work_tile.expert,
                            shared.full(stage));
        if constexpr (Config::kTwoPlanes) {
          to += Config::kFirstPlane + m64 * kM64Rows * Config::kSecondPitch;
          ptx::tensor_copy_3d(to, &p.second_plane, first + valid / kScaleBlock * kNibbleBytes, row, at.work_tile.expert,
                              shared.full(stage));
        }
      }
      const uint8_t* expert_scales = p.weight_scales + at.work_tile.expert * p.weight_scale_pitch;
      for (int chunk = 0; chunk < chunks; ++chunk) {
        const int64_t word =
            static_cast<int64_t>(chunk_block(at.work_tile.m_tile, chunk)) * scale_words(Config::kWeights, p.k) +
            at.k_tile * Config::kScaleWords;
        ptx::bulk_copy(shared.scales(stage) + chunk * Config::kScaleWords * kScaleChunkBytes,
                       expert_scales + word * kScaleChunkBytes, scale_bytes, shared.full(stage));
      }
    }
    __syncwarp();
  }

  __device__ __forceinline__ void issue_tokens(int stage, const Cursor& at) const {
    if constexpr (Config::kTokenScales) {
      gather_rows(stage, at);
      issue_token_scales(stage, at);
      ptx::mbarrier_arrive_after_copies(shared.full(stage));
    } else {
      copy_packed_rows(stage, at);
    }
  }

  // Packed rows are in permuted order: a tile is contiguous in each K block.
  __device__ __forceinline__ void copy_packed_rows(int stage, const Cursor& at) const {
    if (lane == 0) {
      for (int kb = 0; kb < k_blocks_in(at.k_tile); ++kb) {
        const int64_t row =
            static_cast<int64_t>(at.k_tile * Config::kKBlocks + kb) * p.num_routed_rows + at.work_tile.first_token;
        ptx::bulk_copy(shared.tokens(stage) + kb * Config::kBlockN * kPackedRowBytes, p.tokens + row * kPackedRowBytes,
                       at.work_tile.num_tokens * kPackedRowBytes, shared.full(stage));
      }
    }
    __syncwarp();
  }

  // 16-byte copies by all lanes: one bulk copy a row would be issued by one lane at a time, and consumers would wait
  // for this warp. So that they do not, a copy is three instructions (compare, address, copy), the check of the end 17
  // for four of them; all else is done once a work tile.
  __device__ __forceinline__ void gather_rows(int stage, const Cursor& at) const {
    const int row = lane / kPieces;
    const bool within_k = lane % kPieces * kPieceElements < valid_k(at.k_tile);
    const int rows = within_k ? at.work_tile.num_tokens : 0;  // that this lane copies from
    const uint8_t* from = p.tokens + at.k_tile * Config::kTokenBytes;
    asm volatile("" : "+l"(from));  // one register: else each copy adds the tensor's address anew
    uint8_t* to = shared.tokens(stage) + row * Config::kTokenPitch + lane % kPieces * 16;
    constexpr int kCheck = kCopies < 4 ? kCopies : 4;  // copies between two looks at the end
#pragma unroll
    for (int first = 0; first < kCopies; first += kCheck) {
      if (first * kRowsTogether >= at.work_tile.num_tokens) break;
#pragma unroll
      for (int c = first; c < first + kCheck; ++c) {
        ptx::copy_16_bytes_if(c * kRowsTogether + row < rows, to + c * kRowsTogether * Config::kTokenPitch,
                              from + uint64_t{16} * at.piece[c]);
      }
    }
  }

  __device__ __forceinline__ void issue_token_scales(int stage, const Cursor& at) const {
    const int stride = p.token_scale_pitch == 0 ? kScaleChunkRows : 1;
    const uint32_t* from = p.token_scales + at.k_tile * Config::kKBlocks * stride;
    uint32_t* to = shared.token_scales(stage) + lane;
#pragma unroll
    for (int kb = 0; kb < Config::kKBlocks; ++kb) {
      if (kb >= k_blocks_in(at.k_tile)) break;
#pragma unroll
      for (int j = 0; j < kRowsPerLane; ++j) {
        if (lane + 32 * j < at.work_tile.num_tokens) {
          ptx::copy_word(to + kb * Config::kBlockN + 32 * j, from + at.scale_word[j] + kb * stride);
        }
      }
    }
  }

  // Scale chunks, of 128 rows, that an M tile touches. With gate rows the up half lies in one, the gate half in one or
  // two, since it starts at inter_size, any multiple of 32.
  __device__ __forceinline__ int num_scale_chunks(int m_tile) const {
    if constexpr (Config::kRole != Role::kFc1) return 1;
    if (!gated<Config>(p)) return 1;
    return m64_row<Config>(p, m_tile, 1) % kScaleChunkRows > kM64Rows ? 3 : 2;
  }
  // Clamped: a tile may reach past the last row block; those rows are never stored, but what is read was written.
  __device__ __forceinline__ int chunk_block(int m_tile, int chunk) const {
    const int block = chunk == 0 ? m64_row<Config>(p, m_tile, 0) / kScaleChunkRows
                                 : m64_row<Config>(p, m_tile, 1) / kScaleChunkRows + chunk - 1;
    return min(block, ceil_div(p.rows, kScaleChunkRows) - 1);
  }

  const Params& p;
  const SharedStorage<Config>& shared;
  const Map& work_tiles;
  const WorkSplit& work;
  int lane;
  int k_blocks;
};

}  // namespace flashinfer::sm12x
