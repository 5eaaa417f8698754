# SPDX-License-Identifier: Apache-2.0
"""What reaches the compiled modules: each argument of an operator under the name that the C++ has for it."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from bindings import in_order, named, signatures
from recording_backend import RecordingBackend

from flashinfer.decode import decode_attention
from flashinfer.fused_moe import moe_step, router_top_k
from flashinfer.gemm import (
    dense_block_scaled,
    dense_block_scaled_rescored_top_k,
    dense_block_scaled_top_k,
    rmsnorm_dense_block_scaled,
)
from flashinfer.gemm.sm12x_dense_launch import MXFP8_SWIZZLED
from flashinfer.gemm.sm12x_group_gemm import GroupGemmCall, group_gemm
from flashinfer.sm12x.device_class import GB10, HOPPER, DeviceClass
from flashinfer.sm12x.instances import GEMM_INSTANCES, MX_DENSE_INSTANCES, index_of, tactic
from flashinfer.testing import (
    DenseCase,
    MoECase,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    virtual_device,
)
from flashinfer.testing.decode_reference import make_decode_case
from flashinfer.testing.router_reference import make_router_inputs

SEED = 3
DENSE = {row.name: row.index for row in MX_DENSE_INSTANCES}


def test_one_argument_under_its_name() -> None:
    """As a kernel author would write a launch: by names, which the C++ orders."""
    ordered = in_order(
        "sm12x_group_gemm_run",
        enable_pdl=True,
        tactic=7,
        **dict.fromkeys("a a_sf b b_sf m_indptr out workspace".split(), WORKSPACE),
    )
    assert named("sm12x_group_gemm_run", ordered)["tactic"] == 7
    with pytest.raises(TypeError, match="C\\+\\+ takes int64_t"):
        named("sm12x_group_gemm_run", (*ordered[:-2], True, True))


class Module:
    """A module whose functions keep what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            given = named(name, arguments)
            if name.endswith("workspace_size"):
                return 64
            self.calls.append((name, given))
            return True

        return called


@dataclasses.dataclass
class Launch:
    """A function of a module, and the operator's call that reaches it.

    ``wanted`` has the value of each parameter: a tensor, a number, or a function of the operator's result; None is
    anything, for memory that the call allocates.  Of ``switches`` one after the other is on, by what it is in the call.
    """

    operator: Callable[..., Any]
    arguments: dict[str, Any]
    wanted: dict[str, Any]
    switches: Mapping[str, tuple[str, Any, Any]] = dataclasses.field(default_factory=dict)
    device_class: DeviceClass = GB10
    absent: frozenset[str] = frozenset()
    """Parameters that are None, rather than anything."""


PDL = {"enable_pdl": ("enable_pdl", False, True)}
WORKSPACE = torch.zeros(64, dtype=torch.uint8)
AHEAD = torch.zeros(32, dtype=torch.uint8)


