// SPDX-License-Identifier: Apache-2.0
// What ld, st, atom and red have in common: qualifiers of space, order, scope and caching.
#pragma once

#include "ops/lanes.h"

namespace vsm::ops {

struct MemoryQualifiers {
  Space space = Space::kGeneric;
  bool acquire = false, release = false;
  bool weak = true;        // neither volatile nor relaxed nor acquire/release
  bool cache_hint = false; // one more operand: the policy
  bool nc = false;
};

/// Takes .weak/.relaxed/.volatile/.acquire/.release/.acq_rel/.sc, .scope, .ss, cache operators and hints.
MemoryQualifiers take_memory_qualifiers(Form& f);

inline uint64_t effective(const Warp& w, const Inst& in, const Operand& base, int lane) {
  return w.value(base, lane) + static_cast<uint64_t>(in.imm);
}

/// After an acquire, or before a release, on shared memory: order between warps for the race watcher; for other
/// blocks a host fence.
void acquire(Warp& w, Space space, uint64_t address);
void release(Warp& w, Space space, uint64_t address);

}  // namespace vsm::ops
