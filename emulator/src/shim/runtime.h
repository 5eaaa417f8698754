// SPDX-License-Identifier: Apache-2.0
// The state behind the CUDA names: registered binaries, streams and graphs, errors, and the record of what ran.
//
// Work is executed when it is submitted: the runtime behaves as a real one does with CUDA_LAUNCH_BLOCKING=1, which is
// a legal schedule of every program whose kernels do not wait for the host or for a kernel of another stream.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "fatbin/fatbin.h"
#include "model/model.h"
#include "shim/cuda_abi.h"

namespace vsm::shim {

struct Binary;

/// A kernel that a binary registered. Its address serves as its cudaKernel_t.
struct Kernel {
  Binary* binary = nullptr;
  std::string name;
  int index = -1;             // in the program, once loaded
  uint32_t registers = 0;     // 0: the binary has no cubin for this architecture
  uint32_t barriers = 0;      // named ones of a block
  int max_dynamic = -1;       // granted by cudaFuncSetAttribute; -1: never asked
  int carveout = -1;
};

struct Variable {
  Binary* binary = nullptr;
  std::string name;
};

/// One fat binary: a translation unit's device code. Parsed when one of its kernels or variables is first used.
struct Binary {
  const void* wrapper = nullptr;
  bool loaded = false;
  int load_error = abi::kSuccess;
  std::string message;
  std::shared_ptr<const Program> program;
  LoadedModule* module = nullptr;
  std::map<std::string, fatbin::KernelResources> resources;
  std::deque<Kernel> kernels;
  std::deque<Variable> variables;
};

/// Captured work: replayed in the order in which it was submitted, which keeps every dependency.
struct Graph {
  std::vector<std::function<int()>> nodes;
};

struct Stream {
  bool non_blocking() const { return (flags & 1) != 0; }

  unsigned flags = 0;
  int priority = 0;
  uint64_t id = 0;
  std::shared_ptr<Graph> capture;  // null when not capturing
  int capture_mode = 0;            // of the origin: 0 global, 1 of this thread, 2 relaxed
  bool capture_origin = false;
  bool capture_invalid = false;
};

struct Event {
  unsigned flags = 0;
  bool recorded = false;
  double seconds = 0;              // on the virtual clock
  std::shared_ptr<Graph> capture;  // the capture it was recorded in
};

struct LaunchRequest {
  Kernel* kernel = nullptr;
  abi::Dim3 grid{1, 1, 1}, block{1, 1, 1}, cluster{1, 1, 1};
  size_t dynamic_shared = 0;
  Stream* stream = nullptr;
  bool cooperative = false;
  bool programmatic = false;
};

/// What one launch did, for whoever asks (control.h).
struct LaunchRecord {
  std::string kernel;
  abi::Dim3 grid{}, block{};
  uint32_t static_shared = 0, dynamic_shared = 0, registers = 0;
  bool programmatic = false, cooperative = false;
  int blocks_per_sm = 0;
  model::Prediction predicted;
  LaunchResult result;
};

struct Settings {
  std::string architecture = "sm_121a";
  int host_threads = 0;
  uint32_t watch = kWatchDefault;
  uint64_t max_warp_instructions = 0;
  uint64_t weak_memory = 0;    // LaunchConfig::weak_memory of every launch
  uint64_t late_copies = 0;    // LaunchConfig::late_copies
  /// PTX is read with the second text of each in place of all occurrences of the first.
  std::vector<std::pair<std::string, std::string>> planted;
  tensor::AccumulationBits accumulation_bits;  // LaunchConfig's
  bool strict = false;         // a checker's report fails the launch, as compute-sanitizer's error exit would
  bool log_to_stderr = true;
  std::string trace_path;      // a line of JSON per launch is appended
};

class Runtime {
 public:
  /// Never destroyed: binaries unregister themselves while the process ends.
  static Runtime& get();

  std::recursive_mutex& mutex() { return mutex_; }
  Device& device();
  const Limits& limits() const { return limits_; }
  Settings& settings() { return settings_; }
  /// Forgets faults and the device with all its memory; registered binaries are loaded anew when used.
  void reset();
  /// Takes another architecture: resets.
  bool set_architecture(const std::string& name);
  /// SMs of the device, 0: its model's; and of each stream, 0: all. False where there are no such numbers; resets.
  bool set_multiprocessors(int device, int stream);
  /// SMs of each stream, if they are of a green context; else 0.
  int stream_multiprocessors() const { return stream_multiprocessors_; }
  /// Reads all PTX anew with these in Settings::planted, to plant faults. Resets.
  void plant(std::vector<std::pair<std::string, std::string>> replacements);
  /// How often they were put in since.
  uint64_t planted() const { return planted_; }

