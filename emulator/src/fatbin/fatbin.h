// SPDX-License-Identifier: Apache-2.0
// The containers that nvcc embeds in a host object: the fat binary (PTX and cubin images) and, inside a cubin, what
// ptxas says of each kernel. Layouts as emitted by nvcc 13.0 and shown by `cuobjdump -elf`.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace vsm::fatbin {

/// Bytes that are not what they should be. `what()` says where.
class FatbinError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class ImageKind : uint8_t { kPtx = 1, kCubin = 2 };

/// One image of a fat binary. `payload` points into the memory that was parsed.
struct Image {
  ImageKind kind = ImageKind::kPtx;
  uint32_t arch = 0;        // 121 for sm_121a and compute_121a
  bool compressed = false;  // the payload is then not readable here
  std::string_view payload; // PTX without its trailing zeros, or an ELF file
};

/// The images of the fat binary that `wrapper` (the struct given to __cudaRegisterFatBinary) points to.
std::vector<Image> images_of_wrapper(const void* wrapper);

/// The images of the fat binary at the start of `bytes`.
std::vector<Image> images_of(std::string_view bytes);

/// What ptxas allotted to a kernel.
struct KernelResources {
  uint32_t registers = 0;     // per thread
  uint32_t static_shared = 0; // bytes, without the reserved kilobyte
  uint32_t stack = 0;         // bytes of local memory per thread
  uint32_t barriers = 0;      // named ones per block: the highest number and one
};

/// Resources by mangled kernel name, from a cubin (.nv.info, .nv.info.* and .nv.shared.*).
std::map<std::string, KernelResources> kernel_resources(std::string_view cubin);

}  // namespace vsm::fatbin
