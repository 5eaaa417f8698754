// SPDX-License-Identifier: Apache-2.0
// The addresses of a tiled copy (PTX ISA 9.0, 5.5.3 "Tiled Mode", 5.5.7 "Swizzling Modes", 9.7.9.25.5.1).
#include <algorithm>
#include <cstring>

#include "layout.h"

namespace vsm::tma {
namespace {

/// Collects runs, joining those that continue the one before in both memories.
class Runs {
 public:
  explicit Runs(std::vector<Run>* out) : out_(out) { out_->clear(); }

  void add(Run::Kind kind, uint64_t global, uint32_t shared, uint32_t bytes) {
    if (!out_->empty()) {
      Run& last = out_->back();
      const bool same_place = kind != Run::Kind::kCopy || last.global + last.bytes == global;
      if (last.kind == kind && last.shared + last.bytes == shared && same_place) {
        last.bytes += bytes;
        return;
      }
    }
    Run run;
    run.kind = kind;
    run.global = kind == Run::Kind::kCopy ? global : 0;
    run.shared = shared;
    run.bytes = bytes;
    out_->push_back(run);
  }

 private:
  std::vector<Run>* out_;
};

/// Bytes that stay together under a swizzle.
uint32_t swizzle_atom(Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::kNone: return ~0u;
    case Swizzle::k128BAtom32B: return 32;
    case Swizzle::k128BAtom32BFlip8B: return 8;
    case Swizzle::k128BAtom64B: return 64;
    default: return 16;
  }
}

/// One line of a box: `groups` groups along dimension 0, of which [first, last) lie inside the tensor.
struct Line {
  uint64_t global = 0;  // address of group 0, meaningful inside [first, last)
  uint32_t shared = 0;  // before the swizzle
  uint32_t groups = 0, first = 0, last = 0;
};

class TileWalk {
 public:
  TileWalk(const Descriptor& d, bool store, std::vector<Run>* runs)
      : d_(d),
        group_(group_of(d.type)),
        atom_(swizzle_atom(d.swizzle)),
        store_(store),
        outside_(store ? Run::Kind::kSkip : Run::Kind::kFill),
        runs_(runs) {}

  void walk(const int32_t* coords, uint32_t shared) {
    const int64_t groups = row_groups(d_);
    // In groups: a packed tensor's rows and coordinates are whole groups (checked before).
    const int64_t start = coords[0] / static_cast<int32_t>(group_.elements);
    const int64_t length = static_cast<int64_t>(d_.dims[0] / group_.elements);
    const int64_t first = std::clamp<int64_t>(-start, 0, groups);
    int64_t last = std::clamp<int64_t>(length - start, first, groups);
    if (store_ && last > first) {
      // A store is cut off at 16-byte granularity: the rest of the tensor's last 16 bytes is written too (measured
      // on an H200, golden case store.u8; strides being multiples of 16, these bytes belong to the row's padding).
      const int64_t chunk = 16 / group_.global_bytes;
      last = std::min(groups, (last + chunk - 1) / chunk * chunk);
    }
    const uint32_t pitch = row_pitch(d_);

    uint32_t steps[5] = {0, 0, 0, 0, 0};
    for (uint32_t row = shared;; row += pitch) {
      Line line;
      line.shared = row;
      line.groups = static_cast<uint32_t>(groups);
      if (row_address(coords, steps, &line.global)) {
        line.global += static_cast<uint64_t>(start * static_cast<int64_t>(group_.global_bytes));
        line.first = static_cast<uint32_t>(first);
        line.last = static_cast<uint32_t>(last);
      }
      add_line(line);
      uint32_t i = 1;
      while (i < d_.rank && ++steps[i] == box_count(d_, i)) steps[i++] = 0;
      if (i >= d_.rank) return;
    }
  }

 private:
  /// Address of element 0 of dimension 0; false if an outer coordinate lies outside the tensor.
  bool row_address(const int32_t* coords, const uint32_t* steps, uint64_t* address) const {
    *address = d_.address;
    for (uint32_t i = 1; i < d_.rank; ++i) {
      const int64_t at = static_cast<int64_t>(coords[i]) + static_cast<int64_t>(steps[i]) * d_.element_strides[i];
      if (at < 0 || static_cast<uint64_t>(at) >= d_.dims[i]) return false;
      *address += static_cast<uint64_t>(at) * d_.strides[i - 1];
    }
    return true;
  }

