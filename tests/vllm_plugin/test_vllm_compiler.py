# SPDX-License-Identifier: Apache-2.0
"""Whether there is a compiler, and whether it can make what is asked: two questions."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_vllm_models import serve

CASES = {
    # what nvcc says, what its headers say, the GPU, the list of architectures; a part of the reason, or none
    "13.0": ("13.0", 13000, "12.1", "", ""),
    "12.9": ("12.9", 12090, "12.1", "", ""),
    "12.8 for an RTX": ("12.8", 12080, "12.0", "", ""),
    "12.6": ("12.6", 12060, "12.1", "", "is of CUDA 12.6, but 12.8 or later is needed"),
    "12.8 for a Spark": ("12.8", 12080, "12.1", "", "compute capability 12.1a needs CUDA 12.9 or later"),
    "12.8 by the list": ("12.8", 12080, "12.0", "12.0f", "is of CUDA 12.8, but 12.9 or later is needed"),
    "headers of another": ("13.5", 13000, "12.1", "", "is of CUDA 13.5, but"),
}


@pytest.fixture(params=CASES)
def reason(request, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A toolkit in CUDA_HOME; a part of why it makes nothing."""
    release, headers, capability, listed, reason = CASES[request.param]
    for name, text in (
        ("bin/nvcc", f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'"),
        ("include/cuda_runtime_api.h", f"#define CUDART_VERSION {headers}"),
        ("include/cuda_runtime.h", ""),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("VIRTUAL_GPU_CAPABILITY", capability)
    if listed:
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", listed)
    else:
        monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    return reason


def test_attention_is_forced_where_it_can_be_made(monkeypatch, reason):
    """vLLM's own question alone finds each of these compilers."""
    from vllm.utils import flashinfer as vllm_flashinfer

    from flashinfer_sm12x.vllm import attention, compiler, replacements

    monkeypatch.setattr(replacements, "_before", {})  # an installed part is not installed again
    monkeypatch.setattr(vllm_flashinfer, "has_nvidia_artifactory", lambda: False)
    attention.install()
    assert vllm_flashinfer._flashinfer_nvcc_path() is not None
    assert vllm_flashinfer.has_nvidia_artifactory() is (not reason)
    assert bool(compiler.why_none()) == bool(reason)
    assert attention.why("TRITON_ATTN") == ("no compiler for XQA" if reason else "vLLM's choice")
    assert reason in attention.advice()


def test_quantized_layers_are_refused_where_they_cannot_be_made(checkpoint_folder, monkeypatch, reason):
    from virtual_gpu_platform import VirtualGpu

    def start() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(VirtualGpu, "device_type", "cuda")
            serve(checkpoint_folder, {"qkv": "mxfp8"})

    if not reason:
        start()
        return
    with pytest.raises(ValueError, match=reason):
        start()


def test_without_ninja_nothing_is_compiled(monkeypatch):
    from flashinfer_sm12x.vllm import compiler

    def none() -> str:
        raise compiler.toolchain.ToolchainError("no ninja")

    monkeypatch.setattr(compiler.toolchain, "find_ninja", none)
    monkeypatch.setattr(compiler.toolchain, "discover", lambda: None)
    monkeypatch.setattr(compiler.toolchain, "require_architectures", lambda *_: None)
    assert compiler.why_none() == "no ninja"
