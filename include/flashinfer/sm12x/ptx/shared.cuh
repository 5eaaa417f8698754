// SPDX-License-Identifier: Apache-2.0
//
// Loads and stores of shared memory by 32-bit address (PTX ISA 9.0, sections 9.7.9.8 and 9.7.9.12): an address that is a sum
// of registers stays 32 bits wide, where a generic pointer would be 64.
//
// Loads are ordered with respect to other memory accesses (the clobber), but may be dropped if nothing uses their value.
#pragma once

#include <cstdint>

namespace flashinfer::sm12x::ptx {

// Sixteen bytes, aligned.
__device__ __forceinline__ void load_shared_vector(uint32_t* words, uint32_t address) {
  asm("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
      : "r"(address)
      : "memory");
}

__device__ __forceinline__ void store_shared_vector(uint32_t address, const float (&values)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(values[0]), "f"(values[1]),
               "f"(values[2]), "f"(values[3])
               : "memory");
}

__device__ __forceinline__ uint32_t load_shared_byte(uint32_t address) {
  uint32_t byte;
  asm("ld.shared.u8 %0, [%1];" : "=r"(byte) : "r"(address) : "memory");
  return byte;
}

__device__ __forceinline__ void store_shared_byte(uint32_t address, uint32_t byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}

}  // namespace flashinfer::sm12x::ptx
