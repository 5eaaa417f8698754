// SPDX-License-Identifier: Apache-2.0
//
// The second half of the conformance program: cudaGetDriverEntryPoint* and the rules of cuTensorMapEncodeTiled
// (CUDA Driver API, "Tensor Map Object Management"), one line for each rule broken and each limit just met.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>

namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                            const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// A valid description: each case changes one thing of it.
struct Description {
  CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint32_t rank = 3;
  std::uintptr_t address = 0;
  cuuint64_t dims[6] = {512, 64, 8, 4, 2, 2};
  cuuint64_t strides[5] = {1024, 65536, 524288, 2097152, 4194304};
  cuuint32_t box[6] = {64, 16, 2, 1, 1, 1};
  cuuint32_t steps[6] = {1, 1, 1, 1, 1, 1};
  CUtensorMapInterleave interleave = CU_TENSOR_MAP_INTERLEAVE_NONE;
  CUtensorMapSwizzle swizzle = CU_TENSOR_MAP_SWIZZLE_128B;
  CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;
  CUtensorMapFloatOOBfill fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
};

Encode encode = nullptr;
std::uintptr_t base = 0;

template <typename Change>
void check(const char* label, Change change) {
  alignas(64) CUtensorMap map;
  Description d;
  d.address = base;
  change(d);
  CUresult result = encode(&map, d.type, d.rank, reinterpret_cast<void*>(d.address), d.dims, d.strides, d.box, d.steps,
                           d.interleave, d.swizzle, d.promotion, d.fill);
  std::printf("tensor map, %s: CUresult %d\n", label, static_cast<int>(result));
}

void pointer_rules() {
  alignas(64) unsigned char storage[256];
  Description d;
  auto call = [&](CUtensorMap* map, void* address, const cuuint64_t* dims, const cuuint64_t* strides,
                  const cuuint32_t* box, const cuuint32_t* steps) {
    return static_cast<int>(
        encode(map, d.type, d.rank, address, dims, strides, box, steps, d.interleave, d.swizzle, d.promotion, d.fill));
  };
  auto map = reinterpret_cast<CUtensorMap*>(storage);
  auto address = reinterpret_cast<void*>(base);
  std::printf("tensor map, null map: CUresult %d\n", call(nullptr, address, d.dims, d.strides, d.box, d.steps));
  std::printf("tensor map, map at 32 bytes: CUresult %d\n",
              call(reinterpret_cast<CUtensorMap*>(storage + 32), address, d.dims, d.strides, d.box, d.steps));
  std::printf("tensor map, null address: CUresult %d\n", call(map, nullptr, d.dims, d.strides, d.box, d.steps));
  std::printf("tensor map, null dims: CUresult %d\n", call(map, address, nullptr, d.strides, d.box, d.steps));
  std::printf("tensor map, null strides: CUresult %d\n", call(map, address, d.dims, nullptr, d.box, d.steps));
  std::printf("tensor map, null box: CUresult %d\n", call(map, address, d.dims, d.strides, nullptr, d.steps));
  std::printf("tensor map, null steps: CUresult %d\n", call(map, address, d.dims, d.strides, d.box, nullptr));
}

void shape_rules() {
  check("valid", [](Description&) {});
  check("unknown type", [](Description& d) { d.type = static_cast<CUtensorMapDataType>(99); });
  check("rank 0", [](Description& d) { d.rank = 0; });
  check("rank 1", [](Description& d) { d.rank = 1; });
  check("rank 5", [](Description& d) { d.rank = 5; });
  check("rank 6", [](Description& d) { d.rank = 6; });
  check("address + 8", [](Description& d) { d.address += 8; });
  check("address + 16", [](Description& d) { d.address += 16; });
  check("dim 0 is zero", [](Description& d) { d.dims[0] = 0; });
  check("dim 2 is zero", [](Description& d) { d.dims[2] = 0; });
  check("dim 2 is 2^32", [](Description& d) { d.dims[2] = cuuint64_t{1} << 32; });
  check("dim 2 is 2^32 + 1", [](Description& d) { d.dims[2] = (cuuint64_t{1} << 32) + 1; });
  check("stride of 8", [](Description& d) { d.strides[0] = 1032; });
  check("stride of 16", [](Description& d) { d.strides[0] = 1040; });
  check("stride 2^40 - 16", [](Description& d) { d.strides[1] = (cuuint64_t{1} << 40) - 16; });
  check("stride 2^40", [](Description& d) { d.strides[1] = cuuint64_t{1} << 40; });
  check("stride zero", [](Description& d) { d.strides[0] = 0; });
  check("stride below the row", [](Description& d) { d.strides[0] = 512; });
  check("outer stride below the inner", [](Description& d) { d.strides[1] = 512; });
  check("box 0 is zero", [](Description& d) { d.box[0] = 0; });
  check("box 1 is zero", [](Description& d) { d.box[1] = 0; });
  check("box 1 is 256", [](Description& d) { d.box[1] = 256; });
  check("box 1 is 257", [](Description& d) { d.box[1] = 257; });
  check("box above the tensor", [](Description& d) { d.dims[1] = 4; });
  check("box row of 8 bytes", [](Description& d) { d.box[0] = 4; });
  check("box row of 24 bytes", [](Description& d) { d.box[0] = 12; });
  check("box row of 16 bytes", [](Description& d) { d.box[0] = 8; });
  check("box of 256 KiB", [](Description& d) { d.box[0] = 64, d.box[1] = 256, d.box[2] = 8; });
  // An SM's shared memory is a whole number of KiB, and 8 rows of 128 bytes are one.
  int most = 0;
  cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerMultiprocessor, 0);
  const auto rows = static_cast<cuuint32_t>(most / 1024);
  check("box of an SM's shared memory", [&](Description& d) { d.box[0] = 64, d.box[1] = rows, d.box[2] = 8; });
  check("box of 1 KiB more", [&](Description& d) { d.box[0] = 64, d.box[1] = rows + 1, d.box[2] = 8; });
  check("step 0 is zero", [](Description& d) { d.steps[0] = 0; });
  check("step 0 is 9", [](Description& d) { d.steps[0] = 9; });
  check("step 1 is zero", [](Description& d) { d.steps[1] = 0; });
  check("step 1 is 8", [](Description& d) { d.steps[1] = 8; });
  check("step 1 is 9", [](Description& d) { d.steps[1] = 9; });
}

