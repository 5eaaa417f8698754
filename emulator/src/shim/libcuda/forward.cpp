// SPDX-License-Identifier: Apache-2.0
// libcuda.so.1 of the virtual device: for libraries that were linked with -lcuda. All state is in libcudart.so.13.
#include <cstdint>

#define VSM_FORWARD(name, target, parameters, arguments) \
  extern "C" int target parameters;                      \
  extern "C" int name parameters { return target arguments; }

VSM_FORWARD(cuInit, vsm_cu_init, (unsigned flags), (flags))
VSM_FORWARD(cuDriverGetVersion, vsm_cu_driver_get_version, (int* version), (version))
VSM_FORWARD(cuDeviceGet, vsm_cu_device_get, (int* device, int ordinal), (device, ordinal))
VSM_FORWARD(cuDeviceGetCount, vsm_cu_device_get_count, (int* count), (count))
VSM_FORWARD(cuDeviceGetAttribute, vsm_cu_device_get_attribute, (int* value, int which, int device),
            (value, which, device))
VSM_FORWARD(cuCtxGetCurrent, vsm_cu_ctx_get_current, (void** context), (context))
VSM_FORWARD(cuCtxGetDevice, vsm_cu_ctx_get_device, (int* device), (device))
VSM_FORWARD(cuGetErrorString, vsm_cu_get_error_string, (int code, const char** text), (code, text))
VSM_FORWARD(cuGetErrorName, vsm_cu_get_error_name, (int code, const char** text), (code, text))
VSM_FORWARD(cuTensorMapReplaceAddress, vsm_cu_tensor_map_replace_address, (void* map, void* address), (map, address))
VSM_FORWARD(cuTensorMapEncodeTiled, vsm_cu_tensor_map_encode_tiled,
            (void* map, int type, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
             const uint32_t* box, const uint32_t* steps, int interleave, int swizzle, int promotion, int fill),
            (map, type, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill))
