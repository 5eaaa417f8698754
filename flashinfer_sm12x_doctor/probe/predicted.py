# SPDX-License-Identifier: Apache-2.0
"""What a GB10 is predicted to do: ranges, which the probe tells beside what it measured.

``benchmarks/perfmodel`` predicts them, and ``tests/doctor`` holds these to what it gives.
"""

DRAM_GB_PER_SECOND = (220.0, 236.0)

MMA_FLOPS_PER_CLOCK = {
    "bf16": (512.0, 1024.0),
    "f16": (512.0, 1024.0),
    "mxf8f6f4": (2048.0, 2048.0),
    "mxf4": (4096.0, 4096.0),
}
"""By the kind of MMA, of one SM."""

LAYER_US = {1: (239.3, 271.7), 4: (865.9, 943.9), 64: (6214.1, 6681.0), 2048: (8443.7, 9071.5)}
"""Microseconds of the layer in ``layer``, by the number of tokens, from block-scaled MMAs."""
