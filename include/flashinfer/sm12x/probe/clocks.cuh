// SPDX-License-Identifier: Apache-2.0
//
// The device's nanoseconds (PTX ISA 9.0, section 10.27); the SM's cycles are clock64().
#pragma once

#include <cstdint>

namespace flashinfer::sm12x::probe {

__device__ __forceinline__ int64_t nanoseconds() {
  int64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)::"memory");
  return now;
}

}  // namespace flashinfer::sm12x::probe
