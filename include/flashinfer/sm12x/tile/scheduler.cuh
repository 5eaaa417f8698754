// SPDX-License-Identifier: Apache-2.0
//
// How work tiles are divided among blocks. A work tile is one output tile (expert, M tile, N tile) and all of K.
// Blocks take whole work tiles in turn, a wave at a time: the work tiles of a wave are neighbours, so that their blocks
// find each other's weights and tokens in L2. The remaining work tiles, fewer than two a block, are cut along K into
// equal, contiguous ranges, so that no wave is partly filled whatever the shape. The last block to arrive finishes a
// work tile that was cut: it adds the partial sums in K order, so that the result does not depend on which block that
// is.
//
// Work tiles are ordered (expert, panel of tokens, M tile, N tile). Contiguous ranges of everything, which would
// also be equal, have every block read another expert: at 8,192 tokens of gpt-oss-120b 15 GB instead of 1.4 (measured
// on an H200). A panel is few enough tokens to stay in L2 while all of an expert's weights go by: without panels a
// dense layer of 8,192 tokens reads all of them again for each M tile, 1.0 GB instead of 0.05 (by a model of L2).
#pragma once

#include <cstdint>

namespace flashinfer::sm12x {

constexpr int kPanelTokens = 512;

struct WorkTile {
  int expert;
  int m_tile;
  int first_token;  // position in permuted order
  int num_tokens;  // 1..kBlockN
};

// tile_prefix[e] = N tiles of the experts before e.
template <int kBlockN>
struct WorkTileMap {
  static constexpr int kPanelTiles = kPanelTokens / kBlockN;

  const int* offsets;
  const int* tile_prefix;
  int num_experts;
  int m_tiles;

  __device__ __forceinline__ int num_work_tiles() const { return tile_prefix[num_experts] * m_tiles; }

  __device__ __forceinline__ WorkTile locate(int work_tile) const {
    int low = 0, high = num_experts - 1;  // the expert whose range holds `work_tile`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tile_prefix[middle + 1] * m_tiles > work_tile) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int n_tiles = tile_prefix[low + 1] - tile_prefix[low];
    int within = work_tile - tile_prefix[low] * m_tiles;
    const int panel = within / (kPanelTiles * m_tiles) * kPanelTiles;  // its first tile
    within -= panel * m_tiles;
    const int width = min(kPanelTiles, n_tiles - panel);
    const int m_tile = within / width;
    const int first = offsets[low] + (panel + within - m_tile * width) * kBlockN;
    return {low, m_tile, first, min(kBlockN, offsets[low + 1] - first)};
  }
};

// How `work_tiles` of `k_tiles` each are divided among blocks.
struct WorkSplit {
  int k_tiles;
  int blocks;  // with work
  int waves;  // whole work tiles of every block
  int length;  // K tiles of the shorter ranges of the rest; the first `longer` blocks have one more
  int longer;

  __device__ __forceinline__ WorkSplit(int work_tiles, int k_tiles_of_work_tile, int grid_blocks)
      : k_tiles(k_tiles_of_work_tile), waves(max(work_tiles / grid_blocks - 1, 0)) {
    const int rest = (work_tiles - waves * grid_blocks) * k_tiles;
    blocks = min(rest, grid_blocks);
    length = rest / max(blocks, 1);
    longer = rest - length * blocks;
  }

  // The first work tile of the rest. Its K tiles are counted from there.
  __device__ __forceinline__ int first_split_work_tile() const { return waves * blocks; }
  __device__ __forceinline__ int begin(int block) const { return block * length + min(block, longer); }
  // All K tiles of a block.
  __device__ __forceinline__ int tiles(int block) const { return waves * k_tiles + begin(block + 1) - begin(block); }

  // The block whose range of the rest holds `tile`.
  __device__ __forceinline__ int owner(int tile) const {
    const int in_longer = longer * (length + 1);
    return tile < in_longer ? tile / (length + 1) : longer + (tile - in_longer) / length;
  }
};

// Consecutive K tiles of one work tile; none at the end.
struct KRange {
  int work_tile;
  int first;
  int tiles;
};

// The K ranges of this block, in the order in which it computes them.
class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const WorkSplit& work)
      : work_(work), at_(work.begin(blockIdx.x)), end_(work.begin(blockIdx.x + 1)) {}

  __device__ __forceinline__ KRange next() {
    if (wave_ < work_.waves) return {work_.blocks * wave_++ + static_cast<int>(blockIdx.x), 0, work_.k_tiles};
    if (at_ >= end_) return {0, 0, 0};
    const int work_tile = at_ / work_.k_tiles, first = at_ - work_tile * work_.k_tiles;
    const int tiles = min(work_.k_tiles - first, end_ - at_);
    at_ += tiles;
    return {work_.first_split_work_tile() + work_tile, first, tiles};
  }

 private:
  const WorkSplit& work_;
  int at_, end_;  // K tiles of the rest
  int wave_ = 0;
};

}  // namespace flashinfer::sm12x
