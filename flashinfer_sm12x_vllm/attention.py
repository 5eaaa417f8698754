# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's attention with sinks on machines that cannot reach NVIDIA's server of cubins.

vLLM takes FLASHINFER for attention with sinks if flashinfer-cubin is installed or that server answers within 5 s; else
it takes TRITON_ATTN without a word. The question is meant for the kernels of data-centre Blackwell. On SM12x and on
Hopper decode is XQA, prefill FA2 or (Hopper) FA3, and FlashInfer compiles these from sources in its wheel: no cubin is
needed, a compiler is.
"""

from __future__ import annotations

import functools
from typing import Any

from . import contacts, devices, settings


def _vllm_flashinfer() -> Any:
    """Where vLLM asks what FlashInfer can do; not imported above, because the table of the log is made without it, too."""
    from vllm.utils import flashinfer

    return flashinfer


def can_compile() -> bool:
    """Whether FlashInfer's JIT finds nvcc and ninja where vLLM looks for them."""
    import shutil

    return _vllm_flashinfer()._flashinfer_nvcc_path() is not None and shutil.which("ninja") is not None


def advice() -> str:
    """What to install so that FlashInfer's attention is chosen."""
    if contacts.why_not("attention"):
        return ""
    if can_compile():
        return 'FLASHINFER (XQA decode): no --attention-backend, and "attention": "flashinfer"'
    return "FLASHINFER (XQA decode): put nvcc (CUDA_HOME) and ninja (PATH) there, or pip install flashinfer-cubin"


def why(backend: str) -> str:
    """Why vLLM took ``backend``, as far as this module had a say in it."""
    if "FLASHINFER" in backend:
        prefill = "FA2" if devices.block_scaled() else "FA3"  # as flashinfer.utils.determine_attention_backend has it
        return f"XQA decode, {prefill} prefill with sinks; compiled here, no cubin needed"
    return "vLLM's choice" if contacts.why_not("attention") or can_compile() else "no compiler for XQA"


def install() -> None:
    """Answer vLLM's question with yes where kernels are compiled here; it is asked again where they are not."""
    vllm_flashinfer = _vllm_flashinfer()
    asked: Any = vllm_flashinfer.has_nvidia_artifactory
    if hasattr(asked, "sm12x_original"):
        return

    @functools.cache
    def has_nvidia_artifactory() -> bool:
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        chosen = settings.resolve(None if config is None else config.additional_config)
        if chosen.attention == "flashinfer" and can_compile():
            return True
        return bool(asked())

    has_nvidia_artifactory.sm12x_original = asked  # type: ignore[attr-defined]
    vllm_flashinfer.has_nvidia_artifactory = has_nvidia_artifactory
