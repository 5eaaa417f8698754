# SPDX-License-Identifier: Apache-2.0
"""A platform of vLLM's that is a CUDA GPU by name and keeps its tensors on the CPU.

Only these are stubbed: the GPU's capability, name and memory; vLLM's compiled modules, which need CUDA's libraries
(empty modules replace them, so that layers run their PyTorch versions, and the router's top-k is PyTorch's); and the
attention kernel (``reference_attention.py``, if a test runs a whole model).
"""

from __future__ import annotations

import os
import sys
import types

import virtual_gpu_ops

VARIABLE = "VIRTUAL_GPU_CAPABILITY"  # "12.1"


def platform() -> str | None:
    """The entry point: the class below where the variable is set."""
    if not os.environ.get(VARIABLE):
        return None
    for name in ("_C_stable_libtorch", "_moe_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C"):
        sys.modules.setdefault(f"vllm.{name}", types.ModuleType(f"vllm.{name}"))
    if not virtual_gpu_ops.defined():
        virtual_gpu_ops.define()
    return "virtual_gpu_platform.VirtualGpu"
