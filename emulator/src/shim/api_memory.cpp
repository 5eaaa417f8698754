// SPDX-License-Identifier: Apache-2.0
// Memory under CUDA's names. Device memory is host memory that the device's allocation table knows.
#include <cstdlib>
#include <cstring>

#include "shim/runtime.h"

using namespace vsm;        // NOLINT: the names below are CUDA's
using namespace vsm::shim;  // NOLINT

namespace {

// Memory of the modelled machine (DGX Spark: 128 GB, shared with its host).
constexpr uint64_t kTotalMemory = 128ull * 1000 * 1000 * 1000;

bool on_device(Runtime& runtime, const void* pointer, size_t bytes) {
  const auto address = reinterpret_cast<uint64_t>(pointer);
  Allocation allocation;
  return runtime.device().find(address, &allocation) && bytes <= allocation.address + allocation.size - address;
}

bool touches_device(Runtime& runtime, const void* pointer) {
  Allocation allocation;
  return runtime.device().find(reinterpret_cast<uint64_t>(pointer), &allocation);
}

int allocate(Runtime& runtime, void** out, size_t bytes) {
  if (!out) return abi::kInvalidValue;
  *out = nullptr;
  if (bytes == 0) return abi::kSuccess;
  if (bytes > kTotalMemory || runtime.device().bytes_allocated() > kTotalMemory - bytes) {
    runtime.explain("cudaMalloc of " + std::to_string(bytes) + " bytes: the modelled machine has " +
                    std::to_string(kTotalMemory));
    return abi::kMemoryAllocation;
  }
  *out = reinterpret_cast<void*>(runtime.device().allocate(bytes));
  return abi::kSuccess;
}

int release(Runtime& runtime, void* pointer) {
  if (!pointer) return abi::kSuccess;
  return runtime.device().release(reinterpret_cast<uint64_t>(pointer)) ? abi::kSuccess : abi::kInvalidValue;
}

/// Whether a copy in this direction may touch these addresses. A CUDA error.
int check_copy(Runtime& runtime, const void* to, const void* from, size_t bytes, int kind) {
  if (kind < abi::kHostToHost || kind > abi::kByAddress) return abi::kInvalidMemcpyDirection;
  if (bytes == 0) return abi::kSuccess;
  if (!to || !from) return abi::kInvalidValue;
  const bool to_device = kind == abi::kHostToDevice || kind == abi::kDeviceToDevice ||
                         (kind == abi::kByAddress && touches_device(runtime, to));
  const bool from_device = kind == abi::kDeviceToHost || kind == abi::kDeviceToDevice ||
                           (kind == abi::kByAddress && touches_device(runtime, from));
  if ((to_device && !on_device(runtime, to, bytes)) || (from_device && !on_device(runtime, from, bytes))) {
    runtime.explain("a copy of " + std::to_string(bytes) + " bytes leaves the device memory that it starts in");
    return abi::kInvalidValue;
  }
  return abi::kSuccess;
}

int copy(Runtime& runtime, void* to, const void* from, size_t bytes, int kind, void* stream_handle) {
  Stream* stream = runtime.find_stream(stream_handle);
  if (!stream) return abi::kInvalidResourceHandle;
  if (int error = check_copy(runtime, to, from, bytes, kind)) return error;
  if (bytes == 0) return abi::kSuccess;
  return runtime.submit(stream, [&runtime, to, from, bytes]() -> int {
    runtime.device().settle();
    std::memmove(to, from, bytes);
    if (touches_device(runtime, to)) runtime.device().mark_initialized(reinterpret_cast<uint64_t>(to), bytes);
    return abi::kSuccess;
  });
}

int set(Runtime& runtime, void* to, int value, size_t bytes, void* stream_handle) {
  Stream* stream = runtime.find_stream(stream_handle);
  if (!stream) return abi::kInvalidResourceHandle;
  if (bytes == 0) return abi::kSuccess;
  if (!to || !on_device(runtime, to, bytes)) {
    runtime.explain("a memset of " + std::to_string(bytes) + " bytes leaves device memory");
    return abi::kInvalidValue;
  }
  return runtime.submit(stream, [&runtime, to, value, bytes]() -> int {
    runtime.device().settle();
    std::memset(to, value, bytes);
    runtime.device().mark_initialized(reinterpret_cast<uint64_t>(to), bytes);
    return abi::kSuccess;
  });
}

int copy_rows(Runtime& runtime, void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
              size_t height, int kind, void* stream) {
  if (width > to_pitch || width > from_pitch) return abi::kInvalidValue;
  for (size_t row = 0; row < height; ++row) {
    if (int error = copy(runtime, static_cast<char*>(to) + row * to_pitch,
                         static_cast<const char*>(from) + row * from_pitch, width, kind, stream)) {
      return error;
    }
  }
  return abi::kSuccess;
}

/// Copies to or from a registered variable. `in`: towards it.
int copy_symbol(Runtime& runtime, const void* symbol, void* host, size_t bytes, size_t offset, bool in, int kind,
                void* stream) {
  uint64_t address = 0, size = 0;
  if (int error = runtime.find_variable(symbol, &address, &size)) return error;
  if (offset > size || bytes > size - offset) return abi::kInvalidValue;
  void* variable = reinterpret_cast<void*>(address + offset);
  return in ? copy(runtime, variable, host, bytes, kind, stream) : copy(runtime, host, variable, bytes, kind, stream);
}

int allocate_pinned(Runtime& runtime, void** out, size_t bytes) {
  if (!out) return abi::kInvalidValue;
  *out = nullptr;
  if (bytes == 0) return abi::kSuccess;
  void* memory = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  if (!memory) return abi::kMemoryAllocation;
  runtime.pinned[memory] = bytes;
  runtime.device().register_memory(memory, bytes);
  *out = memory;
  return abi::kSuccess;
}

}  // namespace

