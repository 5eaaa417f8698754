// SPDX-License-Identifier: Apache-2.0
//
// What an SM120/SM121 is, at the path where the MoE backend looks for it.
#pragma once

#include "flashinfer/sm12x/common/arch.h"
