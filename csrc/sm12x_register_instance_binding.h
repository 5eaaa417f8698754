// SPDX-License-Identifier: Apache-2.0
//
// An instance that is a library of its own, handed to the MoE's library by its address. Included by that binding alone.
#pragma once

#include "flashinfer/sm12x/host/instance.h"
#include "tvm_ffi_utils.h"

namespace flashinfer::sm12x {

inline void register_instance_address(int64_t index, int64_t address) {
  const auto* instance = reinterpret_cast<const Instance*>(address);
  TVM_FFI_CHECK(instance != nullptr && instance->index == index, ValueError)
      << "the module handed over for tactic " << index << " holds another instance";
  register_instance(instance);
}

}  // namespace flashinfer::sm12x

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_register_instance, flashinfer::sm12x::register_instance_address);
