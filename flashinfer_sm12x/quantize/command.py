# SPDX-License-Identifier: Apache-2.0
"""The command ``sm12x-quantize``: opens the model, runs, and tells what it cost and what it brought."""

from __future__ import annotations

import dataclasses
import math
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..host_memory import SHARE
from . import measure, models, texts
from .endings import is_out_of_memory, message_of, running
from .files import FolderError, read_text, require_writable
from .formats import BF16
from .manifest import MANIFEST, UNFINISHED
from .run import QUANTIZED, ROUNDED, QuantizeError, Run, attention_layers, begun, with_losses

WINDOW = 256
"""Tokens in a row."""
TOKENS_OF_AN_INPUT, FEWEST = 4, 3
"""Tokens that are read, and at least wanted, for each input of the widest layer: more change nothing
(docs/accuracy.md)."""
HELD_OUT = 4096
"""Tokens that losses are measured on, at most."""


@dataclasses.dataclass(frozen=True)
class Request:
    """The options of the command line."""

    checkpoint: str
    out: Path
    formats: dict[str, str]
    text: Path | None
    tokens: int | None
    device: str


def opened(request: Request) -> models.Subject:
    """The model of a folder, a GGUF file, a name on the hub, or the default one of the accuracy benchmark."""
    device = request.device
    if request.checkpoint == models.DEFAULT:
        return models.load(None, torch.float32, device)
    # On a CPU float32 is as good as bf16. On a GPU the model keeps bf16, so that a Spark's memory holds gpt-oss-120b.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    path = models.fetched(request.checkpoint)
    subject = models.load(path, dtype, device)
    if not Path(request.checkpoint).expanduser().exists():
        subject.name = request.checkpoint  # the folder's is a commit's
    return subject


def peak_memory(device: str) -> str:
    """The peak memory of this process, and on its GPU."""
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)
    if not device.startswith("cuda"):
        return f"{host:.1f} GiB"
    return f"{host:.1f} GiB of the host's memory and {torch.cuda.max_memory_allocated() / (1 << 30):.1f} of the GPU's"


def how_to_serve(request: Request, subject: models.Subject) -> str:
    """The command that serves the folder; for a model that is no gpt-oss, a text that there is none."""
    if not subject.packed_experts:
        return f"{subject.name} is no gpt-oss in MXFP4, whose folders alone vLLM's plugin serves"
    dense = f"""--additional-config '{{"sm12x": {{"dense": "{request.out.resolve()}"}}}}'"""
    return f"serve it: vllm serve {request.checkpoint} --host 127.0.0.1 --gpu-memory-utilization {SHARE} {dense}"


def quantize(request: Request, say: Callable[[str], None]) -> None:
    """Fill the folder.

    Raises
    ------
    UserError
        Why the folder cannot be filled; raised before anything is downloaded or written if the cause can be known then.
    KeyboardInterrupt
        Ctrl-C or a signal, with how to go on.
    """
    os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")  # gpt-oss's experts run on this fork's operator, on Hopper too
    try:
        _quantize(request, say)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_what_is_there(request.out)) from None
    except Exception as error:
        if (line := message_of(error)) is None:
            raise
        if isinstance(error, OSError) or is_out_of_memory(error):  # from without: nothing is wrong with what was made
            line = f"{line}; {_what_is_there(request.out)}"
        raise FolderError(line) from error


def _what_is_there(out: Path) -> str:
    """What a run that ended early has left, and how to go on."""
    if (out / MANIFEST).exists():
        return f"{out} is finished"
    if not (out / UNFINISHED).exists():
        return "nothing was written"
    return (
        f"files in {out} so far: {len(list(out.glob('*.safetensors')))}; the same command, run again, goes on "
        "from there"
    )


def _quantize(request: Request, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    models.require_device(request.device)
    read = texts.calibration() if request.text is None else [read_text(request.text)]
    if set(request.formats.values()) == {BF16}:
        raise QuantizeError("--qkv, --o and --lm-head are all bf16: nothing is to be quantized")
    begun(request.out)  # before a model is loaded, which takes minutes
    require_writable(request.out, "--out")
    subject = opened(request)
    both = attention_layers(subject).values()
    widest = max(layer.in_features for pair in both for layers in pair for layer in layers.parts.values())
    windows = texts.windows(read, subject.encode, WINDOW, request.tokens or TOKENS_OF_AN_INPUT * widest)
    if not windows:
        raise QuantizeError("--text: there are fewer than 16 tokens in it")
    run = Run(subject, request.out, request.formats, windows)
    tokens = sum(map(len, windows))
    say(
        f"{subject.name}: {tokens:,} tokens of {request.text or 'the texts that come along'}, layers of K up to "
        f"{widest:,}"
    )
    if tokens < FEWEST * widest:
        say(
            f"fewer than {FEWEST * widest:,} tokens: more of them, by --text and --tokens, lose less (docs/accuracy.md)"
        )
    if run.done:
        say(f"{request.out}: {run.done} of its files are there already")
    held_out = texts.windows(texts.texts("evaluation"), subject.encode, WINDOW, HELD_OUT)
    with running(subject.name, "run"):
        losses = with_losses(run, held_out)
    bootstrap = measure.Bootstrap(held_out)
    kl = {name: bootstrap.mean(scores.kl) for name, scores in losses.items()}
    if not all(math.isfinite(each.value) for each in kl.values()):
        raise QuantizeError(f"{subject.name}: its losses are no numbers: the model gives infinities or NaN of the text")
    minutes, memory = (time.monotonic() - began) / 60, peak_memory(request.device)
    run.finish(
        {
            "text": str(request.text or "the texts that come along"),
            "kl": {name: dataclasses.asdict(each) for name, each in kl.items()},
            "minutes": minutes,
            "peak_memory": memory,
        }
    )
    say("")
    say(f"KL on {subject.name}, {sum(len(w) - 1 for w in held_out):,} tokens of other text (95 % interval):")
    for name in (ROUNDED, QUANTIZED):
        say(f"  {name:22} {kl[name].value:.4f} ({kl[name].low:.4f} to {kl[name].high:.4f})")
    size = sum(path.stat().st_size for path in request.out.glob("*.safetensors")) / 1e9
    say(f"{request.out}: {run.manifest.formats_summary}; {size:.2f} GB, {minutes:.1f} minutes, at most {memory}")
    say(how_to_serve(request, subject))