void mode_rules() {
  auto swizzle = [](CUtensorMapSwizzle mode, cuuint32_t elements) {
    return [=](Description& d) { d.swizzle = mode, d.box[0] = elements; };
  };
  check("swizzle 32, row of 32", swizzle(CU_TENSOR_MAP_SWIZZLE_32B, 16));
  check("swizzle 32, row of 48", swizzle(CU_TENSOR_MAP_SWIZZLE_32B, 24));
  check("swizzle 64, row of 64", swizzle(CU_TENSOR_MAP_SWIZZLE_64B, 32));
  check("swizzle 64, row of 80", swizzle(CU_TENSOR_MAP_SWIZZLE_64B, 40));
  check("swizzle 128, row of 128", swizzle(CU_TENSOR_MAP_SWIZZLE_128B, 64));
  check("swizzle 128, row of 144", swizzle(CU_TENSOR_MAP_SWIZZLE_128B, 72));
  check("no swizzle, row of 512", swizzle(CU_TENSOR_MAP_SWIZZLE_NONE, 256));
  check("unknown swizzle", swizzle(static_cast<CUtensorMapSwizzle>(9), 64));
  check("unknown promotion", [](Description& d) { d.promotion = static_cast<CUtensorMapL2promotion>(9); });
  check("unknown interleave", [](Description& d) { d.interleave = static_cast<CUtensorMapInterleave>(9); });
  check("unknown fill", [](Description& d) { d.fill = static_cast<CUtensorMapFloatOOBfill>(9); });
  check("NaN fill of bf16", [](Description& d) { d.fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA; });
  check("NaN fill of uint8", [](Description& d) {
    d.type = CU_TENSOR_MAP_DATA_TYPE_UINT8;
    d.fill = CU_TENSOR_MAP_FLOAT_OOB_FILL_NAN_REQUEST_ZERO_FMA;
  });
  auto interleave = [](CUtensorMapInterleave layout, CUtensorMapSwizzle mode, cuuint32_t rank) {
    return [=](Description& d) { d.interleave = layout, d.swizzle = mode, d.rank = rank, d.box[0] = 8; };
  };
  check("interleave 16, rank 2", interleave(CU_TENSOR_MAP_INTERLEAVE_16B, CU_TENSOR_MAP_SWIZZLE_NONE, 2));
  check("interleave 16, rank 3", interleave(CU_TENSOR_MAP_INTERLEAVE_16B, CU_TENSOR_MAP_SWIZZLE_NONE, 3));
  check("interleave 32, no swizzle", interleave(CU_TENSOR_MAP_INTERLEAVE_32B, CU_TENSOR_MAP_SWIZZLE_NONE, 3));
  check("interleave 32, swizzle 32", interleave(CU_TENSOR_MAP_INTERLEAVE_32B, CU_TENSOR_MAP_SWIZZLE_32B, 3));
  check("interleave 32, address + 16", [](Description& d) {
    d.interleave = CU_TENSOR_MAP_INTERLEAVE_32B, d.swizzle = CU_TENSOR_MAP_SWIZZLE_32B, d.box[0] = 8, d.address += 16;
  });
  check("interleave 32, stride of 16", [](Description& d) {
    d.interleave = CU_TENSOR_MAP_INTERLEAVE_32B, d.swizzle = CU_TENSOR_MAP_SWIZZLE_32B, d.box[0] = 8,
    d.strides[0] = 1040;
  });
}

}  // namespace

void entry_point_cases() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  cudaError_t error = cudaGetDriverEntryPointByVersion("cuNoSuchFunction", &function, 12000, cudaEnableDefault, &found);
  std::printf("unknown entry point: %s %d\n", cudaGetErrorName(error), static_cast<int>(found));
  error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, nullptr);
  std::printf("entry point without a status: %s\n", cudaGetErrorName(error));
  error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 11000, cudaEnableDefault, &found);
  std::printf("entry point of an older version: %s %d\n", cudaGetErrorName(error), static_cast<int>(found));
  error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  std::printf("entry point: %s %d\n", cudaGetErrorName(error), static_cast<int>(found));
  cudaGetLastError();
  encode = reinterpret_cast<Encode>(function);
  void* memory = nullptr;
  cudaMalloc(&memory, 1 << 20);
  base = reinterpret_cast<std::uintptr_t>(memory);
  pointer_rules();
  shape_rules();
  mode_rules();
  cudaFree(memory);
}
