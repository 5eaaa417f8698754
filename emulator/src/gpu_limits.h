// SPDX-License-Identifier: Apache-2.0
// What the modelled GPU grants: the figures that launches are checked against.
#pragma once

#include <cstdint>

namespace vsm {

inline constexpr int kWarpSize = 32;

/// Limits of one GPU model. The defaults are those of GB10 (compute capability 12.1).
struct Limits {
  int compute_major = 12;
  int compute_minor = 1;
  int num_sms = 48;
  uint32_t shared_per_sm = 102400;
  uint32_t shared_per_block_optin = 101376;
  uint32_t shared_per_block_default = 49152;
  /// Bytes at the start of a block's shared window that the system keeps for itself.
  uint32_t shared_reserved = 1024;
  uint32_t registers_per_sm = 65536;
  uint32_t registers_per_block = 65536;
  uint32_t max_threads_per_sm = 1536;
  uint32_t max_threads_per_block = 1024;
  uint32_t max_blocks_per_sm = 24;
  /// Named barriers of all blocks. A block takes as many as its highest one's number and one: with 13 others saw a GB10
  /// hold one block where it held two with 11, and refuse a cooperative launch (b12x#363).
  uint32_t barriers_per_sm = 24;
  uint32_t max_grid[3] = {2147483647u, 65535u, 65535u};
  uint32_t max_block[3] = {1024u, 1024u, 64u};
  uint32_t max_param_bytes = 32764;
  uint32_t l2_bytes = 24u << 20;
  /// What a kernel that saturates it reads (public measurements give 231 to 236 GB/s); it is sold as 273.
  uint64_t dram_bytes_per_second = 233ull * 1000 * 1000 * 1000;
  uint32_t clock_khz = 2418000;
};

/// Limits of an H200 (compute capability 9.0): for programs compiled for sm_90a.
inline Limits hopper_limits() {
  Limits l;
  l.compute_major = 9;
  l.compute_minor = 0;
  l.num_sms = 132;
  l.shared_per_sm = 233472;
  l.shared_per_block_optin = 232448;
  l.max_threads_per_sm = 2048;
  l.max_blocks_per_sm = 32;
  l.barriers_per_sm = 64;
  l.l2_bytes = 50u << 20;
  l.dram_bytes_per_second = 4800ull * 1000 * 1000 * 1000;
  l.clock_khz = 1980000;
  return l;
}

}  // namespace vsm
