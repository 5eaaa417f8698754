// SPDX-License-Identifier: Apache-2.0
//
// Host code that every launch of the family uses: plain CUDA, no framework.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

namespace flashinfer::sm12x {

struct LaunchOptions {
  cudaStream_t stream;
  bool dependent_launch;  // programmatic dependent launch within the layer
  int device_sms;         // SMs of the device, for which workspaces are sized
  int sm_count;  // SMs that the stream may use: fewer in a green context, or under MPS with a limited share
  bool sm12x;             // compute capability 12.x, else Hopper
  int shared_bytes;  // most that a block may have
  int l2_bytes;
};

// Launches a kernel after the earlier launches of the stream. With dependent_launch it may start beside them, up to its
// own wait for them. `cooperative`: all of its blocks are resident together.
template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), const Params& params, int blocks, int threads, int shared_bytes,
                          const LaunchOptions& options, bool cooperative = false) {
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (options.dependent_launch) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = options.stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// The same for a kernel whose threads share `items`: one thread for each, up to eight blocks for each SM.
template <class Params>
cudaError_t launch_over(void (*kernel)(Params), const Params& params, int64_t items, int threads,
                        const LaunchOptions& options) {
  const int64_t wanted = (items + threads - 1) / threads;
  const int blocks = static_cast<int>(std::min<int64_t>(wanted, 8 * options.sm_count));
  return launch_kernel(kernel, params, blocks, threads, 0, options);
}

// Lets a kernel ask for all the shared memory that a block may have. Always the same amount, so that threads which
// launch layers of different sizes cannot take away from each other what they were granted.
template <class Params>
cudaError_t grant_shared_memory(void (*kernel)(Params), const LaunchOptions& options) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, options.shared_bytes);
}

// A launch that failed, and why: `what` names the call, null where `error` says it all.
struct Status {
  cudaError_t error = cudaSuccess;
  const char* what = nullptr;
};

// A call of the driver's that came with CUDA `version`, found through the runtime: the library does not link libcuda.
// Null where the driver is older.
template <class Function>
Function* driver_call(const char* name, unsigned version) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, version, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(entry) : nullptr;
}

// A 3-D tensor map, dense but for `strides`; `refused` says what the driver did not take.
inline Status encode_tensor_map(CUtensorMapDataType type, const uint8_t* data, const cuuint64_t (&sizes)[3],
                                const cuuint64_t (&strides)[2], const cuuint32_t (&box)[3], CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, const char* refused, CUtensorMap* map) {
  static const auto encode = driver_call<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled", 12000);
  if (encode == nullptr) return {cudaErrorSymbolNotFound, "the driver has no cuTensorMapEncodeTiled"};
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result = encode(map, type, 3, const_cast<uint8_t*>(data), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return {cudaErrorInvalidValue, refused};
  return {};
}

}  // namespace flashinfer::sm12x
