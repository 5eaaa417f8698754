// SPDX-License-Identifier: Apache-2.0
#include "ops/families.h"

namespace vsm::ptx {

const FormTable& form_table() {
  static const FormTable table = [] {
    FormTable t;
    ops::add_arithmetic(t);
    ops::add_integer(t);
    ops::add_float(t);
    ops::add_compare(t);
    ops::add_move(t);
    ops::add_convert(t);
    ops::add_control(t);
    ops::add_warp(t);
    ops::add_memory(t);
    ops::add_atomic(t);
    ops::add_barrier(t);
    ops::add_mbarrier(t);
    ops::add_async(t);
    ops::add_launch_control(t);
    ops::add_matrix(t);
    return t;
  }();
  return table;
}

}  // namespace vsm::ptx
