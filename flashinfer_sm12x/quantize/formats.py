# SPDX-License-Identifier: Apache-2.0
"""Formats that the instrument compares, one row each, and what they leave of a matrix.

The quantizers are the operators' own, so that what is measured is what is served. Q8_0 is llama.cpp's, by its own
``gguf``.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch

from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import WeightFormat, dequantize_weight, quantize_weight

from .manifest import COARSE

CHUNK_ROWS = 2048
"""Rows that gguf rounds at once: the largest LM heads take gigabytes in float32."""


class Format(NamedTuple):
    """A format of weights.

    Attributes
    ----------
    stored : str
        The predictor's name for it, which gives its bytes and the kernel's time.
    rounded : callable
        A whole matrix ``[n, K]`` of floats on the CPU to what the format holds of it, float32.
    """

    stored: str
    rounded: Callable[[torch.Tensor], torch.Tensor]


def _ours(stored: WeightFormat, rule: mx_cpu.ScaleRule | None = None) -> Format:
    """A format of the operators', by the rule that the plugin takes unless another is named."""

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        return dequantize_weight(quantize_weight(weight, stored, rule), stored, weight.shape[1])

    return Format(stored, rounded)


def _q8_0_by_rows(weight: torch.Tensor) -> torch.Tensor:
    return torch.cat([_q8_0(rows) for rows in weight.split(CHUNK_ROWS)])


def _q8_0(rows: torch.Tensor) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    packed = quants.quantize(rows.float().numpy(), GGMLQuantizationType.Q8_0)
    return torch.from_numpy(quants.dequantize(packed, GGMLQuantizationType.Q8_0)).view(rows.shape)


def _mxfp4(rows: torch.Tensor) -> torch.Tensor:
    return mx_cpu.round_to_mxfp4(rows.flatten(0, -2)).view(rows.shape)


BF16, Q8_0 = "bf16", "q8_0"
WEIGHTS: dict[str, Format] = {
    Q8_0: Format("q8_0", _q8_0_by_rows),
    "mxint8": _ours("mxint8"),
    "mxfp8": _ours("mxfp8"),
    "mxfp6": _ours("mxfp6"),
    "nvfp4": _ours("nvfp4"),
    "mxfp4": _ours("mxfp4"),
    "mxfp4-amax": _ours("mxfp4", "amax"),
}
"""Formats of weights in addition to bf16, the reference. Scales follow the plugin's rule; ``-amax``: the largest
magnitude's, as upstream's do."""
HEADS: dict[str, Format] = {name: WEIGHTS[coarse]._replace(stored=name) for name, coarse in COARSE.items()}
"""Formats of an LM head alone: what they hold of it gives all logits, of which the largest are computed again from the
original rows (:func:`.measure.rescore`)."""
OURS = tuple(name for name in WEIGHTS if name != Q8_0)
SERVED = tuple(name for name in OURS if WEIGHTS[name].stored == name)
"""The formats that the plugin quantizes to."""

TOKENS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mxfp8": mx_cpu.round_to_mxfp8,
    "mxfp4": _mxfp4,
    Q8_0: _q8_0,
}
"""Formats to which a layer can round its tokens, with the rounding of the kernels that do so."""


def has_gguf() -> bool:
    return importlib.util.find_spec("gguf") is not None


def round_weight(weight: torch.Tensor, name: str) -> torch.Tensor:
    """``[n, K]`` rounded to the format: float32, on the weight's device. The rounding itself always runs on the CPU."""
    return (WEIGHTS | HEADS)[name].rounded(weight.cpu()).to(weight.device)


def round_tokens(tokens: torch.Tensor, name: str) -> torch.Tensor:
    """``[..., K]`` rounded as a layer does that rounds its tokens to ``name``; the dtype stays."""
    device = "cpu" if name == Q8_0 else tokens.device  # gguf's are numpy's arrays
    return TOKENS[name](tokens.to(device)).to(tokens)
