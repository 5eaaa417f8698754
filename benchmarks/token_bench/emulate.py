# SPDX-License-Identifier: Apache-2.0
"""Times of this fork's kernels on a GB10, predicted from runs on the virtual SM121, as a step of gpt-oss needs them.

They are kept beside this module (``gb10_kernels.json``), since running them takes a quarter of an hour;
``bench_token.py --emulate`` runs them all again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x_gpu_probe.prediction import Assumptions, Times
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

from .sizes import MATRICES, SIZES, TOKENS_BESIDE

KEPT = Path(__file__).with_name("gb10_kernels.json")
MODE = 1  # W4A8 from bf16, the plugin's default
MODELS = {
    ("gpt-oss-120b", 1): "gpt-oss-120b",
    ("gpt-oss-120b", 2): "gpt-oss-120b-tp2",
    ("gpt-oss-20b", 1): "gpt-oss-20b",
}
"""Of a model and its ranks the name in the layers' table."""
DECODE, PREFILL = (1, 4, 16, 64), (512, 2048, 8192)
STREAMED_TOKENS = 16
"""Up to so many a dense layer is a stream of weights that takes as long whatever its tokens are rounded to: what is kept is
that of bf16 ones."""
RANKS = (1, 2)
MODEL = "gpt-oss-120b"


@dataclasses.dataclass(kw_only=True)
class Kept(Times):
    """One layer: ``kind`` is "MoE" or one of the dense layers, ``weights`` its format, ``activation`` that of its tokens.

    The experts' tokens are rounded to MXFP8.
    """

    kind: str
    model: str
    ranks: int
    tokens: int
    weights: str
    activation: str


def times(line: Times) -> dict[str, Any]:
    """The fields of :class:`Times` alone."""
    return {field.name: getattr(line, field.name) for field in dataclasses.fields(Times)}


def dense_line(device: VirtualDevice, ranks: int, kind: str, weights: str, tokens: int, activation: str) -> list[Kept]:
    """A dense layer run and predicted; none where cuBLAS would multiply widened weights."""
    from moe_bench import predict_dense

    began = time.perf_counter()
    shape = SIZES[MODEL].split(ranks).matrices[kind]
    row = predict_dense.predict_layer(device, kind, tokens, weights, activation, shape)
    what = f"{kind} of {ranks}, {tokens} tokens of {activation}, {weights}"
    print(f"{what}: {time.perf_counter() - began:.0f} s", flush=True)
    if row is None:
        return []
    about = {"kind": kind, "model": MODEL, "ranks": ranks, "tokens": tokens, "weights": weights}
    return [Kept(**about, activation=activation, **times(row))]


def emulate() -> int:
    """Run all of them and write :data:`KEPT`; 2 where the emulator cannot run."""
    from moe_bench import predict

    found: list[Kept] = []
    try:
        predict.build_emulator()
        for (model, ranks), name in MODELS.items():
            for line in predict.lines([name], [*DECODE, *PREFILL], [MODE], Assumptions(), {}):
                found.append(
                    Kept(
                        kind="MoE",
                        model=model,
                        ranks=ranks,
                        tokens=line.tokens,
                        weights="mxfp4",
                        activation="mxfp8",
                        **times(line),
                    )
                )
        with virtual_device("sm_121a", strict=False) as device:
            device.module(gen_dense_module)
            for ranks, kind, weights, tokens in itertools.product(
                RANKS, MATRICES, ("mxfp8", "mxfp4"), (*DECODE, *PREFILL)
            ):
                if kind == "LM head" and tokens in PREFILL:
                    continue  # a prompt's logits are of its last token
                for activation in TOKENS_BESIDE[weights] if tokens > STREAMED_TOKENS else ("bf16",):
                    found += dense_line(device, ranks, kind, weights, tokens, activation)
    except RuntimeError as error:
        print(f"bench: no prediction: {error}", file=sys.stderr)
        return 2
    KEPT.write_text(json.dumps([dataclasses.asdict(line) for line in found], indent=1) + "\n", encoding="utf-8")
    print(f"wrote {KEPT}")
    return 0


def kept() -> list[Kept]:
    """What :func:`emulate` wrote."""
    return [Kept(**line) for line in json.loads(KEPT.read_text(encoding="utf-8"))]