  // --- errors -------------------------------------------------------------------------------------------------
  int sticky() const { return sticky_; }
  /// Notes why a call failed, for vsm_runtime_message; also on stderr where asked for.
  void explain(const std::string& text);
  const std::string& explanation() const { return explanation_; }
  void clear_explanation() { explanation_.clear(); }

  // --- binaries -----------------------------------------------------------------------------------------------
  Binary* add_binary(const void* wrapper);
  void remove_binary(Binary* binary);
  void add_kernel(Binary* binary, const void* host, const char* name);
  void add_variable(Binary* binary, const void* host, const char* name);
  /// By the host function's address or by cudaKernel_t. Null if unknown.
  Kernel* find_kernel(const void* host);
  bool is_kernel_handle(const void* handle) const { return kernel_handles_.count(handle) != 0; }
  /// Parses and places the binary's program. A CUDA error.
  int load(Binary& binary);
  const KernelInfo& info(const Kernel& kernel) const { return kernel.binary->program->kernels()[kernel.index]; }
  /// Address and size of a registered variable. A CUDA error.
  int find_variable(const void* host, uint64_t* address, uint64_t* size);

  // --- work ---------------------------------------------------------------------------------------------------
  /// Runs `work` now, or adds it to the stream's graph while it captures.
  int submit(Stream* stream, std::function<int()> work);
  /// Checks a launch as the driver does, packs its arguments and submits it. A CUDA error.
  int launch(const LaunchRequest& request, void** arguments);
  std::deque<LaunchRecord>& records() { return records_; }
  uint64_t take_dropped() {
    const uint64_t dropped = launches_dropped_;
    launches_dropped_ = 0;
    return dropped;
  }
  double clock_seconds() const { return clock_seconds_; }

  // --- streams and events -------------------------------------------------------------------------------------
  /// Null and the two special handles are the default stream; null result: no such stream.
  Stream* find_stream(void* handle);
  Stream* add_stream(unsigned flags, int priority);
  void remove_stream(Stream* stream);
  template <typename Visit>
  void for_each_stream(Visit visit) {
    visit(default_stream_);
    for (Stream* stream : streams_) visit(*stream);
  }
  /// Answers a call that waits or allocates: an error while a stream captures in a mode that forbids such calls.
  int forbid_in_capture(const char* call);
  /// Makes every capture invalid, for the reason `error`, and hands it on.
  int invalidate_captures(int error, const std::string& text);
  std::set<Event*> events;
  std::set<Graph*> graphs;
  std::set<Graph*> executables;
  std::map<const void*, uint64_t> pinned;  // cudaHostAlloc

 private:
  Runtime();
  int check(const LaunchRequest& request);
  /// What an instruction that is not known is to its kernel. A CUDA error.
  int decode(const Kernel& kernel);
  int run(const LaunchRequest& request, const std::vector<uint8_t>& params);
  void record(LaunchRecord record);
  const fatbin::Image* choose_image(const std::vector<fatbin::Image>& images, std::string* why) const;

  std::recursive_mutex mutex_;
  Settings settings_;
  uint64_t planted_ = 0;
  Limits limits_;
  int stream_multiprocessors_ = 0;
  std::unique_ptr<Device> device_;
  int sticky_ = abi::kSuccess;
  std::string explanation_;
  std::set<Binary*> binaries_;
  std::unordered_map<const void*, Kernel*> kernels_;
  std::unordered_map<const void*, Variable*> variables_;
  std::set<const void*> kernel_handles_;
  Stream default_stream_;
  std::set<Stream*> streams_;
  uint64_t next_stream_id_ = 1;
  std::deque<LaunchRecord> records_;
  uint64_t launches_dropped_ = 0;
  double clock_seconds_ = 0;
};

/// The calling thread's last error (cudaGetLastError).
int& last_error();

/// Notes `error` as the thread's last and hands it on.
inline int finish(int error) {
  if (error != abi::kSuccess && error != abi::kNotReady) last_error() = error;
  return error;
}

int guard(Runtime& runtime, const std::function<int()>& body);

/// Body of a call that works on the context: answers the fault that ended it, if one did.
template <typename Body>
int api(Body body) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  if (runtime.sticky() != abi::kSuccess) return finish(runtime.sticky());
  return finish(guard(runtime, [&] { return body(runtime); }));
}

/// Body of a call that answers after a fault too.
template <typename Body>
int api_always(Body body) {
  Runtime& runtime = Runtime::get();
  std::lock_guard<std::recursive_mutex> lock(runtime.mutex());
  return finish(guard(runtime, [&] { return body(runtime); }));
}

}  // namespace vsm::shim