  void add_line(const Line& line) {
    if (group_.global_bytes == group_.shared_bytes) {
      add_piece(line, 0, line.first);
      add_piece(line, line.first, line.last);
      add_piece(line, line.last, line.groups);
      return;
    }
    for (uint32_t g = 0; g < line.groups; ++g) {  // data, then padding, group by group
      add_piece(line, g, g + 1);
      const uint32_t padding = line.shared + g * group_.shared_bytes + group_.global_bytes;
      add_swizzled(Run::Kind::kSkip, 0, padding, group_.shared_bytes - group_.global_bytes);
    }
  }

  /// Groups [from, to), all inside the tensor or all outside.
  void add_piece(const Line& line, uint32_t from, uint32_t to) {
    if (from >= to) return;
    const bool inside = from >= line.first && to <= line.last;
    add_swizzled(inside ? Run::Kind::kCopy : outside_, line.global + uint64_t{from} * group_.global_bytes,
                 line.shared + from * group_.shared_bytes, (to - from) * group_.global_bytes);
  }

  void add_swizzled(Run::Kind kind, uint64_t global, uint32_t shared, uint32_t bytes) {
    while (bytes > 0) {
      const uint32_t piece = std::min(bytes, atom_ - shared % atom_);
      runs_.add(kind, global, swizzle_address(d_.swizzle, shared), piece);
      global += piece;
      shared += piece;
      bytes -= piece;
    }
  }

  const Descriptor& d_;
  const Group group_;
  const uint32_t atom_;
  const bool store_;
  const Run::Kind outside_;
  Runs runs_;
};

std::string check_copy(const Descriptor& d, const int32_t* coords, uint32_t shared, bool store) {
  const std::string broken = check(d);
  if (!broken.empty()) return "the tensor map breaks a rule: " + broken;
  if (d.interleave != Interleave::kNone) return "interleaved tensor maps are not modelled";
  if (shared % 128) return "the shared-memory address is " + std::to_string(shared) + ", must be a multiple of 128";
  const Group group = group_of(d.type);
  if (int64_t{coords[0]} * group.global_bytes % (16 * int64_t{group.elements})) {
    // PTX ISA 5.5.3.1; the hardware stops with an illegal-instruction error.
    return "coordinate 0 is " + std::to_string(coords[0]) +
           ": the box must start at a multiple of 16 bytes along dimension 0";
  }
  if (is_packed(d.type)) {
    const int32_t multiple = is_padded(d.type) ? 128 : 16;
    if (coords[0] % multiple) {
      return "coordinate 0 is " + std::to_string(coords[0]) + ", must be a multiple of " + std::to_string(multiple) +
             " with this packed type";
    }
    if (d.dims[0] % 16) return "a packed tensor whose rows are not whole groups of 16 elements is not modelled";
    if (store && is_padded(d.type)) return "a packed type with padding cannot be stored from shared memory";
  }
  for (uint32_t i = 0; store && i < d.rank; ++i) {
    if (coords[i] < 0)
      return "coordinate " + std::to_string(i) + " of a store is " + std::to_string(coords[i]) +
             ", must not be negative";
  }
  return {};
}

}  // namespace

uint32_t swizzle_address(Swizzle swizzle, uint32_t address) {
  const uint32_t line = address >> 7;  // of 128 bytes
  switch (swizzle) {
    case Swizzle::kNone: return address;
    case Swizzle::k32B: return address ^ ((line & 1) << 4);
    case Swizzle::k64B: return address ^ ((line & 3) << 4);
    case Swizzle::k128B: return address ^ ((line & 7) << 4);
    case Swizzle::k128BAtom32B: return address ^ ((line & 3) << 5);
    case Swizzle::k128BAtom32BFlip8B: return address ^ ((line & 3) << 5) ^ ((line & 1) << 3);
    case Swizzle::k128BAtom64B: return address ^ ((line & 1) << 6);
  }
  return address;
}

uint32_t box_bytes(const Descriptor& d) {
  uint32_t bytes = row_groups(d) * group_of(d.type).global_bytes;
  for (uint32_t i = 1; i < d.rank; ++i) bytes *= box_count(d, i);
  return bytes;
}

uint32_t box_shared_bytes(const Descriptor& d) {
  uint32_t rows = 1;
  for (uint32_t i = 1; i < d.rank; ++i) rows *= box_count(d, i);
  return rows * row_pitch(d);
}

std::string tile_runs(const Descriptor& d, const int32_t* coords, uint32_t shared, bool store, std::vector<Run>* runs) {
  std::string broken = check_copy(d, coords, shared, store);
  if (broken.empty()) TileWalk(d, store, runs).walk(coords, shared);
  return broken;
}

}  // namespace vsm::tma
