// SPDX-License-Identifier: Apache-2.0
//
// One program, two runtimes. It calls the CUDA runtime with right and wrong arguments and prints one line
// `case: ErrorName` per call. Run on a real GPU it makes the golden file; run on the virtual device it must
// print the same lines. Every size that depends on the device is asked of the device, so the lines do not.
//
//   conformance            all cases that leave the context usable
//   conformance GROUP      one group of them: launch shared attributes device memory stream capture driver
//   conformance fault KIND one kernel fault and what the calls after it answer (a fault is sticky)
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

namespace {

constexpr int kStaticBytes = 16384;

__constant__ int table[4] = {7, 11, 13, 17};
__device__ int cell = 5;

__global__ void plain_kernel(int* out) { out[0] = table[1] + cell; }

__global__ void dynamic_kernel(int* out, int bytes) {
  extern __shared__ char dynamic[];
  if (threadIdx.x == 0 && bytes > 0) {
    dynamic[bytes - 1] = 42;
    out[0] = dynamic[bytes - 1];
  }
}

__global__ void static_kernel(int* out) {
  extern __shared__ char dynamic[];
  __shared__ int fixed[kStaticBytes / 4];
  fixed[threadIdx.x] = out[threadIdx.x & 1];
  dynamic[0] = 1;
  __syncthreads();
  out[0] = fixed[threadIdx.x ^ 1];
}

__global__ void __launch_bounds__(128) bounded_kernel(int* out) { out[threadIdx.x & 1] = 3; }

// All 160 values are live across the barrier: more than the 64 registers that 1,024 threads may have each.
__global__ void __maxnreg__(200) register_kernel(float* out) {
  float value[160];
#pragma unroll
  for (int i = 0; i < 160; ++i) value[i] = out[i * 32 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 160; ++i) out[(159 - i) * 32 + threadIdx.x] = value[i] * value[(i * 7 + 3) % 160];
}

__global__ void store_kernel(int* address) { *address = 1; }
__global__ void misaligned_kernel(char* address) { *reinterpret_cast<volatile int*>(address + 1) = 1; }
__global__ void trap_kernel() { asm volatile("trap;"); }

void show(const char* label, cudaError_t error) {
  std::printf("%s: %s\n", label, cudaGetErrorName(error));
  cudaGetLastError();
}

void show(const char* label, long long number) { std::printf("%s: %lld\n", label, number); }

int attribute(cudaDeviceAttr which) {
  int value = -1;
  cudaDeviceGetAttribute(&value, which, 0);
  return value;
}

template <typename... Parameters, typename... Arguments>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t dynamic_bytes, Arguments... arguments) {
  void* pointers[] = {static_cast<void*>(&arguments)..., nullptr};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), grid, block, pointers, dynamic_bytes, nullptr);
}

