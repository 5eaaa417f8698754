# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention with sinks on machines that cannot reach NVIDIA's server of cubins.

vLLM takes FLASHINFER for attention with sinks if flashinfer-cubin is installed or that server answers within 5 s;
otherwise it takes TRITON_ATTN and logs nothing. The check is meant for the kernels of data-centre Blackwell. On SM12x
and on Hopper decode is XQA and prefill FA2 or (Hopper) FA3, which FlashInfer compiles from sources in its wheel: they
need a compiler and no cubin.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from typing import Any

from . import api_checks, compiler, devices, fallback, replacements, settings


def _vllm_flashinfer() -> Any:
    """vLLM's module of checks of what FlashInfer can do. Imported here, because the log's table must work without it,
    too."""
    from vllm.utils import flashinfer

    return flashinfer


def why_not_compiled() -> str:
    """The reason why XQA cannot be compiled here, and a fix; empty if it can. vLLM and FlashInfer each look for a
    compiler in places of their own."""
    if reason := compiler.why_none():
        return reason
    if _vllm_flashinfer()._flashinfer_nvcc_path() is None:
        return "vLLM finds no nvcc: put it into CUDA_HOME"
    return "" if shutil.which("ninja") else "vLLM finds no ninja: put it on PATH"


def advice() -> str:
    """Advice to a user who wants FlashInfer's attention chosen."""
    if api_checks.why_not("attention"):
        return ""
    reason = why_not_compiled()
    if not reason:
        return 'FLASHINFER (XQA decode): no --attention-backend, and "attention": "flashinfer"'
    return f"FLASHINFER (XQA decode): {reason}; or pip install flashinfer-cubin"


def why(backend: str) -> str:
    """Why vLLM took ``backend``, as far as this module had a say in it."""
    if "FLASHINFER" in backend:
        prefill = "FA2" if devices.block_scaled() else "FA3"  # as flashinfer.utils.determine_attention_backend has it
        return f"XQA decode, {prefill} prefill with sinks; compiled here, no cubin needed"
    return "vLLM's choice" if api_checks.why_not("attention") or not why_not_compiled() else "no compiler for XQA"


def answered_here(asked: Callable[[], bool]) -> Callable[[], bool]:
    """vLLM's question, which is asked only if XQA cannot be compiled here or the user chose otherwise."""

    @functools.cache
    def has_nvidia_artifactory() -> bool:
        from vllm.config import get_current_vllm_config_or_none

        with fallback.leaving(api_checks.MODULES["attention"][1]):
            config = get_current_vllm_config_or_none()
            chosen = settings.resolve(None if config is None else config.additional_config)
            if chosen.attention == "flashinfer" and not why_not_compiled():
                return True
        return bool(asked())

    return has_nvidia_artifactory


def install() -> None:
    """Answer vLLM's question with yes where kernels are compiled here; it is asked again where they are not."""
    with replacements.installing("attention") as (question,):
        question.replace(answered_here(question.original()))
