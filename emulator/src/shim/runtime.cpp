// SPDX-License-Identifier: Apache-2.0
#include "shim/runtime.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

namespace vsm::shim {
namespace {

uint32_t watch_from(const char* text) {
  const std::string list = std::string(",") + text + ",";
  auto has = [&](const char* name) { return list.find(std::string(",") + name + ",") != std::string::npos; };
  uint32_t flags = has("default") ? uint32_t{kWatchDefault} : 0u;
  if (has("uninitialized") || has("all")) flags |= kWatchUninitialized;
  if (has("races") || has("all")) flags |= kWatchRaces;
  if (has("fences") || has("all")) flags |= kWatchFences;
  if (has("distinct") || has("all")) flags |= kWatchDistinct;
  if (has("arrivals")) flags |= kWatchArrivals;  // not of "all": the PTX ISA asks for none of it
  return flags;
}

/// Settings that the environment gives: for programs that do not know that they run here.
Settings settings_from_environment() {
  Settings settings;
  if (const char* text = std::getenv("VSM_ARCH")) settings.architecture = text;
  if (const char* text = std::getenv("VSM_THREADS")) settings.host_threads = std::atoi(text);
  if (const char* text = std::getenv("VSM_WATCH")) settings.watch = watch_from(text);
  if (const char* text = std::getenv("VSM_MAX_INSTRUCTIONS"))
    settings.max_warp_instructions = std::strtoull(text, nullptr, 10);
  if (const char* text = std::getenv("VSM_WEAK_MEMORY")) settings.weak_memory = std::strtoull(text, nullptr, 10);
  if (const char* text = std::getenv("VSM_LATE_COPIES")) settings.late_copies = std::strtoull(text, nullptr, 10);
  if (const char* text = std::getenv("VSM_STRICT")) settings.strict = std::strcmp(text, "0") != 0;
  if (const char* text = std::getenv("VSM_TRACE")) settings.trace_path = text;
  if (const char* text = std::getenv("VSM_QUIET")) settings.log_to_stderr = std::strcmp(text, "0") == 0;
  return settings;
}

bool limits_of(const std::string& architecture, Limits* limits) {
  if (architecture == "sm_121a") {
    *limits = Limits();
    return true;
  }
  if (architecture == "sm_90a") {
    *limits = hopper_limits();
    return true;
  }
  return false;
}

}  // namespace

int& last_error() {
  thread_local int error = abi::kSuccess;
  return error;
}

int guard(Runtime& runtime, const std::function<int()>& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    runtime.explain("the machine has no memory left for this allocation");
    return abi::kMemoryAllocation;
  } catch (const std::exception& error) {
    runtime.explain(error.what());
    return abi::kUnknown;
  }
}

Runtime& Runtime::get() {
  static Runtime* runtime = new Runtime();
  return *runtime;
}

Runtime::Runtime() : settings_(settings_from_environment()) {
  if (!limits_of(settings_.architecture, &limits_)) {
    explain("VSM_ARCH is '" + settings_.architecture +
            "'; the virtual device can be sm_121a or sm_90a: it is sm_121a now");
    settings_.architecture = "sm_121a";
  }
  const char* const bits = std::getenv("VSM_ACCUMULATION_BITS");
  if (bits && !settings_.accumulation_bits.parse(bits)) {
    explain(std::string("VSM_ACCUMULATION_BITS is '") + bits + "'; it is a number from 0 to " +
            std::to_string(tensor::kMaxAccumulationBits) +
            ", or a list such as bf16=21,f16=21,tf32=21,f8=20,mxf8f6f4=20,mxf4=20: sums are exact now");
    settings_.accumulation_bits = {};
  }
}

Device& Runtime::device() {
  if (!device_) device_ = std::make_unique<Device>(limits_, settings_.host_threads);
  return *device_;
}

void Runtime::reset() {
  for (Binary* binary : binaries_) {
    if (binary->module) device().unload(binary->module);
    binary->module = nullptr;
    binary->loaded = false;
    for (Kernel& kernel : binary->kernels) kernel.max_dynamic = kernel.carveout = -1;
  }
  device_.reset();
  sticky_ = abi::kSuccess;
  clock_seconds_ = 0;
}

bool Runtime::set_architecture(const std::string& name) {
  if (name == settings_.architecture) return true;
  Limits limits;
  if (!limits_of(name, &limits)) return false;
  reset();
  settings_.architecture = name;
  limits_ = limits;
  return true;
}

