# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can compile kernels for its GPU: the answer of the toolchain that will be asked to."""

from __future__ import annotations

import os

from ..build import toolchain
from . import fallback


def why_none() -> str:
    """Why nothing can be compiled, and what to install; an empty text if it can. CUDA stays untouched.

    The rules are those of a build: a compiler that agrees with its headers, of a release that knows the GPU, and ninja.
    """
    from vllm.platforms import current_platform

    try:
        toolkit = toolchain.discover()
        capability = None
        with fallback.leaving("the check of the compiler's architectures is"):
            capability = current_platform.get_device_capability()
        if not os.environ.get("FLASHINFER_CUDA_ARCH_LIST") and capability is not None:  # the list's is discover's
            toolchain.require_architectures(toolkit, [(capability.major, f"{capability.minor}a")])
        toolchain.find_ninja()
    except toolchain.ToolchainError as error:
        return str(error)
    return ""