void launch_cases(int* out, float* floats) {
  int max_x = attribute(cudaDevAttrMaxThreadsPerBlock);
  show("grid of zero blocks", launch(plain_kernel, dim3(0), dim3(1), 0, out));
  show("block of zero threads", launch(plain_kernel, dim3(1), dim3(0), 0, out));
  show("block z of zero", launch(plain_kernel, dim3(1), dim3(1, 1, 0), 0, out));
  show("block of the most threads", launch(plain_kernel, dim3(1), dim3(max_x), 0, out));
  show("block of one thread too many", launch(plain_kernel, dim3(1), dim3(max_x + 1), 0, out));
  show("block 32 x 33", launch(plain_kernel, dim3(1), dim3(32, 33), 0, out));
  show("block z of 65", launch(plain_kernel, dim3(1), dim3(1, 1, 65), 0, out));
  show("grid y of 65536", launch(plain_kernel, dim3(1, 65536), dim3(1), 0, out));
  show("grid z of 65536", launch(plain_kernel, dim3(1, 1, 65536), dim3(1), 0, out));
  show("grid x of 2^31", launch(plain_kernel, dim3(0x80000000u), dim3(1), 0, out));
  show("null kernel", cudaLaunchKernel(nullptr, dim3(1), dim3(1), nullptr, 0, nullptr));
  int not_a_kernel = 0;
  show("pointer that is no kernel", cudaLaunchKernel(&not_a_kernel, dim3(1), dim3(1), nullptr, 0, nullptr));
  show("launch bounds met", launch(bounded_kernel, dim3(1), dim3(128), 0, out));
  show("launch bounds exceeded", launch(bounded_kernel, dim3(1), dim3(129), 0, out));
  show("registers fit", launch(register_kernel, dim3(1), dim3(32), 0, floats));
  show("registers do not fit", launch(register_kernel, dim3(1), dim3(1024), 0, floats));
  plain_kernel<<<0, 1>>>(out);
  show("triple brackets, grid of zero blocks", cudaGetLastError());
  plain_kernel<<<1, 2048>>>(out);
  show("triple brackets, block of 2048", cudaGetLastError());
  plain_kernel<<<1, 32, 1 << 20>>>(out);
  show("triple brackets, 1 MiB of shared memory", cudaGetLastError());
  register_kernel<<<1, 1024>>>(floats);
  show("triple brackets, registers do not fit", cudaGetLastError());
  plain_kernel<<<1, 32>>>(out);
  show("triple brackets", cudaGetLastError());
  cudaError_t first = launch(plain_kernel, dim3(0), dim3(1), 0, out);
  std::printf("error state: %s", cudaGetErrorName(first));
  std::printf(" peek %s", cudaGetErrorName(cudaPeekAtLastError()));
  std::printf(" get %s", cudaGetErrorName(cudaGetLastError()));
  std::printf(" get %s\n", cudaGetErrorName(cudaGetLastError()));
  launch(plain_kernel, dim3(0), dim3(1), 0, out);
  cudaError_t second = cudaStreamSynchronize(nullptr);
  std::printf("a good call after an error: %s", cudaGetErrorName(second));
  std::printf(" get %s\n", cudaGetErrorName(cudaGetLastError()));
}

void shared_memory_cases(int* out) {
  int standard = attribute(cudaDevAttrMaxSharedMemoryPerBlock);
  int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  auto dynamic = reinterpret_cast<const void*>(dynamic_kernel);
  auto fixed = reinterpret_cast<const void*>(static_kernel);
  const cudaFuncAttribute limit = cudaFuncAttributeMaxDynamicSharedMemorySize;
  show("default shared memory", launch(dynamic_kernel, dim3(1), dim3(32), standard, out, standard));
  show("default shared memory plus one", launch(dynamic_kernel, dim3(1), dim3(32), standard + 1, out, standard));
  show("opt in to all", cudaFuncSetAttribute(dynamic, limit, most));
  show("use all", launch(dynamic_kernel, dim3(1), dim3(32), most, out, most));
  show("use one more than all", launch(dynamic_kernel, dim3(1), dim3(32), most + 1, out, most));
  show("opt in to one more than all", cudaFuncSetAttribute(dynamic, limit, most + 1));
  show("use all after a refused opt in", launch(dynamic_kernel, dim3(1), dim3(32), most, out, most));
  show("opt in to 60000", cudaFuncSetAttribute(dynamic, limit, 60000));
  show("use 60000", launch(dynamic_kernel, dim3(1), dim3(32), 60000, out, 60000));
  show("use 60001 of 60000", launch(dynamic_kernel, dim3(1), dim3(32), 60001, out, 60000));
  show("opt in to 1000", cudaFuncSetAttribute(dynamic, limit, 1000));
  show("use 1001 of 1000", launch(dynamic_kernel, dim3(1), dim3(32), 1001, out, 1000));
  show("opt in to a negative size", cudaFuncSetAttribute(dynamic, limit, -1));
  show("opt in beside static memory", cudaFuncSetAttribute(fixed, limit, most - kStaticBytes));
  show("use it", launch(static_kernel, dim3(1), dim3(32), most - kStaticBytes, out));
  show("opt in beside static memory, one more", cudaFuncSetAttribute(fixed, limit, most - kStaticBytes + 1));
  show("unknown function attribute", cudaFuncSetAttribute(dynamic, static_cast<cudaFuncAttribute>(77), 1));
  show("carveout 100", cudaFuncSetAttribute(dynamic, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  show("carveout 101", cudaFuncSetAttribute(dynamic, cudaFuncAttributePreferredSharedMemoryCarveout, 101));
  show("carveout -2", cudaFuncSetAttribute(dynamic, cudaFuncAttributePreferredSharedMemoryCarveout, -2));
  show("attribute of a null kernel", cudaFuncSetAttribute(nullptr, limit, 1));
  cudaFuncAttributes attributes;
  show("attributes", cudaFuncGetAttributes(&attributes, fixed));
  show("static shared memory", static_cast<long long>(attributes.sharedSizeBytes));
  show("static kernel max dynamic", static_cast<long long>(most - attributes.maxDynamicSharedSizeBytes));
  cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(plain_kernel));
  show("plain kernel max dynamic", static_cast<long long>(standard - attributes.maxDynamicSharedSizeBytes));
  show("plain kernel max threads", static_cast<long long>(attributes.maxThreadsPerBlock));
  cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(bounded_kernel));
  show("bounded kernel max threads", static_cast<long long>(attributes.maxThreadsPerBlock));
  show("attributes of a null kernel", cudaFuncGetAttributes(&attributes, nullptr));
}

