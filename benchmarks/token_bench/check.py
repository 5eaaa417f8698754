# SPDX-License-Identifier: Apache-2.0
"""Whether the stacks agree: small models with the same weights, batch and caches, compared with torch's step."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import torch
from perfmodel.step import Step, formats_of
from timing import github, reason, relative_error

from flashinfer.sm12x.models import Model as Size
from flashinfer.testing import MoEInputs, moe_reference

from .model import Experts, ForkExperts, Model, fork_experts, marlin_experts, random_experts

SMALL = Size(layers=2, experts=8, vocab=4096)
STEPS = (Step(3, 300), Step(3, 300, 2, verified=True), Step(1, 40, 40))
TOLERANCE = 0.05
"""Allowed error of the logits, relative to their Frobenius norm. Another order of sums rounds to other bf16 hidden
states, and with an fp8 cache a kernel may round queries and softmax weights to e4m3: vLLM's own stack was 0.010 to
0.030 off on an H200."""
ACTIVATIONS = "a16"
"""The experts' activations in the check, whichever are timed. Rounding to e4m3 would hide errors: tokens that are 0.2 %
apart come out of a W4A8 layer 2.6 % apart and out of a W4A16 layer 0.4 %, both computed in float64. The operator's own
tests check A8."""


def choosing_alike(one: Model, other: Model, step: Step) -> torch.Tensor:
    """Rows of the logits, bool, whose tokens got the same experts in every layer of both models' last steps.

    Rounding may turn a close choice, and the token's logits then differ by more than any rounding. It turns few: where
    more than half differ, something is wrong.
    """
    pairs = zip(one.chosen_experts(), other.chosen_experts(), strict=True)
    same = torch.stack([(a.sort().values == b.sort().values).all(1) for a, b in pairs]).all(0)
    return same if step.logits == step.tokens else same[step.new - 1 :: step.new]


class ReferenceExperts(ForkExperts):
    """The float64 reference of the operator."""

    def __init__(self, weights: MoEInputs) -> None:
        super().__init__(weights, ACTIVATIONS)
        self.by = "float64"

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_reference(self.inputs(x, ids, weights))[0].to(x.dtype)


def check(
    arguments: argparse.Namespace,
    make_marlin: Callable[[], Any],
    equip: Callable[[Model, argparse.Namespace, str], None],
    device: str = "cuda",
) -> int:
    """Print each stack's error; 1 where one disagrees or could not run.

    ``make_marlin`` gives the peer or raises; ``equip`` gives a model the operators of a stack.
    """
    formats = tuple(dict.fromkeys(("bf16", *arguments.dense)))

    def model(make: Callable[[torch.Generator], Experts]) -> Model:
        return Model(SMALL, make, formats, device=device, positions=4096)

    stacks: dict[str, Callable[[], Model]] = {
        "fork": lambda: model(fork_experts(SMALL, ACTIVATIONS)),
        "vllm": lambda: model(marlin_experts(SMALL, make_marlin())),
    }
    reference = model(lambda generator: ReferenceExperts(random_experts(SMALL, generator)))
    lines, wrong = [], False
    for stack in arguments.stacks:
        try:
            tried = stacks[stack]()
            equip(tried, arguments, stack)
        except Exception as error:
            lines.append([stack, "", "", "", "", "", reason(error)])
            wrong = True
            continue
        separate = (["bf16"], ["separate"], ["separate"])
        choices = (formats, arguments.router, arguments.decode_attention) if stack == "fork" else separate
        for step, kv, dense, router, attention in itertools.product(STEPS, arguments.kv, *choices):
            if step.prefill and attention == "fork":
                continue
            parts = {"fused_router": router == "fork", "fused_attention": attention == "fork"}
            step = dataclasses.replace(step, kv=kv, formats=formats_of(dense), **parts)
            batch = reference.batch(step)
            caches = reference.caches(step, batch)
            apart = dataclasses.replace(step, fused_router=False, fused_attention=False)
            expected, _ = reference.step(apart, batch, [kv.clone() for kv in caches])
            what = "prefill" if step.prefill else "window" if step.verified else "decode"
            by = tried.by(step)
            line = [stack, what, kv, dense, by["router"], by["attention, full"]]
            try:
                logits, _ = tried.step(step, batch, caches)
                alike = choosing_alike(tried, reference, step)
                off = relative_error(logits[alike], expected[alike]) if 2 * alike.sum() >= len(alike) else float("inf")
                agrees = off <= TOLERANCE
                wrong |= not agrees
                lines.append([*line, f"{off:.4f}{'' if agrees else ' DISAGREES'}"])
            except Exception as error:
                wrong = True
                lines.append([*line, reason(error)])
    headers = ["stack", "step", "KV", "dense", "router", "attention", "error of the logits"]
    print(github(lines, headers))
    return int(wrong)