bool Runtime::set_multiprocessors(int device, int stream) {
  Limits model;
  limits_of(settings_.architecture, &model);
  if (device == 0) device = model.num_sms;
  if (device < 1 || stream < 0 || stream > device) return false;
  reset();
  limits_.num_sms = device;
  stream_multiprocessors_ = stream;
  return true;
}

void Runtime::plant(std::vector<std::pair<std::string, std::string>> replacements) {
  reset();
  for (Binary* binary : binaries_) binary->program.reset();
  settings_.planted = std::move(replacements);
  planted_ = 0;
}

void Runtime::explain(const std::string& text) {
  explanation_ = text;
  if (settings_.log_to_stderr) std::fprintf(stderr, "virtual %s: %s\n", settings_.architecture.c_str(), text.c_str());
}

// --- binaries -------------------------------------------------------------------------------------------------

Binary* Runtime::add_binary(const void* wrapper) {
  Binary* binary = new Binary();
  binary->wrapper = wrapper;
  binaries_.insert(binary);
  return binary;
}

void Runtime::remove_binary(Binary* binary) {
  if (binaries_.erase(binary) == 0) return;
  if (binary->module) device().unload(binary->module);
  auto belongs = [&](const auto& entry) { return entry.second->binary == binary; };
  for (auto it = kernels_.begin(); it != kernels_.end();) it = belongs(*it) ? kernels_.erase(it) : std::next(it);
  for (auto it = variables_.begin(); it != variables_.end();) it = belongs(*it) ? variables_.erase(it) : std::next(it);
  for (const Kernel& kernel : binary->kernels) kernel_handles_.erase(&kernel);
  delete binary;
}

void Runtime::add_kernel(Binary* binary, const void* host, const char* name) {
  binary->kernels.push_back(Kernel());
  Kernel& kernel = binary->kernels.back();
  kernel.binary = binary;
  kernel.name = name;
  kernels_[host] = &kernel;
  kernel_handles_.insert(&kernel);
}

void Runtime::add_variable(Binary* binary, const void* host, const char* name) {
  binary->variables.push_back(Variable{binary, name});
  variables_[host] = &binary->variables.back();
}

Kernel* Runtime::find_kernel(const void* host) {
  auto found = kernels_.find(host);
  if (found != kernels_.end()) return found->second;
  auto handle = kernel_handles_.find(host);
  return handle == kernel_handles_.end() ? nullptr : const_cast<Kernel*>(static_cast<const Kernel*>(*handle));
}

/// The PTX that this device runs: that of its own architecture, else the newest that is older. Null with the reason.
const fatbin::Image* Runtime::choose_image(const std::vector<fatbin::Image>& images, std::string* why) const {
  const uint32_t own = static_cast<uint32_t>(limits_.compute_major * 10 + limits_.compute_minor);
  const fatbin::Image* best = nullptr;
  bool compressed = false;
  for (const fatbin::Image& image : images) {
    if (image.kind != fatbin::ImageKind::kPtx || image.arch > own) continue;
    if (image.compressed) {
      compressed = true;
      continue;
    }
    // Text for "sm_90a" runs on 9.0 alone; text for "sm_90" on anything newer (PTX ISA, .target).
    const size_t target = image.payload.find(".target sm_");
    const size_t line = image.payload.find('\n', target);
    const std::string_view text = target == std::string_view::npos ? "" : image.payload.substr(target, line - target);
    const bool specific = text.find_first_of("af", 11) != std::string_view::npos;
    if (specific && image.arch != own) continue;
    if (!best || image.arch > best->arch) best = &image;
  }
  if (best) return best;
  if (compressed) {
    *why =
        "the PTX embedded in this library is compressed, which the virtual device does not read: build with "
        "nvcc -no-compress (FlashInfer's JIT: FLASHINFER_SM12X_EMBED_PTX=1)";
  } else {
    *why = "this library embeds no PTX that " + settings_.architecture +
           " can run: build it with nvcc -no-compress "
           "-gencode arch=compute_121a,code=[sm_121a,compute_121a] (FlashInfer's JIT: FLASHINFER_SM12X_EMBED_PTX=1)";
  }
  return nullptr;
}