void launch_attribute_cases(int* out) {
  void* arguments[] = {&out};
  auto kernel = reinterpret_cast<const void*>(plain_kernel);
  cudaLaunchAttribute list[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(32);
  show("no attributes", cudaLaunchKernelExC(&config, kernel, arguments));
  config.attrs = list;
  config.numAttrs = 1;
  list[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  list[0].val.programmaticStreamSerializationAllowed = 1;
  show("programmatic stream serialization", cudaLaunchKernelExC(&config, kernel, arguments));
  list[0].id = cudaLaunchAttributeClusterDimension;
  list[0].val.clusterDim.x = list[0].val.clusterDim.y = list[0].val.clusterDim.z = 1;
  show("cluster of one", cudaLaunchKernelExC(&config, kernel, arguments));
  list[0].val.clusterDim.x = 2;
  show("cluster that does not divide the grid", cudaLaunchKernelExC(&config, kernel, arguments));
  list[0].val.clusterDim.x = 0;
  show("cluster of zero", cudaLaunchKernelExC(&config, kernel, arguments));
  list[0].id = cudaLaunchAttributeCooperative;
  list[0].val.cooperative = 1;
  show("cooperative", cudaLaunchKernelExC(&config, kernel, arguments));
  config.gridDim = dim3(1u << 20);
  show("cooperative grid too large", cudaLaunchKernelExC(&config, kernel, arguments));
  show("cooperative launch call, too large",
       cudaLaunchCooperativeKernel(kernel, dim3(1u << 20), dim3(32), arguments, 0, nullptr));
  config.gridDim = dim3(1);
  list[0].id = cudaLaunchAttributePriority;
  list[0].val.priority = 0;
  show("priority", cudaLaunchKernelExC(&config, kernel, arguments));
  list[0].id = cudaLaunchAttributeIgnore;
  show("ignored attribute", cudaLaunchKernelExC(&config, kernel, arguments));
  list[0].id = static_cast<cudaLaunchAttributeID>(63);
  show("unknown launch attribute", cudaLaunchKernelExC(&config, kernel, arguments));
  config.attrs = nullptr;
  show("attribute count without attributes", cudaLaunchKernelExC(&config, kernel, arguments));
}

void device_cases() {
  int count = 0, value = 0, device = -1;
  show("device count", cudaGetDeviceCount(&count));
  show("null device count", cudaGetDeviceCount(nullptr));
  show("get device", cudaGetDevice(&device));
  show("device", static_cast<long long>(device));
  show("set device 0", cudaSetDevice(0));
  show("set device past the last", cudaSetDevice(count));
  show("set device -1", cudaSetDevice(-1));
  show("unknown device attribute", cudaDeviceGetAttribute(&value, static_cast<cudaDeviceAttr>(9999), 0));
  show("attribute of a missing device", cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, count));
  show("attribute into null", cudaDeviceGetAttribute(nullptr, cudaDevAttrWarpSize, 0));
  cudaDeviceProp properties;
  show("properties of a missing device", cudaGetDeviceProperties(&properties, count));
  show("properties", cudaGetDeviceProperties(&properties, 0));
  show("warp size", static_cast<long long>(properties.warpSize));
  show("reserved shared memory", static_cast<long long>(properties.reservedSharedMemPerBlock));
  show("properties match attributes",
       static_cast<long long>(properties.major == attribute(cudaDevAttrComputeCapabilityMajor) &&
                              properties.minor == attribute(cudaDevAttrComputeCapabilityMinor) &&
                              properties.multiProcessorCount == attribute(cudaDevAttrMultiProcessorCount) &&
                              properties.sharedMemPerBlockOptin ==
                                  static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)) &&
                              properties.l2CacheSize == attribute(cudaDevAttrL2CacheSize) &&
                              properties.regsPerMultiprocessor == attribute(cudaDevAttrMaxRegistersPerMultiprocessor) &&
                              properties.maxBlocksPerMultiProcessor ==
                                  attribute(cudaDevAttrMaxBlocksPerMultiprocessor)));
  int blocks = 0;
  auto kernel = reinterpret_cast<const void*>(plain_kernel);
  show("occupancy", cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 128, 0));
  show("occupancy of zero threads", cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 0, 0));
  show("occupancy of negative threads", cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, -4, 0));
  show("occupancy into null", cudaOccupancyMaxActiveBlocksPerMultiprocessor(nullptr, kernel, 128, 0));
  show("occupancy of a null kernel",
       cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, static_cast<const void*>(nullptr), 128, 0));
  show("occupancy of 2048 threads", cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 2048, 0));
  show("blocks of 2048 threads", static_cast<long long>(blocks));
  show("occupancy above the default shared memory",
       cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 128,
                                                     attribute(cudaDevAttrMaxSharedMemoryPerBlock) + 1));
  show("blocks above the default shared memory", static_cast<long long>(blocks));
  int low = 9, high = 9;
  show("stream priorities", cudaDeviceGetStreamPriorityRange(&low, &high));
}

