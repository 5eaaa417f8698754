# SPDX-License-Identifier: Apache-2.0
"""Quantizes a model in one pass over the text. At each attention it collects the Gram matrix of QKV's inputs and
quantizes QKV, does the same for O, and goes on through the quantized layers; the LM head comes last. So each layer is
quantized for the inputs that it will have in service.

transformers' code runs the model, with gpt-oss's experts packed on this fork's operator, so that a Spark's memory
suffices. In addition to the model, memory holds at most one layer's float64 copy (16,384 rows of the head's), or, while
losses are measured, the head twice in float32, before and after.

If a layer's file exists, it is read and the layer is not quantized again. The forward pass up to it is the same, so an
interrupted run that is resumed ends with the same bytes as one that was not interrupted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from flashinfer.quantization.block_scaled import BlockScaledWeight, dequantize_rows
from flashinfer.quantization.error_feedback import DAMPING, quantize_with_feedback

from ..files import remove_scratch, replace_bytes
from ..versions import __fork_version__
from . import measure
from .choice import Choice
from .endings import ModelError
from .files import FolderError
from .folder import Folder, join, to_tensors, weight_hash
from .formats import BF16, round_weight
from .manifest import HEAD, MANIFEST, UNFINISHED, Manifest, Module, stored
from .models import OUTPUT, Subject

ROUNDED, QUANTIZED = "rounded to nearest", "with error feedback"


class QuantizeError(ModelError):
    """A model that cannot be quantized, in a line."""


@dataclasses.dataclass(frozen=True)
class Layers:
    """Layers that are quantized as one matrix: their kind, and the linear layers that are its rows, by their names."""

    kind: str
    parts: dict[str, nn.Linear]

    @property
    def sizes(self) -> list[int]:
        return [layer.out_features for layer in self.parts.values()]

    @property
    def weight(self) -> torch.Tensor:
        return torch.cat([layer.weight.detach() for layer in self.parts.values()])

    def hashes(self) -> dict[str, str]:
        return {name: weight_hash(layer.weight) for name, layer in self.parts.items()}

    def replace(self, weight: torch.Tensor) -> None:
        for layer, rows in zip(self.parts.values(), weight.split(self.sizes), strict=True):
            layer.weight.data = rows.to(layer.weight)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Layers, what their weights have become, with linear scales, and the hashes of what they were."""

    layers: Layers
    weight: BlockScaledWeight
    sources: dict[str, str]


def attention_layers(subject: Subject) -> dict[str, tuple[Layers, Layers]]:
    """QKV and O of each attention, by its name."""
    names = {module: name for name, module in subject.model.named_modules()}
    found = {}
    for attention in subject.attentions:
        qkv = {names[layer]: layer for layer in subject.qkv(attention)}
        o: Any = attention.get_submodule(OUTPUT)
        found[names[attention]] = Layers("qkv", qkv), Layers("o", {names[o]: o})
    return found


def gram(rows: torch.Tensor) -> torch.Tensor:
    """The sum of x^T x over rows x, float64."""
    rows = rows.double()
    return rows.t() @ rows


def begun(folder: Path) -> Manifest | None:
    """The manifest that an interrupted run left in a folder to write to; None if the folder is empty or not there.

    Raises
    ------
    FolderError
        The folder is finished, or holds something else.
    """
    if (folder / MANIFEST).exists():
        raise FolderError(f"{folder} is finished: choose another folder, or remove it")
    if (folder / UNFINISHED).exists():
        return Manifest.read(folder / UNFINISHED)
    if folder.exists() and any(folder.iterdir()):
        raise FolderError(f"{folder} is not empty, and was not begun by sm12x-quantize: choose another folder")
    return None


