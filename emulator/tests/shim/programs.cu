// SPDX-License-Identifier: Apache-2.0
//
// A shared library as a JIT builds them: launchers that take pointers, kernels beside them. test_programs.py calls it
// through ctypes, with CPU memory that was registered as device memory.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

__constant__ float weights[4] = {1.0f, 2.0f, 4.0f, 8.0f};
__device__ int visits = 100;

__global__ void add_kernel(const float* a, const float* b, float* c, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i] * weights[i & 3];
}

// Sums a block's values through dynamic shared memory of as many bytes as the launch grants.
__global__ void sum_kernel(const int* in, int* out) {
  extern __shared__ int values[];
  values[threadIdx.x] = in[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) values[threadIdx.x] += values[threadIdx.x + step];
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    out[blockIdx.x] = values[0];
    atomicAdd(&visits, 1);
  }
}

struct Mixed {
  char tag;
  double scale;
  short offsets[3];
};

// Parameters of every size and alignment.
__global__ void params_kernel(bool flag, char small, const __grid_constant__ Mixed mixed, float half, int64_t wide,
                              short last, double* out) {
  out[0] = flag, out[1] = small, out[2] = mixed.tag, out[3] = mixed.scale, out[4] = mixed.offsets[2], out[5] = half;
  out[6] = static_cast<double>(wide), out[7] = last;
}

// A chain of programmatic dependents: each doubles what its predecessor left, and may forget to wait for it.
__global__ void chain_kernel(int* value, bool waits) {
  if (waits) asm volatile("griddepcontrol.wait;" ::: "memory");
  *value = *value * 2 + 1;
  asm volatile("griddepcontrol.launch_dependents;");
}

// Copies one 64 x 16 box of bf16 with the tensor copy engine and writes it out as it lies in shared memory.
__global__ void tensor_copy_kernel(const __grid_constant__ CUtensorMap map, int x, int y, uint16_t* out) {
  __shared__ alignas(128) uint16_t tile[16 * 64];
  __shared__ alignas(8) uint64_t barrier;
  const auto tile_address = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  const auto barrier_address = static_cast<uint32_t>(__cvta_generic_to_shared(&barrier));
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier_address));
    asm volatile("fence.proxy.async.shared::cta;");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier_address), "r"(2048));
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
            tile_address),
        "l"(&map), "r"(barrier_address), "r"(x), "r"(y)
        : "memory");
  }
  __syncthreads();
  uint32_t done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier_address)
                 : "memory");
  }
  for (int i = threadIdx.x; i < 16 * 64; i += blockDim.x) out[i] = tile[i];
}

__global__ void bad_store_kernel(int* out, int index) { out[index] = 1; }

__global__ void uninitialized_kernel(int* out) {
  __shared__ volatile int never_written[32];
  out[threadIdx.x] = never_written[threadIdx.x];
}

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

}  // namespace

// A register that the virtual device does not know.
__global__ void unknown_register_kernel(unsigned* out) { asm volatile("mov.u32 %0, %%envreg31;" : "=r"(*out)); }

extern "C" {

int add(const float* a, const float* b, float* c, int n) {
  add_kernel<<<(n + 127) / 128, 128>>>(a, b, c, n);
  return cudaGetLastError();
}

int sum(const int* in, int* out, int blocks, int threads, int bytes) {
  sum_kernel<<<blocks, threads, bytes>>>(in, out);
  return cudaGetLastError();
}

int read_visits(int* out) { return cudaMemcpyFromSymbol(out, visits, sizeof(int)); }

int params(double* out) {
  Mixed mixed = {'m', 0.375, {1, -2, -3}};
  params_kernel<<<1, 1>>>(true, 'x', mixed, 1.5f, int64_t{1} << 40, short{-7}, out);
  return cudaGetLastError();
}

int chain_that_waits(int* value, int links, void* stream, bool waits) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(1);
  config.blockDim = dim3(1);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &attribute;
  config.numAttrs = 1;
  for (int i = 0; i < links; ++i) {
    if (cudaError_t error = cudaLaunchKernelEx(&config, chain_kernel, value, waits)) return error;
  }
  return cudaSuccess;
}

int chain(int* value, int links, void* stream) { return chain_that_waits(value, links, stream, true); }

int tensor_copy(void* matrix, int width, int height, int x, int y, int swizzle, uint16_t* out) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  if (cudaError_t error =
          cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found)) {
    return error;
  }
  CUtensorMap map;
  const cuuint64_t dims[2] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(height)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(width) * 2};
  const cuuint32_t box[2] = {64, 16};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = reinterpret_cast<Encode>(function)(
      &map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, matrix, dims, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      static_cast<CUtensorMapSwizzle>(swizzle), CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return result;
  tensor_copy_kernel<<<1, 32>>>(map, x, y, out);
  return cudaGetLastError();
}

int bad_store(int* out, int index) {
  bad_store_kernel<<<1, 1>>>(out, index);
  return cudaGetLastError();
}

int uninitialized(int* out) {
  uninitialized_kernel<<<1, 32>>>(out);
  return cudaGetLastError();
}

// memset, two kernels and a copy back, in one stream: each sees what the one before it left.
int in_order(int* device, int* host) {
  cudaStream_t stream;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  cudaMemsetAsync(device, 0, 4, stream);
  int error = chain(device, 3, stream);
  cudaMemcpyAsync(host, device, 4, cudaMemcpyDeviceToHost, stream);
  cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  return error;
}

// Captures a chain of three on `value` and replays it twice; *nodes is the number of captured nodes.
int graph(int* value, int* before_replay, int* nodes) {
  cudaStream_t stream;
  cudaGraph_t captured;
  cudaGraphExec_t executable;
  size_t count = 0;
  cudaStreamCreate(&stream);
  if (cudaError_t error = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)) return error;
  if (int error = chain(value, 3, stream)) return error;
  if (cudaError_t error = cudaStreamEndCapture(stream, &captured)) return error;
  *before_replay = *value;
  cudaGraphGetNodes(captured, nullptr, &count);
  *nodes = static_cast<int>(count);
  if (cudaError_t error = cudaGraphInstantiate(&executable, captured, 0)) return error;
  for (int i = 0; i < 2; ++i) {
    if (cudaError_t error = cudaGraphLaunch(executable, stream)) return error;
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(captured);
  return cudaStreamDestroy(stream);
}

int synchronize() { return cudaDeviceSynchronize(); }

int unknown_register(unsigned* out) {
  unknown_register_kernel<<<1, 1>>>(out);
  return cudaGetLastError();
}

// What a capture answers to a call that it forbids, and what it ends with then.
int synchronize_in_capture(int* value, int* end) {
  cudaStream_t stream;
  cudaGraph_t captured = nullptr;
  cudaStreamCreate(&stream);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  chain(value, 1, stream);
  const int refused = cudaStreamSynchronize(stream);
  *end = cudaStreamEndCapture(stream, &captured);
  cudaStreamDestroy(stream);
  cudaGetLastError();
  return refused;
}

}  // extern "C"
