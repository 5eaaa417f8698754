// SPDX-License-Identifier: Apache-2.0
// Global memory as blocks may see each other's writes where nothing orders them, for a launch with a seed. The model, and
// the statements of the PTX ISA that it stands on: emulator/README.md, "Weak memory".
//
// Memory itself holds what is published. A block's weak writes wait beside it until something orders them before what
// another block may do: a release at device scope, whose thread's clock says which. What was published stays readable as it
// was before, for a thread that has acquired nothing since. One host thread runs the launch, so a seed repeats exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "exec/thread_order.h"

namespace vsm::exec {

class WeakMemory {
 public:
  WeakMemory(uint64_t seed, uint64_t blocks) : random_(seed * 0x9E3779B97F4A7C15ull + 1), buffers_(blocks) {}
  ~WeakMemory() { publish_all(); }

  static constexpr uint64_t kNoBlock = ~uint64_t{0};
  struct Thread {
    uint64_t block = 0;
    uint32_t index = 0;  // in the block
    uint32_t version = 0;  // of what it writes (ThreadOrder)
    uint32_t acquired = 0;  // the time of the last acquire that is ordered before
  };

  /// Now: what is published from here on, no acquire until here has seen.
  uint32_t now() const { return time_; }
  /// The bytes as this thread may see them. Returns a block that wrote some of them with nothing ordering that before,
  /// or kNoBlock. A strong read sees what is published, and its block's own.
  uint64_t read(const Thread& t, uint64_t address, uint32_t bytes, uint8_t* out, bool strong);
  /// A weak write. Returns a block whose write of the same bytes nothing orders before this one, or kNoBlock.
  uint64_t write(const Thread& t, uint64_t address, uint32_t bytes, const uint8_t* data);
  /// Before memory itself is written: by an atomic, a strong write, the async proxy.
  void before_publishing(uint64_t block, uint64_t address, uint32_t bytes);
  /// A release at device scope: of the block's writes, those that come before what this clock stands for.
  void publish(uint64_t block, const uint32_t* released);
  /// Writes may reach the others at any time: some do now.
  void publish_some(uint64_t block);
  void publish_all();
  /// For whoever decides where a seed may.
  uint64_t random() {
    random_ ^= random_ << 13;
    random_ ^= random_ >> 7;
    random_ ^= random_ << 17;
    return random_ * 0x2545F4914F6CDD1Dull >> 11;
  }

 private:
  struct Word {  // 4 bytes that wait
    uint8_t mask = 0;
    uint8_t bytes[4] = {};
    uint32_t thread[4] = {}, version[4] = {};  // who wrote each
  };
  struct Change {  // of a published word
    uint32_t time;
    uint64_t block;
    uint8_t mask;
    uint8_t before[4];
  };
  using Buffer = std::unordered_map<uint64_t, Word>;  // by address / 4

  bool touched(uint64_t address, uint32_t bytes) const;
  void publish(uint64_t block, uint64_t word, Word& w, uint8_t mask);
  void note_change(uint64_t block, uint64_t word, uint8_t mask);
  uint64_t unordered_writer(const Thread& t, uint64_t word, uint8_t mask) const;

  uint64_t random_;
  uint32_t time_ = 0;
  std::vector<Buffer> buffers_;  // by block
  std::unordered_map<uint64_t, std::vector<Change>> changes_;
  std::unordered_map<uint64_t, std::vector<uint64_t>> waiting_;  // blocks with bytes of the word that wait
  std::unordered_set<uint64_t> pages_;  // with any write
};

}  // namespace vsm::exec