extern "C" {

int cudaMalloc(void** out, size_t bytes) {
  return api([&](Runtime& r) -> int {
    if (int error = r.forbid_in_capture("cudaMalloc")) return error;
    return allocate(r, out, bytes);
  });
}

int cudaMallocManaged(void** out, size_t bytes, unsigned) {
  return api([&](Runtime& r) -> int { return allocate(r, out, bytes); });
}

int cudaFree(void* pointer) {
  return api([&](Runtime& r) -> int {
    if (int error = r.forbid_in_capture("cudaFree")) return error;
    return release(r, pointer);
  });
}

int cudaMallocAsync(void** out, size_t bytes, void* stream) {
  return api([&](Runtime& r) -> int {
    Stream* found = r.find_stream(stream);
    if (!found) return abi::kInvalidResourceHandle;
    if (found->capture) {
      r.explain("cudaMallocAsync in a capture (a memory node) is not modelled");
      return abi::kNotSupported;
    }
    return allocate(r, out, bytes);
  });
}

int cudaFreeAsync(void* pointer, void* stream) {
  return api(
      [&](Runtime& r) -> int { return r.find_stream(stream) ? release(r, pointer) : abi::kInvalidResourceHandle; });
}

int cudaHostAlloc(void** out, size_t bytes, unsigned) {
  return api([&](Runtime& r) -> int {
    if (int error = r.forbid_in_capture("cudaHostAlloc")) return error;
    return allocate_pinned(r, out, bytes);
  });
}

int cudaMallocHost(void** out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

int cudaFreeHost(void* pointer) {
  return api([&](Runtime& r) -> int {
    if (!pointer) return abi::kSuccess;
    if (r.pinned.erase(pointer) == 0) return abi::kInvalidValue;
    r.device().unregister_memory(pointer);
    std::free(pointer);
    return abi::kSuccess;
  });
}

int cudaHostRegister(void* pointer, size_t bytes, unsigned) {
  return api([&](Runtime& r) -> int {
    if (!pointer || bytes == 0) return abi::kInvalidValue;
    r.device().register_memory(pointer, bytes);
    return abi::kSuccess;
  });
}

int cudaHostUnregister(void* pointer) {
  return api([&](Runtime& r) -> int { return r.device().unregister_memory(pointer) ? abi::kSuccess : 713; });
}

int cudaHostGetDevicePointer(void** device, void* host, unsigned) {
  return api([&](Runtime& r) -> int {
    if (!device || !touches_device(r, host)) return abi::kInvalidValue;
    *device = host;
    return abi::kSuccess;
  });
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return api([&](Runtime& r) { return copy(r, to, from, bytes, kind, stream); });
}

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  return api([&](Runtime& r) { return copy(r, to, from, bytes, kind, nullptr); });
}

int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                      int kind, void* stream) {
  return api([&](Runtime& r) { return copy_rows(r, to, to_pitch, from, from_pitch, width, height, kind, stream); });
}

