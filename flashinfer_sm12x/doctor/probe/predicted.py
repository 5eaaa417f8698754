# SPDX-License-Identifier: Apache-2.0
"""Predicted ranges for a GB10, which the probe prints beside its measurements.

``benchmarks/perfmodel`` predicts them; ``tests/doctor`` checks that these numbers are its own.
"""

DRAM_GB_PER_SECOND = (218.0, 250.0)

MMA_FLOPS_PER_CLOCK = {
    "bf16": (862.0, 1024.0),
    "f16": (862.0, 1024.0),
    "mxf8f6f4": (2048.0, 2048.0),
    "mxf4": (4096.0, 4096.0),
}
"""FLOP per clock of one SM, slow and fast, by the kind of MMA."""

LAYER_US = {1: (226.7, 273.9), 4: (818.2, 952.3), 64: (5866.9, 6742.0), 2048: (7972.5, 9154.3)}
"""Microseconds of the layer in ``layer``, by the number of tokens, from block-scaled MMAs."""
