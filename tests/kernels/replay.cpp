// SPDX-License-Identifier: Apache-2.0
//
// Calls a function of a compiled module as TVM-FFI would, with neither Python nor torch: for a processor that is emulated.
//
//   replay LIBRARY MODULE                      load them and say so
//   replay LIBRARY MODULE CALL OUTPUT          also make the call in the file CALL on the virtual GPU; the bytes of its
//                                              first argument go to OUTPUT, the launches as JSON to stdout
//
// LIBRARY is libtvm_ffi.so. CALL is what check_wheels.py writes: the function's name and its arguments.
#include <control.h>  // of the emulator
#include <dlfcn.h>
#include <tvm/ffi/c_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace {

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "replay: %s\n", text.c_str());
  std::exit(1);
}

void* open_library(const char* path) {
  void* library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) fail(dlerror());
  return library;
}

template <typename Function>
Function* find(void* library, const std::string& name) {
  void* symbol = dlsym(library, name.c_str());
  if (symbol == nullptr) fail("no " + name);
  return reinterpret_cast<Function*>(symbol);
}

struct Tensor {
  DLTensor view = {};
  std::vector<int64_t> shape;
  std::vector<uint64_t> words;  // of 8 bytes, for their alignment
  uint64_t bytes = 0;
};

class File {
 public:
  explicit File(const char* path) : stream_(path, std::ios::binary) {
    if (!stream_) fail(std::string("cannot read ") + path);
  }
  template <typename Value>
  Value read() {
    Value value = {};
    read(&value, sizeof(value));
    return value;
  }
  void read(void* into, size_t bytes) {
    if (!stream_.read(static_cast<char*>(into), static_cast<std::streamsize>(bytes))) fail("the call ends early");
  }

 private:
  std::ifstream stream_;
};

void read_tensor(File& file, Tensor& tensor) {
  tensor.view.dtype.code = file.read<uint8_t>();
  tensor.view.dtype.bits = file.read<uint8_t>();
  tensor.view.dtype.lanes = 1;
  tensor.view.device = {kDLCPU, 0};
  tensor.shape.resize(file.read<uint32_t>());
  for (int64_t& size : tensor.shape) size = file.read<int64_t>();
  tensor.view.ndim = static_cast<int>(tensor.shape.size());
  tensor.view.shape = tensor.shape.data();
  tensor.bytes = file.read<uint64_t>();
  // What kernels move in bulk must start at a multiple of 16 bytes; tensors of torch do at one of 64.
  tensor.words.resize(tensor.bytes / 8 + 9);
  const auto start = (reinterpret_cast<uintptr_t>(tensor.words.data()) + 63) / 64 * 64;
  tensor.view.data = reinterpret_cast<void*>(start);
  file.read(tensor.view.data, tensor.bytes);
}

// Strides of a dense tensor, which the bindings may ask for.
std::vector<int64_t> dense_strides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

void replay(void* runtime, void* module, const char* call, const char* output) {
  const auto configure = find<decltype(vsm_runtime_configure)>(runtime, "vsm_runtime_configure");
  const auto allow = find<decltype(vsm_runtime_register)>(runtime, "vsm_runtime_register");
  const uint8_t exact[6] = {};  // sums of MMAs
  File file(call);
  std::string name(file.read<uint32_t>(), '\0');
  file.read(name.data(), name.size());
  const auto watch = file.read<uint32_t>();
  if (configure("sm_121a", 0, watch, 0, 1, 1, exact) != 0) fail("there is no sm_121a");

  const auto count = file.read<uint32_t>();
  std::vector<Tensor> tensors(count);
  std::vector<std::vector<int64_t>> strides(count);
  std::vector<TVMFFIAny> arguments(count);
  for (uint32_t i = 0; i < count; ++i) {
    arguments[i].type_index = file.read<int32_t>();
    if (arguments[i].type_index == kTVMFFIDLTensorPtr) {
      read_tensor(file, tensors[i]);
      strides[i] = dense_strides(tensors[i].shape);
      tensors[i].view.strides = strides[i].data();
      arguments[i].v_ptr = &tensors[i].view;
      allow(reinterpret_cast<uintptr_t>(tensors[i].view.data), tensors[i].bytes, 0);
    } else {
      arguments[i].v_int64 = file.read<int64_t>();
    }
  }
  const auto function = find<int(void*, const TVMFFIAny*, int32_t, TVMFFIAny*)>(module, "__tvm_ffi_" + name);
  TVMFFIAny result = {};
  const int status = function(nullptr, arguments.data(), static_cast<int32_t>(count), &result);
  uint64_t dropped = 0;
  std::puts(find<decltype(vsm_runtime_take_launches)>(runtime, "vsm_runtime_take_launches")(&dropped));
  if (status != 0) fail(name + " raised an error");
  std::ofstream(output, std::ios::binary)
      .write(static_cast<const char*>(tensors[0].view.data), static_cast<std::streamsize>(tensors[0].bytes));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3 && argc != 5) fail("usage: replay LIBRARY MODULE [CALL OUTPUT]");
  open_library(argv[1]);
  void* module = open_library(argv[2]);
  std::printf("loaded %s\n", argv[2]);
  if (argc == 5) replay(open_library("libcudart.so.13"), module, argv[3], argv[4]);
  return 0;
}
