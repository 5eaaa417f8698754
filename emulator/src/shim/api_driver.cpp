// SPDX-License-Identifier: Apache-2.0
// The driver calls that a runtime program reaches through cudaGetDriverEntryPoint, or through libcuda.so.1
// (libcuda/forward.cpp, which calls the vsm_cu_* names below).
#include <cstring>

#include "shim/runtime.h"
#include "tma/tma.h"

using namespace vsm;        // NOLINT: the names below are CUDA's
using namespace vsm::shim;  // NOLINT

extern "C" {
int cudaDeviceGetAttribute(int* value, int attribute, int device);
const char* cudaGetErrorName(int code);
const char* cudaGetErrorString(int code);
}

namespace {

/// The rule that a description breaks, or nothing. Differs from the documentation (tma::check) where a real driver
/// does (tests/shim/golden): it takes a null address and an interleave of 32B without a swizzle, and refuses a box
/// larger than an SM's shared memory.
std::string broken_rule(const Limits& limits, const tma::Descriptor& description) {
  tma::Descriptor d = description;
  constexpr uint64_t kAnyAlignedAddress = 4096;
  if (d.address == 0) d.address = kAnyAlignedAddress;
  if (d.interleave == tma::Interleave::k32B && d.swizzle == tma::Swizzle::kNone) d.swizzle = tma::Swizzle::k32B;
  std::string rule = tma::check(d);
  if (rule.empty() && tma::box_bytes(d) > limits.shared_per_sm) {
    rule = "the box takes " + std::to_string(tma::box_bytes(d)) + " bytes of shared memory; an SM has " +
           std::to_string(limits.shared_per_sm);
  }
  return rule;
}

}  // namespace

extern "C" {

int vsm_cu_tensor_map_encode_tiled(void* map, int type, uint32_t rank, void* address, const uint64_t* dims,
                                   const uint64_t* strides, const uint32_t* box, const uint32_t* steps, int interleave,
                                   int swizzle, int promotion, int fill) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  auto refuse = [&](const std::string& rule) {
    runtime.explain("cuTensorMapEncodeTiled refused: " + rule);
    return static_cast<int>(abi::kInvalidValue);
  };
  if (!map || !dims || !box || !steps || (rank > 1 && !strides)) return refuse("a required pointer is null");
  if (rank < 1 || rank > 5) return refuse("tensorRank is " + std::to_string(rank) + ", must be 1 to 5");
  for (int mode : {type, interleave, swizzle, promotion, fill}) {
    if (mode < 0 || mode > 255)
      return refuse("a mode is " + std::to_string(mode) + ", which is none of its enumeration");
  }
  tma::Descriptor d;
  d.address = reinterpret_cast<uint64_t>(address);
  d.rank = rank;
  d.type = static_cast<tma::ElementType>(type);
  d.interleave = static_cast<tma::Interleave>(interleave);
  d.swizzle = static_cast<tma::Swizzle>(swizzle);
  d.fill = static_cast<tma::Fill>(fill);
  d.l2_promotion = static_cast<uint8_t>(promotion);
  for (uint32_t i = 0; i < rank; ++i) {
    d.dims[i] = dims[i];
    d.box[i] = box[i];
    d.element_strides[i] = steps[i];
    if (i + 1 < rank) d.strides[i] = strides[i];
  }
  const std::string rule = broken_rule(runtime.limits(), d);
  if (!rule.empty()) return refuse(rule);
  uint8_t image[128];
  tma::encode(d, image);
  std::memcpy(map, image, sizeof(image));
  return abi::kSuccess;
}

int vsm_cu_tensor_map_replace_address(void* map, void* address) {
  if (!map) return abi::kInvalidValue;
  uint8_t image[128];
  std::memcpy(image, map, sizeof(image));
  tma::Descriptor d;
  if (!tma::decode(image, &d)) return abi::kInvalidValue;
  d.address = reinterpret_cast<uint64_t>(address);
  if (!broken_rule(Runtime::get().limits(), d).empty()) return abi::kInvalidValue;
  tma::encode(d, image);
  std::memcpy(map, image, sizeof(image));
  return abi::kSuccess;
}

