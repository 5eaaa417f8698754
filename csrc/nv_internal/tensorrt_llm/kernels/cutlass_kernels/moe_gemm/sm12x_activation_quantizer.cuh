// SPDX-License-Identifier: Apache-2.0
//
// The quantizer of activations, at the path where the MoE backend looks for it.
#pragma once

#include "flashinfer/sm12x/common/quantize.cuh"
