// SPDX-License-Identifier: Apache-2.0
// cub's device-wide scan and reduction over what a file holds: scan|reduce INPUT OUTPUT, int32.
#include <cub/device/device_reduce.cuh>
#include <cub/device/device_scan.cuh>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <vector>

namespace {

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

void* device_memory(size_t bytes) {
  void* address = nullptr;
  check(cudaMalloc(&address, bytes ? bytes : 1));
  return address;
}

}  // namespace

int main(int, char** argv) {
  const bool scan = std::strcmp(argv[1], "scan") == 0;
  std::ifstream input(argv[2], std::ios::binary);
  const std::vector<char> bytes{std::istreambuf_iterator<char>(input), {}};
  const int n = static_cast<int>(bytes.size() / sizeof(int));
  std::vector<char> result(scan ? bytes.size() : sizeof(int));
  const auto source = static_cast<int*>(device_memory(bytes.size()));
  const auto target = static_cast<int*>(device_memory(result.size()));
  check(cudaMemcpy(source, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
  auto run = [&](void* workspace, size_t& size) {
    check(scan ? cub::DeviceScan::InclusiveSum(workspace, size, source, target, n)
               : cub::DeviceReduce::Sum(workspace, size, source, target, n));
  };
  size_t size = 0;
  run(nullptr, size);
  run(device_memory(size), size);
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(result.data(), target, result.size(), cudaMemcpyDeviceToHost));
  std::ofstream(argv[3], std::ios::binary).write(result.data(), static_cast<std::streamsize>(result.size()));
  return 0;
}
