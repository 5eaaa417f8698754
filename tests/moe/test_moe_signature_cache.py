# SPDX-License-Identifier: Apache-2.0
"""A call that looks like an earlier one skips validation: it must cost little, and nothing else may skip it."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flashinfer.autotuner import AutoTuner
from moe_recording import CASE, WORKSPACE, RecordingModule, meta_arguments

import flashinfer
from flashinfer import sm12x_probes
from flashinfer.fused_moe import core, sm12x_dispatch, sm12x_operator, sm12x_signature_cache
from flashinfer.testing import make_moe_inputs

# Calls of Python and C functions that sys.setprofile sees in a call that is known, the public function's included.
# Counted with CPython 3.11: 30, and 36 in a process that has an autotuner.  Each is 40 to 100 ns.
MOST_CALLS = {False: 30, True: 36}


def _complete(mode: int) -> dict[str, Any]:
    arguments = meta_arguments(mode)
    arguments["output"] = torch.empty(6, 160, dtype=torch.bfloat16, device="meta")
    arguments["workspace_buffer"] = torch.empty(WORKSPACE, dtype=torch.uint8, device="meta")
    return arguments


def _counted(function: Callable[[], Any]) -> list[str]:
    """Names of the functions that ``function`` calls, its own apart."""
    names: list[str] = []

    def record(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            names.append(frame.f_code.co_name)
        elif event == "c_call":
            names.append(argument.__name__)

    sys.setprofile(record)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names[1:-1]  # without the lambda, and without setprofile itself


@pytest.mark.parametrize("tuner", [False, True])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_repeated_call_takes_few_steps(
    mode: int, tuner: bool, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = _complete(mode)
    if tuner:
        AutoTuner.get()
    else:
        monkeypatch.setattr(AutoTuner, "_instance", None)

    def call() -> torch.Tensor:
        return flashinfer.cutlass_fused_moe(**arguments)

    first = _counted(call)
    names = _counted(call)
    print(f"mode {mode}: {len(first)} calls the first time, {len(names)} after it: {names}")
    assert "validate_moe" in first
    assert "validate_moe" not in names
    assert len(names) <= MOST_CALLS[tuner], names
    assert len(module.launches) == 2


@pytest.mark.parametrize("mode", [0, 1])
def test_one_tensor_in_two_places_is_repeated_too(mode: int, module: RecordingModule) -> None:
    """vLLM passes the same global scale for both GEMMs."""
    arguments = _complete(mode)
    fc1_sf, one, fc2_sf, _ = arguments["quant_scales"]
    shared = {**arguments, "quant_scales": [fc1_sf, one, fc2_sf, one]}
    flashinfer.cutlass_fused_moe(**shared)
    assert "validate_moe" not in _counted(lambda: flashinfer.cutlass_fused_moe(**shared))
    distinct = {**arguments, "quant_scales": [fc1_sf, one, fc2_sf, one.clone()]}
    assert "validate_moe" in _counted(lambda: flashinfer.cutlass_fused_moe(**distinct))
    for known in (shared, distinct):
        assert "validate_moe" not in _counted(lambda known=known: flashinfer.cutlass_fused_moe(**known))
    other = {**arguments, "quant_scales": [fc1_sf, one[:-1], fc2_sf, one[:-1]]}
    with pytest.raises(ValueError, match="quant_scales"):
        flashinfer.cutlass_fused_moe(**other)


def test_repeated_call_without_the_c_guards_does_the_same(
    module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sm12x_probes, "TENSOR_GUARDS", None)
    arguments = _complete(0)
    flashinfer.cutlass_fused_moe(**arguments)
    names = _counted(lambda: flashinfer.cutlass_fused_moe(**arguments))
    assert "validate_moe" not in names
    with pytest.raises(ValueError, match=r"^input_sf "):
        flashinfer.cutlass_fused_moe(**{**arguments, "input_sf": arguments["input_sf"][:-1]})


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty((*tensor.shape, 2), dtype=tensor.dtype, device=tensor.device)[..., 0]


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda tensor: torch.empty((*tensor.shape[:-1], tensor.shape[-1] + 32), dtype=tensor.dtype, device="meta"),
    # A dtype that no argument may have, but for weights: other dtypes of theirs make the call one of upstream's.
    "dtype": lambda tensor: torch.empty(
        tensor.shape, dtype=torch.int64 if tensor.ndim == 3 and tensor.shape[-1] > 8 else torch.complex64, device="meta"
    ),
    "device": lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"),
    "layout": _strided,
}
# Every tensor of a call; those of quant_scales by their position.
TENSORS = (
    "input", "input_sf", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights",
    "fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "output",
    "workspace_buffer", 0, 1, 2, 3,
)  # fmt: skip


@pytest.mark.parametrize("guards", ["C", "Python"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("tensor", TENSORS)
def test_a_changed_tensor_is_validated_again(
    tensor: str | int, change: str, guards: str, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guards == "Python":
        monkeypatch.setattr(sm12x_probes, "TENSOR_GUARDS", None)
    arguments = _complete(0)
    flashinfer.cutlass_fused_moe(**arguments)
    changed = dict(arguments)
    if isinstance(tensor, int):
        changed["quant_scales"] = list(arguments["quant_scales"])
        changed["quant_scales"][tensor] = CHANGES[change](changed["quant_scales"][tensor])
    elif tensor == "workspace_buffer" and change == "shape":
        changed[tensor] = arguments[tensor][:-1]
    else:
        changed[tensor] = CHANGES[change](arguments[tensor])
    with pytest.raises((ValueError, TypeError), match=r"; it must be|; this call needs"):
        flashinfer.cutlass_fused_moe(**changed)
    assert len(module.launches) == 1
    flashinfer.cutlass_fused_moe(**arguments)
    assert len(module.launches) == 2


def test_metadata_changed_in_place_is_validated_again(module: RecordingModule) -> None:
    """A parameter keeps its identity when its data are exchanged."""
    arguments = _complete(0)
    arguments["fc1_expert_weights"] = torch.nn.Parameter(arguments["fc1_expert_weights"], requires_grad=False)
    for _ in range(2):
        flashinfer.cutlass_fused_moe(**arguments)
    arguments["fc1_expert_weights"].data = torch.empty(8, 192, 96, dtype=torch.uint8, device="meta")
    with pytest.raises(ValueError, match=r"^fc1_expert_weights is .*\(8, 192, 96\).*\(8, 192, 80\)"):
        flashinfer.cutlass_fused_moe(**arguments)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tp_size": 0}, "tp_size"),
        ({"tp_size": [1]}, "tp_size is a list of 1"),
        ({"ep_rank": 3}, "ep_rank is 3"),
        ({"cluster_size": 2}, "cluster_size is 2"),
        ({"min_latency_mode": True}, "min_latency_mode is True"),
        ({"output_dtype": torch.float32}, "output_dtype is torch.float32"),
        ({"profile_ids": [0]}, r"profile_ids is \[0\]"),
        ({"profile_ids": [0, 9999]}, r"profile_ids is \[0, 9999\]"),
        ({"quant_scales": None}, "quant_scales is None"),
        ({"quant_scales": []}, "quant_scales is a list of 0"),
        ({"input_sf": None}, "input_sf is None"),
        ({"use_w4_group_scaling": True}, "use_mxfp8_act_scaling and use_w4_group_scaling are both True"),
        ({"swiglu_limit": 7.0}, "swiglu_limit is 7.0"),
        ({"clamped_relu2_limit": 7.0}, "clamped_relu2_limit is given"),
        ({"situ_beta": 7.0}, "situ_beta is given"),
        ({"situ_linear_beta": 7.0}, "situ_linear_beta is given"),
        ({"tune_max_num_tokens": 0}, "tune_max_num_tokens is 0"),
        ({"ep_size": 2**29}, "ep_size is 536870912; .* with 8 experts a rank, since ids are int32"),
    ],
)
@pytest.mark.parametrize("guards", ["C", "Python"])
def test_a_changed_option_is_validated_again(
    guards: str, changes: dict[str, Any], text: str, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    if guards == "Python":
        monkeypatch.setattr(sm12x_probes, "TENSOR_GUARDS", None)
    arguments = _complete(0)
    flashinfer.cutlass_fused_moe(**arguments)
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=text):
        flashinfer.cutlass_fused_moe(**{**arguments, **changes})
    assert len(module.launches) == 1


def test_options_that_reach_the_launch_are_not_mixed_up(module: RecordingModule) -> None:
    arguments = _complete(1)
    wanted = [(pdl, swizzled) for pdl in (True, False) for swizzled in (True, False)] * 2
    for pdl, swizzled in wanted:
        flashinfer.cutlass_fused_moe(**{**arguments, "enable_pdl": pdl, "swizzled_input_sf": swizzled})
    assert [(launch["enable_pdl"], launch["swizzled_input_sf"]) for launch in module.launches] == wanted


def test_profile_ids_of_a_repeated_call_are_honoured(module: RecordingModule) -> None:
    from flashinfer.fused_moe.sm12x_launch import allowed_tactics, computes_layer
    from flashinfer.fused_moe.sm12x_validation import Mode
    from flashinfer.jit.sm12x.instances import INSTANCES

    tactics = [tactic for tactic in allowed_tactics(Mode.HALF_INPUT, True) if not computes_layer(tactic)]
    arguments = _complete(1)
    pairs = [[tactic, other] for tactic in tactics for other in (tactics[0], tactics[-1])] * 2
    for pair in pairs:
        flashinfer.cutlass_fused_moe(**arguments, profile_ids=[INSTANCES[tactic].number for tactic in pair])
    assert [[launch["tactic_fc1"], launch["tactic_fc2"]] for launch in module.launches] == pairs


def test_asked_for_value_checks_nothing_is_remembered(module: RecordingModule, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(sm12x_operator, "check_expert_ids", lambda ids, experts: checked.append(experts))
    arguments = _complete(1)
    flashinfer.cutlass_fused_moe(**arguments)
    assert checked == []
    monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    for _ in range(2):
        flashinfer.cutlass_fused_moe(**arguments)
    assert checked == [8, 8]
    monkeypatch.delenv("FLASHINFER_SM12X_CHECK")
    flashinfer.cutlass_fused_moe(**arguments)
    assert checked == [8, 8]
    assert len(module.launches) == 4


def test_switching_to_upstream_is_seen_by_a_repeated_call(
    module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = _complete(1)
    flashinfer.cutlass_fused_moe(**arguments)
    monkeypatch.setattr(sm12x_dispatch, "serves", lambda device: os.environ.get("FLASHINFER_SM12X_MOE") != "0")
    monkeypatch.setattr(core, "require_computing_device", lambda name, tensor: None)  # meta stands for CUDA
    monkeypatch.setattr(core._upstream, "cutlass_fused_moe", lambda **named: "upstream")
    assert flashinfer.cutlass_fused_moe(**arguments) is arguments["output"]
    monkeypatch.setenv("FLASHINFER_SM12X_MOE", "0")
    assert flashinfer.cutlass_fused_moe(**arguments) == "upstream"
    assert len(module.launches) == 2


def test_the_memory_is_bounded_and_keeps_no_tensor(module: RecordingModule, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = _complete(1)
    for size in range(2 * sm12x_signature_cache.MAX_SIGNATURES):
        arguments["workspace_buffer"] = torch.empty(WORKSPACE + size, dtype=torch.uint8, device="meta")
        flashinfer.cutlass_fused_moe(**arguments)
    (signatures,) = sm12x_signature_cache._cache.values()
    assert len(signatures) == sm12x_signature_cache.MAX_SIGNATURES
    assert "validate_moe" not in _counted(lambda: flashinfer.cutlass_fused_moe(**arguments))
    monkeypatch.setattr(sm12x_signature_cache, "MAX_OPTIONS", 2)
    for pdl in (True, False, None):
        flashinfer.cutlass_fused_moe(**arguments, enable_pdl=pdl)
    assert len(sm12x_signature_cache._cache) <= 2
    weights = weakref.ref(arguments["fc1_expert_weights"])
    module.launches.clear()
    arguments.clear()
    gc.collect()
    assert weights() is None


@pytest.mark.parametrize(
    "name",
    [
        "input",
        "input_sf",
        "output",
        "fc1_expert_weights",
        "fc1_expert_biases",
        "fc2_expert_weights",
        "fc2_expert_biases",
        0,
        2,
        "workspace_buffer",
    ],
)
def test_a_misaligned_address_is_refused_in_a_repeated_call(
    name: str | int, module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU tensors, which have addresses, called the way a CUDA call is."""
    inputs = make_moe_inputs(CASE, 0)
    arguments = {**inputs.arguments(), "output": torch.empty(6, 160, dtype=torch.bfloat16)}
    arguments["workspace_buffer"] = torch.empty(WORKSPACE + 256, dtype=torch.uint8)
    arguments["workspace_buffer"] = arguments["workspace_buffer"][-arguments["workspace_buffer"].data_ptr() % 128 :]
    arguments["workspace_buffer"] = arguments["workspace_buffer"][:WORKSPACE]
    arguments["quant_scales"] = list(arguments["quant_scales"])
    scales = arguments.pop("quant_scales")
    fields = {field: arguments.get(field) for field in sm12x_signature_cache.MoETensors._fields}
    problem = sm12x_operator._validated_problem(
        sm12x_operator.MoECall(
            sm12x_operator.Mode(CASE.mode), torch.bfloat16, True, (1, 1 - 1, 1, 0), sm12x_signature_cache.MoETensors(**fields),
            scales, False, 8192, None, None,
        )
    )  # fmt: skip
    plan = sm12x_signature_cache.Plan(problem, WORKSPACE, (0, 0))
    known = sm12x_signature_cache.ValidatedCall(plan, torch.device("cpu"), torch.bfloat16, True, True, (0, 0))
    known.run(tuple(fields.values()), scales, 8192)

    alignment = {"workspace_buffer": 128, "input_sf": 4}.get(name, 16)  # type: ignore[call-overload]

    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        wide = torch.empty(tensor.numel() * tensor.element_size() + 256, dtype=torch.uint8)
        start = -wide.data_ptr() % 128 + alignment // 2
        return wide[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)

    if isinstance(name, int):
        scales[name] = shifted(scales[name])
    else:
        fields[name] = shifted(fields[name])
    label = {0: r"fc1's block scales \(quant_scales\)", 2: r"fc2's block scales \(quant_scales\)"}.get(name, name)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=rf"^{label} starts at address 0x[0-9a-f]+; .*aligned to {alignment} bytes"):
        known.run(tuple(fields.values()), scales, 8192)
    assert len(module.launches) == 1