void memory_cases() {
  char* device = nullptr;
  char* empty = reinterpret_cast<char*>(8);
  std::vector<char> host(4096, 1);
  int on_stack = 0;
  show("malloc 1024", cudaMalloc(&device, 1024));
  show("malloc alignment", static_cast<long long>(reinterpret_cast<size_t>(device) % 256));
  show("malloc 0", cudaMalloc(&empty, 0));
  show("malloc 0 gives null", static_cast<long long>(empty == nullptr));
  void* huge = nullptr;
  show("malloc 2^60", cudaMalloc(&huge, size_t{1} << 60));
  show("malloc into null", cudaMalloc(static_cast<void**>(nullptr), 16));
  show("free null", cudaFree(nullptr));
  show("free inside an allocation", cudaFree(device + 16));
  show("free host memory", cudaFree(&on_stack));
  show("copy in", cudaMemcpy(device, host.data(), 1024, cudaMemcpyHostToDevice));
  show("copy in past the end", cudaMemcpy(device, host.data(), 1025 + (2 << 20), cudaMemcpyHostToDevice));
  show("copy nothing to null", cudaMemcpy(nullptr, host.data(), 0, cudaMemcpyHostToDevice));
  show("copy to null", cudaMemcpy(nullptr, host.data(), 16, cudaMemcpyHostToDevice));
  show("copy in unknown direction", cudaMemcpy(device, host.data(), 16, static_cast<cudaMemcpyKind>(9)));
  show("copy by address", cudaMemcpy(host.data(), device, 1024, cudaMemcpyDefault));
  show("host to host", cudaMemcpy(host.data(), host.data() + 2048, 16, cudaMemcpyHostToHost));
  show("memset", cudaMemset(device, 3, 1024));
  show("memset async", cudaMemsetAsync(device, 4, 1024, nullptr));
  show("memset null", cudaMemset(nullptr, 3, 16));
  show("memset nothing", cudaMemset(nullptr, 3, 0));
  show("copy out", cudaMemcpy(host.data(), device, 1024, cudaMemcpyDeviceToHost));
  show("byte after memset", static_cast<long long>(host[1023]));
  cudaPointerAttributes pointer;
  show("attributes of device memory", cudaPointerGetAttributes(&pointer, device + 100));
  show("device memory type", static_cast<long long>(pointer.type));
  show("attributes of a stack address", cudaPointerGetAttributes(&pointer, &on_stack));
  show("symbol in", cudaMemcpyToSymbol(cell, &on_stack, sizeof(int)));
  show("symbol in past the end", cudaMemcpyToSymbol(cell, host.data(), 8));
  show("symbol in, offset past the end", cudaMemcpyToSymbol(cell, host.data(), 4, 1));
  show("symbol out", cudaMemcpyFromSymbol(&on_stack, cell, sizeof(int)));
  show("unknown symbol", cudaMemcpyToSymbol(host, host.data(), 4));
  void* address = nullptr;
  show("symbol address", cudaGetSymbolAddress(&address, table));
  size_t bytes = 0;
  show("symbol size", cudaGetSymbolSize(&bytes, table));
  show("symbol bytes", static_cast<long long>(bytes));
  void* pooled = nullptr;
  show("malloc async", cudaMallocAsync(&pooled, 512, nullptr));
  show("free async", cudaFreeAsync(pooled, nullptr));
  show("free", cudaFree(device));
  void* pinned = nullptr;
  show("host malloc", cudaMallocHost(&pinned, 512));
  show("host free", cudaFreeHost(pinned));
  show("host free of a stack address", cudaFreeHost(&on_stack));
}