int cudaMemcpy2D(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width, size_t height,
                 int kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, nullptr);
}

int cudaMemsetAsync(void* to, int value, size_t bytes, void* stream) {
  return api([&](Runtime& r) { return set(r, to, value, bytes, stream); });
}

int cudaMemset(void* to, int value, size_t bytes) {
  return api([&](Runtime& r) { return set(r, to, value, bytes, nullptr); });
}

int cudaMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height, void* stream) {
  return api([&](Runtime& r) -> int {
    if (width > pitch) return abi::kInvalidValue;
    for (size_t row = 0; row < height; ++row) {
      if (int error = set(r, static_cast<char*>(to) + row * pitch, value, width, stream)) return error;
    }
    return abi::kSuccess;
  });
}

int cudaMemcpyToSymbolAsync(const void* symbol, const void* from, size_t bytes, size_t offset, int kind, void* stream) {
  return api(
      [&](Runtime& r) { return copy_symbol(r, symbol, const_cast<void*>(from), bytes, offset, true, kind, stream); });
}

int cudaMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset, int kind) {
  return cudaMemcpyToSymbolAsync(symbol, from, bytes, offset, kind, nullptr);
}

int cudaMemcpyFromSymbolAsync(void* to, const void* symbol, size_t bytes, size_t offset, int kind, void* stream) {
  return api([&](Runtime& r) { return copy_symbol(r, symbol, to, bytes, offset, false, kind, stream); });
}

int cudaMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset, int kind) {
  return cudaMemcpyFromSymbolAsync(to, symbol, bytes, offset, kind, nullptr);
}

int cudaGetSymbolAddress(void** out, const void* symbol) {
  return api([&](Runtime& r) -> int {
    uint64_t address = 0, size = 0;
    if (!out) return abi::kInvalidValue;
    if (int error = r.find_variable(symbol, &address, &size)) return error;
    *out = reinterpret_cast<void*>(address);
    return abi::kSuccess;
  });
}

int cudaGetSymbolSize(size_t* out, const void* symbol) {
  return api([&](Runtime& r) -> int {
    uint64_t address = 0, size = 0;
    if (!out) return abi::kInvalidValue;
    if (int error = r.find_variable(symbol, &address, &size)) return error;
    *out = size;
    return abi::kSuccess;
  });
}

int cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  return api([&](Runtime& r) -> int {
    if (!free_bytes || !total) return abi::kInvalidValue;
    *total = kTotalMemory;
    *free_bytes = kTotalMemory - r.device().bytes_allocated();
    return abi::kSuccess;
  });
}

int cudaPointerGetAttributes(abi::PointerAttributes* out, const void* pointer) {
  return api([&](Runtime& r) -> int {
    if (!out) return abi::kInvalidValue;
    *out = abi::PointerAttributes{};
    out->device = -2;  // of memory that CUDA does not know
    out->host_pointer = const_cast<void*>(pointer);
    if (!touches_device(r, pointer)) return abi::kSuccess;
    auto pinned = r.pinned.upper_bound(pointer);
    const bool host = pinned != r.pinned.begin() &&
                      static_cast<const char*>(pointer) < static_cast<const char*>((--pinned)->first) + pinned->second;
    out->type = host ? 1 : 2;
    out->device = 0;
    out->device_pointer = const_cast<void*>(pointer);
    if (!host) out->host_pointer = nullptr;
    return abi::kSuccess;
  });
}

}  // extern "C"
