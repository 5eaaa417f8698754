/* SPDX-License-Identifier: Apache-2.0 */
/* C face of the virtual GPU, for ctypes. Every call is thread-safe unless said otherwise. */
#ifndef VSM_CAPI_H_
#define VSM_CAPI_H_
#include <stddef.h>
#include <stdint.h>
#ifdef __cplusplus
extern "C" {
#endif

typedef struct vsm_device vsm_device;
typedef struct vsm_module vsm_module;

typedef struct vsm_launch {
  uint32_t grid[3], block[3];
  uint32_t dynamic_shared, registers, max_dynamic_shared, watch, max_reports, programmatic, cooperative;
  uint8_t accumulation_bits[6]; /* bf16, f16, tf32, f8, mxf8f6f4, mxf4; 0: exact (tensor.h) */
  uint64_t max_warp_instructions, stream, weak_memory;
} vsm_launch;

/* Text of the calling thread's last failure ("" if none). */
const char* vsm_last_error(void);
/* "sm_121a" or "sm_90a"; host_threads 0: all cores. NULL on failure. */
vsm_device* vsm_device_create(const char* architecture, int host_threads);
void vsm_device_destroy(vsm_device*);
uint64_t vsm_allocate(vsm_device*, uint64_t bytes);
/* 0, or -1 if the address is not the start of an allocation (a registered range). */
int vsm_release(vsm_device*, uint64_t address);
void vsm_register_memory(vsm_device*, uint64_t address, uint64_t bytes, int read_only);
int vsm_unregister_memory(vsm_device*, uint64_t address);
void vsm_mark_initialized(vsm_device*, uint64_t address, uint64_t bytes);
void vsm_discard(vsm_device*, uint64_t address, uint64_t bytes);
/* Parses PTX and loads it; NULL on failure (vsm_last_error names line and form). */
vsm_module* vsm_module_load(vsm_device*, const char* ptx, size_t bytes, const char* name);
void vsm_module_unload(vsm_device*, vsm_module*);
/* Index of a kernel, -1 if absent. */
int vsm_module_kernel(vsm_device*, vsm_module*, const char* name);
uint64_t vsm_module_variable(vsm_device*, vsm_module*, const char* name, uint64_t* size);
/* Bytes of the packed parameter buffer of a kernel. */
uint32_t vsm_kernel_param_bytes(vsm_device*, vsm_module*, int kernel);
/* Runs a kernel. Returns LaunchStatus; *json is the result (status, message, counters, reports) as JSON text,
   to be given to vsm_free. */
int vsm_run(vsm_device*, vsm_module*, int kernel, const vsm_launch*, const void* params, size_t param_bytes,
            char** json);
void vsm_free(char*);
/* The watch flags of device.h. */
enum { VSM_WATCH_UNINITIALIZED = 1, VSM_WATCH_RACES = 2, VSM_WATCH_FENCES = 4, VSM_WATCH_DISTINCT = 8 };

#ifdef __cplusplus
}
#endif
#endif
