// SPDX-License-Identifier: Apache-2.0
//
// What every launch of the family needs on the host: plain CUDA, no framework.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace flashinfer::sm12x {

struct LaunchOptions {
  cudaStream_t stream;
  bool dependent_launch;  // programmatic dependent launch within the layer
  int device_sms;         // of the device: what a workspace is made for
  int sm_count;  // that kernels of the stream may use: fewer in a green context, or under MPS with a limited share
  bool sm12x;             // compute capability 12.x, else Hopper
  int shared_bytes;  // that a block may have
};

// A kernel behind the launches before it in the stream, or, with dependent_launch, beside them until it waits for them.
template <class Params>
cudaError_t launch_kernel(void (*kernel)(Params), const Params& params, int blocks, int threads, int shared_bytes,
                          const LaunchOptions& options) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = options.stream;
  config.attrs = &attribute;
  config.numAttrs = options.dependent_launch ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, params);
}

// Lets a kernel ask for all the shared memory that a block may have. Always the same amount, so that threads which launch
// layers of different sizes cannot take away from each other what they were granted.
template <class Params>
cudaError_t grant_shared_memory(void (*kernel)(Params), const LaunchOptions& options) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, options.shared_bytes);
}

// A launch that failed, and why: `what` names the call, null where `error` says it all.
struct Status {
  cudaError_t error = cudaSuccess;
  const char* what = nullptr;
};

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// The driver's entry point, through the runtime: the library does not link libcuda.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTiled>(entry)
                                                                        : nullptr;
  }();
  return function;
}

}  // namespace flashinfer::sm12x
