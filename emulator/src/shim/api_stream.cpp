// SPDX-License-Identifier: Apache-2.0
// Streams, events, captures and graphs. Work is done when it is submitted, so waiting is answered at once; what is
// left to keep are the handles' rules, the virtual clock of events, and captures.
#include "shim/runtime.h"

using namespace vsm;        // NOLINT: the names below are CUDA's
using namespace vsm::shim;  // NOLINT

namespace {

constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kEventFlags = 7;      // blocking sync, disable timing, interprocess
constexpr unsigned kStreamFlags = 1;     // non-blocking
constexpr unsigned kWaitFlags = 1;       // external
enum CaptureStatus : int { kNotCapturing = 0, kCapturing = 1, kCaptureInvalid = 2 };

CaptureStatus capture_status(const Stream& stream) {
  if (!stream.capture) return kNotCapturing;
  return stream.capture_invalid ? kCaptureInvalid : kCapturing;
}

int create_stream(Runtime& r, void** out, unsigned flags, int priority) {
  if (!out || (flags & ~kStreamFlags)) return abi::kInvalidValue;
  *out = r.add_stream(flags, priority);
  return abi::kSuccess;
}

int record(Runtime& r, void* handle, void* stream_handle) {
  auto event = static_cast<Event*>(handle);
  Stream* stream = r.find_stream(stream_handle);
  if (!stream || !r.events.count(event)) return abi::kInvalidResourceHandle;
  event->capture = stream->capture;
  if (stream->capture) return abi::kSuccess;
  event->recorded = true;
  event->seconds = r.clock_seconds();
  return abi::kSuccess;
}

/// Waiting for a stream or asking about it: everything is done already.
int wait_for_stream(Runtime& r, void* handle, const char* call) {
  Stream* stream = r.find_stream(handle);
  if (!stream) return abi::kInvalidResourceHandle;
  if (int error = r.forbid_in_capture(call)) return error;
  if (!stream->capture) {
    r.device().settle();
    return abi::kSuccess;
  }
  return r.invalidate_captures(abi::kStreamCaptureUnsupported, std::string(call) + " of a stream that captures");
}

int wait_for_event(Runtime& r, void* handle, const char* call) {
  if (!r.events.count(static_cast<Event*>(handle))) return abi::kInvalidResourceHandle;
  if (int error = r.forbid_in_capture(call)) return error;
  r.device().settle();
  return abi::kSuccess;
}

/// Ends the capture on every stream that joined it.
void leave_capture(Runtime& r, Stream* origin) {
  std::shared_ptr<Graph> graph = origin->capture;
  r.for_each_stream([&](Stream& stream) {
    if (stream.capture != graph) return;
    stream.capture.reset();
    stream.capture_origin = stream.capture_invalid = false;
  });
}

}  // namespace

extern "C" {

int cudaStreamCreateWithPriority(void** out, unsigned flags, int priority) {
  return api([&](Runtime& r) { return create_stream(r, out, flags, priority); });
}

int cudaStreamCreateWithFlags(void** out, unsigned flags) { return cudaStreamCreateWithPriority(out, flags, 0); }
int cudaStreamCreate(void** out) { return cudaStreamCreateWithPriority(out, 0, 0); }

int cudaStreamDestroy(void* handle) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream || stream == r.find_stream(nullptr)) return abi::kInvalidResourceHandle;
    r.remove_stream(stream);
    return abi::kSuccess;
  });
}

int cudaStreamSynchronize(void* handle) {
  return api([&](Runtime& r) { return wait_for_stream(r, handle, "cudaStreamSynchronize"); });
}

int cudaStreamQuery(void* handle) {
  return api([&](Runtime& r) { return wait_for_stream(r, handle, "cudaStreamQuery"); });
}

int cudaStreamGetFlags(void* handle, unsigned* flags) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    return flags ? (*flags = stream->flags, abi::kSuccess) : abi::kInvalidValue;
  });
}

int cudaStreamGetPriority(void* handle, int* priority) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    return priority ? (*priority = stream->priority, abi::kSuccess) : abi::kInvalidValue;
  });
}

int cudaStreamGetId(void* handle, unsigned long long* id) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    return id ? (*id = stream->id, abi::kSuccess) : abi::kInvalidValue;
  });
}

int cudaStreamGetDevice(void* handle, int* device) {
  return api([&](Runtime& r) -> int {
    if (!r.find_stream(handle)) return abi::kInvalidResourceHandle;
    return device ? (*device = 0, abi::kSuccess) : abi::kInvalidValue;
  });
}

int cudaStreamWaitEvent(void* handle, void* event_handle, unsigned flags) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    auto event = static_cast<Event*>(event_handle);
    if (!stream || !r.events.count(event)) return abi::kInvalidResourceHandle;
    if (flags & ~kWaitFlags) return abi::kInvalidValue;
    if (event->capture && !stream->capture) stream->capture = event->capture;  // joins the capture
    return abi::kSuccess;
  });
}

int cudaLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    if (!function) return abi::kInvalidValue;
    return r.submit(stream, [=, &r]() -> int {
      r.device().settle();
      return function(data), abi::kSuccess;
    });
  });
}

// --- events -----------------------------------------------------------------------------------------------------

int cudaEventCreateWithFlags(void** out, unsigned flags) {
  return api([&](Runtime& r) -> int {
    if (!out || (flags & ~kEventFlags)) return abi::kInvalidValue;
    Event* event = new Event();
    event->flags = flags;
    r.events.insert(event);
    *out = event;
    return abi::kSuccess;
  });
}

