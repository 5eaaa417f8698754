/* SPDX-License-Identifier: Apache-2.0 */
/* What a host that knows of the virtual device asks of libcudart.so.13 beside CUDA's own names: settings, memory to
   make accessible, and the record of what ran. Every call is thread-safe. */
#ifndef VSM_SHIM_CONTROL_H_
#define VSM_SHIM_CONTROL_H_
#include <stdint.h>
#ifdef __cplusplus
#include <string>
namespace vsm::shim {
struct LaunchRecord;
/// One launch as a JSON object.
std::string to_json(const LaunchRecord& record);
}  // namespace vsm::shim
extern "C" {
#endif

/* architecture: "sm_121a" or "sm_90a"; another one than now resets the device. watch: flags of device.h.
   host_threads 0: all cores (takes effect at the next reset). max_warp_instructions 0: the default bound.
   strict: a checker's report fails its launch. log: explanations go to stderr too. accumulation_bits: mma's, six bytes for
   bf16, f16, tf32, f8, mxf8f6f4 and mxf4, 0: exact (tensor.h). Returns 0, or -1 for a bad name. */
int vsm_runtime_configure(const char* architecture, int host_threads, uint32_t watch, uint64_t max_warp_instructions,
                          int strict, int log, const uint8_t* accumulation_bits);
/* Current settings: any pointer may be NULL. The string lives until the next configure. */
void vsm_runtime_settings(const char** architecture, int* host_threads, uint32_t* watch,
                          uint64_t* max_warp_instructions, int* strict, int* log, uint8_t* accumulation_bits);
/* SMs of the device (0: as many as its model has), and of each stream (0: all of them; fewer: the stream is of a green
   context). Resets. Returns 0, or -1 where there are no such numbers. */
int vsm_runtime_multiprocessors(int device, int stream);
/* Makes host memory accessible to kernels, as if cudaMalloc had given it. Counted per address. */
void vsm_runtime_register(uint64_t address, uint64_t bytes, int read_only);
int vsm_runtime_unregister(uint64_t address);
/* Of allocated memory: whatever lies there, a kernel must not read it before something writes it. */
void vsm_runtime_discard(uint64_t address, uint64_t bytes);
/* LaunchConfig::weak_memory of the launches from now on: a seed, or 0. */
void vsm_runtime_weak_memory(uint64_t seed);
/* LaunchConfig::late_copies of the launches from now on: rounds, or 0. */
void vsm_runtime_late_copies(uint64_t rounds);
/* Reads all PTX anew with to[i] in place of each from[i], to plant faults; count 0: as it is. Resets. */
void vsm_runtime_plant(const char* const* from, const char* const* to, int count);
/* How often they were put in since. */
uint64_t vsm_runtime_planted(void);
/* The launches since the last call as a JSON array, oldest first; to be given to vsm_runtime_free. At most 65,536
   are kept; *dropped counts those lost since the last call. */
char* vsm_runtime_take_launches(uint64_t* dropped);
void vsm_runtime_free(char*);
/* Why the last refused call was refused ("" if none was); cleared by the call. To be given to vsm_runtime_free. */
char* vsm_runtime_take_message(void);
/* Seconds that the launches since the last reset would take on the modelled GPU (predicted). */
double vsm_runtime_clock(void);
/* Forgets a fault, all device memory and all grants; registered binaries stay. */
void vsm_runtime_reset(void);

#ifdef __cplusplus
}
#endif
#endif