int vsm_cu_init(unsigned) { return abi::kSuccess; }
int vsm_cu_driver_get_version(int* version) { return version ? (*version = 13000, abi::kSuccess) : abi::kInvalidValue; }
int vsm_cu_device_get(int* device, int ordinal) {
  if (!device) return abi::kInvalidValue;
  if (ordinal != 0) return abi::kInvalidDevice;
  *device = 0;
  return abi::kSuccess;
}
int vsm_cu_device_get_count(int* count) { return count ? (*count = 1, abi::kSuccess) : abi::kInvalidValue; }
int vsm_cu_device_get_attribute(int* value, int attribute, int device) {
  const int error = cudaDeviceGetAttribute(value, attribute, device);
  if (error) last_error() = abi::kSuccess;  // a driver call does not set the runtime's last error
  return error;
}
/// One context, always current; its handle is the runtime's address.
int vsm_cu_ctx_get_current(void** context) {
  return context ? (*context = &Runtime::get(), abi::kSuccess) : abi::kInvalidValue;
}
int vsm_cu_ctx_get_device(int* device) { return vsm_cu_device_get(device, 0); }
/// A stream's green context, whose handle is the runtime's address; null where the stream may use all SMs.
int vsm_cu_stream_get_green_ctx(void*, void** context) {
  if (!context) return abi::kInvalidValue;
  *context = Runtime::get().stream_multiprocessors() > 0 ? &Runtime::get() : nullptr;
  return abi::kSuccess;
}
int vsm_cu_green_ctx_get_dev_resource(void* context, abi::DeviceResource* resource, int type) {
  if (context != &Runtime::get() || !resource) return abi::kInvalidValue;
  if (type != abi::kResourceSm) return abi::kNotSupported;
  *resource = {};
  resource->type = type;
  resource->sm_count = static_cast<unsigned>(Runtime::get().stream_multiprocessors());
  return abi::kSuccess;
}
int vsm_cu_get_error_string(int code, const char** text) {
  return text ? (*text = cudaGetErrorString(code), abi::kSuccess) : abi::kInvalidValue;
}
int vsm_cu_get_error_name(int code, const char** text) {
  return text ? (*text = cudaGetErrorName(code), abi::kSuccess) : abi::kInvalidValue;
}

}  // extern "C"

namespace {

struct EntryPoint {
  const char* name;
  void* function;
  unsigned version;  // of CUDA, in which it appeared
};

template <typename Function>
EntryPoint entry(const char* name, Function* function, unsigned version) {
  return {name, reinterpret_cast<void*>(function), version};
}

int driver_entry_point(const char* name, void** out, unsigned version, int* status) {
  enum { kFound = 0, kSymbolNotFound = 1, kVersionNotSufficient = 2 };
  static const EntryPoint entries[] = {
      entry("cuTensorMapEncodeTiled", vsm_cu_tensor_map_encode_tiled, 12000),
      entry("cuTensorMapReplaceAddress", vsm_cu_tensor_map_replace_address, 12000),
      entry("cuInit", vsm_cu_init, 2000),
      entry("cuDriverGetVersion", vsm_cu_driver_get_version, 2020),
      entry("cuDeviceGet", vsm_cu_device_get, 2000),
      entry("cuDeviceGetCount", vsm_cu_device_get_count, 2000),
      entry("cuDeviceGetAttribute", vsm_cu_device_get_attribute, 2000),
      entry("cuCtxGetCurrent", vsm_cu_ctx_get_current, 4000),
      entry("cuCtxGetDevice", vsm_cu_ctx_get_device, 2000),
      entry("cuStreamGetGreenCtx", vsm_cu_stream_get_green_ctx, 12040),
      entry("cuGreenCtxGetDevResource", vsm_cu_green_ctx_get_dev_resource, 12040),
      entry("cuGetErrorString", vsm_cu_get_error_string, 6000),
      entry("cuGetErrorName", vsm_cu_get_error_name, 6000),
  };
  if (!name || !out) return abi::kInvalidValue;
  *out = nullptr;
  int found = kSymbolNotFound;
  for (const EntryPoint& candidate : entries) {
    if (std::strcmp(candidate.name, name) != 0) continue;
    found = version >= candidate.version ? kFound : kVersionNotSufficient;
    if (found == kFound) *out = candidate.function;
  }
  if (status) *status = found;
  if (found == kSymbolNotFound) Runtime::get().explain(std::string("the driver call ") + name + " is not modelled");
  return abi::kSuccess;
}

}  // namespace

extern "C" {

int cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned version, unsigned long long, int* status) {
  return finish(driver_entry_point(name, out, version, status));
}

int cudaGetDriverEntryPoint(const char* name, void** out, unsigned long long, int* status) {
  return finish(driver_entry_point(name, out, 13000, status));
}

}  // extern "C"
