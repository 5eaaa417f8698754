# SPDX-License-Identifier: Apache-2.0
"""Choices for gpt-oss-120b, in the words of the plugin's settings, and the time that a token of each takes on a
GB10."""

from __future__ import annotations

import dataclasses
from typing import Any

from perfmodel.step import LAYER_MODEL, MATRICES, TOKENS_BESIDE, Predicted, Step, predict
from token_bench.hindcast import Figure, rows

from flashinfer.sm12x.models import MODELS, matrix_bytes
from flashinfer_sm12x.quantize.choice import GROUPS, Choice
from flashinfer_sm12x.quantize.formats import BF16, HEADS, OURS, Q8_0, SERVED, WEIGHTS, has_gguf
from flashinfer_sm12x.quantize.manifest import COARSE, HEAD, finished, located
from flashinfer_sm12x.variables import PRESETS, RESCORED

CONTEXT = 1024
DRAFT_ROWS = (1, 2, 4, 8)
KV = ("bf16", "fp8")
TOKEN_FORMATS = {"a16": BF16, "a8": "mxfp8", "a4": "mxfp4"}
EXPERTS = {f"mxfp4-{suffix}": TOKEN_FORMATS[suffix] for suffix in ("a16", "a8")}


LLAMA_CPP = Choice(Q8_0, Q8_0, Q8_0, Q8_0, Q8_0)
"""llama.cpp's gpt-oss: dense weights in Q8_0; all matrices multiply tokens of int8 with a scale for 32 of them."""
LLAMA_CPP_NAME = "llama.cpp"
RESCORED_HEAD = Choice(lm_head=RESCORED)


def parse(text: str) -> Choice:
    """``mxfp8``, ``spark``, ``qkv=mxfp4,o=mxfp4,lm_head=mxfp8``, ``mxfp8,moe=mxfp4-a8,kv=fp8``, ``llama.cpp``, or
    ``folder=`` and one of ``sm12x-quantize``'s; later words win.

    Raises
    ------
    ValueError
        Naming the word, and what may stand there.
    """
    if text.strip() == LLAMA_CPP_NAME:
        if not has_gguf():
            raise ValueError(f"{LLAMA_CPP_NAME}: its quantizer is gguf's, which is not installed: pip install gguf")
        return LLAMA_CPP
    words: dict[str, str] = {}
    for item in (item.strip() for item in text.split(",")):
        key, given, value = item.partition("=")
        if given:
            words[key.strip()] = value.strip()
        elif item in PRESETS:
            words |= PRESETS[item]
        else:
            words |= dict.fromkeys(("qkv", "o", "lm_head"), item)
    named: dict[str, str] = {}
    tokens: dict[str, str] = {}
    for key, value in words.items():
        if key in ("qkv", "o", "lm_head"):
            weights, _, suffix = value.rpartition("-")
            if suffix not in TOKEN_FORMATS:
                weights, suffix = value, "a16"
            own = (*OURS, *HEADS) if key == HEAD else OURS
            if weights != BF16 and weights not in own:
                allowed = ", ".join([BF16, *own])
                raise ValueError(
                    f"{text!r}: {key} is {value!r}; it may be {allowed}, the formats with -a16, -a8 or -a4 behind, "
                    f"and all of it {', '.join(PRESETS)} or {LLAMA_CPP_NAME}"
                )
            named[key] = weights
            if weights != BF16:
                tokens[key] = TOKEN_FORMATS[suffix]
        elif key == "folder":
            named |= {**finished(located(value)).formats, "folder": str(located(value))}
        elif key == "moe" and value in EXPERTS:
            named["experts"] = EXPERTS[value]
        elif key == "kv" and value in KV:
            named["kv"] = value
        else:
            allowed = f"qkv, o and lm_head, a format each; moe, {' or '.join(EXPERTS)}; kv, {' or '.join(KV)}; folder"
            raise ValueError(f"{text!r}: {key}={value} is not known; what may be chosen is {allowed}")
    if len(set(tokens.values())) > 1:
        raise ValueError(f"{text!r}: the dense layers round their tokens alike, or not at all")
    choice = Choice(**named, tokens=next(iter(tokens.values()), BF16))
    for kind in tokens:
        stored = (WEIGHTS | HEADS)[named[kind]].stored
        if choice.tokens not in TOKENS_BESIDE.get(stored, (BF16,)):
            raise ValueError(f"{text!r}: no kernel has tokens of {choice.tokens} beside weights of {named[kind]}")
    return choice


