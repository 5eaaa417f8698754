// SPDX-License-Identifier: Apache-2.0
//
// The host's side of the architecture: the limits that a device and a stream set to launches of the SM12x family, and
// the instances that may run there. The device's side (limits that kernels are built for) is flashinfer/sm12x/types.h.
#pragma once

#include <map>
#include <mutex>

#include "flashinfer/sm12x/host/instance.h"

namespace flashinfer::sm12x {

inline Status device_attribute(cudaDeviceAttr attribute, int device, int* value) {
  return {cudaDeviceGetAttribute(value, attribute, device), "an attribute of the device"};
}

constexpr unsigned kSmsOfContexts = 12040;  // CUDA that brought the driver's calls below

// SMs that the current context may use, of `all`: under MPS a client may have a share only.
inline int context_sms(int all) {
  static const auto get_current = driver_call<CUresult(CUcontext*)>("cuCtxGetCurrent", kSmsOfContexts);
  static const auto get_resource =
      driver_call<CUresult(CUcontext, CUdevResource*, CUdevResourceType)>("cuCtxGetDevResource", kSmsOfContexts);
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
  static const auto get_context = driver_call<CUresult(CUstream, CUgreenCtx*)>("cuStreamGetGreenCtx", kSmsOfContexts);
  static const auto get_resource =
      driver_call<CUresult(CUgreenCtx, CUdevResource*, CUdevResourceType)>("cuGreenCtxGetDevResource", kSmsOfContexts);
  CUgreenCtx context = nullptr;
  CUdevResource resource;
  if (get_context == nullptr || get_resource == nullptr || get_context(stream, &context) != CUDA_SUCCESS ||
      context == nullptr || get_resource(context, &resource, CU_DEV_RESOURCE_TYPE_SM) != CUDA_SUCCESS) {
    return others;
  }
  return static_cast<int>(resource.sm.smCount);
}

// Fills in what a launch needs to know of its device, which the driver is asked once, and of its stream.
inline Status find_launch_options(cudaStream_t stream, bool dependent_launch, int device, LaunchOptions* options) {
  static std::mutex mutex;
  static std::map<int, LaunchOptions> known;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto found = known.find(device);
    if (found == known.end()) {
      LaunchOptions facts = {};
      int major = 0;
      for (const Status& status :
           {device_attribute(cudaDevAttrMultiProcessorCount, device, &facts.device_sms),
            device_attribute(cudaDevAttrComputeCapabilityMajor, device, &major),
            device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device, &facts.shared_bytes),
            device_attribute(cudaDevAttrL2CacheSize, device, &facts.l2_bytes)}) {
        if (status.error) return status;
      }
      facts.sm_count = context_sms(facts.device_sms);
      facts.sm12x = major == 12;
      found = known.emplace(device, facts).first;
    }
    *options = found->second;
  }
  options->stream = stream;
  options->dependent_launch = dependent_launch;
  options->sm_count = stream_sms(stream, options->sm_count);
  return {};
}

// Whether a MoE layer's tactic can run where `options` says: a fused MoE kernel needs all SMs of the device, since its
// blocks wait for each other.
inline bool takes_sms(const Instance& instance, const LaunchOptions& options) {
  return !instance.is_fused_moe() || options.sm_count >= options.device_sms;
}

// Whether GEMM kernels sort a layer's routed rows by themselves: if operands are MXFP8 and routed rows are few. A
// launch in front packs rows of bfloat16 in permuted order and needs that order.
inline bool routes_in_kernel(const Instance& instance, int num_routed_rows) {
  return instance.compute_type != Element::kBf16 && num_routed_rows <= kInKernelRoutedRows;
}

}  // namespace flashinfer::sm12x
