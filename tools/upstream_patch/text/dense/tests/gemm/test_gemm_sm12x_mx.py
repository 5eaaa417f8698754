"""``backend="sm12x"`` of mm_fp4, mm_mxfp8 and mm_bf16_fp4 against a float64 reference."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from flashinfer import mm_fp4, mm_mxfp8
from flashinfer.autotuner import AutoTuner, autotune
from flashinfer.gemm import gemm_sm12x_mx, mm_bf16_fp4, prepare_bf16_fp4_weights
from flashinfer.gemm.gemm_sm12x_mx import (
    BF16,
    MXFP4_SWIZZLED,
    MXFP8_SWIZZLED,
    DenseCall,
    choose_instance,
    run_dense,
)
from flashinfer.jit.sm12x.instances import DENSE_INSTANCES
from tests.test_helpers.mx_dense import (
    DenseCase,
    dense_inputs_with_not_numbers,
    dense_reference,
    make_dense_inputs,
    moved,
)
from tests.test_helpers.mx_error_bounds import check_within_bound
from tests.test_helpers.mx_formats import quantize_mxfp4, sm12x_device, swizzle_scales

device = pytest.fixture(sm12x_device, name="device")
# Formats of weights and tokens.
OPERATORS = {
    "mm_fp4": ("mxfp4", "mxfp4"),
    "mm_mxfp8": ("mxfp8", "mxfp8"),
    "mm_bf16_fp4": ("mxfp4", "bf16"),
}
EVERY_OPERATOR = pytest.mark.parametrize("operator", OPERATORS)


def _run(operator, inputs, **named):
    x, weight, scale = inputs.arguments
    given, alpha, x_scale = inputs.named, inputs.named.get("alpha"), inputs.named.get("x_scale")
    named = {"out_dtype": given["out_dtype"], "backend": "sm12x", **named}
    if operator == "mm_mxfp8":
        return mm_mxfp8(x, weight.T, x_scale.flatten(), scale.flatten(), **named)
    if operator == "mm_fp4":
        return mm_fp4(x, weight.T, x_scale, scale.T, alpha, block_size=32, use_nvfp4=False, **named)
    prepared = prepare_bf16_fp4_weights(weight, scale, alpha, backend="sm12x", block_size=32)
    return mm_bf16_fp4(x, *prepared, block_size=32, **named)


def _check(operator, case, seed, device):
    """Within the bound, into an output that is given, and the same bits when it is repeated."""
    print("seed", seed)
    weights, tokens = OPERATORS[operator]
    case = dataclasses.replace(case, weights=weights, tokens=tokens)
    inputs = moved(device, make_dense_inputs(case, seed))
    out = torch.full((case.num_tokens, case.n), torch.nan, dtype=case.out_dtype, device=device)
    assert _run(operator, inputs, out=out) is out
    check_within_bound(out, *dense_reference(inputs), f"{operator}, {case}, seed {seed}")
    again = _run(operator, inputs)
    assert (again.dtype, again.shape) == (out.dtype, out.shape)
    assert torch.equal(again.view(torch.int16), out.view(torch.int16)), "a second run differs"


@EVERY_OPERATOR
@pytest.mark.parametrize("m", [1, 8, 9, 64, 130])
@pytest.mark.parametrize("n,k", [(128, 128), (200, 288)])
def test_operators(operator, m, n, k, device):
    out_dtype = torch.float16 if n == 200 else torch.bfloat16
    _check(operator, DenseCase(m, n, k, out_dtype=out_dtype), m + n, device)


@pytest.mark.parametrize("operator", ["mm_fp4", "mm_bf16_fp4"])
@pytest.mark.parametrize("m", [3, 40])
def test_alpha(operator, m, device):
    _check(operator, DenseCase(m, 136, 160, alpha=True), m, device)


# gpt-oss-120b: QKV, output projection, LM head; and a row of each K that a stream takes
# last and a GEMM first.
@EVERY_OPERATOR
@pytest.mark.parametrize("m", [1, 8, 64, 300])
@pytest.mark.parametrize("n,k", [(5120, 2880), (2880, 4096), (201088, 2880), (512, 6176)])
def test_layers_of_models(operator, m, n, k, device):
    _check(operator, DenseCase(m, n, k), m, device)


@EVERY_OPERATOR
def test_replays_from_a_cuda_graph(operator, device):
    weights, tokens = OPERATORS[operator]
    for m in (1, 16, 40):
        inputs = moved(device, make_dense_inputs(DenseCase(m, 640, 2880, weights, tokens), 12))
        eager = _run(operator, inputs)
        out = torch.full_like(eager, torch.nan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            _run(operator, inputs, out=out)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, eager)


# --- rows of the table ----------------------------------------------------------------

# Tokens that a row takes, by what it multiplies: their format here, and its number.
TOKENS_OF = {"bf16": ("bf16", BF16), "mxfp8": ("mxfp8", MXFP8_SWIZZLED), "mxfp4": ("mxfp4", MXFP4_SWIZZLED)}


def _run_row(row, inputs):
    x, weight, scale = inputs.arguments
    out = torch.full((len(x), len(weight)), torch.nan, dtype=torch.bfloat16, device=x.device)
    alpha, number = inputs.named.get("alpha"), TOKENS_OF[inputs.tokens][1]
    return run_dense(DenseCall(out, x, inputs.named.get("x_scale"), weight, scale, alpha), number, True, row.index)


@pytest.mark.parametrize("row", DENSE_INSTANCES, ids=lambda row: row.name)
def test_every_row(row, device):
    """More tokens than a tile has, rows of weights that are no multiple of its, a K that is none of a step."""
    case = DenseCase(row.block_n + 3, 200, 288, row.weights, TOKENS_OF[row.compute_dtype][0], alpha=True)
    inputs = moved(device, make_dense_inputs(case, 7))
    check_within_bound(_run_row(row, inputs), *dense_reference(inputs), f"{row.name}, seed 7")


@pytest.mark.parametrize("row", [row for row in DENSE_INSTANCES if row.split_k], ids=lambda row: row.name)
@pytest.mark.parametrize("tokens", ["mxfp8", "mxfp4"])
def test_a_stream_takes_quantized_tokens(row, tokens, device):
    case = DenseCase(row.block_n, 72, 160, row.weights, tokens)
    inputs = moved(device, make_dense_inputs(case, 8))
    check_within_bound(_run_row(row, inputs), *dense_reference(inputs), f"{row.name}, seed 8")


@EVERY_OPERATOR
def test_what_is_no_number_stays_in_its_row_or_column(operator, device):
    weights, tokens = OPERATORS[operator]
    for m in (5, 20):  # a stream, and a GEMM
        case = DenseCase(m, 136, 160, weights, tokens, alpha=operator != "mm_mxfp8")
        for what, inputs in dense_inputs_with_not_numbers(case, 10):
            inputs = moved(device, inputs)
            check_within_bound(_run(operator, inputs), *dense_reference(inputs), what)


def test_what_is_chosen():
    for weights, operand in [("mxfp4", "bf16"), ("mxfp8", "bf16"), ("mxfp4", "mxfp4"), ("mxfp8", "mxfp8")]:
        for k in (32, 2880, 4096, 7168, 16384):
            for m in (1, 8, 9, 16, 17, 64, 128, 4096):
                row = choose_instance(weights, m, 5120, k, operand, 48)
                assert row.weights == weights and row.longest_k >= k
                assert row.compute_dtype == operand or row.split_k
                assert not row.split_k or m <= 2 * row.block_n  # two passes
        assert choose_instance(weights, 1, 5120, 2880, operand, 48).streamed
        tiles = [row.block_n for row in DENSE_INSTANCES if (row.weights, row.compute_dtype) == (weights, operand)]
        assert choose_instance(weights, 4096, 5120, 2880, operand, 48).block_n == max(tiles)


def test_rows_are_numbered_by_their_place():
    assert [row.index for row in DENSE_INSTANCES] == list(range(len(DENSE_INSTANCES)))


# --- the autotuner --------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["mm_fp4", "mm_mxfp8"])
def test_the_autotuner_times_what_takes_the_call_and_the_fastest_is_used(operator, device, monkeypatch):
    weights, tokens = OPERATORS[operator]
    inputs = moved(device, make_dense_inputs(DenseCase(8, 128, 128, weights, tokens), 13))
    asked, used = [], []

    def profile(tuner, runner, inputs, tactic, *given, **named):
        runner(inputs, tactic=tactic)  # of bytes that are no numbers, too
        asked.append(tactic)
        return 0.5 if tactic == fastest else 1.0

    fastest = next(row.index for row in DENSE_INSTANCES if row.weights == weights and row.compute_dtype == tokens)
    run = gemm_sm12x_mx.run_dense
    monkeypatch.setattr(AutoTuner, "_profile_single_kernel", profile)
    monkeypatch.setattr(gemm_sm12x_mx, "run_dense", lambda *given: used.append(given[3]) or run(*given))
    AutoTuner.get().clear_cache()
    with autotune(True):
        _run(operator, inputs)
    rows = [DENSE_INSTANCES[place] for place in set(asked) - {-1}]
    assert fastest in asked
    assert all(row.weights == weights and (row.split_k or row.compute_dtype == tokens) for row in rows)
    out = _run(operator, inputs)
    assert used[-1] == fastest
    check_within_bound(out, *dense_reference(inputs), "seed 13")
    AutoTuner.get().clear_cache()


# --- the trace ------------------------------------------------------------------------


def test_mm_bf16_fp4_trace(device):
    torch.manual_seed(0)
    a = torch.randn(9, 288, device=device).to(torch.bfloat16)
    b, b_sf = quantize_mxfp4(torch.randn(200, 288, device=device))
    named = {"b_descale": swizzle_scales(b_sf), "block_size": 32}
    definition = mm_bf16_fp4.fi_trace(a=a, b=b, backend="sm12x", **named)
    assert definition["name"] == "mm_bf16_fp4_sm12x_N200_K288_block_size32"
    rendered = {}  # the reference stands alone
    exec(definition["reference"], rendered)
    expected = rendered["_mm_bf16_fp4_sm12x_reference"](a, b, **named)
    out = mm_bf16_fp4(a, b, backend="sm12x", **named)
    torch.testing.assert_close(out, expected, rtol=2.0**-7, atol=1e-5)


# --- what a call may be ---------------------------------------------------------------


def _behind(tensor):
    """The same elements, one behind an aligned address."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


