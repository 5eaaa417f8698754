# SPDX-License-Identifier: Apache-2.0
"""Predicted ranges for a GB10, which the probe prints beside its measurements.

``benchmarks/perfmodel`` predicts them; ``tests/doctor`` checks that these numbers are its own.
"""

DRAM_GB_PER_SECOND = (220.0, 236.0)

MMA_FLOPS_PER_CLOCK = {
    "bf16": (512.0, 1024.0),
    "f16": (512.0, 1024.0),
    "mxf8f6f4": (2048.0, 2048.0),
    "mxf4": (4096.0, 4096.0),
}
"""FLOP per clock of one SM, slow and fast, by the kind of MMA."""

LAYER_US = {1: (239.3, 271.7), 4: (865.9, 943.9), 64: (6214.1, 6681.0), 2048: (8443.7, 9071.5)}
"""Microseconds of the layer in ``layer``, by the number of tokens, from block-scaled MMAs."""
