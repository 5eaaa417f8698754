// SPDX-License-Identifier: Apache-2.0
//
// A tactic outside the default set is a library of its own: one rendered source and this face. The main module runs it.
#include <cstdint>

#include "tvm_ffi_utils.h"

extern "C" const void* sm12x_this_instance();

static int64_t instance_address() { return reinterpret_cast<int64_t>(sm12x_this_instance()); }

TVM_FFI_DLL_EXPORT_TYPED_FUNC(sm12x_instance_address, instance_address);
