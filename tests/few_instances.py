# SPDX-License-Identifier: Apache-2.0
"""Fewer kernels in the modules that ``make test`` and ``make demo`` compile: nvcc takes minutes for all of them.

A pytest plugin (``-p few_instances``), and :func:`install` for the demo. The tables of instances stay as they are, and
planner and tests choose among all of them. An instance that :data:`ROWS` leaves out of a MoE module is a module of its
own; a dense layer or a grouped GEMM that asks for one is refused by the launcher.
"""

from __future__ import annotations

from flashinfer.jit.sm12x import modules
from flashinfer.sm12x import instances

ROWS = (
    # Experts: both persistent kernels of a decode step, and the tiled GEMM with block-scaled MMAs.
    *("mxfp8_m8_k128", "stream_mxfp8_as_bf16_m8", "stream_bf16_m8", "nvfp4_stream_bf16_m8"),
    # Dense layers: the persistent kernel of a decode step and a tiled GEMM with block-scaled MMAs.
    *("dense_mxfp4_m8_w2", "dense_mxfp4_m64_gemm_mxfp8"),
)


def install() -> None:
    """Leave all other instances out of the modules that this process generates from now on."""
    for weights, rows in instances.MOE_MODULES.items():
        instances.MOE_MODULES[weights] = tuple(row for row in rows if row.name in ROWS)
    modules.DENSE_INSTANCES = tuple(row for row in modules.DENSE_INSTANCES if row.name in ROWS)
    modules.GEMM_INSTANCES = tuple(row for row in modules.GEMM_INSTANCES if row.name in ROWS)


def pytest_configure() -> None:
    install()
