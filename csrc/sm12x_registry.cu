// SPDX-License-Identifier: Apache-2.0
//
// The table of a library's instances.
#include <array>
#include <atomic>

#include "flashinfer/sm12x/host/instance.h"

namespace flashinfer::sm12x {

namespace {

using Registry = std::array<std::atomic<const Instance*>, kMaxInstances>;

Registry& registry() {
  static Registry instances = {};  // first used by the static initialisers of the rendered sources
  return instances;
}

}  // namespace

const Instance* find_instance(int index) {
  return index >= 0 && index < kMaxInstances ? registry()[index].load(std::memory_order_acquire) : nullptr;
}

void register_instance(const Instance* instance) {
  registry()[instance->index].store(instance, std::memory_order_release);
}

}  // namespace flashinfer::sm12x
