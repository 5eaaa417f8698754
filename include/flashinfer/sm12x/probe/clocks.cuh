// SPDX-License-Identifier: Apache-2.0
//
// The SM's cycles and the device's nanoseconds (PTX ISA 9.0, sections 10.25 and 10.27).
#pragma once

#include <cstdint>

namespace flashinfer::sm12x::probe {

__device__ __forceinline__ int64_t cycles() { return clock64(); }

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace flashinfer::sm12x::probe