def of_weights() -> list[Choice]:
    """Every format in all three, in the LM head alone, and in QKV and O with heads of 8 bits and rescored ones;
    others in all three."""
    mixed = [BF16, *SERVED]
    heads = {BF16: [*mixed, *HEADS]} | {name: ["mxint8", name, *HEADS] for name in SERVED}
    served = [Choice(body, body, head) for body in mixed for head in dict.fromkeys(heads[body])]
    return served + [Choice(name, name, name) for name in OURS if name not in SERVED]


def of_modes() -> list[Choice]:
    """Choices that round something beside the weights, one at a time; tokens of dense layers as each format's kernels
    have them."""
    dense = [Choice(name, name, name, tokens) for name in SERVED for tokens in TOKENS_BESIDE[name][1:]]
    return [Choice(experts="mxfp8"), Choice(kv="fp8"), *dense]


def stored(name: str) -> str:
    """The predictor's name of a format of weights."""
    return name if name == BF16 else (WEIGHTS | HEADS)[name].stored


def fed_back() -> list[dict[str, str]]:
    """Formats of the folders that the default table makes as ``sm12x-quantize`` does: a rescored head, alone and with
    the preset spark's QKV and O."""
    spark = PRESETS["spark"]
    bodies = [(BF16, BF16), (spark["qkv"], spark["o"])]
    return [{"qkv": qkv, "o": o, HEAD: RESCORED} for qkv, o in bodies]


def of_drafts(choice: Choice) -> list[Choice]:
    """A rescored head with fewer rows of each group, as a draft's could be, and the head itself."""
    return [*(dataclasses.replace(choice, rescored=rows) for rows in DRAFT_ROWS), choice]


def predicted(choice: Choice) -> Predicted:
    """A step of gpt-oss-120b on one GB10 with the plugin's launches, one stream, context 1,024.

    For llama.cpp only the bytes are of use.
    """
    formats = dict(zip(MATRICES, map(stored, (choice.qkv, choice.o, choice.lm_head)), strict=True))
    if choice.is_llama_cpp:
        return predict(LAYER_MODEL, Step(1, CONTEXT, formats=formats, fork=False))
    tokens: Any = choice.tokens
    fused = {"fused_router": True, "fused_attention": True}
    step = Step(1, CONTEXT, kv=choice.kv, formats=formats, dense_tokens=tokens, expert_tokens=choice.experts, **fused)
    return predict(LAYER_MODEL, step)


def bits(choice: Choice) -> float:
    """Bits of a dense weight of gpt-oss-120b that a token reads, on average over QKV, O and LM head, scales
    included."""
    size = MODELS[LAYER_MODEL]
    calls = {"QKV": size.layers, "O": size.layers, "LM head": 1}
    total = weights = 0
    for name, form in zip(MATRICES, (choice.qkv, choice.o, choice.lm_head), strict=True):
        n, k = size.matrices[name]
        total += calls[name] * matrix_bytes(n, k, COARSE.get(form, stored(form)))
        if form in HEADS:
            total += 2 * k * GROUPS * choice.rescored
        weights += calls[name] * n * k
    return 8 * total / weights


def published() -> Figure:
    """llama.cpp's highest published tokens/s on one GB10, one stream."""
    found = [
        row
        for row in rows()
        if (row.engine, row.gpu, row.gpus, row.model, row.dense) == ("llama.cpp", "GB10", 1, LAYER_MODEL, "q8_0")
        and (row.sequences, row.new) == (1, 1)
        and row.context <= CONTEXT
    ]
    return max(found, key=lambda row: row.value)


def default() -> list[Choice]:
    """Weights, modes, and llama.cpp's where ``gguf`` is installed."""
    return [*of_weights(), *of_modes(), *([LLAMA_CPP] if has_gguf() else [])]
