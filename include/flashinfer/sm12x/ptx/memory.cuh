// SPDX-License-Identifier: Apache-2.0
//
// Copies from global to shared memory, prefetches, a predicated load (PTX ISA 9.0, section 9.7.9). Hopper has all
// of them, so that it runs the same kernels.
//
// Loads and stores of shared memory take a 32-bit address (sections 9.7.9.8 and 9.7.9.12): an address that is a sum of
// registers stays 32 bits wide, where a generic pointer would be 64. These loads are ordered with respect to other
// memory accesses (the clobber), but may be dropped if nothing uses their value.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "sync.cuh"

namespace flashinfer::sm12x::ptx {

// A box of a 3-D tensor map; completes `barrier` by the box's bytes (out-of-bounds elements are zero and count).
__device__ __forceinline__ void tensor_copy_3d(void* shared, const CUtensorMap* map, int x, int y, int z,
                                               uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cta.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(shared_address(barrier))
      : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(global)));
}

// Contiguous bytes, a multiple of 16, from an address aligned to 16 (section 9.7.9.25.4.3).
__device__ __forceinline__ void bulk_prefetch_to_l2(const void* global, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes)
               : "memory");
}

// Sixteen aligned bytes, or zeros. A predicate instead of a branch: the code is fetched whether or not it is wanted.
__device__ __forceinline__ uint4 load_16_bytes_if(bool wanted, const void* global) {
  uint4 loaded;
  asm("{\n\t.reg .pred wanted;\n\t"
      "setp.ne.u32 wanted, %5, 0;\n\t"
      "mov.b32 %0, 0;\n\tmov.b32 %1, 0;\n\tmov.b32 %2, 0;\n\tmov.b32 %3, 0;\n\t"
      "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n\t}"
      : "=&r"(loaded.x), "=&r"(loaded.y), "=&r"(loaded.z), "=&r"(loaded.w)
      : "l"(__cvta_generic_to_global(global)), "r"(static_cast<uint32_t>(wanted))
      : "memory");
  return loaded;
}

// Contiguous bytes, a multiple of 16, both ends aligned to 16.
__device__ __forceinline__ void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Bypasses L1: other blocks want these bytes, this one does not read them again. A predicate instead of a branch: with
// a branch, lanes would reconverge after each copy.
__device__ __forceinline__ void copy_16_bytes_if(bool wanted, void* shared, const void* global) {
  asm volatile(
      "{\n\t.reg .pred wanted;\n\t"
      "setp.ne.u32 wanted, %2, 0;\n\t"
      "@wanted cp.async.cg.shared.global [%0], [%1], 16;\n\t}" ::"r"(shared_address(shared)),
      "l"(__cvta_generic_to_global(global)), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

// This thread's copies have landed, and it may read them; others may behind a barrier.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

__device__ __forceinline__ void copy_word(void* shared, const void* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(shared)),
               "l"(__cvta_generic_to_global(global))
               : "memory");
}

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

// Two bytes, and eight, aligned.
__device__ __forceinline__ uint32_t load_shared_16_bits(uint32_t address) {
  uint32_t half;
  asm("{\n\t.reg .u16 half;\n\tld.shared.u16 half, [%1];\n\tcvt.u32.u16 %0, half;\n\t}"
      : "=r"(half)
      : "r"(address)
      : "memory");
  return half;
}

__device__ __forceinline__ void load_shared_pair(uint32_t* words, uint32_t address) {
  asm("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(address) : "memory");
}

__device__ __forceinline__ void store_shared_byte(uint32_t address, uint32_t byte) {
  asm volatile("st.shared.u8 [%0], %1;" ::"r"(address), "r"(byte) : "memory");
}

}  // namespace flashinfer::sm12x::ptx
