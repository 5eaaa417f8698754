# SPDX-License-Identifier: Apache-2.0
"""Which backend serves a device, and the compiled modules behind it.

Environment
-----------
``FLASHINFER_SM12X_MOE``
    ``0``: SM12x goes to upstream's module (``fused_moe_120_upstream``), for comparison.  ``1``: compute capability 9.0
    runs this kernel family too.  Unset: SM12x runs it, other devices are upstream's.
``FLASHINFER_SM12X_CHECK``
    ``1``: expert ids and ``m_indptr`` are read back and checked before each launch.  This synchronizes with the device,
    and is skipped while a CUDA graph is captured.
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import Any

import torch

from .. import sm12x_variables
from ..jit.sm12x.instances import INSTANCES, SM12X
from ..sm12x_probes import environment
from ..utils import get_compute_capability

OPT_IN_CAPABILITIES = ((9, 0),)


# Read on every call, so that one process can compare both settings.
_environment, _encode = environment()
_MOE = _encode("FLASHINFER_SM12X_MOE")
_CHECK = _encode("FLASHINFER_SM12X_CHECK")
_TRACE_DUMP = _encode("FLASHINFER_TRACE_DUMP")


def _switch(name: Any) -> str:
    raw = _environment.get(name)
    if raw is None:
        return ""
    value = os.fsdecode(raw)
    sm12x_variables.parse(os.fsdecode(name), value)
    return value


def switches() -> tuple[Any, Any]:
    """The raw values of ``FLASHINFER_SM12X_MOE`` and ``FLASHINFER_SM12X_CHECK``: equal ones mean the same."""
    return _environment.get(_MOE), _environment.get(_CHECK)


def dumps_traces() -> bool:
    """Whether ``FLASHINFER_TRACE_DUMP`` asks for a trace of each call, as upstream reads it."""
    raw = _environment.get(_TRACE_DUMP)
    return raw is not None and os.fsdecode(raw) not in ("", "0")


def checks_values() -> bool:
    """Whether ``FLASHINFER_SM12X_CHECK`` asks for checks that read tensors back."""
    return _switch(_CHECK) == "1"


@functools.lru_cache(maxsize=64)
def _serves(capability: tuple[int, int], switch: str) -> bool:
    if capability[0] == 12:
        return switch != "0"
    if switch == "1" and capability not in OPT_IN_CAPABILITIES:
        warnings.warn(
            f"FLASHINFER_SM12X_MOE=1, but the kernel family has no kernels for compute capability "
            f"{capability[0]}.{capability[1]}; upstream's are used there",
            stacklevel=2,
        )
    return switch == "1" and capability in OPT_IN_CAPABILITIES


@functools.lru_cache(maxsize=64)
def _capability(index: int) -> tuple[int, int]:
    major, minor = get_compute_capability(torch.device("cuda", index))
    return int(major), int(minor)


def serves_cuda(index: int) -> bool:
    """Whether CUDA device ``index`` runs the MXFP4 modes on this kernel family."""
    return _serves(_capability(index), _switch(_MOE))


def serves(device: torch.device) -> bool:
    """Whether this fork computes the MXFP4 modes on ``device``; upstream does otherwise."""
    kind = device.type
    return serves_cuda(device.index) if kind == "cuda" else kind == "cpu"


def has_block_scaled_mma(index: int) -> bool:
    """Whether CUDA device ``index`` multiplies block scales in its MMA: the planner's choice of tiles depends on it."""
    return _capability(index)[0] == 12


def is_block_scaled(device: torch.device) -> bool:
    """:func:`has_block_scaled_mma` of a device of any kind; a virtual device runs whatever it is given."""
    return device.type != "cpu" and has_block_scaled_mma(device.index)


@functools.lru_cache(maxsize=64)
def gpu_name(device: torch.device) -> str:
    """What ``device`` is called: tactics that were timed on one GPU are those of others of its name, and of no others."""
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else device.type


@functools.cache
def one_device() -> bool:
    """Whether the process sees no more than one CUDA device: it is then the current one."""
    return torch.cuda.device_count() <= 1


@functools.cache
def moe_module() -> Any:
    """The loaded ``fused_moe_120``; built on first use."""
    from ..jit.fused_moe import gen_cutlass_fused_moe_sm120_module

    return gen_cutlass_fused_moe_sm120_module().build_and_load()


@functools.cache
def ensure_instance(index: int) -> None:
    """Make tactic ``index`` runnable: rows that SM12x's table has not are built and registered when first asked for."""
    if INSTANCES[index] in SM12X:
        return
    from ..jit.fused_moe import gen_cutlass_fused_moe_sm120_instance_module

    module = gen_cutlass_fused_moe_sm120_instance_module(index).build_and_load()
    moe_module().sm12x_register_instance(index, module.sm12x_instance_address())


@functools.cache
def group_gemm_module() -> Any:
    """The loaded ``gemm_mxfp4_sm12x``; built on first use."""
    from ..jit.sm12x.modules import gen_group_gemm_module

    return gen_group_gemm_module().build_and_load()


@functools.cache
def dense_module() -> Any:
    """The loaded ``dense_mx_sm12x``; built on first use."""
    from ..jit.sm12x.modules import gen_dense_module

    return gen_dense_module().build_and_load()


@functools.cache
def router_module() -> Any:
    """The loaded ``router_sm12x``; built on first use."""
    from ..jit.sm12x.modules import gen_router_module

    return gen_router_module().build_and_load()


@functools.cache
def decode_module() -> Any:
    """The loaded ``decode_sm12x``; built on first use."""
    from ..jit.sm12x.modules import gen_decode_module

    return gen_decode_module().build_and_load()
