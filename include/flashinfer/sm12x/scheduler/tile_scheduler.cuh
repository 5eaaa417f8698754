// SPDX-License-Identifier: Apache-2.0
//
// Which block computes what. Work is a sequence of k-tiles: unit after unit (a unit is one output tile: expert, row
// tile, token tile), and within a unit along K. Every block takes an equal, contiguous share of that sequence, so no
// wave is ever partly filled whatever the shape. A unit that a share boundary cuts is finished by the last block to
// arrive, which adds the parts in K order: the sum does not depend on who that is.
//
// Units are ordered (expert, row tile, token tile): consecutive units reuse the weights that were just read.
#pragma once

#include <cstdint>

namespace flashinfer::sm12x::scheduler {

struct Unit {
  int expert;
  int row_tile;
  int first_token;  // position in expert order
  int num_tokens;   // 1..kTokenTile
};

// tile_prefix[e] = token tiles of the experts before e.
template <int kTokenTile>
struct UnitMap {
  const int* offsets;
  const int* tile_prefix;
  int num_experts;
  int row_tiles;

  __device__ __forceinline__ int num_units() const { return tile_prefix[num_experts] * row_tiles; }

  __device__ __forceinline__ Unit locate(int unit) const {
    int low = 0, high = num_experts - 1;  // the expert whose range holds `unit`
    while (low < high) {
      const int middle = (low + high) / 2;
      if (tile_prefix[middle + 1] * row_tiles > unit) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    const int token_tiles = tile_prefix[low + 1] - tile_prefix[low];
    const int within = unit - tile_prefix[low] * row_tiles;
    const int row_tile = within / token_tiles;
    const int first = offsets[low] + (within - row_tile * token_tiles) * kTokenTile;
    return {low, row_tile, first, min(kTokenTile, offsets[low + 1] - first)};
  }
};

// The shares of `total` k-tiles among `blocks` blocks: equal but for one tile, the first `longer` blocks having it.
struct Shares {
  int blocks;
  int length;  // of the shorter shares
  int longer;

  __device__ __forceinline__ Shares(int total, int grid_blocks) : blocks(min(total, grid_blocks)) {
    length = total / max(blocks, 1);
    longer = total - length * blocks;
  }

  __device__ __forceinline__ int begin(int block) const { return block * length + min(block, longer); }

  // The block whose share holds `tile`.
  __device__ __forceinline__ int owner(int tile) const {
    const int in_longer = longer * (length + 1);
    return tile < in_longer ? tile / (length + 1) : longer + (tile - in_longer) / length;
  }
};

}  // namespace flashinfer::sm12x::scheduler
