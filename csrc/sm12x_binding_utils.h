// SPDX-License-Identifier: Apache-2.0
//
// Helpers of the SM12x bindings: tensors become plain pointers, a failed launch becomes an exception.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>

#include "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/sm12x_arch_config.h"
#include "tvm_ffi_utils.h"

namespace flashinfer::sm12x {

template <class T>
T* data(const tvm::ffi::TensorView& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
T* data_or_null(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor) {
  return tensor.has_value() ? data<T>(tensor.value()) : nullptr;
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

inline void check_status(const Status& status) {
  TVM_FFI_CHECK(status.error == cudaSuccess, RuntimeError)
      << (status.what != nullptr ? status.what : "launch") << ": " << cudaGetErrorString(status.error);
}

inline int current_device() {
  int device = 0;
  check_status({cudaGetDevice(&device), "the current device"});
  return device;
}

inline int multiprocessors(int device) {
  int value = 0;
  check_status(device_attribute(cudaDevAttrMultiProcessorCount, device, &value));
  return value;
}

inline cudaStream_t stream_of(const tvm::ffi::TensorView& tensor) {
  const DLDevice device = tensor.device();
  return static_cast<cudaStream_t>(TVMFFIEnvGetStream(device.device_type, device.device_id));
}

inline LaunchOptions launch_options(const tvm::ffi::TensorView& tensor, bool dependent_launch) {
  LaunchOptions options;
  check_status(find_launch_options(stream_of(tensor), dependent_launch, tensor.device().device_id, &options));
  return options;
}

// The beginning of a tensor that the next launch reads, for prefetching: a twelfth of L2, about as much as memory
// brings between two launches. With more, other blocks would wait for their own bytes.
inline L2Prefetch l2_prefetch_of(const tvm::ffi::Optional<tvm::ffi::TensorView>& tensor, const LaunchOptions& options) {
  constexpr int kReadAheadShare = 12;
  if (!tensor.has_value()) return {};
  const tvm::ffi::TensorView& view = tensor.value();
  TVM_FFI_CHECK(reinterpret_cast<uintptr_t>(view.data_ptr()) % 16 == 0, ValueError)
      << "next_weights must start at a multiple of 16 bytes";
  const int64_t bytes = view.numel() * (view.dtype().bits * view.dtype().lanes) / 8;
  return {view.data_ptr(), std::min<int64_t>(bytes, options.l2_bytes / kReadAheadShare) / 16 * 16};
}

}  // namespace flashinfer::sm12x
