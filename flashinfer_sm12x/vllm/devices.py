# SPDX-License-Identifier: Apache-2.0
"""Tells whether the fork serves this machine's GPU, without initializing CUDA and without importing flashinfer."""

from __future__ import annotations

from .. import variables


def served() -> bool:
    """SM12x, unless ``FLASHINFER_SM12X_MOE=0``; compute capability 9.0 with ``FLASHINFER_SM12X_MOE=1``, for tests on
    Hopper.

    It is the fork's own switch (``flashinfer.sm12x.devices``), so plugin and operator agree.

    Raises
    ------
    ValueError
        The variable has a value that it cannot have.
    """
    from vllm.platforms import current_platform

    switch = variables.read("FLASHINFER_SM12X_MOE")
    if not current_platform.is_cuda():
        return False
    if current_platform.is_device_capability_family(120):
        return switch is not False
    return bool(switch) and current_platform.is_device_capability(90)


def block_scaled() -> bool:
    """Whether the GPU is of the SM12x family itself."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_device_capability_family(120))