void stream_cases() {
  cudaStream_t stream = nullptr;
  cudaEvent_t first = nullptr, second = nullptr, untimed = nullptr;
  float milliseconds = -1;
  show("stream", cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  show("stream with unknown flags", cudaStreamCreateWithFlags(&stream, 0x80));
  show("stream into null", cudaStreamCreate(nullptr));
  show("stream query", cudaStreamQuery(stream));
  show("event", cudaEventCreate(&first));
  show("second event", cudaEventCreateWithFlags(&second, cudaEventDefault));
  show("untimed event", cudaEventCreateWithFlags(&untimed, cudaEventDisableTiming));
  cudaEvent_t refused = nullptr;
  show("event with unknown flags", cudaEventCreateWithFlags(&refused, 0x100));
  show("query before record", cudaEventQuery(first));
  show("wait before record", cudaStreamWaitEvent(stream, first, 0));
  show("elapsed before record", cudaEventElapsedTime(&milliseconds, first, second));
  show("record", cudaEventRecord(first, stream));
  show("record again", cudaEventRecord(second, stream));
  show("record untimed", cudaEventRecord(untimed, stream));
  show("record null", cudaEventRecord(nullptr, stream));
  show("wait", cudaStreamWaitEvent(stream, first, 0));
  show("wait with unknown flags", cudaStreamWaitEvent(stream, first, 0x40));
  show("synchronize event", cudaEventSynchronize(second));
  show("elapsed", cudaEventElapsedTime(&milliseconds, first, second));
  show("elapsed is not negative", static_cast<long long>(milliseconds >= 0));
  show("elapsed of an untimed event", cudaEventElapsedTime(&milliseconds, first, untimed));
  show("elapsed into null", cudaEventElapsedTime(nullptr, first, second));
  cudaStreamCaptureStatus capture;
  show("is capturing", cudaStreamIsCapturing(stream, &capture));
  show("capture status", static_cast<long long>(capture));
  show("destroy event", cudaEventDestroy(first));
  show("destroy null event", cudaEventDestroy(nullptr));
  show("synchronize stream", cudaStreamSynchronize(stream));
  show("destroy stream", cudaStreamDestroy(stream));
  show("destroy default stream", cudaStreamDestroy(nullptr));
  show("synchronize device", cudaDeviceSynchronize());
}

void capture_cases(int* out) {
  cudaStream_t stream = nullptr, other = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cudaEvent_t event = nullptr;
  cudaStreamCaptureStatus status;
  void* memory = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
  cudaEventCreateWithFlags(&event, cudaEventDisableTiming);
  const auto mode = cudaStreamCaptureModeGlobal;
  show("capture of the default stream", cudaStreamBeginCapture(nullptr, mode));
  show("end without a capture", cudaStreamEndCapture(stream, &graph));
  show("capture", cudaStreamBeginCapture(stream, mode));
  show("capture again", cudaStreamBeginCapture(stream, mode));
  cudaStreamIsCapturing(stream, &status);
  show("status in a capture", static_cast<long long>(status));
  plain_kernel<<<1, 32, 0, stream>>>(out);
  show("launch in a capture", cudaGetLastError());
  show("memset in a capture", cudaMemsetAsync(out, 0, 16, stream));
  show("record in a capture", cudaEventRecord(event, stream));
  show("wait joins the capture", cudaStreamWaitEvent(other, event, 0));
  cudaStreamIsCapturing(other, &status);
  show("status of the stream that joined", static_cast<long long>(status));
  plain_kernel<<<1, 32, 0, other>>>(out);
  cudaEventRecord(event, other);
  cudaStreamWaitEvent(stream, event, 0);
  show("end", cudaStreamEndCapture(stream, &graph));
  size_t nodes = 0;
  show("nodes", cudaGraphGetNodes(graph, nullptr, &nodes));
  show("number of nodes", static_cast<long long>(nodes));
  show("instantiate", cudaGraphInstantiate(&executable, graph, 0));
  show("instantiate null", cudaGraphInstantiate(&executable, nullptr, 0));
  show("graph launch", cudaGraphLaunch(executable, stream));
  show("graph launch on the default stream", cudaGraphLaunch(executable, nullptr));
  show("synchronize after it", cudaStreamSynchronize(stream));
  show("destroy executable", cudaGraphExecDestroy(executable));
  show("destroy graph", cudaGraphDestroy(graph));

  cudaStreamBeginCapture(stream, mode);
  cudaEventRecord(event, stream);
  cudaStreamWaitEvent(other, event, 0);
  show("end on the stream that joined", cudaStreamEndCapture(other, &graph));
  show("end after that", cudaStreamEndCapture(stream, &graph));
  graph = nullptr;
  auto forbidden = [&](const char* label, auto call) {
    cudaStreamBeginCapture(stream, mode);
    show(label, call());
    cudaStreamIsCapturing(stream, &status);
    show("  status after it", static_cast<long long>(status));
    plain_kernel<<<1, 32, 0, stream>>>(out);
    show("  launch after it", cudaGetLastError());
    show("  end after it", cudaStreamEndCapture(stream, &graph));
    if (graph) cudaGraphDestroy(graph);
    graph = nullptr;
  };
  auto kernel = reinterpret_cast<const void*>(plain_kernel);
  int blocks = 0;
  cudaEventRecord(event, other);
  forbidden("refused launch in a capture", [&] { return plain_kernel<<<0, 32, 0, stream>>>(out), cudaGetLastError(); });
  forbidden("synchronize in a capture", [&] { return cudaStreamSynchronize(stream); });
  forbidden("query in a capture", [&] { return cudaStreamQuery(stream); });
  forbidden("synchronize another stream in a capture", [&] { return cudaStreamSynchronize(other); });
  forbidden("query another stream in a capture", [&] { return cudaStreamQuery(other); });
  forbidden("synchronize an event in a capture", [&] { return cudaEventSynchronize(event); });
  forbidden("query an event in a capture", [&] { return cudaEventQuery(event); });
  forbidden("synchronize device in a capture", [] { return cudaDeviceSynchronize(); });
  forbidden("malloc in a capture", [&] { return cudaMalloc(&memory, 16); });
  forbidden("host malloc in a capture", [&] { return cudaMallocHost(&memory, 16); });
  forbidden("free of null in a capture", [] { return cudaFree(nullptr); });
  forbidden("copy on the default stream in a capture",
            [&] { return cudaMemcpy(out, &status, 4, cudaMemcpyHostToDevice); });
  forbidden("launch on the default stream in a capture",
            [&] { return plain_kernel<<<1, 32>>>(out), cudaGetLastError(); });
  forbidden("launch on another stream in a capture",
            [&] { return plain_kernel<<<1, 32, 0, other>>>(out), cudaGetLastError(); });
  forbidden("grant in a capture",
            [&] { return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, 1024); });
  forbidden("occupancy in a capture",
            [&] { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, 128, 0); });
  cudaStream_t blocking = nullptr;
  cudaStreamCreate(&blocking);
  std::swap(stream, blocking);
  forbidden("copy on the default stream beside a blocking capture",
            [&] { return cudaMemcpy(out, &status, 4, cudaMemcpyHostToDevice); });
  forbidden("launch on the default stream beside a blocking capture",
            [&] { return plain_kernel<<<1, 32>>>(out), cudaGetLastError(); });
  std::swap(stream, blocking);
  cudaStreamDestroy(blocking);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
  show("malloc in a relaxed capture", cudaMalloc(&memory, 16));
  show("synchronize another stream in a relaxed capture", cudaStreamSynchronize(other));
  show("end of a relaxed capture", cudaStreamEndCapture(stream, &graph));
  cudaFree(memory);
  cudaGraphDestroy(graph);
  cudaEventDestroy(event);
  cudaStreamDestroy(stream);
  cudaStreamDestroy(other);
}

}  // namespace

