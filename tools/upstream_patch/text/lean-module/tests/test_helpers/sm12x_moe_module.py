"""Layers by the module ``sm12x_moe`` itself, each instance forced, in memory that holds NaN before."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Optional

import torch

from flashinfer.jit.sm12x.instances import INSTANCES, Instance
from flashinfer.jit.sm12x.moe import gen_sm12x_moe_module
from flashinfer.utils import device_support_pdl, get_device_sm_count
from tests.test_helpers.mx_error_bounds import accumulation_on, check_within_bound
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs, same_bits
from tests.test_helpers.sm12x_moe_reference import MoEInputs, moe_reference

# The modes that a row's activations serve: MXFP8 tokens, 16-bit ones that are quantized
# inside, and bfloat16 ones.
MODES = {"mxfp8": (0, 1), "bf16": (2,)}


@functools.cache
def _module() -> Any:
    return gen_sm12x_moe_module().build_and_load()


def moe_module(device: torch.device) -> Any:
    """The module's functions; ``device`` is a GPU that they serve."""
    return _module()


def sm_count(device: torch.device) -> int:
    return get_device_sm_count(device)


def blocks_of_gemms(device: torch.device, row: Instance) -> list[int]:
    """Blocks of FC1 and of FC2 by the table: as many as fit all SMs."""
    return [sm_count(device) * row.blocks_per_sm] * 2


def moved(inputs: MoEInputs, device: torch.device) -> MoEInputs:
    """``inputs`` with their tensors on ``device``."""
    values = {field.name: getattr(inputs, field.name) for field in dataclasses.fields(inputs)}
    return type(inputs)(
        **{name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    )


def workspace_bytes(inputs: MoEInputs, mode: int) -> int:
    """The bytes that a layer needs."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    return _module().sm12x_moe_workspace_size(tokens, hidden, 2 * half, experts, top_k, mode, False)


def arguments_of(inputs: MoEInputs, mode: int, tactics: Sequence[int]) -> dict[str, Any]:
    """The arguments of ``sm12x_moe_run`` by their names, in its order; the output holds NaN, the workspace 255."""
    device, experts = inputs.input.device, inputs.fc2_weights.shape[0]
    shape = (inputs.input.shape[0], inputs.fc2_weights.shape[1])
    size = workspace_bytes(inputs, mode) if shape[0] else 0
    return {
        "output": torch.full(shape, torch.nan, dtype=inputs.output_dtype, device=device),
        "input": inputs.input,
        "input_sf": None if inputs.input_sf is None else inputs.input_sf.view(torch.uint8),
        "top_k": inputs.token_selected_experts.shape[1],
        "token_selected_experts": inputs.token_selected_experts,
        "token_final_scales": inputs.token_final_scales,
        "fc1_w": inputs.fc1_weights,
        "fc1_sf": inputs.fc1_scales,
        "fc1_global": inputs.fc1_global,
        "fc1_bias": inputs.fc1_bias,
        "fc2_w": inputs.fc2_weights,
        "fc2_sf": inputs.fc2_scales,
        "fc2_global": inputs.fc2_global,
        "fc2_bias": inputs.fc2_bias,
        "swiglu_alpha": inputs.swiglu_alpha,
        "swiglu_beta": inputs.swiglu_beta,
        "swiglu_limit": inputs.swiglu_limit,
        "activation_type": int(inputs.activation_type),
        "workspace": torch.full((size,), 255, dtype=torch.uint8, device=device),
        "mode": mode,
        "swizzled_input_sf": inputs.swizzled_input_sf,
        "first_expert": inputs.ep_rank * experts,
        "num_experts_total": experts * inputs.ep_size,
        "tactic_fc1": tactics[0],
        "tactic_fc2": tactics[1],
        # What only a decode step's call has.
        "next_weights": None,
        "router_logits": None,
        "is_padding": None,
        "barrier": None,
        "enable_pdl": device_support_pdl(device),
    }


def launch(arguments: dict[str, Any]) -> torch.Tensor:
    """The output of ``sm12x_moe_run`` with what :func:`arguments_of` gives, or changes of that."""
    _module().sm12x_moe_run(*arguments.values())
    return arguments["output"]


def default_tactics(inputs: MoEInputs, mode: int) -> list[int]:
    """The first row of the table that computes the layer."""
    rows = (row for row in INSTANCES if mode in MODES[row.activation] and row.weights == inputs.weights)
    return [next(rows).index] * 2


def run_moe(
    device: torch.device, inputs: MoEInputs, mode: int, tactics: Optional[Sequence[int]] = None, fill: int = 255
) -> torch.Tensor:
    """The layer on ``device``, by the rows at ``tactics`` in the table, in a workspace of bytes ``fill``.

    The output lies where the inputs lie.
    """
    arguments = arguments_of(moved(inputs, device), mode, tactics or default_tactics(inputs, mode))
    arguments["workspace"].fill_(fill)
    return launch(arguments).to(inputs.input.device)


def check_moe(device: torch.device, case: MoECase, seed: int, tactics: Optional[Sequence[int]] = None) -> MoEInputs:
    """A layer within its bound, and the same bits over other bytes in the workspace; its inputs."""
    print("seed", seed)
    if tactics:
        case = dataclasses.replace(case, weights=INSTANCES[tactics[0]].weights)
    inputs = make_moe_inputs(case, seed, device)
    output = run_moe(device, inputs, case.mode, tactics)
    check_within_bound(output, *moe_reference(inputs, accumulation_on(device)), f"{case}, seed {seed}, {tactics}")
    again = run_moe(device, inputs, case.mode, tactics, fill=0)
    assert same_bits(output, again), "a second run differs"
    return inputs


@dataclasses.dataclass
class LayerCall:
    """One layer of :func:`run_layers`; ``output`` may be what a later layer takes as input."""

    inputs: MoEInputs
    mode: int
    tactic: int
    output: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        shape = (self.inputs.input.shape[0], self.inputs.fc2_weights.shape[1])
        device = torch.device("cuda")
        self.inputs = moved(self.inputs, device)
        self.output = torch.full(shape, torch.nan, dtype=self.inputs.output_dtype, device=device)


def run_layers(device: torch.device, calls: Sequence[LayerCall]) -> None:
    """Layers one behind the other in one workspace, without a wait between their launches."""
    size = max(workspace_bytes(each.inputs, each.mode) for each in calls)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=device)
    made = [arguments_of(each.inputs, each.mode, [each.tactic] * 2) for each in calls]
    for each, arguments in zip(calls, made, strict=True):
        launch(arguments | {"output": each.output, "workspace": workspace})
