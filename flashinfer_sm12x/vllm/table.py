# SPDX-License-Identifier: Apache-2.0
"""The table in the log: each kind of layer, what computes it, in which format, why, and what would be faster."""

from __future__ import annotations

from typing import Any

from tabulate import tabulate
from vllm.logger import init_logger

from . import attention, fallback

logger = init_logger("vllm.flashinfer_sm12x")

ORDER = ("moe", "qkv", "o", "lm_head", "attention", "decode")
AS_CHECKPOINT = "as the checkpoint"  # of a format that is no choice here
_rows: dict[str, tuple[str, str, str]] = {}


def note(kind: str, backend: str, weights: str, why: str) -> None:
    """Remember what a kind of layer got; layers of a kind are alike, and the last one is kept."""
    _rows[kind] = (backend, weights, why)


def faster(kind: str, backend: str, weights: str) -> str:
    """The change with which a user gets a faster layer of this kind, or an empty text."""
    if weights.endswith(AS_CHECKPOINT):
        return ""
    if kind == "attention":
        return attention.advice() if "FLASHINFER" not in backend else ""
    if kind == "moe":
        return "" if backend == "flashinfer-sm12x" else "the fork's experts, where the reason can go"
    if weights == "bf16":
        return '"sm12x": "spark" or "spark-int8", half of the bytes at next to no loss (docs/accuracy.md)'
    return ""


def _note_attention() -> None:
    from vllm.config import get_current_vllm_config_or_none

    config = get_current_vllm_config_or_none()
    layers: dict[str, Any] = {} if config is None else config.compilation_config.static_forward_context
    found = {
        (layer.attn_backend.get_name(), str(layer.kv_cache_dtype))
        for layer in layers.values()
        if hasattr(layer, "attn_backend") and hasattr(layer, "kv_cache_dtype")
    }
    if found:
        names, types = (", ".join(sorted(set(column))) for column in zip(*found, strict=True))
        note("attention", names, f"KV cache {types}", attention.why(names))


def text() -> str:
    """The table of what was noted so far."""
    rows = [(kind, *_rows[kind], faster(kind, _rows[kind][0], _rows[kind][1])) for kind in ORDER if kind in _rows]
    headers = ("layers", "kernels", "format", "why", "what would be faster")
    return str(tabulate(rows, headers=headers, tablefmt="github"))


def log_once(model: str = "gpt-oss") -> None:
    """Log the table, once a server: layers call it when their weights are in, by when all of them exist."""
    with fallback.leaving("the attention's row of the table is"):
        _note_attention()
    with fallback.leaving("the table of layers is"):
        logger.info_once("flashinfer-sm12x serves %s:\n%s", model, text(), scope="global")