def _moe(logits: bool = False) -> Launch:
    # 128 tokens and a hidden size of 128: scales have one shape in both layouts.
    layer = make_moe_inputs(MoECase(128, 128, 64, 8, 2, 0, ep_size=2, ep_rank=1), SEED)
    arguments = layer.arguments()
    fc1_sf, fc1_global, fc2_sf, fc2_global = arguments["quant_scales"]
    pair = ["mxfp8_m32_k256", "mxfp8_m8_k256"]
    given = {
        "output": torch.empty(128, 128, dtype=torch.bfloat16),
        "workspace_buffer": WORKSPACE,
        "barrier": torch.zeros(2, dtype=torch.int32),
        "next_weights": AHEAD,
    }
    routing: dict[str, Any] = {name: arguments[name] for name in ("token_selected_experts", "token_final_scales")}
    absent: dict[str, Any] = {"router_logits": None, "is_padding": None}
    if logits:
        pair = ["stream_mxfp8_as_bf16_m8"] * 2
        for name in ("input", "input_sf"):
            arguments[name] = arguments[name].view(128, -1)[:1].clone()
        given["output"] = given["output"][:1]
        absent = dict.fromkeys(routing)
        routing = {"router_logits": torch.zeros(1, 8), "is_padding": torch.zeros(1).bool()}
        given["top_k"] = 2  # type: ignore[assignment]
    arguments |= given | dict.fromkeys(absent) | routing
    arguments["profile_ids"] = [tactic(name) for name in pair]
    switches = {"swizzled_input_sf": ("swizzled_input_sf", False, True), **PDL}
    if logits:  # linear scales of one row are no 128 rows
        arguments["swizzled_input_sf"] = False
        del switches["swizzled_input_sf"]
    same = "input input_sf token_selected_experts token_final_scales swiglu_alpha swiglu_beta swiglu_limit".split()
    wanted = {
        **{
            name: arguments[name]
            for name in (*same, "output", "barrier", "next_weights", "router_logits", "is_padding")
        },
        "top_k": 2,
        "fc1_w": arguments["fc1_expert_weights"],
        "fc1_sf": fc1_sf,
        "fc1_global": fc1_global,
        "fc1_bias": arguments["fc1_expert_biases"],
        "fc2_w": arguments["fc2_expert_weights"],
        "fc2_sf": fc2_sf,
        "fc2_global": fc2_global,
        "fc2_bias": arguments["fc2_expert_biases"],
        "activation_type": 3,
        "workspace": WORKSPACE,
        "mode": 0,
        "first_expert": 4,
        "num_experts_total": 8,
        "tactic_fc1": index_of(pair[0]),
        "tactic_fc2": index_of(pair[1]),
        **({"swizzled_input_sf": False} if logits else {}),
    }
    return Launch(moe_step, arguments, wanted, switches, absent=frozenset(absent))


def _router() -> Launch:
    given = make_router_inputs(3, 64, 16, 2, SEED, adds=True, norms=True, bias=True)
    given |= {"is_padding": torch.zeros(3).bool(), "eps": 0.25}
    wanted = {
        "top_k_weights": lambda result: result.topk_weights,
        "top_k_ids": lambda result: result.topk_ids,
        "logits": lambda result: result.logits,
        "normed": lambda result: result.hidden_states,
        "sum": lambda result: result.residual,
        "hidden": given["hidden_states"],
        "epsilon": 0.25,
        **{name: given[name] for name in ("weight", "bias", "residual", "norm_weight", "is_padding")},
    }
    rounds = {"rounds_logits": ("logits_dtype", torch.float32, torch.bfloat16)}
    return Launch(router_top_k, given, wanted, {**rounds, "constant_weights": ("constant_weights", False, True), **PDL})


CONSTANT = {"weights_first": ("constant_weights", False, True), **PDL}


