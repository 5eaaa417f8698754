# SPDX-License-Identifier: Apache-2.0
"""The checks of vLLM; all but the first are left out where it is not installed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from .asking import PIP, PLUGIN, TREE, Answers, versions
from .checks import VLLM_VERSION, Outcome

VLLM_OPTIONS = "--moe-backend flashinfer_cutlass --quantization-config.moe.activation mxfp8"
GRAPH_SIZES = "--cudagraph-capture-sizes 1 2 3 4 5 6 7 8 10 12 14 16 20 24 28 32"


def check_vllm(a: Answers) -> Outcome:
    """Whether the vLLM that this fork is made for is here."""
    version = a.versions().get("vllm")
    there = version is not None or a("vllm", "found")
    if not there:
        return "ok", f"not installed here; the fork is made for {VLLM_VERSION}"
    if version != VLLM_VERSION:
        text = (
            f"vLLM {version or 'of an unknown version'}; the fork is made for {VLLM_VERSION}, what follows may differ"
        )
        return "warn", text, f"{PIP} install vllm=={VLLM_VERSION}"
    return "ok", f"vLLM {version}"


def _with_vllm(check: Callable[[Answers], Outcome]) -> Callable[[Answers], Outcome]:
    def checked(a: Answers) -> Outcome:
        # Found by its metadata or by import; a question that hung counts as there.
        absent = a.versions().get("vllm") is None and a.get("vllm", "found") is False
        return None if absent else check(a)

    checked.__doc__ = check.__doc__
    return checked


@_with_vllm
def check_vllm_flashinfer(a: Answers) -> Outcome:
    """What vLLM finds in FlashInfer."""
    sees = a("vllm", "has_flashinfer_cutlass_fused_moe")
    names = ("has_flashinfer", "has_flashinfer_cutlass_fused_moe", "has_flashinfer_autotune_v2")
    text = ", ".join(f"{name}: {'yes' if a.get('vllm', name) else 'no'}" for name in names)
    if sees:
        return "ok", text
    if not a("vllm", "has_flashinfer"):
        lacks = [what for what in ("nvcc", "ninja") if not a("vllm", what)]
        toolkit = a.get("compiler", "nvcc")
        home = Path(toolkit).parent.parent if toolkit else "<the toolkit>"
        why = f"vLLM finds no {' and no '.join(lacks)}, and no flashinfer-cubin" if lacks else "flashinfer is not found"
        remedy = (
            f'export CUDA_HOME={home} PATH="{Path(sys.prefix, "bin")}:$PATH"' if lacks else "see the check 'import'"
        )
        return "fail", f"{text}: {why}, and does without FlashInfer", remedy
    return "fail", f"{text}: the flashinfer that it imports lacks functions", "see 'import' and 'pythonpath'"


@_with_vllm
def check_vllm_plugin(a: Answers) -> Outcome:
    """The fork's plugin."""
    if PLUGIN not in a("path", "plugins"):
        return (
            "warn",
            f"no entry point {PLUGIN} in vllm.general_plugins: vLLM takes its own choices",
            f"export PYTHONPATH={shlex.quote(str(TREE))}; or pass {VLLM_OPTIONS}",
        )
    if not a.plugin():
        names = ("VLLM_PLUGINS", "FLASHINFER_SM12X_VLLM", "FLASHINFER_SM12X_MOE")
        on = [name for name in names if name in a.environ]
        text = ", ".join(f"{name}={a.environ[name]}" for name in on)
        return "warn", f"the plugin is installed and switched off: {text}", f"unset {' '.join(on)}"
    return "ok", f"{PLUGIN} = {a('path', 'plugins')[PLUGIN]}"


@_with_vllm
def check_vllm_moe(a: Answers) -> Outcome:
    """Which kernels gpt-oss's experts get."""
    if not a.serves():
        return "ok", "the GPU is not of the SM12x family: vLLM's own choice"
    if not a("vllm", "has_flashinfer_cutlass_fused_moe"):
        return "fail", "Marlin: vLLM does without FlashInfer", "see the check 'vllm-flashinfer'"
    if a.environ.get("FLASHINFER_SM12X_MOE") == "0":
        return "warn", "upstream's kernels: FLASHINFER_SM12X_MOE=0", "unset FLASHINFER_SM12X_MOE"
    if a.plugin():
        return "ok", "this fork's, without any option"
    return (
        "warn",
        "Marlin, unless asked: FLASHINFER_CUTLASS_MXFP4_MXFP8 is this fork's",
        f"vllm serve ... {VLLM_OPTIONS}",
    )


@_with_vllm
def check_vllm_linear(a: Answers) -> Outcome:
    """Which kernels the dense layers get."""
    text = "bf16 by cuBLAS: QKV, O and the LM head are 62 % of what a token of gpt-oss-120b reads"
    if a.plugin():
        return "ok", f"""{text}; faster: --additional-config '{{"sm12x": {{"qkv": "mxfp8", "o": "mxfp8"}}}}'"""
    asked = '{"linear": "mxfp8", "moe": {"activation": "mxfp8"}}'
    return "ok", f"{text}; faster for QKV and O: --quantization-config '{asked}'"


@_with_vllm
def check_vllm_attention(a: Answers) -> Outcome:
    """Which backend attention with sinks gets."""
    if not a.serves():
        return "ok", "the GPU is not of the SM12x family: vLLM's own choice"
    if not a("vllm", "has_flashinfer"):
        return "fail", "TRITON_ATTN: vLLM does without FlashInfer", "see the check 'vllm-flashinfer'"
    compiles = bool(a("vllm", "nvcc") and a("vllm", "ninja"))
    if a("vllm", "has_flashinfer_cubin"):
        return "ok", "FLASHINFER (flashinfer-cubin is installed)"
    if a.plugin() and compiles:
        return "ok", "FLASHINFER (XQA and FA2 are compiled here)"
    if a("vllm", "has_nvidia_artifactory"):
        return "ok", "FLASHINFER, as long as NVIDIA's server of cubins answers within 5 s at each start"
    return (
        "warn",
        "TRITON_ATTN: there is no flashinfer-cubin, and NVIDIA's server of cubins does not answer",
        f'{PIP} install "flashinfer-cubin=={versions()[1]}"',
    )


@_with_vllm
def check_vllm_graphs(a: Answers) -> Outcome:
    """Sizes of captured CUDA graphs."""
    if a.plugin():
        return "ok", "the plugin has vLLM capture each batch size up to 8, and 10, 12, 14, 16, 20 ... 256"
    text = "vLLM captures batches of 1, 2, 4, 8, 16 ...: one of 5 computes 8 tokens in every layer but the experts"
    return "warn", text, f"vllm serve ... {GRAPH_SIZES}"
