// SPDX-License-Identifier: Apache-2.0
// A file of arrays, one behind the other, on their way to the device.
#pragma once

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <vector>

#include "runtime_calls.h"

// Takes arrays off the front of the input.
class Input {
 public:
  explicit Input(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  }
  template <class T>
  T* host(size_t count) {
    const auto at = reinterpret_cast<T*>(bytes_.data() + position_);
    position_ += count * sizeof(T);
    if (position_ > bytes_.size()) std::exit(3);
    return at;
  }
  template <class T>
  T* device(size_t count) {
    const auto address = static_cast<T*>(allocate(count * sizeof(T)));
    check(cudaMemcpy(address, host<T>(count), count * sizeof(T), cudaMemcpyHostToDevice));
    return address;
  }
  template <class T>
  static T* to_device(const T* values, size_t count) {
    const auto address = static_cast<T*>(allocate(count * sizeof(T)));
    check(cudaMemcpy(address, values, count * sizeof(T), cudaMemcpyHostToDevice));
    return address;
  }

 private:
  std::vector<char> bytes_;
  size_t position_ = 0;
};
