# SPDX-License-Identifier: Apache-2.0
"""Specs of the fused MoE modules.

Adds to upstream: ``fused_moe_120`` is the lean MXFP4 module of the SM12x family. Upstream's own, which serves all other
dtypes and modes on these GPUs, is ``fused_moe_120_upstream``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

from flashinfer_sm12x.build.jobs import GIB

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


UPSTREAM_JOB_MEMORY = 6 * GIB
"""Bytes that a compiler of upstream's module may need: 5.5 GB have been measured on SM120."""


def gen_cutlass_fused_moe_sm120_module(use_fast_build: bool = False) -> Any:
    """The spec of ``fused_moe_120``: MXFP4 weights with MXFP8 or bf16 activations on compute capability 12.x.

    Args:
        use_fast_build: Accepted for upstream's signature. It leaves out kernels of upstream's module; this one has none
            to leave out.

    Raises:
        RuntimeError: no architecture of the family is to be compiled for; the message says what to set.
    """
    from .sm12x.modules import gen_fused_moe_module

    return gen_fused_moe_module()


def gen_cutlass_fused_moe_sm120_nvfp4_module() -> Any:
    """The spec of ``fused_moe_120_nvfp4``: NVFP4 weights with bf16 activations on compute capability 12.x.

    Raises:
        RuntimeError: as :func:`gen_cutlass_fused_moe_sm120_module`.
    """
    from .sm12x.modules import gen_fused_moe_module

    return gen_fused_moe_module("nvfp4")


def gen_cutlass_fused_moe_sm120_instance_module(tactic: int) -> Any:
    """The spec of the module with one instance that is part of neither ``fused_moe_120`` nor ``fused_moe_120_nvfp4``.

    Args:
        tactic: The instance's place in ``INSTANCES`` (``flashinfer.sm12x.instances``).

    Raises:
        ValueError: there is no such instance, or it is part of one of those modules.
        RuntimeError: as :func:`gen_cutlass_fused_moe_sm120_module`.
    """
    from ..sm12x.instances import instance
    from .sm12x.modules import gen_fused_moe_instance_module

    return gen_fused_moe_instance_module(instance(tactic))


def gen_cutlass_fused_moe_sm120_upstream_module(use_fast_build: bool = False) -> Any:
    """The spec of ``fused_moe_120_upstream``: upstream's module for compute capability 12.x, all dtypes.

    Its sources and flags are upstream's; it is built by the engine of the SM12x modules, so that a build of most of an
    hour is not begun again because of file times, and is not killed for memory.

    Args:
        use_fast_build: Upstream's option.

    Raises:
        RuntimeError: there is no architecture 12.x to compile for.
    """
    from .sm12x.spec import JitSpecSm12x

    spec = _upstream.gen_cutlass_fused_moe_sm120_module(use_fast_build)
    targets = _upstream.current_compilation_context.TARGET_CUDA_ARCHS
    architectures = sorted(target for target in targets if target[0] == 12)
    return JitSpecSm12x.adopt(spec, architectures, UPSTREAM_JOB_MEMORY)


def gen_cutlass_fused_moe_module(
    nvcc_flags: list[str], device_arch: str, use_fast_build: bool = False, module_name: str | None = None
) -> Any:
    """Upstream's generator of fused MoE modules; its one for ``"120"`` is named ``fused_moe_120_upstream``."""
    if device_arch == "120" and module_name is None:
        module_name = "fused_moe_120_upstream"
    return _upstream.gen_cutlass_fused_moe_module(nvcc_flags, device_arch, use_fast_build, module_name)
