// SPDX-License-Identifier: Apache-2.0
//
// Compiled against the toolkit's headers: the shim's own declarations have CUDA's sizes, offsets and values.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstddef>

#include "shim/cuda_abi.h"

#define SAME_SIZE(theirs, ours) static_assert(sizeof(theirs) == sizeof(vsm::abi::ours), #theirs)
#define SAME_OFFSET(theirs, field, ours, member) \
  static_assert(offsetof(theirs, field) == offsetof(vsm::abi::ours, member), #theirs "." #field)
#define SAME_VALUE(theirs, ours) static_assert(int(theirs) == int(vsm::abi::ours), #theirs)

SAME_SIZE(dim3, Dim3);
SAME_SIZE(cudaLaunchAttribute, LaunchAttribute);
SAME_OFFSET(cudaLaunchAttribute, val, LaunchAttribute, value);
SAME_SIZE(cudaLaunchConfig_t, LaunchConfig);
SAME_OFFSET(cudaLaunchConfig_t, blockDim, LaunchConfig, block);
SAME_OFFSET(cudaLaunchConfig_t, dynamicSmemBytes, LaunchConfig, dynamic_shared);
SAME_OFFSET(cudaLaunchConfig_t, stream, LaunchConfig, stream);
SAME_OFFSET(cudaLaunchConfig_t, attrs, LaunchConfig, attributes);
SAME_OFFSET(cudaLaunchConfig_t, numAttrs, LaunchConfig, attribute_count);

SAME_SIZE(cudaFuncAttributes, FunctionAttributes);
SAME_OFFSET(cudaFuncAttributes, sharedSizeBytes, FunctionAttributes, shared_bytes);
SAME_OFFSET(cudaFuncAttributes, localSizeBytes, FunctionAttributes, local_bytes);
SAME_OFFSET(cudaFuncAttributes, maxThreadsPerBlock, FunctionAttributes, max_threads_per_block);
SAME_OFFSET(cudaFuncAttributes, numRegs, FunctionAttributes, registers);
SAME_OFFSET(cudaFuncAttributes, ptxVersion, FunctionAttributes, ptx_version);
SAME_OFFSET(cudaFuncAttributes, binaryVersion, FunctionAttributes, binary_version);
SAME_OFFSET(cudaFuncAttributes, maxDynamicSharedSizeBytes, FunctionAttributes, max_dynamic_shared_bytes);
SAME_OFFSET(cudaFuncAttributes, preferredShmemCarveout, FunctionAttributes, preferred_shared_carveout);

SAME_SIZE(cudaChannelFormatDesc, ChannelFormat);
SAME_OFFSET(cudaChannelFormatDesc, f, ChannelFormat, kind);
SAME_SIZE(cudaPointerAttributes, PointerAttributes);
SAME_OFFSET(cudaPointerAttributes, device, PointerAttributes, device);
SAME_OFFSET(cudaPointerAttributes, devicePointer, PointerAttributes, device_pointer);
SAME_OFFSET(cudaPointerAttributes, hostPointer, PointerAttributes, host_pointer);

SAME_SIZE(cudaDeviceProp, DeviceProperties);
SAME_OFFSET(cudaDeviceProp, totalGlobalMem, DeviceProperties, total_global_mem);
SAME_OFFSET(cudaDeviceProp, sharedMemPerBlock, DeviceProperties, shared_mem_per_block);
SAME_OFFSET(cudaDeviceProp, regsPerBlock, DeviceProperties, regs_per_block);
SAME_OFFSET(cudaDeviceProp, warpSize, DeviceProperties, warp_size);
SAME_OFFSET(cudaDeviceProp, maxThreadsPerBlock, DeviceProperties, max_threads_per_block);
SAME_OFFSET(cudaDeviceProp, maxGridSize, DeviceProperties, max_grid_size);
SAME_OFFSET(cudaDeviceProp, totalConstMem, DeviceProperties, total_const_mem);
SAME_OFFSET(cudaDeviceProp, major, DeviceProperties, major);
SAME_OFFSET(cudaDeviceProp, multiProcessorCount, DeviceProperties, multi_processor_count);
SAME_OFFSET(cudaDeviceProp, surfaceAlignment, DeviceProperties, surface_alignment);
SAME_OFFSET(cudaDeviceProp, concurrentKernels, DeviceProperties, concurrent_kernels);
SAME_OFFSET(cudaDeviceProp, unifiedAddressing, DeviceProperties, unified_addressing);
SAME_OFFSET(cudaDeviceProp, memoryBusWidth, DeviceProperties, memory_bus_width);
SAME_OFFSET(cudaDeviceProp, l2CacheSize, DeviceProperties, l2_cache_size);
SAME_OFFSET(cudaDeviceProp, maxThreadsPerMultiProcessor, DeviceProperties, max_threads_per_multi_processor);
SAME_OFFSET(cudaDeviceProp, sharedMemPerMultiprocessor, DeviceProperties, shared_mem_per_multiprocessor);
SAME_OFFSET(cudaDeviceProp, regsPerMultiprocessor, DeviceProperties, regs_per_multiprocessor);
SAME_OFFSET(cudaDeviceProp, cooperativeLaunch, DeviceProperties, cooperative_launch);
SAME_OFFSET(cudaDeviceProp, sharedMemPerBlockOptin, DeviceProperties, shared_mem_per_block_optin);
SAME_OFFSET(cudaDeviceProp, maxBlocksPerMultiProcessor, DeviceProperties, max_blocks_per_multi_processor);
SAME_OFFSET(cudaDeviceProp, reservedSharedMemPerBlock, DeviceProperties, reserved_shared_mem_per_block);
SAME_OFFSET(cudaDeviceProp, memoryPoolsSupported, DeviceProperties, memory_pools_supported);
SAME_OFFSET(cudaDeviceProp, clusterLaunch, DeviceProperties, cluster_launch);

SAME_SIZE(CUdevResource, DeviceResource);
SAME_OFFSET(CUdevResource, sm.smCount, DeviceResource, sm_count);
SAME_VALUE(CU_DEV_RESOURCE_TYPE_SM, kResourceSm);

SAME_VALUE(cudaSuccess, kSuccess);
SAME_VALUE(cudaErrorInvalidValue, kInvalidValue);
SAME_VALUE(cudaErrorMemoryAllocation, kMemoryAllocation);
SAME_VALUE(cudaErrorInvalidSymbol, kInvalidSymbol);
SAME_VALUE(cudaErrorInvalidMemcpyDirection, kInvalidMemcpyDirection);
SAME_VALUE(cudaErrorInvalidDeviceFunction, kInvalidDeviceFunction);
SAME_VALUE(cudaErrorInvalidDevice, kInvalidDevice);
SAME_VALUE(cudaErrorInvalidKernelImage, kInvalidKernelImage);
SAME_VALUE(cudaErrorNoKernelImageForDevice, kNoKernelImageForDevice);
SAME_VALUE(cudaErrorInvalidPtx, kInvalidPtx);
SAME_VALUE(cudaErrorInvalidResourceHandle, kInvalidResourceHandle);
SAME_VALUE(cudaErrorIllegalState, kIllegalState);
SAME_VALUE(cudaErrorNotReady, kNotReady);
SAME_VALUE(cudaErrorIllegalAddress, kIllegalAddress);
SAME_VALUE(cudaErrorLaunchOutOfResources, kLaunchOutOfResources);
SAME_VALUE(cudaErrorLaunchTimeout, kLaunchTimeout);
SAME_VALUE(cudaErrorIllegalInstruction, kIllegalInstruction);
SAME_VALUE(cudaErrorMisalignedAddress, kMisalignedAddress);
SAME_VALUE(cudaErrorLaunchFailure, kLaunchFailure);
SAME_VALUE(cudaErrorCooperativeLaunchTooLarge, kCooperativeLaunchTooLarge);
SAME_VALUE(cudaErrorNotSupported, kNotSupported);
SAME_VALUE(cudaErrorStreamCaptureUnsupported, kStreamCaptureUnsupported);
SAME_VALUE(cudaErrorStreamCaptureInvalidated, kStreamCaptureInvalidated);
SAME_VALUE(cudaErrorStreamCaptureUnmatched, kStreamCaptureUnmatched);
SAME_VALUE(cudaErrorStreamCaptureImplicit, kStreamCaptureImplicit);
SAME_VALUE(cudaErrorInvalidClusterSize, kInvalidClusterSize);
SAME_VALUE(cudaErrorUnknown, kUnknown);

SAME_VALUE(cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxDynamicShared);
SAME_VALUE(cudaFuncAttributePreferredSharedMemoryCarveout, kSharedCarveout);
SAME_VALUE(cudaFuncAttributeNonPortableClusterSizeAllowed, kNonPortableCluster);
SAME_VALUE(cudaFuncAttributeClusterSchedulingPolicyPreference, kClusterPolicy);
SAME_VALUE(cudaLaunchAttributeCooperative, kCooperative);
SAME_VALUE(cudaLaunchAttributeClusterDimension, kClusterDimension);
SAME_VALUE(cudaLaunchAttributeProgrammaticStreamSerialization, kProgrammaticStreamSerialization);
SAME_VALUE(cudaLaunchAttributeProgrammaticEvent, kProgrammaticEvent);
SAME_VALUE(cudaLaunchAttributeLaunchCompletionEvent, kLaunchCompletionEvent);
SAME_VALUE(cudaLaunchAttributeNvlinkUtilCentricScheduling, kLastLaunchAttribute);
SAME_VALUE(cudaMemcpyDefault, kByAddress);
