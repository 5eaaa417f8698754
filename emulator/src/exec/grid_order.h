// SPDX-License-Identifier: Apache-2.0
// Launches that may overlap on the hardware: what a grid touched, for the check of the one behind it.
//
// Launches run one after another here. On the hardware, a grid that was launched with programmatic stream serialization
// may start once every block of the grid before it has executed griddepcontrol.launch_dependents or ended; that grid is
// complete, and what it wrote visible, only after griddepcontrol.wait (PTX ISA 9.0, 9.7.13.13).
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace vsm::exec {

/// Bytes of global memory.
class ByteSet {
 public:
  void add(uint64_t address, uint64_t bytes);
  bool touches(uint64_t address, uint64_t bytes) const;
  void remove(uint64_t address, uint64_t bytes);
  void merge(const ByteSet& other);

 private:
  static constexpr uint64_t kPageBytes = 4096;
  using Page = std::array<uint64_t, kPageBytes / 64>;  // a bit per byte
  std::unordered_map<uint64_t, Page> pages_;
  uint64_t last_ = ~uint64_t{0};
  Page* last_page_ = nullptr;
};

struct GridAccesses {
  std::string kernel;
  ByteSet reads, writes;
};

/// A grid of a stream that the next one may overlap.
struct GridInFlight {
  std::shared_ptr<GridAccesses> accesses;
  // griddepcontrol.wait waits for the grid right ahead. One further ahead is complete then only if that one waited for it,
  // in any of its blocks; else it may still run behind the wait.
  bool outlives_wait = false;
};
using GridsInFlight = std::vector<GridInFlight>;

}  // namespace vsm::exec
