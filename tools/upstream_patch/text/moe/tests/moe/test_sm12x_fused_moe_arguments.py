"""What ``backend="sm12x"`` of cutlass_fused_moe says of each bad argument, before a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer.fused_moe import sm12x_moe
from flashinfer.tllm_enums import ActivationType
from tests.test_helpers.mx_formats import sm12x_device
from tests.test_helpers.sm12x_fused_moe import (
    cutlass_fused_moe,
    cutlass_fused_moe_workspace_size,
)
from tests.test_helpers.sm12x_moe import MoECase, make_moe_inputs

Arguments = dict[str, Any]
device = pytest.fixture(sm12x_device, name="device")


# take tests/operator_calls.py: on workspace_sizes _strided
# take tests/sm12x/test_bad_calls.py: _moe
strided = _strided
# take tests/sm12x/test_bad_calls.py: off_by_one emptied MOE_BAD in_a_row_each changed

CALLS = {
    **{f"MoE {mode}": (cutlass_fused_moe, lambda mode=mode: _moe(mode)) for mode in range(3)},
    "MoE, NVFP4": (cutlass_fused_moe, lambda: _moe(2, weights="nvfp4")),
    "MoE, SwigluStep": (cutlass_fused_moe, lambda: _moe(0, swiglu_step=True)),
    "MoE, Relu2": (cutlass_fused_moe, lambda: _moe(0, relu2=True)),
    "MoE, Relu2, NVFP4": (
        cutlass_fused_moe,
        lambda: _moe(2, relu2=True, weights="nvfp4"),
    ),
    "MoE workspace": (cutlass_fused_moe_workspace_size, workspace_sizes),
}
NOT_SERVED = "^backend='sm12x' takes packed e2m1 weights"
# Words of this operator's own, beside those of the checks.
OTHERS: dict[str, list[tuple[Any, ...]]] = {
    "MoE 0": [
        ({"use_mxfp8_act_scaling": False}, NOT_SERVED),
        ({"use_w4_group_scaling": True}, NOT_SERVED),
        ({"use_packed_weights": True}, NOT_SERVED),
        ({"use_wfp4afp8_humming": True}, NOT_SERVED),
        ({"use_deepseek_fp8_block_scale": True}, NOT_SERVED),
        ({"fc1_expert_weights": lambda w: w.bfloat16()}, NOT_SERVED),
        ({"activation_type": 4}, NOT_SERVED),
    ],
    "MoE workspace": [
        ({"weight_dtype": torch.bfloat16}, NOT_SERVED),
        ({"max_num_tokens": 0}, "max_num_tokens must be positive, got 0"),
        ({"intermediate_size": -32}, "intermediate_size must be positive, got -32"),
        ({"num_experts_total": 0}, "num_experts_total must be positive, got 0"),
        ({"top_k": 0}, "top_k must be positive, got 0"),
        ({"ep_size": 3}, r"num_experts_total \(8\) must be divisible by ep_size \(3\)"),
        ({"ep_size": 2, "ep_rank": 2}, r"ep_rank must be in \[0, 2\), got 2"),
        ({"tp_size": 0}, "tp_size must be positive, got 0"),
    ],
}


@pytest.mark.parametrize(("operator", "changes", "message", "error"), [*in_a_row_each(MOE_BAD), *in_a_row_each(OTHERS)])
def test_a_bad_argument_is_named(
    operator: str,
    changes: Arguments,
    message: str,
    error: type[Exception],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, make = CALLS[operator]
    arguments = on(device, make())
    if "device" in arguments:
        arguments["device"] = device
    launched: list[Any] = []
    monkeypatch.setattr(sm12x_moe, "launch", lambda *given: launched.append(given) or True)
    function(**arguments)
    assert len(launched) == (operator != "MoE workspace")
    with pytest.raises(error, match=message):
        function(**on(device, changed(arguments, changes)))
    assert len(launched) == (operator != "MoE workspace")


@pytest.mark.parametrize("written", ["output", "workspace_buffer"])
def test_what_is_written_is_memory_of_its_own(written: str, device: torch.device) -> None:
    """Each tensor in turn lies in it, from its first byte and behind that."""
    names = ("input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_biases")
    for name in names:
        for offset in (0, 1024):
            arguments = on(device, _moe(2))
            other = arguments[name]
            size = 6 * 160 * 2 if written == "output" else 4096
            memory = torch.zeros(max(size, offset + other.nbytes), dtype=torch.uint8, device=device)
            inside = memory[offset : offset + other.nbytes].view(other.dtype).view(other.shape)
            arguments[name] = inside.copy_(other)
            first = memory[:size]
            arguments[written] = first.view(torch.bfloat16).view(6, 160) if written == "output" else first
            with pytest.raises(ValueError, match=f"^{written} overlaps {name}; it must be memory of its own$"):
                cutlass_fused_moe(**arguments)


def test_a_workspace_that_is_a_byte_too_small(device: torch.device) -> None:
    sizes = {**workspace_sizes(), "max_num_tokens": 6, "device": device}
    needed = cutlass_fused_moe_workspace_size(**sizes)
    workspace = torch.empty(needed - 1, dtype=torch.uint8, device=device)
    message = f"^workspace_buffer holds {needed - 1} bytes; this call needs {needed} "
    with pytest.raises(ValueError, match=message):
        cutlass_fused_moe(**on(device, _moe(1)), workspace_buffer=workspace)
