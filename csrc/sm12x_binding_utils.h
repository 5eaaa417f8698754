// SPDX-License-Identifier: Apache-2.0
//
// What the bindings of the SM12x family share: from tensors to plain pointers, from a failed launch to an exception.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <climits>
#include <map>
#include <mutex>

#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_sm120_mixed_input_launcher.h"
#include "tvm_ffi_utils.h"

namespace flashinfer::sm12x {

inline const void* pointer_or_null(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor) {
  return tensor.has_value() ? tensor.value().data_ptr() : nullptr;
}

inline const uint8_t* bytes_or_null(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor) {
  return static_cast<const uint8_t*>(pointer_or_null(tensor));
}

inline const float* floats_or_null(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor) {
  return static_cast<const float*>(pointer_or_null(tensor));
}

inline ScalarType scalar_type(const tvm::ffi::TensorView& tensor, const char* name) {
  const DLDataType type = tensor.dtype();
  if (type.code == kDLBfloat && type.bits == 16) return ScalarType::kBf16;
  if (type.code == kDLFloat && type.bits == 16) return ScalarType::kF16;
  TVM_FFI_CHECK(type.code == kDLFloat && type.bits == 32, ValueError)
      << name << " must be bfloat16, float16 or float32";
  return ScalarType::kF32;
}

// A size as the kernels count it.
inline int checked_int(int64_t value, const char* name) {
  TVM_FFI_CHECK(value >= 0 && value <= INT_MAX, ValueError) << name << " is " << value << "; it must be below 2^31";
  return static_cast<int>(value);
}

inline int current_device() {
  int device = 0;
  const cudaError_t error = cudaGetDevice(&device);
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error);
  return device;
}

inline int device_attribute(cudaDeviceAttr attribute, int device) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, attribute, device);
  TVM_FFI_CHECK(error == cudaSuccess, RuntimeError) << cudaGetErrorString(error);
  return value;
}

inline int multiprocessors(int device) { return device_attribute(cudaDevAttrMultiProcessorCount, device); }

// A call of the driver's that came with CUDA 12.4, found through the runtime (this library does not link libcuda); null
// where the driver is older.
template <class Function>
Function* driver_call(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &entry, 12040, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(entry) : nullptr;
}

// SMs that the current context may use, of `all`: under MPS a client may have a share only.
inline int context_sms(int all) {
  static const auto get_current = driver_call<CUresult(CUcontext*)>("cuCtxGetCurrent");
  static const auto get_resource =
      driver_call<CUresult(CUcontext, CUdevResource*, CUdevResourceType)>("cuCtxGetDevResource");
  CUcontext context;
  CUdevResource resource;
  if (get_current == nullptr || get_resource == nullptr || get_current(&context) != CUDA_SUCCESS ||
      get_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) {
    return all;
  }
  return static_cast<int>(resource.sm.smCount);
}

// SMs of a stream's green context; `others` where it belongs to none.
inline int stream_sms(cudaStream_t stream, int others) {
  static const auto get_context = driver_call<CUresult(CUstream, CUgreenCtx*)>("cuStreamGetGreenCtx");
  static const auto get_resource =
      driver_call<CUresult(CUgreenCtx, CUdevResource*, CUdevResourceType)>("cuGreenCtxGetDevResource");
  CUgreenCtx context = nullptr;
  CUdevResource resource;
  if (get_context == nullptr || get_resource == nullptr || get_context(stream, &context) != CUDA_SUCCESS ||
      context == nullptr || get_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) {
    return others;
  }
  return static_cast<int>(resource.sm.smCount);
}

// What launches need to know of a device, asked of the driver once, and of the stream.
inline LaunchOptions launch_options(cudaStream_t stream, bool dependent_launch, int device) {
  static std::mutex mutex;
  static std::map<int, LaunchOptions> known;
  LaunchOptions options;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(device);
    if (found == known.end()) {
      const int sms = multiprocessors(device);
      const LaunchOptions facts = {nullptr,
                                   false,
                                   sms,
                                   context_sms(sms),
                                   device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 12,
                                   device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
      found = known.emplace(device, facts).first;
    }
    options = found->second;
  }
  options.stream = stream;
  options.dependent_launch = dependent_launch;
  options.sm_count = stream_sms(stream, options.sm_count);
  return options;
}

inline cudaStream_t stream_of(const tvm::ffi::TensorView& tensor) {
  const DLDevice device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline void check_status(const Status& status) {
  TVM_FFI_CHECK(status.error == cudaSuccess, RuntimeError)
      << (status.what != nullptr ? status.what : "launch") << ": " << cudaGetErrorString(status.error);
}

}  // namespace flashinfer::sm12x