NOT_128X4 = "only supports 128x4 scale factor layout"
BAD = {
    "mm_fp4": [
        ({"use_8x4_sf_layout": True}, NOT_128X4),
        ({"use_nvfp4": True, "block_size": 16}, r"takes MXFP4 operands \(use_nvfp4=False\)"),
        ({"block_size": 16}, "mxfp4 only supports block_size = 32"),
        ({"a": lambda a: a.view(torch.int8)}, "must have float4_e2m1fn_x2 packed into uint8"),
        ({"a": lambda a: a[0]}, "accepts 2d tensors"),
        ({"a": lambda a: a[:, :48].contiguous()}, "K dimension mismatch"),
        ({"a": lambda a: a.repeat(1, 2)[:, ::2]}, "a must be contiguous"),
        ({"a": _behind}, "a must start at a multiple of 16 bytes"),
        ({"b": lambda b: b.contiguous()}, r"b must be contiguous \(b: column-major\)"),
        ({"b": lambda b: _behind(b.T).T}, "b must start at a multiple of 16 bytes"),
        ({"a": lambda a: a[:, :8].contiguous(), "b": lambda b: b[:8].T.contiguous().T}, "K must be a multiple of 32"),
        ({"a_descale": lambda s: s[:64]}, r"a_descale must be 512 uint8 in the 128x4 layout for 4 rows and K=128"),
        ({"b_descale": lambda s: s[:, :64]}, r"b_descale must be 512 uint8 in the 128x4 layout for 128 rows"),
        ({"a_descale": lambda s: s.float()}, "must have float8_e4m3fnx2 packed into uint8"),
        ({"alpha": lambda a: a.double()}, "alpha must be a float tensor"),
        ({"alpha": lambda a: a.repeat(4)}, "per-token alpha is only implemented by"),
        ({"out_dtype": torch.float32}, "Unsupported output dtype"),
        ({"out": lambda out: out.T.contiguous().T}, "out must be contiguous"),
    ],
    "mm_mxfp8": [
        ({"a": lambda a: a[0]}, "accepts 2d tensors"),
        ({"a": lambda a: a[:, :96].contiguous()}, "K dimension mismatch"),
        ({"a": lambda a: a.bfloat16()}, "a must be a float8_e4m3fn tensor"),
        ({"b": lambda b: b.to(torch.float8_e5m2)}, "b must be a float8_e4m3fn tensor"),
        ({"b": lambda b: b.contiguous()}, r"b must be contiguous \(b: column-major\)"),
        ({"a": _behind}, "a must start at a multiple of 16 bytes"),
        ({"a_descale": lambda s: s[:64]}, "a_descale shape mismatch for swizzled layout"),
        ({"b_descale": lambda s: s.float()}, "b_descale must be a uint8 tensor"),
        ({"use_8x4_sf_layout": True, "a_descale": lambda s: s[:32]}, "only supports 1D swizzled 128x4 scales"),
    ],
    "mm_bf16_fp4": [
        ({"a": lambda a: a.half()}, "a must be bfloat16; got torch.float16"),
        ({"a": lambda a: a[0]}, "a must be 2-D"),
        ({"a": lambda a: a[:, :96].contiguous()}, r"sm12x expects the uint8 \(N, K/2\) weight with K=96"),
        ({"a": lambda a: a.repeat(1, 2)[:, ::2]}, "a must be contiguous"),
        ({"b": lambda b: b.view(torch.int8)}, r"sm12x expects the uint8 \(N, K/2\) weight with K=128; got torch.int8"),
        ({"b": lambda b: b.T}, "sm12x expects the uint8"),
        ({"b": _behind}, "b must start at a multiple of 16 bytes"),
        ({"b_descale": lambda s: s[:64]}, "b_descale must be 512 uint8 in the 128x4 layout for 128 rows and K=128"),
        ({"block_size": 16}, "block_size must be 16 for FP4, or 32"),
        ({"out_dtype": torch.float32}, "out_dtype must be bfloat16 or float16"),
    ],
}
ROWS = [(operator, *row) for operator, rows in BAD.items() for row in rows]


