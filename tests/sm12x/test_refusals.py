# SPDX-License-Identifier: Apache-2.0
"""What a launcher refuses, Python has refused before, on every backend.

The refusals are read from the C++: a new one belongs into :data:`TWINS`, beside a call whose error comes before it, or
into :data:`UNREACHABLE`, with what Python passes instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bindings import refusals
from operator_calls import OPERATORS, Arguments, moved_to, outcome

import flashinfer
from flashinfer._layer import fork_root
from flashinfer.fused_moe import sm12x_validation
from flashinfer.fused_moe.sm12x_validation import MoECall
from flashinfer.gemm import sm12x_group_gemm
from flashinfer.gemm.sm12x_dense import require_tokens
from flashinfer.gemm.sm12x_dense_launch import BF16, DenseCall
from flashinfer.quantization.block_scaled import LAYOUTS
from flashinfer.sm12x.checks import MOST_ACTIVATION_BYTES, require_activation_bytes
from flashinfer.sm12x.instances import INSTANCES, MX_DENSE_INSTANCES, tactic


def _call(operator: str, change: Callable[[Arguments], Any]) -> Callable[[], tuple[str, str]]:
    def run() -> tuple[str, str]:
        function, make = OPERATORS[operator]
        arguments = make()
        change(arguments)
        return outcome(function, arguments)[:2]

    return run


def _put(operator: str, name: str, change: Callable[[Any], Any]) -> Callable[[], tuple[str, str]]:
    return _call(operator, lambda given: given.update({name: change(given.get(name))}))


def _scales(place: int, change: Callable[[torch.Tensor], Any]) -> Callable[[], tuple[str, str]]:
    def apply(given: Arguments) -> None:
        held = list(given["quant_scales"])
        held[place] = change(held[place])
        given["quant_scales"] = held

    return _call("MoE 0", apply)


def _tactics(mode: int, *names: str, **more: Any) -> Callable[[], tuple[str, str]]:
    return _call(f"MoE {mode}", lambda given: given.update(profile_ids=[tactic(name) for name in names], **more))


def _logits(experts: int) -> Callable[[], tuple[str, str]]:
    def run() -> tuple[str, str]:
        call, device = _meta_call(2, 32, 32, 2), torch.device("meta")
        call = call._replace(
            ep_size=experts // 2,
            token_selected_experts=None,
            top_k=2,
            router_logits=torch.empty(2, experts, device=device),
        )
        return outcome(lambda: sm12x_validation.validate(call), {})[:2]

    return run


def _meta_call(tokens: int, hidden: int, inter: int, experts: int, top_k: int = 1) -> MoECall:
    """A call of W4A16 without memory: its metadata alone."""

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def scales(rows: int, k: int) -> torch.Tensor:
        return empty(experts, -(-rows // 128) * 128, -(-k // 128) * 4)

    given: dict[str, Any] = dict.fromkeys(MoECall._fields) | {
        "input": empty(tokens, hidden, dtype=torch.bfloat16),
        "token_selected_experts": empty(tokens, top_k, dtype=torch.int32),
        "fc1_expert_weights": empty(experts, 2 * inter, hidden // 2),
        "fc2_expert_weights": empty(experts, hidden, inter // 2),
        "quant_scales": [scales(2 * inter, hidden), scales(hidden, inter)],
        "activation_type": 3,
        "output_dtype": torch.bfloat16,
        "moe_mode": 2,
        "swizzled_input_sf": True,
        "tp_size": 1,
        "tp_rank": 0,
        "ep_size": 1,
        "ep_rank": 0,
        "enable_alltoall": False,
        "tune_max_num_tokens": 8192,
        "top_k": 0,
    }
    return MoECall(**given)


def _meta(tokens: int, hidden: int, inter: int, experts: int, top_k: int = 1) -> Callable[[], tuple[str, str]]:
    return lambda: outcome(lambda: sm12x_validation.validate(_meta_call(tokens, hidden, inter, experts, top_k)), {})[:2]


def _normed(rows: int) -> Callable[[], tuple[str, str]]:
    return _call("rmsnorm_dense_block_scaled", lambda given: given.update(norm_weight=given["norm_weight"][:rows]))


def _many_rows() -> tuple[str, str]:
    def more(given: Arguments) -> None:
        given.update(weight=torch.zeros(6200, 48, dtype=torch.uint8), bias=None, out=None, groups=1)
        given.update(weight_scale=torch.zeros(6272, 8, dtype=torch.uint8), fine_weight=torch.zeros(6200, 96).bfloat16())

    return _call("dense_block_scaled_rescored", more)()


def _long_rescored() -> tuple[str, str]:
    def longer(given: Arguments) -> None:
        given.update(x=torch.zeros(3, 14_368).bfloat16(), weight=torch.zeros(72, 7184, dtype=torch.uint8))
        given.update(
            weight_scale=torch.zeros(128, 900, dtype=torch.uint8), fine_weight=torch.zeros(72, 14_368).bfloat16()
        )

    return _call("dense_block_scaled_rescored", longer)()


def off(tensor: torch.Tensor) -> torch.Tensor:
    return moved_to(tensor, 1)


# The words of a refusal in C++, a wrong call, and the beginning of its error.
TWINS: dict[str, tuple[Callable[[], tuple[str, str]], str]] = {
    # The bindings' helpers.
    "must be bfloat16, float16 or float32": (_put("dense_block_scaled", "bias", lambda t: t.double()),
        "bias is torch.float64"),
    "next_weights must start at a multiple of 16 bytes": (
        _put("dense_block_scaled", "next_weights", lambda t: off(torch.zeros(32).byte())),
        "next_weights starts at address 0x; it must be aligned to 16 bytes",
    ),
    # Experts.
    "tactic is not among the instances of this module": (_call("MoE 0", lambda g: g.update(profile_ids=[1, 1])),
        "profile_ids is [1, 1]"),
    "tactic was compiled for other activations than this call has": (_tactics(0, "bf16_m8_k128", "bf16_m8_k128"),
        "profile_ids is"),
    "has scales; the tactic's weights have": (_scales(0, lambda t: t.flatten()[:-1]), "quant_scales[0] is"),
    "top_k is ; it must be at least 1": (
        lambda: outcome(
            lambda: flashinfer.fused_moe.cutlass_fused_moe_workspace_size(
                8, 160, 96, 8, 0, x_dtype=torch.bfloat16, weight_dtype=torch.uint8, use_w4_group_scaling=True,
                device="cpu"
            ),
            {},
        )[:2],
        "top_k is 0; it must be",
    ),
    "top_k is": (_put("MoE 0", "token_selected_experts", lambda t: t[:, :0]),
        "top_k (token_selected_experts.shape[1]) is 0"),
    "experts are chosen by token_selected_experts or by router_logits": (
        _put("moe_step", "token_selected_experts", lambda t: torch.zeros(3, 2, dtype=torch.int32)),
        "router_logits are given; token_selected_experts",
    ),
    "router_logits must be [tokens, experts]": (_put("moe_step", "router_logits", lambda t: t[:, :3].contiguous()),
        "router_logits is"),
    "is_padding must be [tokens]": (_put("moe_step", "is_padding", lambda t: t[:2]), "is_padding is"),
    "token_selected_experts must be [tokens, top_k]": (_put("MoE 0", "token_selected_experts", lambda t: t[:2]),
        "token_selected_experts is"),
    "barrier must have two elements": (_put("moe_step", "barrier", lambda t: t[:1]), "barrier is"),
    "activation_type is none of these kernels'": (_put("moe_step", "activation_type", lambda t: 4), "input is"),
    "input, fc1_expert_weights and fc2_expert_weights disagree about hidden or intermediate size": (
        _put("MoE 0", "fc1_expert_weights", lambda t: t[:, :-1].contiguous()),
        "fc1_expert_weights is",
    ),
    "hidden size and intermediate size must be multiples of 32": (_meta(1, 48, 32, 1), "hidden size"),
    "local experts; the kernels route at most": (_meta(1, 32, 32, 513), "fc2_expert_weights is"),
    "too many routed rows (tokens x top_k) for one call": (_meta(2**30, 32, 32, 1),
        "num_tokens (input.shape[0]) is 1073741824; with top_k 1"),
    "local experts [ , ) of": (_call("MoE 0", lambda g: g.update(ep_size=2, ep_rank=2)), "ep_rank is 2; it must be"),
    "MXFP8 input needs its scales (input_sf)": (_put("MoE 0", "input_sf", lambda t: None), "input_sf is None"),
    "input_sf must start at a multiple of 4 bytes": (_put("MoE 0", "input_sf", off),
        "input_sf (swizzled_input_sf=True) starts at"),
    "a fused MoE tactic computes both GEMMs: FC1 and FC2 must name the same": (_tactics(2, "bf16_m8_k128",
        "stream_bf16_m8"), "profile_ids is"),
    "a fused MoE kernel chooses experts of at most 32 routed rows (tokens x top_k), of at most 512": (
        _logits(514),
        "router_logits is torch.float32 (2, 514) on meta; it must have at most 512 experts",
    ),
    "FC1 and FC2 must keep activations in the same type": (_tactics(0, "mxfp8_m8_k128", "mxfp8_as_bf16_m16_k128"),
        "profile_ids is"),
    "a fused MoE tactic takes at most 1536 routed rows (tokens x top_k)": (
        _tactics(
            2,
            *["stream_bf16_m8"] * 2,
            input=torch.zeros(769, 96).bfloat16(),
            token_selected_experts=torch.zeros(769, 2, dtype=torch.int32),
            token_final_scales=None,
            output=None,
        ),
        "profile_ids is",
    ),
    "biases must start at a multiple of 16 bytes": (
        _put("MoE 0", "fc1_expert_biases", lambda t: moved_to(t, 8)),
        "fc1_expert_biases starts at address 0x; it must be aligned to 16 bytes",
    ),
    "activations of 64 GiB and more": (_meta(2**20, 2**16, 32, 1),
        "num_tokens (input.shape[0]) is 1048576; with 65536 bytes a row"),
    # Dense layers.
    "a row is wide, not": (_put("dense_block_scaled", "x", lambda t: t[:, :64].contiguous()), "x is"),
    "quantized rows need their scales": (_put("dense_block_scaled, MXFP8 tokens", "x_scale", lambda t: None), "x is"),
    "there are scales; are needed": (_put("dense_block_scaled, MXFP8 tokens", "x_scale", lambda t: t.flatten()[:-4]),
        "x_scale is"),
    "tactic of the dense layer does not exist": (_put("dense_block_scaled", "tactic", lambda t: 99), "tactic is '99'"),
    "tactic of the dense layer is no GEMM": (_put("dense_block_scaled", "tactic", lambda t: "none"),
        "tactic is 'none'"),
    "out must be [ , ]": (_put("dense_block_scaled", "out", lambda t: t[:2]), "out is"),
    "a row of weights is bytes, not": (_put("dense_block_scaled, mxfp6", "weight", lambda t: t[:, :40].contiguous()),
        "weight is"),
    "weight_scales is too small": (_put("dense_block_scaled", "weight_scale", lambda t: t[:-1]), "weight_scale is"),
    "bias must have n elements": (_put("dense_block_scaled", "bias", lambda t: t[:-1]), "bias is"),
    "residual must have the shape and dtype of out": (_put("dense_block_scaled", "residual", lambda t: t.float()),
        "residual is"),
    "top of": (_put("dense_block_scaled_top_k", "top_k", lambda t: 99), "top_k is 99"),
    "logits must be [tokens, n], of at least one token and one row of the fine weight": (
        _put("dense_block_scaled_rescored", "fine_weight", lambda t: t[:-1]), "fine_weight is"),
    "groups is , rescored ; they must be positive, rescored at most": (
        _put("dense_block_scaled_rescored", "rescored", lambda t: 17), "rescored is 17"),
    "groups is of rows; there are less than 2^27, in a group at most , in a launch 2^31 - 1 blocks": (
        _many_rows, "groups is 1; with 6200 rows it must be at least 2"),
    "k is ; it must be at most": (_long_rescored, "weight is torch.uint8"),
    "norm_weight must have k elements": (_normed(95), "norm_weight is"),
    "residual and what it adds up to must be [tokens, k], both or neither": (
        _put("rmsnorm_dense_block_scaled", "residual", lambda t: t[:2]),
        "residual is",
    ),
    "K is too long for this dense tactic": (_call("dense_block_scaled",
        lambda g: g.update(_long("dense_mxfp4_m8_w2"))), "tactic is"),
    # Grouped GEMM.
    "a must be float8_e4m3fn or float8_e5m2": (_put("grouped GEMM", "a", lambda t: t.view(torch.uint8)),
        "a is torch.uint8"),
    "a, b, out and m_indptr disagree about their sizes": (_put("grouped GEMM", "m_indptr", lambda t: t[:-1]),
        "m_indptr is"),
    "k is ; it must be a multiple of 32": (_put("grouped GEMM", "b", lambda t: t[:, :, :8].contiguous()),
        "k (b.shape[2] * 2) is 16"),
    "groups; the kernels take at most": (_put("grouped GEMM", "b", lambda t: t[:1].expand(513, -1, -1)), "b is"),
    "a_scale must start at a multiple of 4 bytes": (_put("grouped GEMM", "a_scale", off), "a_scale starts at"),
    # Router.
    "k is": (_put("router", "weight", lambda t: t[:, :60].contiguous()), "k is 60; it must be a multiple of 8"),
    "experts, top": (_put("router", "top_k", lambda t: 33), "top_k is 33"),
    "must have elements": (_put("router", "bias", lambda t: t[:-1]), "bias is"),
    "weight must be [experts, k]": (_put("router", "weight", lambda t: t[:, :32].contiguous()), "hidden_states is"),
    # Decode attention.
    "q_len_per_req is": (_put("decode", "q_len_per_req", lambda t: 65), "q_len_per_req is 65"),
    "query must be [ , , ]": (_put("decode", "query", lambda t: t[:, :4]), "query is"),
    "out must be as query": (_put("decode", "out", lambda t: t[:1]), "out is"),
    "key goes with value": (_put("decode", "value", lambda t: None), "value is None"),
    "key and value must be [ , , ]": (_put("decode", "key", lambda t: t[:1]), "key is"),
    "block_tables must have a row a sequence": (_put("decode", "block_tables", lambda t: t[:1]), "block_tables is"),
    "sinks must have": (_put("decode", "sinks", lambda t: torch.zeros(4)), "sinks is"),
    "pages have positions; it must be a power of two from on": (_put("decode", "kv_cache", lambda t: t[..., :8, :]),
        "kv_cache has pages of 8"),
}  # fmt: skip


def _long(name: str) -> Arguments:
    """A dense call whose K no stream of this name takes, with the tactic."""
    row = next(row for row in MX_DENSE_INSTANCES if row.name == name)
    k = -(-(row.longest_k + 1) // 32) * 32
    columns = LAYOUTS["mxfp4"].columns(k)
    return {
        "x": torch.zeros(3, k).bfloat16(),
        "weight": torch.zeros(72, columns, dtype=torch.uint8),
        "weight_scale": torch.zeros(128, -(-k // 128) * 4, dtype=torch.uint8),
        "tactic": name,
    }


_OURS = "a size, number or tensor that Python makes itself"
_DEVICE = "a state of the device, not an argument"
# Words of a refusal that no call reaches, and why.
UNREACHABLE: dict[str, str] = {
    "is ; it must be below 2^31": "sizes are tensors' extents, which require_pairs and require_int bound",
    "launch :": "the text of the status that a launch returned",
    "mode is ; it may be 0 (MXFP8 input), 1 (bf16/fp16 input, quantized inside) or 2 (W4A16)": _OURS,
    "the format is ; it may be 0 to": _OURS,
    "tactic needs a workspace": _OURS,
    "tactic has no norm in front of it": "compute_normed norms before a GEMM",
    "values and indices must be [rows, top_k]": _OURS,
    "ranks is too small": _OURS,
    "logits must have as many rows": _OURS,
    "values come with indices and ranks": _OURS,
    "indices must have a row for each token": _OURS,
    "out must be bfloat16, with as many rows": _OURS,
    "logits is too small": _OURS,
    "top_k_weights and top_k_ids must be [tokens, top_k]": _OURS,
    "sum goes with residual": _OURS,
    "normed goes with norm_weight": _OURS,
    "workspace is too small": "require_int of workspace_buffer's size, with a backend",
    "the workspace is too small": "compute() compares with the launcher's own number, with a backend",
    "a fused MoE tactic needs all SMs of the device, and this stream has fewer": "moe_run answers False before",
    "K is too long for this fused MoE tactic": "Instance.takes, whose longest_k the rendered source asserts",
    "two stages of this fused MoE tactic do not fit shared memory": "Instance.takes",
    "the two-kernel path takes expert ids, not logits": "compute() routes before a pair",
    "a norm in front of a dense tactic takes up to eight bfloat16 tokens, and tiles of eight": "compute_normed norms "
    "before",
    "this dense tactic multiplies MXFP4 tokens: they must come so or be rounded to MXFP4": "instance() lists what "
    "takes them",
    "this dense tactic multiplies MXFP8 tokens: they must come quantized or be rounded to MXFP8": "instance() lists "
    "what takes them",
    "scales of tokens must start at a multiple of 4 bytes": "require_scales, as input_sf's",
    "no grouped GEMM instance of that tactic is loaded": "validate() has the tactics",
    "this device does not grant the fused MoE tactic's shared memory": _DEVICE,
    "this device does not grant the dense tactic's shared memory": _DEVICE,
    "this device does not grant the instance's shared memory": _DEVICE,
    "the instance does not fit an SM of this device": _DEVICE,
    "the driver has no cuTensorMapEncodeTiled": _DEVICE,
    "shared memory of the router": _DEVICE,
    "FC1": _DEVICE,
    "FC2": _DEVICE,
    "top-k of chunks": _DEVICE,
    "launch of the router's logits": _DEVICE,
    "launch of the router's top-k": _DEVICE,
    "launch of decode attention": _DEVICE,
}
PROBES = ("sm12x_probe_binding.cu",)  # whose sizes the probe makes; its tests are tests/probe's
REGISTRY = ("sm12x_register_instance_binding.h",)  # of a module that Python has just built


def test_every_refusal_of_a_launcher_has_a_twin_or_a_reason() -> None:
    found = {each.words: each.file for each in refusals() if each.file not in (*PROBES, *REGISTRY)}
    assert len(found) > 80, "this test sees them"
    known = TWINS.keys() | UNREACHABLE.keys()
    missing = {words: file for words, file in found.items() if words not in known}
    gone = known - found.keys()
    assert not missing, f"without a twin: {missing}"
    assert not gone, f"no launcher says it any more: {gone}"
    assert not TWINS.keys() & UNREACHABLE.keys()


@pytest.mark.parametrize("words", TWINS)
def test_python_refuses_first(words: str) -> None:
    call, begins = TWINS[words]
    kind, text = call()
    assert kind in ("ValueError", "TypeError"), (kind, text)
    assert text.startswith(begins), text


@pytest.mark.parametrize("row_bytes", [32, 96, 65536, 2**20])
def test_activations_end_below_64_gib(row_bytes: int) -> None:
    """The launcher's own arithmetic, ``rows * row_bytes / 16 > UINT32_MAX``, at its edge."""
    most = (MOST_ACTIVATION_BYTES - 1) // row_bytes
    assert most * row_bytes // 16 <= 2**32 - 1 < (most + 1) * row_bytes // 16
    require_activation_bytes("rows", most, row_bytes)
    with pytest.raises(ValueError, match=f"^rows is {most + 1}; .* it must be at most {most}: split the batch$"):
        require_activation_bytes("rows", most + 1, row_bytes)


