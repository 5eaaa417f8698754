# SPDX-License-Identifier: Apache-2.0
"""Folders as ``sm12x-quantize`` makes them, for rows of the default table."""

from __future__ import annotations

from pathlib import Path

from flashinfer_sm12x.quantize import command, texts
from flashinfer_sm12x.quantize.choice import Choice
from flashinfer_sm12x.quantize.models import Subject
from flashinfer_sm12x.quantize.run import Run, attention_layers


def quantized_once(subject: Subject, formats: dict[str, str], path: Path) -> Choice:
    """The choice of a folder at ``path`` that is made with error feedback; the model is afterwards as before."""
    both = [layers for pair in attention_layers(subject).values() for layers in pair]
    before = [(layer, layer.weight.data) for layers in both for layer in layers.parts.values()]
    tokens = command.TOKENS_OF_AN_INPUT * max(layer.in_features for layer, _ in before)
    windows = texts.windows(texts.calibration(), subject.encode, command.WINDOW, tokens)
    run = Run(subject, path, formats, windows)
    try:
        run.fill()
    finally:
        for layer, weight in before:
            layer.weight.data = weight
    run.finish({})
    return Choice(**formats, folder=str(path))
