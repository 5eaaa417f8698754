// SPDX-License-Identifier: Apache-2.0
// Handlers of common floating point forms that compute a whole warp at a time (fast_float.cpp).
#pragma once

#include <cstdint>

#include "ops/lanes.h"

namespace vsm::ops {

enum class FastOp { kAdd, kSub, kMul, kFma };

/// For forms that round to nearest and have no modifier; null for types that have no such handler.
Handler fast_float(Type type, FastOp op);

/// One lane's result formed exactly and rounded once (float.cpp); `form` is Inst::form.
uint32_t exact_bf16(uint32_t form, bool packed, uint32_t a, uint32_t b, uint32_t c);

}  // namespace vsm::ops
