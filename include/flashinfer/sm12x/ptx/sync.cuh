// SPDX-License-Identifier: Apache-2.0
//
// Barriers, fences, dependent launches and waiting: thin wrappers of PTX instructions (PTX ISA 9.0, section 9.7.13),
// and the fences that GB10 needs in front of arrivals.
#pragma once

#include <cstdint>

// GB10 does not reliably honour the release ordering of mbarrier.arrive (flashinfer issue 3658, seen on a DGX Spark and
// not on SM120; the XQA kernel carries the same remedy). So a block-level fence stands before every arrival,
// also before that of a thread that has only read, and a device-level fence before a block counts itself at a counter
// that other blocks read.
//
// Decided by where the binary may run, not by __CUDA_ARCH__: code for 12.1, and code for the family 12.x, which a GB10
// takes too. Only 12.0a never runs there. Defined on the command line, the macro forces either.
#if !defined(FLASHINFER_SM12X_FENCE_ARRIVALS)
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200 && __CUDA_ARCH__ < 1300 && \
    !(__CUDA_ARCH__ == 1200 && defined(__CUDA_ARCH_SPECIFIC__))
#define FLASHINFER_SM12X_FENCE_ARRIVALS 1
#else
#define FLASHINFER_SM12X_FENCE_ARRIVALS 0
#endif
#endif

namespace flashinfer::sm12x::ptx {

// gridDim.x, read anew at each call: ptxas would keep the value in a register, and none is left.
__device__ __forceinline__ int grid_blocks() {
  int blocks;
  asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(blocks));
  return blocks;
}

constexpr bool kFenceArrivals = FLASHINFER_SM12X_FENCE_ARRIVALS;

// In front of every arrival at an mbarrier.
__device__ __forceinline__ void fence_before_arrival() {
  if constexpr (kFenceArrivals) __threadfence_block();
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  fence_before_arrival();
  asm volatile(
      "{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared::cta.b64 state, [%0];\n\t}" ::"r"(shared_address(barrier))
      : "memory");
}

// One arrival that also announces `bytes` of asynchronous copies for the current phase.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t* barrier, uint32_t bytes) {
  fence_before_arrival();
  asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n\t}" ::"r"(
                   shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

// Arrives once all of this thread's earlier cp.async copies have landed. The arrival is one of those that the barrier
// was initialised with (.noinc).
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint64_t* barrier) {
  fence_before_arrival();
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n\t.reg .pred complete;\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 complete, [%1], %2;\n\t"
        "selp.b32 %0, 1, 0, complete;\n\t}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (done == 0);
}

// Makes mbarrier.init visible to the async proxy's completions.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Orders this thread's generic writes to shared memory before later writes of the async proxy to the same place.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

template <int kThreads>
__device__ __forceinline__ void named_barrier_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// The next number of a counter in shared memory. It orders nothing: a barrier of the block stands before those who read
// what the numbers lead to.
__device__ __forceinline__ int take_number(int* counter) { return atomicAdd(counter, 1); }

// Counts this block among those that have arrived. A thread that sees the count also sees the writes that this block's
// threads made before the barrier in front of this call.
__device__ __forceinline__ void arrive_at_gpu_counter(unsigned* counter) {
  if constexpr (kFenceArrivals) __threadfence();
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(__cvta_generic_to_global(counter)) : "memory");
}

// Counts the calling thread at a counter in global memory, and returns whether it is the last of `arrivals`. The last
// thread may read the others' writes, and so may its block after a barrier: this thread, which saw the count, fences
// between the count and that barrier, and only this order makes the writes visible to the whole block.
__device__ __forceinline__ bool is_last_to_arrive(int* counter, int arrivals) {
  __threadfence();
  const bool last = atomicAdd(counter, 1) == arrivals - 1;
  if (last) __threadfence();
  return last;
}

__device__ __forceinline__ unsigned load_acquire_gpu(const unsigned* counter) {
  unsigned value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(__cvta_generic_to_global(counter)) : "memory");
  return value;
}

// True in one lane of a warp; all lanes must call (section 9.7.13.14). In a branch on it the compiler knows that one
// lane is active. In a branch on the lane's number it turned each bulk copy of the split-K kernels into a loop over
// lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n\t.reg .pred elected;\n\t"
      "elect.sync _|elected, 0xffffffff;\n\t"
      "selp.b32 %0, 1, 0, elected;\n\t}"
      : "=r"(elected));
  return elected != 0;
}

// Counts the calling warp at a named barrier without waiting there.
template <int kThreads>
__device__ __forceinline__ void named_barrier_arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Programmatic dependent launch (section 9.7.13.13): waits until the grids this one depends on have completed and their
// writes are visible; returns at once in a grid launched without the attribute.
__device__ __forceinline__ void wait_for_prerequisite_grids() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void launch_dependent_grids() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// That many cycles of the SM's clock, or a few more; returns at once for 0.
__device__ __forceinline__ void wait_cycles(int cycles) {
  for (const int64_t begin = clock64(); clock64() - begin < cycles;) {}
}

}  // namespace flashinfer::sm12x::ptx
