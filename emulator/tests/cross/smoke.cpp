// SPDX-License-Identifier: Apache-2.0
// Runs kernels of one PTX file, `k(out, in)` of 32 threads each, and prints what each left in 4,096 bytes of memory:
// smoke FILE.ptx. The same on every host.
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "device.h"

int main(int count, char** arguments) {
  if (count != 2) return 1;
  std::ifstream file(arguments[1]);
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  constexpr uint64_t kBytes = 4096;
  vsm::Device device(vsm::Limits(), 2);
  vsm::LoadedModule* module = device.load(vsm::Program::parse(text, "smoke"));
  const uint64_t buffers[2] = {device.allocate(kBytes), device.allocate(kBytes)};  // out, in
  auto* out = reinterpret_cast<uint8_t*>(buffers[0]);
  auto* in = reinterpret_cast<uint8_t*>(buffers[1]);
  uint32_t state = 1;
  for (uint64_t i = 0; i < kBytes; ++i) in[i] = static_cast<uint8_t>((state = state * 1664525u + 1013904223u) >> 24);
  for (const uint64_t buffer : buffers) device.mark_initialized(buffer, kBytes);
  vsm::LaunchConfig config;
  config.block[0] = 32;
  config.watch = vsm::kWatchDefault | vsm::kWatchRaces;
  for (size_t k = 0; k < device.program(module).kernels().size(); ++k) {
    std::memset(out, 0, kBytes);
    const vsm::LaunchResult result = device.launch(module, static_cast<int>(k), config, buffers, sizeof buffers);
    std::printf("%s %d %s\n", device.program(module).kernels()[k].name.c_str(), static_cast<int>(result.status),
                result.message.c_str());
    for (const vsm::Report& report : result.reports) std::printf("%s\n", report.text.c_str());
    for (uint64_t i = 0; i < kBytes; ++i) std::printf("%02x", out[i]);
    std::printf("\n");
  }
  return 0;
}
