// SPDX-License-Identifier: Apache-2.0
// What ld, st, atom and red have in common: qualifiers of space, order, scope and caching.
#pragma once

#include <cstdint>

#include "ops/lanes.h"

namespace vsm::ops {

struct MemoryQualifiers {
  Space space = Space::kGeneric;
  bool acquire = false, release = false;
  bool weak = true;        // neither volatile nor relaxed nor acquire/release
  bool is_volatile = false;
  bool block = false;      // the scope is no wider than the block (a cluster has one)
  bool cache_hint = false; // one more operand: the policy
  bool nc = false;
};

/// Takes .weak/.relaxed/.volatile/.acquire/.release/.acq_rel/.sc, .scope, .ss, cache operators and hints.
MemoryQualifiers take_memory_qualifiers(Form& f);

inline uint64_t effective(const Warp& w, const Inst& in, const Operand& base, int lane) {
  return w.value(base, lane) + static_cast<uint64_t>(in.imm);
}

inline bool is_global(Space space, uint64_t address) {
  return space == Space::kGlobal || (space == Space::kGeneric && address >> 56 == 0);
}

/// What a strong read, or write, means for the order of accesses (PTX ISA 9.0, 8.8).
struct Pattern {
  bool ordering = false;  // itself an acquire, or a release; else it is one together with a fence
  bool block = false;     // the scope is no wider than the block
};

/// After a strong read, or before a strong write. Between warps (Warp::clock) any pair of them counts as ordering.
void after_read(Warp& w, Space space, uint64_t address, int lane, Pattern pattern);
void before_write(Warp& w, Space space, uint64_t address, int lane, Pattern pattern);

}  // namespace vsm::ops