int cudaEventCreate(void** out) { return cudaEventCreateWithFlags(out, 0); }

int cudaEventDestroy(void* handle) {
  return api([&](Runtime& r) -> int {
    auto event = static_cast<Event*>(handle);
    if (r.events.erase(event) == 0) return abi::kInvalidResourceHandle;
    delete event;
    return abi::kSuccess;
  });
}

int cudaEventRecord(void* event, void* stream) {
  return api([&](Runtime& r) { return record(r, event, stream); });
}

int cudaEventRecordWithFlags(void* event, void* stream, unsigned flags) {
  return api([&](Runtime& r) -> int { return flags > 1 ? abi::kInvalidValue : record(r, event, stream); });
}

int cudaEventQuery(void* event) {
  return api([&](Runtime& r) { return wait_for_event(r, event, "cudaEventQuery"); });
}

int cudaEventSynchronize(void* event) {
  return api([&](Runtime& r) { return wait_for_event(r, event, "cudaEventSynchronize"); });
}

/// Milliseconds of predicted device time (model/), not of the host's.
int cudaEventElapsedTime(float* milliseconds, void* from_handle, void* to_handle) {
  return api([&](Runtime& r) -> int {
    auto from = static_cast<Event*>(from_handle);
    auto to = static_cast<Event*>(to_handle);
    if (!milliseconds) return abi::kInvalidValue;
    if (!r.events.count(from) || !r.events.count(to)) return abi::kInvalidResourceHandle;
    if (!from->recorded || !to->recorded || ((from->flags | to->flags) & kEventDisableTiming)) {
      return abi::kInvalidResourceHandle;
    }
    *milliseconds = static_cast<float>((to->seconds - from->seconds) * 1e3);
    return abi::kSuccess;
  });
}

// --- captures and graphs ------------------------------------------------------------------------------------------

int cudaStreamBeginCapture(void* handle, int mode) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    if (stream == r.find_stream(nullptr)) return abi::kStreamCaptureUnsupported;  // the legacy stream cannot capture
    if (stream->capture) return abi::kIllegalState;
    stream->capture = std::make_shared<Graph>();
    stream->capture_origin = true;
    stream->capture_mode = mode;
    return abi::kSuccess;
  });
}

int cudaStreamEndCapture(void* handle, void** out) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    if (!stream->capture) return abi::kIllegalState;
    if (!stream->capture_origin) {
      return r.invalidate_captures(abi::kStreamCaptureUnmatched,
                                   "a capture is ended on the stream that it was begun on");
    }
    const bool invalid = stream->capture_invalid;
    Graph* graph = invalid ? nullptr : new Graph(*stream->capture);
    leave_capture(r, stream);
    if (graph) r.graphs.insert(graph);
    if (out) *out = graph;
    return invalid ? abi::kStreamCaptureInvalidated : abi::kSuccess;
  });
}

int cudaStreamIsCapturing(void* handle, int* status) {
  return api([&](Runtime& r) -> int {
    Stream* stream = r.find_stream(handle);
    if (!stream) return abi::kInvalidResourceHandle;
    return status ? (*status = capture_status(*stream), abi::kSuccess) : abi::kInvalidValue;
  });
}

int cudaThreadExchangeStreamCaptureMode(int*) { return abi::kSuccess; }

int cudaGraphInstantiate(void** out, void* handle, unsigned long long) {
  return api([&](Runtime& r) -> int {
    auto graph = static_cast<Graph*>(handle);
    if (!out || !r.graphs.count(graph)) return abi::kInvalidValue;
    Graph* executable = new Graph(*graph);
    r.executables.insert(executable);
    *out = executable;
    return abi::kSuccess;
  });
}

int cudaGraphInstantiateWithFlags(void** out, void* graph, unsigned long long flags) {
  return cudaGraphInstantiate(out, graph, flags);
}

int cudaGraphGetNodes(void* handle, void** nodes, size_t* count) {
  return api([&](Runtime& r) -> int {
    auto graph = static_cast<Graph*>(handle);
    if (!count || !r.graphs.count(graph)) return abi::kInvalidValue;
    if (nodes) return abi::kNotSupported;  // the nodes cannot be looked at, only counted
    *count = graph->nodes.size();
    return abi::kSuccess;
  });
}

int cudaGraphLaunch(void* handle, void* stream_handle) {
  return api([&](Runtime& r) -> int {
    auto graph = static_cast<Graph*>(handle);
    Stream* stream = r.find_stream(stream_handle);
    if (!stream || !r.executables.count(graph)) return abi::kInvalidResourceHandle;
    return r.submit(stream, [nodes = graph->nodes]() -> int {
      for (const auto& node : nodes) {
        if (int error = node()) return error;
      }
      return abi::kSuccess;
    });
  });
}

int cudaGraphUpload(void*, void*) { return abi::kSuccess; }

int cudaGraphDestroy(void* handle) {
  return api([&](Runtime& r) -> int {
    auto graph = static_cast<Graph*>(handle);
    if (r.graphs.erase(graph) == 0) return abi::kInvalidValue;
    delete graph;
    return abi::kSuccess;
  });
}

int cudaGraphExecDestroy(void* handle) {
  return api([&](Runtime& r) -> int {
    auto graph = static_cast<Graph*>(handle);
    if (r.executables.erase(graph) == 0) return abi::kInvalidValue;
    delete graph;
    return abi::kSuccess;
  });
}

}  // extern "C"
