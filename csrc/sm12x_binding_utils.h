// SPDX-License-Identifier: Apache-2.0
//
// What the bindings of the SM12x family share: from tensors to plain pointers, from a failed launch to an exception.
#pragma once

#include <cuda_runtime.h>

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

// What launches need to know of a device, asked of the driver once.
inline LaunchOptions launch_options(cudaStream_t stream, bool dependent_launch, int device) {
  static std::mutex mutex;
  static std::map<int, LaunchOptions> known;
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known.find(device);
  if (found == known.end()) {
    const LaunchOptions facts = {nullptr, false, multiprocessors(device),
                                 device_attribute(cudaDevAttrComputeCapabilityMajor, device) == 12,
                                 device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device)};
    found = known.emplace(device, facts).first;
  }
  LaunchOptions options = found->second;
  options.stream = stream;
  options.dependent_launch = dependent_launch;
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