class Run:
    """A folder that is being filled.

    Parameters
    ----------
    subject : Subject
        The model; its QKV and O are quantized in place.
    folder : Path
        The folder to make; or the folder of an interrupted run with the same parameters, to resume it.
    formats : dict
        The formats of ``qkv``, ``o`` and ``lm_head``; ``bf16`` leaves a kind out.
    windows : list
        Token ids, as ``texts.windows`` cuts them.

    Raises
    ------
    FolderError
        The folder is finished, is another run's, or holds something else.
    """

    def __init__(self, subject: Subject, folder: Path, formats: dict[str, str], windows: list[list[int]]) -> None:
        self.subject, self.folder, self.windows = subject, folder, windows
        self.attentions = attention_layers(subject)
        run = {
            "model": subject.name,
            "dtype": str(next(subject.model.parameters()).dtype),
            "device": subject.device.type,
            "damping": DAMPING,
            "tokens": sum(map(len, windows)),
            "tokens_sha256": hashlib.sha256(json.dumps(windows).encode()).hexdigest(),
            "flashinfer_sm12x": __fork_version__,
            "torch": torch.__version__,
        }
        self.manifest = Manifest({kind: name for kind, name in formats.items() if name != BF16}, run)
        if before := begun(folder):
            theirs, ours = ({"formats": each.formats_summary, **each.run} for each in (before, self.manifest))
            if differs := [
                f"{key} was {theirs.get(key)}, is {ours[key]}" for key in ours if theirs.get(key) != ours[key]
            ]:
                raise FolderError(
                    f"{folder} was begun by another run ({'; '.join(differs)}): choose another folder, or remove it"
                )
            self.manifest = before
        folder.mkdir(parents=True, exist_ok=True)
        self.manifest.write(folder / UNFINISHED)

    @property
    def done(self) -> int:
        """Files that are there."""
        return len(self.manifest.files)

    def fill(self) -> None:
        """Quantize all that is not there yet. QKV and O are replaced in the model, the LM head is not.

        Raises
        ------
        QuantizeError
            A weight or a layer's input is not finite; names the layer.
        FolderError
            A file of an earlier run is damaged, or was made of other weights.
        """
        ids, real = measure.batch(self.windows, self.subject.device)
        undo: list[Any] = []
        with tqdm(total=len(self.attentions) + 1, desc="layers", unit="layer") as progress, torch.inference_mode():
            try:
                for name, both in self.attentions.items():
                    wanted = [layers for layers in both if layers.kind in self.manifest.formats]
                    turn = Turn(self, f"{name}.safetensors", wanted, real)
                    for layers in wanted:
                        first = next(iter(layers.parts.values()))
                        undo.append(first.register_forward_pre_hook(turn.hook(layers)))
                    (last,) = both[1].parts.values()
                    undo.append(last.register_forward_hook(lambda *_: progress.update() and None))
                hidden = self.subject.model.base_model(ids, use_cache=False).last_hidden_state
            finally:
                for each in undo:
                    each.remove()
            if HEAD in self.manifest.formats:
                head = Layers(HEAD, {HEAD: self.subject.head})
                Turn(self, f"{HEAD}.safetensors", [head], real).weight(head, hidden)
            progress.update()

    def finish(self, told: dict[str, Any]) -> None:
        """Write the manifest: from here on the folder can be loaded."""
        self.manifest.told |= told
        self.manifest.write(self.folder / MANIFEST)
        (self.folder / UNFINISHED).unlink()
        remove_scratch(self.folder)

    def quantize(self, layers: Layers, inputs: torch.Tensor) -> Quantized:
        """Layers that are given the rows ``inputs``."""
        form: Any = stored(self.manifest.formats[layers.kind])
        try:
            weight = quantize_with_feedback(layers.weight, gram(inputs), form)
        except ValueError as error:
            raise QuantizeError(f"{self.subject.name}: {', '.join(layers.parts)}: {error}") from error
        return Quantized(layers, weight, layers.hashes())

    def read(self, file: str, wanted: Sequence[Layers]) -> dict[str, BlockScaledWeight]:
        """The weights that an earlier run left in a file, by kind."""
        earlier = Folder(self.folder, self.manifest)
        for layers in wanted:
            for name, source in layers.hashes().items():
                if source != self.manifest.modules[name].source:
                    raise FolderError(f"{self.folder} was begun with another weight of {name}: choose another folder")
        return {layers.kind: join(earlier.weights(list(layers.parts))) for layers in wanted}

    def write(self, file: str, found: Sequence[Quantized]) -> None:
        """A file, and then the manifest that knows of it."""
        from safetensors.torch import save

        tensors: dict[str, torch.Tensor] = {}
        for each in found:
            layers, form = each.layers, stored(self.manifest.formats[each.layers.kind])
            parts = zip(each.weight.values.split(layers.sizes), each.weight.scales.split(layers.sizes), strict=True)
            for (name, layer), (values, scales) in zip(layers.parts.items(), parts, strict=True):
                tensors |= to_tensors(name, form, BlockScaledWeight(values, scales, each.weight.global_scale))
                size = layer.out_features, layer.in_features
                self.manifest.modules[name] = Module(layers.kind, *size, file, each.sources[name])
        data = save(tensors, {"format": "pt"})
        replace_bytes(self.folder / file, data)
        self.manifest.files[file] = hashlib.sha256(data).hexdigest()
        self.manifest.write(self.folder / UNFINISHED)


class Turn:
    """Layers of one file, as the forward pass comes to them."""

    def __init__(self, run: Run, file: str, wanted: list[Layers], real: torch.Tensor) -> None:
        self.run, self.file, self.wanted, self.real = run, file, wanted, real
        self.there: dict[str, BlockScaledWeight] = {}
        self.found: list[Quantized] = []

    def weight(self, layers: Layers, inputs: torch.Tensor) -> BlockScaledWeight:
        """The layers' quantized weight: the file's if there is one, which is written after the last of its layers if
        not."""
        if layers is self.wanted[0] and self.file in self.run.manifest.files:
            self.there = self.run.read(self.file, self.wanted)
        if layers.kind in self.there:
            return self.there[layers.kind]
        self.found.append(self.run.quantize(layers, inputs[self.real]))
        if len(self.found) == len(self.wanted):
            self.run.write(self.file, self.found)
        return self.found[-1].weight

    def hook(self, layers: Layers) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        """The hook that runs before the first of the layers: it replaces the weights of all."""

        def before(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
            weight = self.weight(layers, given[0])
            layers.replace(dequantize_rows(weight, self.run.manifest.formats[layers.kind], given[0].shape[-1]))

        return before


def with_losses(run: Run, windows: list[list[int]]) -> dict[str, measure.Scores]:
    """Fill the folder, and tell how far the model is from itself, on other text, with its weights rounded and as they
    are then."""
    subject, formats = run.subject, run.manifest.formats
    rounded = Choice(**formats)
    rows = rounded.rescored * rounded.rescores
    before = {choice: measure.hidden_states(subject, windows, choice) for choice in (Choice(), rounded.body)}
    run.fill()
    states = measure.hidden_states(subject, windows, Choice())

    def case(name: str, hidden: torch.Tensor) -> measure.Case:
        if HEAD not in formats:
            return measure.Case(hidden, BF16, lambda weight: weight)
        if name == ROUNDED:
            return measure.Case(hidden, name, lambda weight: round_weight(weight, formats[HEAD]), rescored=rows)
        folder = Folder(run.folder, run.manifest)
        return measure.Case(hidden, name, lambda weight: folder.dequantized([HEAD]).to(weight), rescored=rows)

    cases = {ROUNDED: case(ROUNDED, before[rounded.body]), QUANTIZED: case(QUANTIZED, states)}
    return measure.losses(subject, windows, before[Choice()], cases)