def test_each_operator_counts_its_activations() -> None:
    assert _meta(2**20 - 1, 2**16, 32, 1)() == ("", "")
    assert _meta(2**20 - 1, 32, 2**16, 1)() == ("", "")
    for hidden, inter in ((2**16, 32), (32, 2**16)):
        assert "activations of 64 GiB" in _meta(2**20, hidden, inter, 1)()[1]
        assert "activations of 64 GiB" in _meta(2**19, hidden, inter, 2, top_k=2)()[1]

    def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows, k = 2**20, 2**16
    call = sm12x_group_gemm.GroupGemmCall(
        None,
        empty(rows, k, dtype=torch.float8_e4m3fn),
        empty(1, 8, k // 2),
        empty(sm12x_group_gemm.scale_rows(rows, 1), k // 32),
        empty(1, 128, k // 32),
        empty(2, dtype=torch.int32),
        None,
        [1, 128, 128, 128],
        True,
        None,
    )
    with pytest.raises(ValueError, match=r"^cum_m \(a.shape\[0\]\) is 1048576; .* 64 GiB"):
        sm12x_group_gemm.validate(call)
    k //= 2  # two bytes an element
    weight = empty(8, k // 2)
    for rows, fits in ((2**20 - 1, True), (2**20, False)):
        x = empty(rows, k, dtype=torch.bfloat16)
        dense = DenseCall(None, x, None, weight, empty(128, k // 32))
        checked = outcome(lambda call=dense: require_tokens(call, k, weight.device, torch.bfloat16, BF16, {}), {})
        text = "" if fits else f"the number of tokens is {rows}; with 65536 bytes a row these are activations of 64 GiB"
        assert bool(checked[1]) != fits, checked
        assert checked[1].startswith(text)


def test_limits_of_texts_are_those_of_tables() -> None:
    """Numbers that the launchers' texts name, and what Python compares with."""
    assert sm12x_validation.MAX_ROUTED_EXPERTS == 512
    types = (fork_root() / "include/flashinfer/sm12x/types.h").read_text(encoding="utf-8")
    for name, value in (
        ("kRouterMaxExperts", sm12x_validation.MAX_ROUTED_EXPERTS),
        ("kMaxLocalExperts", sm12x_validation.MAX_EXPERTS),
    ):
        assert re.search(rf"constexpr int {name} = {value};", types), name
    assert any(row.split_k for row in INSTANCES)
