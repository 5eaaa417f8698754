// SPDX-License-Identifier: Apache-2.0
// The virtual GPU: memory, modules, launches.
//
// A device pointer to global, const or param memory IS the host address of the bytes. Shared and local memory are
// reached through windows above 2^56, where no host address lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "gpu_limits.h"
#include "program.h"
#include "report.h"
#include "tensor/tensor.h"

namespace vsm {

struct DeviceImpl;
struct LoadedModule;  // a Program with its variables placed in one device's memory

struct Allocation {
  uint64_t address = 0;
  uint64_t size = 0;
  bool read_only = false;
  bool owned = false;  // by the device (allocate), not by the host (register_memory)
};

enum WatchFlags : uint32_t {
  kWatchUninitialized = 1u << 0,  // shared memory, and global memory from allocate()
  kWatchRaces = 1u << 1,          // shared memory, between the warps of a block (slow)
  kWatchFences = 1u << 2,  // generic write, async access, no proxy fence between; overlapping grids without a wait
  kWatchDistinct = 1u << 3,  // count distinct global bytes
  // GB10's ordering rule (exec/arrival_checker.h). Off unless asked for, whatever target a module is compiled for: by
  // the PTX ISA nothing is missing, kernels without these fences are right on every other GPU, and most of those that
  // are compiled for sm_121a (CUTLASS's) have none. To be asked for where kernels are meant to run on a GB10.
  kWatchArrivals = 1u << 4,
  kWatchDefault = kWatchUninitialized | kWatchFences | kWatchDistinct,
};

struct LaunchConfig {
  uint32_t grid[3] = {1, 1, 1};
  uint32_t block[3] = {1, 1, 1};
  uint32_t dynamic_shared = 0;
  /// Registers per thread and named barriers per block as ptxas allotted them; 0: unknown, not checked.
  uint32_t registers = 0;
  uint32_t barriers = 0;
  /// What cudaFuncSetAttribute(MaxDynamicSharedMemorySize) granted; static + dynamic above 48 KiB needs it.
  uint32_t max_dynamic_shared = 0;
  uint32_t cluster[3] = {1, 1, 1};
  /// Launches of one stream are ordered; with programmatic stream serialization, this one by griddepcontrol.wait alone.
  uint64_t stream = 0;
  bool programmatic = false;
  /// All blocks are resident at once, so that they may wait for one another: what a kernel's grid-wide barrier needs.
  bool cooperative = false;
  tensor::AccumulationBits accumulation_bits;
  uint32_t watch = kWatchDefault;
  uint64_t max_warp_instructions = 0;  // bound for the launch; 0: the device's default
  uint32_t max_reports = 64;  // of a kind
  bool stop_at_first_report = false;
  /// A seed: other blocks see a block's weak writes only when something orders them, or at random. 0: at once.
  uint64_t weak_memory = 0;
  /// Scheduler rounds by which one asynchronous copy in 50 lands later than the others. 0: none.
  uint64_t late_copies = 0;
};

class Device {
 public:
  /// `host_threads` 0: one per core of the machine.
  explicit Device(const Limits& limits = Limits(), int host_threads = 0);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  const Limits& limits() const;

  // --- memory (thread-safe) ---------------------------------------------------------------------------------
  /// Bytes of global memory, 256-byte aligned, uninitialized (and watched as such). Throws std::bad_alloc.
  uint64_t allocate(uint64_t bytes);
  /// False if `address` is not the start of an allocation of this device.
  bool release(uint64_t address);
  /// Makes host memory that somebody else owns (a CPU tensor) accessible to kernels; counts as initialized.
  /// Registering the same range again is counted; overlapping ranges are allowed.
  void register_memory(const void* address, uint64_t bytes, bool read_only = false);
  bool unregister_memory(const void* address);
  /// The allocation that holds `address`, if any.
  bool find(uint64_t address, Allocation* out) const;
  /// For memcpy/memset of the runtime: says that the host wrote the bytes.
  void mark_initialized(uint64_t address, uint64_t bytes);
  /// The opposite, for memory from allocate(): whatever lies there, a kernel must not read it before it is written.
  void discard(uint64_t address, uint64_t bytes);
  uint64_t bytes_allocated() const;
  /// Every launch so far is complete before the next begins: the host waited, or put other work between them.
  void settle();

  // --- modules ----------------------------------------------------------------------------------------------
  /// Places the program's variables. Throws PtxError if a symbol cannot be resolved.
  LoadedModule* load(std::shared_ptr<const Program> program);
  void unload(LoadedModule* module);
  /// Address of a .global/.const variable; 0 if the module has none of that name.
  uint64_t variable(const LoadedModule* module, const std::string& name, uint64_t* size) const;
  const Program& program(const LoadedModule* module) const;

  // --- launches ---------------------------------------------------------------------------------------------
  /// Runs a kernel to its end. `params` is the packed parameter buffer (KernelInfo::params gives the offsets).
  /// Never throws for what the program does: that is in the result. Refuses a kernel with an instruction that is not
  /// known.
  LaunchResult launch(LoadedModule* module, int kernel, const LaunchConfig& config, const void* params,
                      size_t param_bytes);

 private:
  std::unique_ptr<DeviceImpl> impl_;
};

}  // namespace vsm
