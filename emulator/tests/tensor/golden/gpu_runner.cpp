// SPDX-License-Identifier: Apache-2.0
// Runs PTX kernels on a real GPU and writes what their buffers hold afterwards.
//
//   g++ -std=c++17 -I<cuda>/include -o gpu_runner gpu_runner.cpp -ldl && ./gpu_runner cases.bin results.bin
//
// The file format is that of runner_file.py. Needs the CUDA driver only: its compiler takes the PTX as it stands.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace {

template <class F>
F driver(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  void* const symbol = library ? dlsym(library, name) : nullptr;
  if (!symbol) {
    std::fprintf(stderr, "the CUDA driver has no %s\n", name);
    std::exit(1);
  }
  return reinterpret_cast<F>(symbol);
}
#define DRIVER(name, suffix) const auto name = driver<decltype(&::name)>(#name suffix)

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  std::fprintf(stderr, "%s: CUresult %d\n", what, static_cast<int>(result));
  std::exit(1);
}

/// Reads little-endian words and byte strings.
class Reader {
 public:
  explicit Reader(std::vector<char> data) : data_(std::move(data)) {}
  uint32_t word() { return scalar<uint32_t>(); }
  uint64_t wide() { return scalar<uint64_t>(); }
  std::string bytes() {
    const uint32_t length = word();
    if (length > data_.size() - at_) fail();
    std::string out(data_.data() + at_, length);
    at_ += length;
    return out;
  }

 private:
  template <class T>
  T scalar() {
    if (sizeof(T) > data_.size() - at_) fail();
    T value;
    std::memcpy(&value, data_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
  [[noreturn]] static void fail() {
    std::fprintf(stderr, "the case file ends too early\n");
    std::exit(1);
  }
  std::vector<char> data_;
  size_t at_ = 0;
};

struct Parameter {
  std::string bytes;      // as passed to the kernel
  CUdeviceptr buffer = 0; // of a buffer parameter
  size_t size = 0;
};

CUtensorMap tensor_map(Reader& in, const std::vector<Parameter>& parameters) {
  const auto encode = driver<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  uint32_t field[7];  // buffer, type, rank, interleave, swizzle, promotion, fill
  for (uint32_t& f : field) f = in.word();
  cuuint64_t dims[5], strides[4];
  cuuint32_t box[5], steps[5];
  for (auto& d : dims) d = in.wide();
  for (auto& s : strides) s = in.wide();
  for (auto& b : box) b = in.word();
  for (auto& s : steps) s = in.word();
  const uint64_t offset = in.wide();
  alignas(64) CUtensorMap map;
  check(encode(&map, static_cast<CUtensorMapDataType>(field[1]), field[2],
               reinterpret_cast<void*>(parameters.at(field[0]).buffer + offset), dims, strides, box, steps,
               static_cast<CUtensorMapInterleave>(field[3]), static_cast<CUtensorMapSwizzle>(field[4]),
               static_cast<CUtensorMapL2promotion>(field[5]), static_cast<CUtensorMapFloatOOBfill>(field[6])),
        "cuTensorMapEncodeTiled");
  return map;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return std::fprintf(stderr, "usage: gpu_runner cases results\n"), 1;
  std::ifstream file(argv[1], std::ios::binary);
  Reader in(std::vector<char>(std::istreambuf_iterator<char>(file), {}));
  std::ofstream out(argv[2], std::ios::binary);

  DRIVER(cuInit, "");
  DRIVER(cuDeviceGet, "");
  DRIVER(cuDevicePrimaryCtxRetain, "");
  DRIVER(cuCtxSetCurrent, "");
  DRIVER(cuModuleLoadData, "");
  DRIVER(cuModuleGetFunction, "");
  DRIVER(cuMemAlloc, "_v2");
  DRIVER(cuMemFree, "_v2");
  DRIVER(cuMemcpyHtoD, "_v2");
  DRIVER(cuMemcpyDtoH, "_v2");
  DRIVER(cuLaunchKernel, "");
  DRIVER(cuCtxSynchronize, "");
  check(cuInit(0), "cuInit");
  CUdevice device;
  CUcontext context;
  check(cuDeviceGet(&device, 0), "cuDeviceGet");
  check(cuDevicePrimaryCtxRetain(&context, device), "cuDevicePrimaryCtxRetain");
  check(cuCtxSetCurrent(context), "cuCtxSetCurrent");

  std::map<std::string, CUmodule> modules;
  const uint32_t cases = in.word();
  for (uint32_t i = 0; i < cases; ++i) {
    const std::string name = in.bytes(), text = in.bytes(), kernel = in.bytes();
    uint32_t shape[7];  // grid, block, dynamic shared memory
    for (uint32_t& s : shape) s = in.word();
    std::vector<Parameter> parameters(in.word());
    for (Parameter& p : parameters) {
      const uint32_t kind = in.word();
      if (kind == 2) {
        const CUtensorMap map = tensor_map(in, parameters);
        p.bytes.assign(reinterpret_cast<const char*>(&map), sizeof(map));
        continue;
      }
      p.bytes = in.bytes();
      if (kind == 0) continue;
      p.size = p.bytes.size();
      check(cuMemAlloc(&p.buffer, p.size + 256), "cuMemAlloc");
      check(cuMemcpyHtoD(p.buffer, p.bytes.data(), p.size), "cuMemcpyHtoD");
      p.bytes.assign(reinterpret_cast<const char*>(&p.buffer), sizeof(p.buffer));
    }
    if (!modules.count(text)) check(cuModuleLoadData(&modules[text], text.c_str()), name.c_str());
    CUfunction function;
    check(cuModuleGetFunction(&function, modules[text], kernel.c_str()), name.c_str());
    std::vector<void*> arguments;
    for (Parameter& p : parameters) arguments.push_back(p.bytes.data());
    check(cuLaunchKernel(function, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6], nullptr,
                         arguments.data(), nullptr),
          name.c_str());
    check(cuCtxSynchronize(), name.c_str());
    for (Parameter& p : parameters) {
      if (!p.buffer) continue;
      std::vector<char> bytes(p.size);
      check(cuMemcpyDtoH(bytes.data(), p.buffer, p.size), "cuMemcpyDtoH");
      out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
      check(cuMemFree(p.buffer), "cuMemFree");
    }
  }
  std::printf("%u cases\n", cases);
  return out ? 0 : 1;
}
