# SPDX-License-Identifier: Apache-2.0
"""Experts under ``"moe": "auto"``: which mode the operator takes for how many tokens, and what it and the other
lose."""

from __future__ import annotations

import dataclasses

import torch
from perfmodel.moe import predicted_range
from perfmodel.step import FITTED_MODES, LAYER_MODEL
from timing import github

from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.sm12x_planner import Mode, most_exact_tokens, plan_mode
from flashinfer.sm12x.models import MODELS
from flashinfer.testing import MoECase, MoEInputs, make_moe_inputs, moe_reference

HIDDEN, INTER = 256, 128
"""A size that a CPU multiplies in a second. The switch depends on experts and top-k, which are the model's."""
MODES = {Mode.W4A16: "W4A16", Mode.BF16_INPUT: "W4A8"}


def output(inputs: MoEInputs, mode: Mode) -> torch.Tensor:
    """The operator's, of the inputs of W4A16."""
    if mode is Mode.BF16_INPUT:
        ones = torch.ones(len(inputs.fc1_weights))
        inputs = dataclasses.replace(inputs, fc1_global=ones, fc2_global=ones)
    both = {"use_mxfp8_act_scaling": True, "use_w4_group_scaling": True} if mode is Mode.AUTO else {}
    result: torch.Tensor = cutlass_fused_moe(**inputs.arguments() | both)
    return result


def table(seed: int = 0) -> str:
    """A row for each number of tokens: the mode, both modes' error, and both modes' time on a GB10, predicted.

    An error is that of the layer's outputs, of random weights and tokens, over the outputs in float64. Times are the
    whole layer's, of W4A8 with tokens that are MXFP8 already.
    """
    layer = MODELS[LAYER_MODEL].moe
    switch = int(most_exact_tokens(layer.top_k, layer.experts))
    rows = []
    for tokens in (1, 16, switch - 1, switch, switch + 1):
        case = MoECase(tokens, HIDDEN, INTER, layer.experts, layer.top_k, int(Mode.W4A16))
        inputs = make_moe_inputs(case, seed)
        exact, _ = moe_reference(inputs)
        found = {mode: output(inputs, mode) for mode in (*MODES, Mode.AUTO)}
        (taken,) = (mode for mode in MODES if torch.equal(found[mode], found[Mode.AUTO]))
        assert taken is plan_mode(Mode.AUTO, tokens, layer.top_k, layer.experts)
        errors = (float((found[mode].double() - exact).norm() / exact.norm()) for mode in MODES)
        times = (predicted_range(layer, FITTED_MODES[mode.activation], tokens) for mode in MODES)
        rows.append(
            [
                f"{tokens:,}",
                MODES[taken],
                *(f"{100 * error:.2f} %" for error in errors),
                *("-" if time is None else "{:,.0f} - {:,.0f}".format(*time) for time in times),
            ]
        )
    columns = [f"{what}, {mode}" for what in ("error", "GB10, us") for mode in MODES.values()]
    return github(rows, ["tokens", "auto takes", *columns])