PROGRAM = """
import torch, flashinfer
from flashinfer.testing import MoECase, make_moe_inputs
arguments = make_moe_inputs(MoECase(2, 64, 32, 4, 2, 1), 0).arguments()
for _ in range(2):
    flashinfer.cutlass_fused_moe(**arguments)
print("has fi_trace:", callable(flashinfer.cutlass_fused_moe.fi_trace))
"""


@pytest.mark.parametrize("log_level", ["0", "1"])
def test_traces_and_logs_are_upstreams(log_level: str, tmp_path: Path) -> None:
    """``FLASHINFER_TRACE_DUMP`` writes one file per kind of call, ``FLASHINFER_LOGLEVEL=1`` names each call."""
    environment = {
        **os.environ,
        "FLASHINFER_LOGLEVEL": log_level,
        "FLASHINFER_TRACE_DUMP": "1",
        "FLASHINFER_TRACE_DUMP_DIR": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300
    )
    assert result.returncode == 0, result.stderr
    assert "has fi_trace: True" in result.stdout
    assert "no trace of cutlass_fused_moe was dumped" not in result.stderr, result.stderr
    (file,) = tmp_path.rglob("*.json")
    assert "moe" in json.dumps(json.loads(file.read_text()))
    assert result.stdout.count("cutlass_fused_moe") == (2 if log_level == "1" else 0), result.stdout


def test_a_trace_that_fails_warns_once_and_does_not_fail_the_call(
    module: RecordingModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**named: Any) -> None:
        raise KeyError("no template")

    monkeypatch.setenv("FLASHINFER_TRACE_DUMP", "1")
    monkeypatch.setattr(core.cutlass_fused_moe, "fi_trace", broken)
    core._warn_of_trace.cache_clear()
    arguments = _complete(1)
    with pytest.warns(UserWarning, match="no trace of cutlass_fused_moe was dumped: KeyError: 'no template'"):
        flashinfer.cutlass_fused_moe(**arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flashinfer.cutlass_fused_moe(**arguments)
    assert len(module.launches) == 2
