// SPDX-License-Identifier: Apache-2.0
//
//   fatbin_tool dump FILE            the images of a fat binary and the resources of its cubins' kernels
//   fatbin_tool fuzz FILE SEED RUNS  parses damaged copies of it: each is read or refused, never more
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
#include <string>

#include "fatbin/fatbin.h"

using vsm::fatbin::FatbinError;
using vsm::fatbin::Image;
using vsm::fatbin::ImageKind;

namespace {

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

int dump(const std::string& bytes) {
  for (const Image& image : vsm::fatbin::images_of(bytes)) {
    std::printf("%s %u %s %zu\n", image.kind == ImageKind::kPtx ? "ptx" : "cubin", image.arch,
                image.compressed ? "compressed" : "plain", image.payload.size());
    if (image.kind == ImageKind::kPtx && !image.compressed) {
      const size_t at = image.payload.find(".target");
      std::printf("  %s\n", std::string(image.payload.substr(at, image.payload.find('\n', at) - at)).c_str());
    }
    if (image.kind != ImageKind::kCubin || image.compressed) continue;
    for (const auto& [name, used] : vsm::fatbin::kernel_resources(image.payload)) {
      std::printf("  %s registers %u stack %u shared %u barriers %u\n", name.c_str(), used.registers, used.stack,
                  used.static_shared, used.barriers);
    }
  }
  return 0;
}

int fuzz(const std::string& original, unsigned seed, int runs) {
  std::mt19937 random(seed);
  int refused = 0;
  for (int run = 0; run < runs; ++run) {
    std::string bytes = original;
    // Damage where the structure is: near the front, and in the tables at the end of the cubin.
    const int edits = 1 + static_cast<int>(random() % 4);
    for (int i = 0; i < edits; ++i) {
      const size_t range = random() % 2 ? 512 : bytes.size();
      bytes[random() % range] = static_cast<char>(random() % 4 ? random() : 0xff);
    }
    if (random() % 4 == 0) bytes.resize(random() % bytes.size());
    try {
      for (const Image& image : vsm::fatbin::images_of(bytes)) {
        if (image.kind == ImageKind::kCubin && !image.compressed) vsm::fatbin::kernel_resources(image.payload);
      }
    } catch (const FatbinError&) { ++refused; }
  }
  std::printf("%d of %d refused\n", refused, runs);
  return refused > 0 && refused < runs ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::string(argv[1]) == "dump") return dump(read_file(argv[2]));
  if (argc == 5 && std::string(argv[1]) == "fuzz") {
    return fuzz(read_file(argv[2]), static_cast<unsigned>(std::atoi(argv[3])), std::atoi(argv[4]));
  }
  return 2;
}
