// SPDX-License-Identifier: Apache-2.0
// Runs upstream's MXFP8 and MXFP4 quantizers through their own launchers (compiled beside this, from the wheel):
//   quantize mxfp8|mxfp4 bf16|half rows columns linear|128x4|8x4 input output
// `input` holds rows x columns values of two bytes; `output` gets the packed values, then the scales.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "tensorrt_llm/kernels/quantization.h"

namespace {

using tensorrt_llm::QuantizationSFLayout;

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(2);
}

template <class T>
T* device_bytes(size_t bytes) {
  void* p = nullptr;
  check(cudaMalloc(&p, bytes));
  return static_cast<T*>(p);
}

template <class T>
void quantize(bool to_fp8, int rows, int columns, QuantizationSFLayout layout, const T* input, int64_t* values,
              int32_t* scales) {
  int processors = 0;
  check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, 0));
  using namespace tensorrt_llm::kernels;
  if (to_fp8) {
    invokeMxFP8Quantization<T>(1, rows, columns, columns, input, values, scales, layout, processors, true, nullptr);
  } else {
    invokeFP4Quantization<T, 32>(1, rows, columns, input, nullptr, values, scales, true, layout, processors, true,
                                 false, false, NVFP4RecipeSpec{}, nullptr);
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 8) return 1;
  const bool to_fp8 = std::string(arguments[1]) == "mxfp8", bf16 = std::string(arguments[2]) == "bf16";
  const int rows = std::atoi(arguments[3]), columns = std::atoi(arguments[4]);
  const std::string name = arguments[5];
  const QuantizationSFLayout layout = name == "linear"  ? QuantizationSFLayout::LINEAR
                                      : name == "128x4" ? QuantizationSFLayout::SWIZZLED_128x4
                                                        : QuantizationSFLayout::SWIZZLED_8x4;
  std::ifstream file(arguments[6], std::ios::binary);
  const std::vector<char> input((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t value_bytes = size_t(rows) * columns / (to_fp8 ? 1 : 2);
  const size_t scale_bytes =
      layout == QuantizationSFLayout::LINEAR
          ? tensorrt_llm::computeLinearLayoutSFSize(rows, columns / 32)
          : tensorrt_llm::computeSwizzledLayoutSFSize(rows, columns / 32, name == "128x4" ? 128 : 8);
  char* source = device_bytes<char>(input.size());
  char *values = device_bytes<char>(value_bytes), *scales = device_bytes<char>(scale_bytes);
  check(cudaMemcpy(source, input.data(), input.size(), cudaMemcpyHostToDevice));
  auto* value_words = reinterpret_cast<int64_t*>(values);
  auto* scale_words = reinterpret_cast<int32_t*>(scales);
  if (bf16) {
    quantize(to_fp8, rows, columns, layout, reinterpret_cast<__nv_bfloat16*>(source), value_words, scale_words);
  } else {
    quantize(to_fp8, rows, columns, layout, reinterpret_cast<half*>(source), value_words, scale_words);
  }
  check(cudaGetLastError());
  check(cudaDeviceSynchronize());
  std::vector<char> output(value_bytes + scale_bytes);
  check(cudaMemcpy(output.data(), values, value_bytes, cudaMemcpyDeviceToHost));
  check(cudaMemcpy(output.data() + value_bytes, scales, scale_bytes, cudaMemcpyDeviceToHost));
  std::ofstream(arguments[7], std::ios::binary).write(output.data(), std::streamsize(output.size()));
  return 0;
}