int Runtime::load(Binary& binary) {
  if (binary.loaded) {
    if (binary.load_error != abi::kSuccess) explain(binary.message);
    return binary.load_error;
  }
  auto fail = [&](int error, const std::string& text) {
    binary.message = text;
    binary.load_error = error;
    explain(text);
    return error;
  };
  binary.loaded = true;
  binary.load_error = abi::kSuccess;
  try {
    const std::vector<fatbin::Image> images = fatbin::images_of_wrapper(binary.wrapper);
    std::string why;
    const fatbin::Image* image = choose_image(images, &why);
    if (!image) return fail(abi::kNoKernelImageForDevice, why);
    for (const fatbin::Image& other : images) {
      if (other.kind == fatbin::ImageKind::kCubin && other.arch == image->arch && !other.compressed) {
        binary.resources = fatbin::kernel_resources(other.payload);
      }
    }
    const std::string name = binary.kernels.empty() ? "fat binary" : "module of " + binary.kernels.front().name;
    if (!settings_.planted.empty()) {
      std::string text(image->payload);
      for (const auto& [from, to] : settings_.planted) {
        for (size_t at = 0; (at = text.find(from, at)) != std::string::npos; at += to.size(), ++planted_) {
          text.replace(at, from.size(), to);
        }
      }
      binary.program = Program::parse(text, name);
    }
    if (!binary.program) binary.program = Program::parse(image->payload, name);
    binary.module = device().load(binary.program);
  } catch (const fatbin::FatbinError& error) {
    return fail(abi::kInvalidKernelImage, error.what());
  } catch (const PtxError& error) { return fail(abi::kInvalidPtx, error.what()); }
  for (Kernel& kernel : binary.kernels) {
    kernel.index = binary.program->find_kernel(kernel.name);
    auto found = binary.resources.find(kernel.name);
    const bool known = found != binary.resources.end();
    kernel.registers = known ? found->second.registers : 0;
    kernel.barriers = known ? found->second.barriers : 0;
  }
  return abi::kSuccess;
}

int Runtime::find_variable(const void* host, uint64_t* address, uint64_t* size) {
  auto found = variables_.find(host);
  if (found == variables_.end()) return abi::kInvalidSymbol;
  Binary& binary = *found->second->binary;
  if (int error = load(binary)) return error;
  *address = device().variable(binary.module, found->second->name, size);
  return *address ? abi::kSuccess : abi::kInvalidSymbol;
}

// --- streams --------------------------------------------------------------------------------------------------

Stream* Runtime::find_stream(void* handle) {
  // 1 and 2 are CUDA's names for the legacy and the per-thread default stream.
  const auto number = reinterpret_cast<uintptr_t>(handle);
  if (number <= 2) return &default_stream_;
  auto found = streams_.find(static_cast<Stream*>(handle));
  return found == streams_.end() ? nullptr : *found;
}

Stream* Runtime::add_stream(unsigned flags, int priority) {
  Stream* stream = new Stream();
  stream->flags = flags;
  stream->priority = priority;
  stream->id = next_stream_id_++;
  streams_.insert(stream);
  return stream;
}

void Runtime::remove_stream(Stream* stream) {
  streams_.erase(stream);
  delete stream;
}

int Runtime::invalidate_captures(int error, const std::string& text) {
  for (Stream* stream : streams_) {
    if (stream->capture) stream->capture_invalid = true;
  }
  explain(text);
  return error;
}

int Runtime::forbid_in_capture(const char* call) {
  constexpr int kRelaxed = 2;
  for (const Stream* stream : streams_) {
    if (!stream->capture_origin || stream->capture_mode == kRelaxed) continue;
    return invalidate_captures(abi::kStreamCaptureUnsupported,
                               std::string(call) + " is not allowed while a stream captures");
  }
  return abi::kSuccess;
}

int Runtime::submit(Stream* stream, std::function<int()> work) {
  if (stream->capture) {
    if (stream->capture_invalid) return abi::kStreamCaptureInvalidated;
    stream->capture->nodes.push_back(std::move(work));
    return abi::kSuccess;
  }
  if (stream == &default_stream_) {
    for (const Stream* other : streams_) {
      if (!other->capture || other->non_blocking()) continue;
      return invalidate_captures(
          abi::kStreamCaptureImplicit,
          "work on the default stream waits for a stream that captures: create that with cudaStreamNonBlocking");
    }
  }
  return work();
}

}  // namespace vsm::shim