void entry_point_cases();  // tensor maps: conformance_tensor_map.cu

namespace {

int fault(const char* kind) {
  int* buffer = nullptr;
  cudaMalloc(&buffer, 1024);
  cudaError_t error = cudaErrorUnknown;
  if (!std::strcmp(kind, "null")) error = launch(store_kernel, dim3(1), dim3(1), 0, static_cast<int*>(nullptr));
  if (!std::strcmp(kind, "freed")) {
    int* large = nullptr;
    cudaMalloc(&large, 64 << 20);
    cudaFree(large);
    error = launch(store_kernel, dim3(1), dim3(1), 0, large);
  }
  if (!std::strcmp(kind, "misaligned"))
    error = launch(misaligned_kernel, dim3(1), dim3(1), 0, reinterpret_cast<char*>(buffer));
  if (!std::strcmp(kind, "trap")) error = launch(trap_kernel, dim3(1), dim3(1), 0);
  std::printf("%s: launch %s\n", kind, cudaGetErrorName(error));
  std::printf("%s: synchronize %s\n", kind, cudaGetErrorName(cudaDeviceSynchronize()));
  std::printf("%s: peek %s\n", kind, cudaGetErrorName(cudaPeekAtLastError()));
  std::printf("%s: get %s\n", kind, cudaGetErrorName(cudaGetLastError()));
  std::printf("%s: get %s\n", kind, cudaGetErrorName(cudaGetLastError()));
  int* other = nullptr;
  std::printf("%s: malloc %s\n", kind, cudaGetErrorName(cudaMalloc(&other, 16)));
  std::printf("%s: memset %s\n", kind, cudaGetErrorName(cudaMemset(buffer, 0, 16)));
  std::printf("%s: good launch %s\n", kind, cudaGetErrorName(launch(plain_kernel, dim3(1), dim3(1), 0, buffer)));
  std::printf("%s: bad launch %s\n", kind, cudaGetErrorName(launch(plain_kernel, dim3(0), dim3(1), 0, buffer)));
  cudaEvent_t event = nullptr;
  std::printf("%s: event %s\n", kind, cudaGetErrorName(cudaEventCreate(&event)));
  int value = 0;
  std::printf("%s: attribute %s\n", kind, cudaGetErrorName(cudaDeviceGetAttribute(&value, cudaDevAttrWarpSize, 0)));
  std::printf("%s: free %s\n", kind, cudaGetErrorName(cudaFree(buffer)));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc == 3 && !std::strcmp(argv[1], "fault")) return fault(argv[2]);
  auto wanted = [&](const char* group) { return argc < 2 || !std::strcmp(argv[1], group); };
  int* out = nullptr;
  float* floats = nullptr;
  cudaMalloc(&out, 1 << 16);
  cudaMalloc(&floats, 1 << 20);
  cudaMemset(out, 0, 1 << 16);
  cudaMemset(floats, 0, 1 << 20);
  if (wanted("launch")) launch_cases(out, floats);
  if (wanted("shared")) shared_memory_cases(out);
  if (wanted("attributes")) launch_attribute_cases(out);
  if (wanted("device")) device_cases();
  if (wanted("memory")) memory_cases();
  if (wanted("stream")) stream_cases();
  if (wanted("capture")) capture_cases(out);
  if (wanted("driver")) entry_point_cases();
  return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
