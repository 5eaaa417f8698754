// SPDX-License-Identifier: Apache-2.0
// The types of CUDA's public runtime and driver interface that cross the boundary of the shim, at their binary layout
// (CUDA 13.0), so that the emulator builds without the toolkit. tests/shim/abi_check.cpp holds every size, offset and
// value against the toolkit's own headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vsm::abi {

enum Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kMemoryAllocation = 2,
  kInvalidSymbol = 13,
  kInvalidMemcpyDirection = 21,
  kInvalidDeviceFunction = 98,
  kInvalidDevice = 101,
  kInvalidKernelImage = 200,
  kNoKernelImageForDevice = 209,
  kInvalidPtx = 218,
  kInvalidResourceHandle = 400,
  kIllegalState = 401,
  kNotReady = 600,
  kIllegalAddress = 700,
  kLaunchOutOfResources = 701,
  kLaunchTimeout = 702,
  kIllegalInstruction = 715,
  kMisalignedAddress = 716,
  kLaunchFailure = 719,
  kCooperativeLaunchTooLarge = 720,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureInvalidated = 901,
  kStreamCaptureUnmatched = 903,
  kStreamCaptureImplicit = 906,
  kInvalidClusterSize = 912,
  kUnknown = 999,
};

struct Dim3 {
  unsigned x, y, z;
};

enum MemcpyKind : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3, kByAddress = 4 };

enum FunctionAttribute : int {
  kMaxDynamicShared = 8,
  kSharedCarveout = 9,
  kClusterMustBeSet = 10,
  kClusterWidth = 11,
  kClusterHeight = 12,
  kClusterDepth = 13,
  kNonPortableCluster = 14,
  kClusterPolicy = 15,
};

struct FunctionAttributes {
  size_t shared_bytes;
  size_t const_bytes;
  size_t local_bytes;
  int max_threads_per_block;
  int registers;
  int ptx_version;
  int binary_version;
  int cache_mode_ca;
  int max_dynamic_shared_bytes;
  int preferred_shared_carveout;
  int cluster_dim_must_be_set;
  int required_cluster_width, required_cluster_height, required_cluster_depth;
  int cluster_scheduling_policy;
  int non_portable_cluster_size_allowed;
  int reserved[16];
};

enum LaunchAttributeId : int {
  kIgnore = 0,
  kAccessPolicyWindow = 1,
  kCooperative = 2,
  kClusterDimension = 4,
  kProgrammaticStreamSerialization = 6,
  kProgrammaticEvent = 7,
  kPreferredClusterDimension = 11,
  kLaunchCompletionEvent = 12,
  kLastLaunchAttribute = 16,
};

struct LaunchAttribute {
  int id;
  char pad[4];
  union {
    char bytes[64];
    int number;
    Dim3 dims;
  } value;
};

struct LaunchConfig {
  Dim3 grid, block;
  size_t dynamic_shared;
  void* stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};

struct ChannelFormat {
  int x, y, z, w;  // bits
  int kind;
};

struct PointerAttributes {
  int type;  // 0 unregistered, 1 host, 2 device, 3 managed
  int device;
  void* device_pointer;
  void* host_pointer;
  long reserved[8];
};

struct DeviceProperties {
  char name[256];
  char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_mem;
  size_t shared_mem_per_block;
  int regs_per_block;
  int warp_size;
  size_t mem_pitch;
  int max_threads_per_block;
  int max_threads_dim[3];
  int max_grid_size[3];
  size_t total_const_mem;
  int major;
  int minor;
  size_t texture_alignment;
  size_t texture_pitch_alignment;
  int multi_processor_count;
  int integrated;
  int can_map_host_memory;
  int textures_and_surfaces[38];  // not modelled: zero
  size_t surface_alignment;
  int concurrent_kernels;
  int ecc_enabled;
  int pci[3];
  int tcc_driver;
  int async_engine_count;
  int unified_addressing;
  int memory_bus_width;
  int l2_cache_size;
  int persisting_l2_cache_max_size;
  int max_threads_per_multi_processor;
  int stream_priorities_supported;
  int global_l1_cache_supported;
  int local_l1_cache_supported;
  size_t shared_mem_per_multiprocessor;
  int regs_per_multiprocessor;
  int managed_memory;
  int is_multi_gpu_board;
  int multi_gpu_board_group_id;
  int host_native_atomic_supported;
  int pageable_memory_access;
  int concurrent_managed_access;
  int compute_preemption_supported;
  int can_use_host_pointer_for_registered_mem;
  int cooperative_launch;
  size_t shared_mem_per_block_optin;
  int pageable_memory_access_uses_host_page_tables;
  int direct_managed_mem_access_from_host;
  int max_blocks_per_multi_processor;
  int access_policy_max_window_size;
  size_t reserved_shared_mem_per_block;
  int host_register_supported;
  int sparse_cuda_array_supported;
  int host_register_read_only_supported;
  int timeline_semaphore_interop_supported;
  int memory_pools_supported;
  int gpu_direct_rdma_supported;
  unsigned gpu_direct_rdma_flush_writes_options;
  int gpu_direct_rdma_writes_ordering;
  unsigned memory_pool_supported_handle_types;
  int deferred_mapping_cuda_array_supported;
  int ipc_event_supported;
  int cluster_launch;
  int unified_function_pointers;
  int device_numa_config;
  int device_numa_id;
  int mps_enabled;
  int host_numa_id;
  unsigned gpu_pci_device_id;
  unsigned gpu_pci_subsystem_id;
  int host_numa_multinode_ipc_supported;
  int reserved[56];
};

/// CUdevResource of SMs.
struct DeviceResource {
  int type;
  unsigned char padding[92];
  unsigned sm_count, least_partition, alignment;
  unsigned char rest[36];
};
enum { kResourceSm = 1 };

}  // namespace vsm::abi
