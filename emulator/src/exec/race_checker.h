// SPDX-License-Identifier: Apache-2.0
// Data races in a block's shared memory, thread by thread (PTX ISA 9.0, 8.7.1): two accesses to a byte, one of them a
// write, that nothing orders, unless both are strong: those have an order of their own.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "exec/thread_order.h"

namespace vsm::exec {

/// Who accesses. `lane` -1: the warp as a whole (ldmatrix and stmatrix move data between lanes).
struct Accessor {
  int warp = 0;
  int lane = 0;
  uint32_t version = 0;             // of the accesses
  const uint32_t* clock = nullptr;  // what is ordered before them, with thread `lane`'s, or lane 0's
  uint64_t step = 0;  // of one instruction of the warp: its lanes' writes are not a race with each other
};

/// The other side of a race.
struct RaceFound {
  bool found = false, wrote = false;
  int warp = 0, lane = 0;
  uint32_t address = 0;
};

class RaceChecker {
 public:
  void start(uint32_t bytes, int warps);
  RaceFound load(const Accessor& who, uint32_t address, uint32_t bytes, bool strong);
  RaceFound store(const Accessor& who, uint32_t address, uint32_t bytes, bool strong);
  /// A volatile access, against the volatile ones of other threads: a write and a read that nothing orders. Not of a
  /// flag: its writer has a fence in front of the write that the reader has yet to learn of.
  RaceFound hand_over(const Accessor& who, const ThreadOrder& order, uint32_t address, uint32_t bytes, bool store);
  /// The bytes are written in another manner.
  void end_hand_over(uint32_t address, uint32_t bytes);
  /// A weak load that leaves no trace.
  RaceFound look(const Accessor& who, uint32_t address, uint32_t bytes);

 private:
  struct Write {
    uint32_t version = 0;  // 0: none
    uint16_t warp = 0;
    bool collective = false;
    uint32_t mask = 0;  // lanes that wrote the byte in one instruction: one of them wins, none sees that as a race
    uint64_t step = 0;
  };
  struct Reads {  // of one warp, the last of each lane
    uint32_t mask = 0;
    uint32_t version : 30;
    uint32_t collective : 1;  // by the warp as a whole: over for all lanes when it is for one
    uint32_t older : 1;  // more of them in `older_`
    Reads() : version(0), collective(0), older(0) {}
  };
  struct Cell {
    Write* write;
    Reads* reads;  // by warp
    uint64_t key;  // of older_
    uint32_t address;
  };

  template <class F>
  void each_cell(uint32_t address, uint32_t bytes, bool strong, F fn);
  void split(uint32_t word);
  static bool ordered(const Accessor& who, int warp, int lane, uint32_t version);
  static bool ordered(const Accessor& who, const Write& write, int* lane);
  static bool ordered(const Accessor& who, int warp, const Reads& reads, int* lane);
  void check(const Accessor& who, const Cell& cell, bool store, RaceFound* out);
  void check_all(const Accessor& who, uint32_t address, uint32_t bytes, bool store, bool strong, RaceFound* out);
  void note_read(const Accessor& who, const Cell& cell);

  // Weak accesses by word, or by byte where one touched part of a word. Strong ones by byte: they are few.
  std::vector<Write> writes_, split_writes_;
  std::vector<Reads> reads_, split_reads_;
  std::vector<uint32_t> split_;  // per word: place in the split ones + 1
  struct StrongCell {
    Write write;
    std::vector<Reads> reads;
  };
  std::unordered_map<uint32_t, StrongCell> strong_;
  struct Visit {  // a volatile access
    int thread = -1;
    uint32_t version = 0;
    uint32_t fenced = 0;  // ThreadOrder::fenced then, of a write
  };
  struct VolatileByte {
    Visit write;
    std::vector<Visit> reads;  // since then, one a thread
  };
  std::unordered_map<uint32_t, VolatileByte> volatile_;
  std::unordered_map<uint64_t, std::vector<Reads>> older_;
  size_t warps_ = 0;
};

}  // namespace vsm::exec
