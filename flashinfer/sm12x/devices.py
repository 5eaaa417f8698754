# SPDX-License-Identifier: Apache-2.0
"""The GPU of a call, and whether this fork or upstream computes there.

Environment
-----------
``FLASHINFER_SM12X_MOE``
    ``0``: SM12x goes to upstream's module (``fused_moe_120_upstream``), for comparison.  ``1``: compute capability 9.0
    runs this kernel family too.  Unset: SM12x runs it, other devices are upstream's.  Read on every call of a function,
    or when that is traced, and by a layer object when its weights are checked.
"""

from __future__ import annotations

import functools
import os
import warnings

import torch

from flashinfer_sm12x import variables

from ..utils import get_compute_capability
from .device_class import DeviceClass, class_of


@functools.lru_cache(maxsize=64)
def _serves(capability: tuple[int, int], switch: bool | None) -> bool:
    found = class_of(capability)
    if found is not None:
        return bool(switch) if found.opt_in else switch is not False
    if switch:
        warnings.warn(
            f"FLASHINFER_SM12X_MOE=1, but the kernel family has no kernels for compute capability "
            f"{capability[0]}.{capability[1]}; upstream's are used there",
            stacklevel=2,
        )
    return False


@functools.lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    major, minor = get_compute_capability(torch.device("cuda", index))
    return int(major), int(minor)


def serves_cuda(index: int) -> bool:
    """Whether this fork's kernels run the MXFP4 modes on CUDA device ``index``."""
    # Dynamo traces os.environ, and not C's getenv.
    environ = os.environ if torch.compiler.is_compiling() else None
    return _serves(_capability(index), variables.read("FLASHINFER_SM12X_MOE", environ))


def serves(device: torch.device) -> bool:
    """Whether this fork computes the MXFP4 modes on ``device``; if not, upstream does."""
    kind = device.type
    return serves_cuda(device.index) if kind == "cuda" else kind == "cpu"


def require_served(operator: str, device: torch.device) -> None:
    """Raise ``NotImplementedError`` where this fork has no kernels for ``device``."""
    if not serves(device):
        raise NotImplementedError(
            f"{operator} has no kernels for {gpu_name(device)}: they are for compute capability 12.x (unless "
            "FLASHINFER_SM12X_MOE=0) and 9.0 (with FLASHINFER_SM12X_MOE=1)"
        )


def device_class(index: int) -> DeviceClass | None:
    """The class of CUDA device ``index``; None where the kernel family has no kernels for it."""
    return class_of(_capability(index))


def require_device_class(index: int) -> DeviceClass:
    """The class of CUDA device ``index``; ``NotImplementedError`` where the kernel family has no kernels for it."""
    found = device_class(index)
    if found is None:
        major, minor = _capability(index)
        raise NotImplementedError(
            f"compute capability is {major}.{minor}; the SM12x kernels are for 12.x, and for 9.0 with "
            "FLASHINFER_SM12X_MOE=1"
        )
    return found


@functools.lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str:
    """The name of ``device``: tactics that were timed on one GPU hold for others of its name, and for no others."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type