def _arguments(operator, device):
    weights, tokens = OPERATORS[operator]
    inputs = moved(device, make_dense_inputs(DenseCase(4, 128, 128, weights, tokens, alpha=True), 14))
    x, weight, scale = inputs.arguments
    named = {"a": x, "b_descale": scale, "backend": "sm12x"}
    if operator == "mm_bf16_fp4":
        return mm_bf16_fp4, {**named, "b": weight, "alpha": inputs.named["alpha"], "block_size": 32}
    named |= {"b": weight.T, "a_descale": inputs.named["x_scale"]}
    if operator == "mm_mxfp8":
        return mm_mxfp8, {**named, "a_descale": named["a_descale"].flatten(), "b_descale": scale.flatten()}
    out = torch.empty(4, 128, dtype=torch.bfloat16, device=device)
    named |= {"b_descale": scale.T, "alpha": inputs.named["alpha"], "out": out}
    return mm_fp4, {**named, "block_size": 32, "use_nvfp4": False}


@pytest.mark.parametrize("operator,changes,message", ROWS, ids=[f"{row[0]}: {row[2][:60]}" for row in ROWS])
def test_what_a_backend_takes_is_checked(operator, changes, message, device, monkeypatch):
    monkeypatch.setattr(gemm_sm12x_mx, "get_sm12x_dense_module", lambda: pytest.fail("launched"))
    function, given = _arguments(operator, device)
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises((TypeError, ValueError), match=message):
        function(**given)


def test_weights_of_mxfp4_alone_are_prepared(device):
    b, b_sf = (
        torch.zeros(128, 64, dtype=torch.uint8, device=device),
        torch.zeros(1024, dtype=torch.uint8, device=device),
    )
    with pytest.raises(ValueError, match="block_size must be 32 for sm12x; got 16"):
        prepare_bf16_fp4_weights(b, b_sf, backend="sm12x")


@pytest.mark.parametrize("operator", [mm_fp4, mm_mxfp8, mm_bf16_fp4])
def test_compute_capabilities(operator):
    assert operator.is_backend_supported("sm12x", 120)
    assert operator.is_backend_supported("sm12x", 121)
    assert not operator.is_backend_supported("sm12x", 100)