def _dense(**more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    inputs = make_dense_inputs(DenseCase(3, 72, 96, bias=torch.bfloat16, alpha=True, residual=True, **more), SEED)
    given = dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | inputs.named
    wanted = {name: given[name] for name in ("alpha", "bias", "residual")}
    return given, wanted | {"tokens": given["x"], "weights": given["weight"], "weight_scales": given["weight_scale"]}


def _dense_launch() -> Launch:
    given, wanted = _dense(tokens="mxfp8")
    out, name = torch.zeros(3, 72, dtype=torch.bfloat16), "dense_mxfp4_m64_gemm_mxfp8"
    given |= {"out": out, "next_weights": AHEAD, "tactic": name}
    wanted |= {"out": out, "token_scales": given["x_scale"], "workspace": None, "next_weights": AHEAD}
    return Launch(dense_block_scaled, given, wanted | {"token_format": MXFP8_SWIZZLED, "tactic": DENSE[name]}, CONSTANT)


def _largest(wanted: dict[str, Any], logits: torch.Tensor) -> tuple[dict[str, Any], dict[str, Any]]:
    """The call's further arguments, and what follows from them."""
    wanted |= {"values": lambda result: result.values, "indices": lambda result: result.indices, "ranks": None}
    return {"top_k": 4, "first_index": 1000, "logits": logits}, wanted | {"first_index": 1000}


def _dense_top_k() -> Launch:
    given, wanted = _dense(tokens="mxfp8")
    out, name = torch.zeros(3, 72, dtype=torch.bfloat16), "dense_mxfp4_m64_gemm_mxfp8"
    more, wanted = _largest(wanted, out)
    given |= more | {"tactic": name}
    wanted |= {"out": out, "token_scales": given["x_scale"], "workspace": None}
    wanted |= {"token_format": MXFP8_SWIZZLED, "tactic": DENSE[name]}
    return Launch(dense_block_scaled_top_k, given, wanted, CONSTANT)


def _rescore() -> Launch:
    given, _ = _dense()
    del given["residual"]
    fine, fine_scale = torch.zeros(72, 96, dtype=torch.int8), torch.zeros(128, 4, dtype=torch.uint8)
    given |= {"fine_weight": fine, "fine_scale": fine_scale, "fine_format": "mxint8", "groups": 2, "rescored": 5}
    logits = torch.zeros(3, 72, dtype=torch.bfloat16)
    more, wanted = _largest({"tokens": given["x"], "bias": given["bias"]}, logits)
    wanted |= {"logits": logits, "fine": fine, "fine_scales": fine_scale, "groups": 2, "rescored": 5}
    return Launch(dense_block_scaled_rescored_top_k, given | more, wanted, PDL)


def _row_top_k() -> Launch:
    """Of logits that cuBLAS computes, from a weight that is dequantized first."""
    given, _ = _dense()
    tokens = HOPPER.cublas_tokens
    given |= {"x": torch.zeros(tokens, 96).bfloat16(), "residual": torch.zeros(tokens, 72).bfloat16()}
    logits = torch.zeros(tokens, 72, dtype=torch.bfloat16)
    more, wanted = _largest({}, logits)
    return Launch(dense_block_scaled_top_k, given | more, wanted | {"logits": logits}, PDL, HOPPER)


def _dequantize() -> Launch:
    launch = _row_top_k()
    weight, scales = launch.arguments["weight"], launch.arguments["weight_scale"]
    wanted = {"out": None, "rows": weight, "scales": scales, "format": None}
    return Launch(launch.operator, launch.arguments, wanted, {}, HOPPER)


def _dense_normed() -> Launch:
    given, wanted = _dense()
    residual, norm_weight = torch.zeros(3, 96).bfloat16(), torch.ones(96).bfloat16()
    given |= {"residual": residual, "norm_weight": norm_weight, "eps": 0.25, "next_weights": AHEAD}
    given["tactic"] = "dense_mxfp4_m8_w2"
    del wanted["residual"]
    wanted |= {
        "sum": lambda result: result.residual,
        "addend": residual,
        "norm_weight": norm_weight,
        "epsilon": 0.25,
        "out": lambda result: result.output,
        "tactic": DENSE["dense_mxfp4_m8_w2"],
        "next_weights": AHEAD,
    }
    return Launch(rmsnorm_dense_block_scaled, given, wanted, CONSTANT)


def _group_gemm() -> Launch:
    given = {**make_group_gemm_inputs([3, 5], 64, 96, SEED), "out": torch.zeros(8, 64, dtype=torch.bfloat16)}
    row = GEMM_INSTANCES[0].index
    options = {"tiles": [1, 128, 128, 128], "swap_ab": True, "out_dtype": None, "tactic": row}
    wanted = {name: given[name] for name in ("out", "a", "b", "m_indptr")}
    wanted |= {"a_sf": given["a_scale"], "b_sf": given["b_scale"], "workspace": None, "tactic": row, "enable_pdl": True}
    return Launch(lambda **arguments: group_gemm(GroupGemmCall(**arguments)), given | options, wanted)


def _decode() -> Launch:
    given: dict[str, Any] = {**make_decode_case([17, 5], 1, SEED, q_len=1, fp8=True).arguments}
    given |= {"out": torch.zeros(given["query"].shape).bfloat16(), "workspace_buffer": WORKSPACE, "window_left": 40}
    given |= {"sm_scale": 0.5, "k_scale": 0.25, "v_scale": 3.0}
    keys, values = given["kv_cache"].unbind(1)
    same = "out query key value block_tables seq_lens rope_table sinks window_left".split()
    wanted = {
        **{name: given[name] for name in same},
        "key_cache": keys,
        "value_cache": values,
        "workspace": WORKSPACE,
        "q_len": 1,
        "score_scale": 0.5 * 0.25 * math.log2(math.e),
        "key_scale": 0.25,
        "value_scale": 3.0,
    }
    return Launch(decode_attention, given, wanted, {"constant_cache": ("constant_cache", False, True), **PDL})


LAUNCHES: dict[str, tuple[str, Callable[[], Launch]]] = {
    "MoE": ("sm12x_moe_run", _moe),
    "MoE by logits": ("sm12x_moe_run", lambda: _moe(logits=True)),
    "router": ("sm12x_router_run", _router),
    "dense": ("sm12x_dense_run", _dense_launch),
    "dense and top-k": ("sm12x_dense_top_k_run", _dense_top_k),
    "rescoring": ("sm12x_rescore_run", _rescore),
    "top-k": ("sm12x_row_top_k_run", _row_top_k),
    "dequantized rows": ("sm12x_dequantize_rows", _dequantize),
    "norm and dense": ("sm12x_dense_normed_run", _dense_normed),
    "grouped GEMM": ("sm12x_group_gemm_run", _group_gemm),
    "decode": ("sm12x_decode_run", _decode),
}


def _is(value: Any, wanted: Any) -> bool:
    if not isinstance(wanted, torch.Tensor):
        return bool(value == wanted)
    return value is not None and bool(value.data_ptr() == wanted.data_ptr())


@pytest.mark.parametrize("name", LAUNCHES)
def test_arguments_have_the_names_of_the_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two arguments of one type are alike, so that a swap shows."""
    print("seed", SEED)
    function, make = LAUNCHES[name]
    launch = make()
    parameters = signatures()[function]
    # float32 results of bfloat16 operands: torch has these on CUDA only.
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: torch.matmul(a.to(out_dtype), b.to(out_dtype)))
    assert launch.wanted.keys() | launch.switches.keys() == parameters.keys()
    for on in launch.switches or [""]:
        module = Module()
        backend = RecordingBackend(module, launch.device_class)
        monkeypatch.setattr(virtual_device, "active", lambda backend=backend: backend)
        chosen = {public: values[switch == on] for switch, (public, *values) in launch.switches.items()}
        result = launch.operator(**launch.arguments | chosen)
        (got,) = [arguments for called, arguments in module.calls if called == function]
        wanted = {place: value(result) if callable(value) else value for place, value in launch.wanted.items()}
        wanted |= {switch: switch == on for switch in launch.switches}
        for place, value in wanted.items():
            if value is not None or place in launch.absent:
                assert _is(got[place], value), place
        kinds = {place: kind.removeprefix("Optional<").removesuffix(">") for place, kind in parameters.items()}
        swappable = [place for place, kind in kinds.items() if kind != "bool" and got[place] is not None]
        for one, two in itertools.combinations(swappable, 2):
            if kinds[one] == kinds[two] and (one, two) != ("tactic_fc1", "tactic_fc2"):
                assert not _is(got[one], got[two]), (one, two)


def test_every_function_that_an_operator_launches_is_called_here() -> None:
    launched = {name for name in signatures() if name.endswith("_run") or "dequantize" in name}
    assert launched == {function for function, _ in LAUNCHES.values()}
