# SPDX-License-Identifier: Apache-2.0
"""The MoE layer's kernels on a virtual device, from inputs that :func:`flashinfer.testing.make_moe_inputs` makes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from bindings import in_order

from flashinfer.fused_moe import sm12x_launch
from flashinfer.fused_moe.sm12x_planner import resolved_pair
from flashinfer.fused_moe.sm12x_validation import Mode, MoECall, MoEProblem
from flashinfer.jit import fused_moe
from flashinfer.sm12x.device_class import GB10
from flashinfer.sm12x.instances import INSTANCES, Instance, is_alone
from flashinfer.testing import MoEInputs
from flashinfer.testing.virtual_device import VirtualDevice


def problem_of(inputs: MoEInputs, mode: int) -> MoEProblem:
    """The sizes of a layer."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    first, total = inputs.ep_rank * experts, inputs.ep_size * experts
    return MoEProblem(Mode(mode), tokens, hidden, 2 * half, experts, top_k, first, total, total, inputs.weights)


def arguments_of(inputs: MoEInputs, output: torch.Tensor) -> dict[str, Any]:
    """The arguments of ``sm12x_moe_run`` that follow from the inputs."""
    problem = problem_of(inputs, 0)
    return {
        "output": output,
        "input": inputs.input,
        "input_sf": inputs.input_sf,
        "top_k": problem.top_k,
        "token_selected_experts": inputs.token_selected_experts,
        "token_final_scales": inputs.token_final_scales,
        "fc1_w": inputs.fc1_weights.view(torch.uint8),
        "fc1_sf": inputs.fc1_scales.view(torch.uint8),
        "fc1_global": inputs.fc1_global,
        "fc1_bias": inputs.fc1_bias,
        "fc2_w": inputs.fc2_weights.view(torch.uint8),
        "fc2_sf": inputs.fc2_scales.view(torch.uint8),
        "fc2_global": inputs.fc2_global,
        "fc2_bias": inputs.fc2_bias,
        "swiglu_alpha": inputs.swiglu_alpha,
        "swiglu_beta": inputs.swiglu_beta,
        "swiglu_limit": inputs.swiglu_limit,
        "activation_type": inputs.activation_type,
        "swizzled_input_sf": inputs.swizzled_input_sf,
        "first_expert": problem.first_expert,
        "num_experts_total": problem.num_experts_total,
        "enable_pdl": True,
    }


def moe_module(device: VirtualDevice) -> Any:
    """The module of layers with MXFP4 experts."""
    return sm12x_launch.moe_module(device, "mxfp4")


def sm_count(device: VirtualDevice) -> int:
    return device.sm_count


def blocks_of_gemms(device: VirtualDevice, row: Instance) -> list[int]:
    """Blocks of FC1 and of FC2 in the layer last launched, by the two-kernel path of ``row``."""
    launches = [launch for launch in device.launches if "grouped_gemm_kernel" in launch.kernel][-2:]
    for launch in launches:
        sizes = (row.block_n, row.block_k, row.stages, row.blocks_per_sm)
        assert "".join(f"Li{size}E" for size in sizes) in launch.kernel, launch.kernel
    fc1, fc2 = (launch.grid[0] for launch in launches)
    return [fc1, fc2]


def register_instance(device: VirtualDevice, module: Any, tactic: int) -> None:
    """Make a tactic that is no part of ``module`` runnable by ``module``."""
    if is_alone(INSTANCES[tactic]):
        instance = device.module(fused_moe.gen_cutlass_fused_moe_sm120_instance_module, tactic)
        module.sm12x_register_instance(tactic, instance.sm12x_instance_address())


def run_moe(
    device: VirtualDevice,
    inputs: MoEInputs,
    mode: int,
    tactics: Sequence[int] | None = None,
    workspace: torch.Tensor | None = None,
    next_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """The layer's output, ``[tokens, hidden]``, in memory that held NaN before; ``tactics`` are places, the planner's
    if None."""
    problem = problem_of(inputs, mode)
    output = torch.full((problem.num_tokens, problem.hidden), float("nan"), dtype=inputs.output_dtype)
    pair = resolved_pair(tactics or (-1, -1), sm12x_launch.default_tactics(problem, GB10))
    in_bf16 = any(INSTANCES[tactic].compute == "mxfp8_as_bf16" for tactic in pair)
    for tactic in pair:
        sm12x_launch.ensure_instance(device, tactic)
    if workspace is None:
        workspace = device.empty(sm12x_launch.workspace_bytes(device, problem, in_bf16))
    known = {name: value for name, value in inputs.arguments().items() if name in MoECall._fields}
    call = MoECall(**dict.fromkeys(MoECall._fields))._replace(**known, output=output, next_weights=next_weights)  # type: ignore[arg-type]
    sm12x_launch.launch(device, problem, call, workspace, pair)
    return output


@dataclasses.dataclass
class LayerCall:
    """One layer of :func:`run_layers`; ``output`` may be what a later layer takes as input."""

    inputs: MoEInputs
    mode: int
    tactic: int
    output: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        shape = (self.inputs.input.shape[0], self.inputs.fc2_weights.shape[1])
        self.output = torch.full(shape, float("nan"), dtype=self.inputs.output_dtype)


def run_layers(device: VirtualDevice, calls: Sequence[LayerCall]) -> None:
    """Layers one after the other in one workspace, with the launches of one still in flight when the next begins."""
    (weights,) = {call.inputs.weights for call in calls}
    module = sm12x_launch.moe_module(device, weights)
    problems = [problem_of(call.inputs, call.mode) for call in calls]
    sizes = []
    for call, problem in zip(calls, problems, strict=True):
        register_instance(device, module, call.tactic)
        shape = (problem.num_tokens, problem.hidden, problem.inter, problem.num_local_experts, problem.top_k)
        sizes.append(
            module.sm12x_moe_workspace_size(*shape, call.mode, INSTANCES[call.tactic].compute == "mxfp8_as_bf16")
        )
    workspace = device.empty(max(sizes))

    def run_all(*_: Any) -> None:
        for call in calls:
            arguments = arguments_of(call.inputs, call.output) | {"workspace": workspace, "mode": call.mode}
            arguments |= {"tactic_fc1": call.tactic, "tactic_fc2": call.tactic}
            module.sm12x_moe_run(*in_order("sm12x_moe_run", **arguments))

    outputs = [call.output for call in calls]
    tensors = {workspace.data_ptr(): workspace} | {output.data_ptr(): output for output in outputs}
    for call in calls:  # a tensor that lies in another one's memory is known already
        for tensor in arguments_of(call.inputs, call.output).values():
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                tensors.setdefault(tensor.data_ptr(), tensor)
    device.call(run_all, *tensors.values(), writes=(workspace, *outputs))
