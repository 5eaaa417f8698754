// SPDX-License-Identifier: Apache-2.0
// The instruction families. Opcodes that several types share (add, mul, ...) are told apart in arithmetic.cpp.
#pragma once

#include "ptx/decode.h"

namespace vsm::ops {

void add_integer(ptx::FormTable&);
void add_arithmetic(ptx::FormTable&);
void add_float(ptx::FormTable&);
void add_compare(ptx::FormTable&);
void add_move(ptx::FormTable&);
void add_convert(ptx::FormTable&);
void add_control(ptx::FormTable&);
void add_warp(ptx::FormTable&);
void add_memory(ptx::FormTable&);
void add_atomic(ptx::FormTable&);
void add_barrier(ptx::FormTable&);
void add_mbarrier(ptx::FormTable&);
void add_async(ptx::FormTable&);
void add_launch_control(ptx::FormTable&);
void add_matrix(ptx::FormTable&);

// integer.cpp
bool integer_add_sub(ptx::Form&);
bool integer_mul(ptx::Form&);
bool integer_div_rem(ptx::Form&);
bool integer_unary(ptx::Form&);
bool integer_min_max(ptx::Form&);
// warp_ops.cpp
void warp_sync(ptx::Form&);  // bar.warp.sync
// float.cpp
void float_binary(ptx::Form&);  // add sub mul
void float_fma(ptx::Form&);
void float_div(ptx::Form&);
void float_unary(ptx::Form&);  // abs neg
void float_min_max(ptx::Form&);

}  // namespace vsm::ops
