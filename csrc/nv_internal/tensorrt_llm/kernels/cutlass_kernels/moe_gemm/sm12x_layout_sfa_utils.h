// SPDX-License-Identifier: Apache-2.0
//
// The layouts of block scales, at the path where the MoE backend looks for it.
#pragma once

#include "flashinfer/sm12x/common/layouts.h"
