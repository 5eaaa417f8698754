# SPDX-License-Identifier: Apache-2.0
"""Dense layers, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on, held to the derived bound."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from virtual_devices import ALL_CHECKERS, RACES, virtual_fixture

import flashinfer
from flashinfer.gemm import sm12x_dense_launch
from flashinfer.gemm.sm12x_dense import dense_block_scaled
from flashinfer.gemm.sm12x_dense_launch import gemm_compute_dtypes
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x.instances import DENSE_INSTANCES, Instance
from flashinfer.testing import (
    ANY_ORDER,
    DenseCase,
    DenseInputs,
    check_within_bound,
    dense_reference,
    dequantize_mxfp4,
    make_dense_inputs,
    quantize_mxfp4,
    swizzle_scales,
    unswizzle_scales,
)
from flashinfer.testing.dense_reference import TOKENS as FORMATS
from flashinfer.testing.dense_reference import TOKENS_OF, WEIGHTS, dense_inputs_with_not_numbers
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

SMS = 48
BY_NAME = {row.name: row for row in DENSE_INSTANCES}

device = virtual_fixture(watch=ALL_CHECKERS)


def tokens_for(row: Instance) -> str:
    """A format that the instance takes."""
    return TOKENS_OF[row.compute_dtype]


def workspace_size(device: VirtualDevice, num_tokens: int, k: int, row: Instance, tokens: str | None = None) -> int:
    module, token_format = device.module(gen_dense_module, row.weights), FORMATS.index(tokens or tokens_for(row))
    return int(device.call(module.sm12x_dense_gemm_workspace_size, num_tokens, k, row.index, token_format))


def run(inputs: DenseInputs, case: DenseCase, tactic: str | None) -> torch.Tensor:
    out = torch.full((case.num_tokens, case.n), torch.nan, dtype=case.out_dtype)
    return dense_block_scaled(*inputs.arguments, **inputs.named, out=out, tactic=tactic)


def check(device: VirtualDevice, case: DenseCase, seed: int, tactic: str | None = None) -> torch.Tensor:
    """Assert that the layer keeps its bound, that nothing was left unwritten and that no checker reports."""
    print("seed", seed, case, tactic)
    inputs = make_dense_inputs(case, seed)
    out = run(inputs, case, tactic)
    used = check_within_bound(out, *dense_reference(inputs), f"{case}, seed {seed}, tactic {tactic}")
    print(f"{used:.1%} of the bound")
    assert all(launch.clean for launch in device.launches), device.launches
    return out


@pytest.mark.parametrize("row", DENSE_INSTANCES, ids=lambda row: row.name)
def test_an_instance(device: VirtualDevice, row: Instance) -> None:
    """A K that is no multiple of 128, as long as the warps share; a last unit that is partly there; two passes or
    tiles."""
    k = row.longest_k - 96 if row.split_k else 800
    n = 16 * SMS + 56 if row.split_k else 200
    check(device, DenseCase(row.block_n + 3, n, k, row.weights, tokens_for(row), bias=torch.bfloat16), 1, row.name)
    launch = device.launches[-1]
    assert ("dense_layer_kernel" if row.split_k else "grouped_gemm_kernel") in launch.kernel
    if row.split_k:
        assert launch.grid[0] == SMS


@pytest.mark.parametrize("name", ["dense_mxfp4_m64_gemm", "dense_mxfp8_m128_gemm_mxfp8", "dense_mxfp4_m128_gemm_mxfp4"])
def test_panels_of_tokens(device: VirtualDevice, name: str) -> None:
    """Two whole panels and a part of one, for each of which all weights go by."""
    row = BY_NAME[name]
    check(device, DenseCase(1100, 264, 64, row.weights, tokens_for(row)), 2, name)


# Whole words and a part of one; one, two and four groups of warps; fewer units than blocks and many; rows in one piece
# and row by row; a slice whose pitch is as many bytes as a row has (640 of MXFP4, 416 of MXFP6).
@pytest.mark.parametrize(
    ("n", "k"),
    [(1, 32), (17, 64), (300, 128), (40, 416), (72, 640), (1600, 512), (33, 1536), (64, 2048), (130, 2880)],
    ids=str,
)
@pytest.mark.parametrize("name", ["dense_mxfp4_m8_w2", "dense_mxfp8_m16_w2", "dense_mxfp6_m8_w2", "dense_nvfp4_m16_w2"])
def test_shapes_of_a_stream(device: VirtualDevice, name: str, n: int, k: int) -> None:
    check(device, DenseCase(5, n, k, BY_NAME[name].weights), 2 + n, name)


KINDS = ("m8_w2", "m32_gemm", "m64_gemm_mxfp8")
# Each kind of instance with each format of tokens that it takes.
EACH_FORMAT = pytest.mark.parametrize(
    ("name", "tokens"),
    [
        (row.name, tokens)
        for row in DENSE_INSTANCES
        if row.name.endswith((*KINDS, "m64_gemm_mxfp4"))
        for choice, tokens in enumerate(FORMATS)
        if row.compute_dtype in gemm_compute_dtypes(row.weights, choice)
        and (row.weights == "mxfp4" or "to_mxfp4" not in tokens)
    ],
)


@EACH_FORMAT
def test_formats_of_tokens_and_what_is_added(device: VirtualDevice, name: str, tokens: str) -> None:
    choice = FORMATS.index(tokens)
    for k in (
        416,
        320,
        256,
    ):  # one block in the last word of scales, two, and four: whole words are read where they are
        case = DenseCase(
            7,
            72,
            k,
            BY_NAME[name].weights,
            tokens,
            bias=(None, torch.bfloat16, torch.float16, torch.float32)[choice % 4],
            alpha=choice % 2 == 0,
            residual=choice % 3 == 0,
            out_dtype=(torch.bfloat16, torch.float16, torch.float32)[choice % 3],
        )
        check(device, case, 40 + choice, name)


@pytest.mark.parametrize(
    "row",
    [row for row in DENSE_INSTANCES if row.block_n in (8, 32) or row.compute_dtype != "bf16"],
    ids=lambda row: row.name,
)
def test_scales_at_both_ends_and_nan(device: VirtualDevice, row: Instance) -> None:
    """Scales that do not fold into the expansion, NaN as a scale and, of MXFP8, as a value: their rows, and no
    other."""
    tokens = {"mxfp8": "mxfp8_linear"}.get(row.compute_dtype, row.compute_dtype)
    case = DenseCase(6, 48, 256, row.weights, tokens, out_dtype=torch.float32)
    inputs = make_dense_inputs(case, 3)
    x, weight, scales = inputs.arguments
    if row.compute_dtype != "bf16":
        inputs.named["x_scale"].sub_(100)
    else:
        x.mul_(2.0**-100)
    swizzled = scales.reshape(-1, 32, 4, 4)  # word along K, row % 32, row / 32, block
    largest = 0x7E if row.weights == "nvfp4" else 200  # 448, 2^73
    swizzled[0, 3, 0, 1] = largest  # row 3
    swizzled[1, 25, 0, 2] = 255  # NaN: row 25, of another M16 fragment
    weight.view(torch.uint8)[20, 5] = 0x7F if row.weights == "mxfp8" else 0x77
    linear = unswizzle_scales(scales, 48, 4 * len(swizzled))
    assert int(linear[3, 1]) == largest
    assert int(linear[25, 6]) == 255
    expected = dense_reference(inputs)
    bad = torch.isnan(expected[0]).all(0).nonzero().flatten().tolist()
    assert bad == ([20, 25] if row.weights == "mxfp8" else [25])
    out = run(inputs, case, row.name)
    check_within_bound(out, *expected, row.name)


EVERY_WEIGHT = [
    (form, kind)
    for form in ("mxint8", "mxfp6", "nvfp4")
    for kind in ("m8_w2", "m8_w3", "m16_w2", "m32_gemm", "m64_gemm_mxfp8")
    if f"dense_{form}_{kind}" in BY_NAME
]


@pytest.mark.parametrize(("form", "kind"), EVERY_WEIGHT)
@pytest.mark.parametrize("k", [32, 96, 288, 512])  # one, three and one blocks in the last word, and four
def test_every_code_and_scale_of_a_weight(device: VirtualDevice, form: str, kind: str, k: int) -> None:
    """Random bytes: each int8, -128 among them, each e2m3, each E4M3 scale with its sign, subnormal ones and both
    NaN."""
    case = DenseCase(3, 80, k, form, TOKENS_OF[BY_NAME[f"dense_{form}_{kind}"].compute_dtype], out_dtype=torch.float32)
    inputs = make_dense_inputs(case, 90 + k)
    print("seed", 91)
    generator = torch.Generator().manual_seed(91)
    _, weight, scales = inputs.arguments
    codes = torch.randint(0, 256, weight.shape, dtype=torch.uint8, generator=generator)
    weight.view(torch.uint8).copy_(codes)
    if form == "nvfp4":
        scales.copy_(torch.arange(scales.numel()).to(torch.uint8).view(scales.shape))
    out = run(inputs, case, f"dense_{form}_{kind}")
    reference, bound = dense_reference(inputs)
    check_within_bound(out, reference, bound, f"{form} {kind}")
    assert form == "nvfp4" or torch.isfinite(out).all()
    assert torch.isfinite(out).any()


# A block of 512 threads rounds a row in eights, dequantizes it in words and pads its scales byte by byte: rows for
# which each thread comes twice, some three times.
@pytest.mark.parametrize(
    ("name", "tokens", "k"),
    [
        ("dense_mxfp4_m64_gemm_mxfp8", "quantize_bf16", 4192),
        ("dense_mxfp4_m64_gemm_mxfp8", "quantize_f16", 8224),
        ("dense_mxfp4_m64_gemm_mxfp8", "mxfp4", 8224),
        ("dense_mxfp4_m64_gemm_mxfp8", "mxfp8_linear", 16_416),
        ("dense_mxfp4_m64_gemm_mxfp4", "bf16_to_mxfp4", 8224),
        ("dense_mxfp4_m32_gemm", "quantize_bf16", 8224),
    ],
)
def test_rows_longer_than_a_block_of_threads(device: VirtualDevice, name: str, tokens: str, k: int) -> None:
    check(device, DenseCase(2, 8, k, tokens=tokens), k, name)


@EACH_FORMAT
def test_what_is_no_number_stays_in_its_row_or_column(device: VirtualDevice, name: str, tokens: str) -> None:
    out_dtype = torch.float16 if "16" in tokens else torch.float32
    case = DenseCase(5, 40, 96, BY_NAME[name].weights, tokens, torch.float32, True, True, out_dtype)
    for what, inputs in dense_inputs_with_not_numbers(case, 17):
        out = run(inputs, case, name)
        reference, bound = dense_reference(inputs)
        check_within_bound(out, reference, bound, what)
        everywhere = not reference.isfinite().any()  # a sum of zero times infinity is NaN
        assert everywhere == ("alpha" in what)


@pytest.mark.parametrize(
    "row", [row for row in DENSE_INSTANCES if row.block_n in (8, 48, 64)], ids=lambda row: row.name
)
def test_a_layer_under_weak_memory(row: Instance) -> None:
    for seed in (1, 2):
        with virtual_device("sm_121a", watch=ALL_CHECKERS, weak_memory=seed) as device:
            check(device, DenseCase(9, 200, 416, row.weights, tokens_for(row), bias=torch.bfloat16), seed, row.name)


def test_results_are_the_same_on_every_run(device: VirtualDevice) -> None:
    for name in (
        "dense_mxfp4_m8_w2",
        "dense_mxfp8_m32_gemm",
        "dense_mxfp4_m64_gemm_mxfp8",
        "dense_mxfp4_m64_gemm_mxfp4",
    ):
        case = DenseCase(8, 136, 1600, BY_NAME[name].weights, tokens_for(BY_NAME[name]))
        first, second = (check(device, case, 5, name) for _ in range(2))
        assert torch.equal(first, second)


# Bytes of a token with k = 416: bfloat16 in whole K blocks; e4m3, and scales in words of four; what the caller has not.
@pytest.mark.parametrize(
    ("name", "tokens", "bytes_of_token"),
    [("dense_mxfp4_m64_gemm", tokens, 1024) for tokens in ("bf16", "quantize_f16", "mxfp8", "mxfp8_linear", "mxfp4")]
    + [
        ("dense_mxfp8_m128_gemm_mxfp8", tokens, size)
        for tokens, size in {"quantize_bf16": 416 + 16, "mxfp8": 0, "mxfp8_linear": 16, "mxfp4": 416}.items()
    ]
    + [("dense_mxfp4_m64_gemm_mxfp4", "mxfp4", 0), ("dense_mxfp4_m64_gemm_mxfp4", "f16_to_mxfp4", 208 + 16)],
)
def test_a_workspace_is_what_the_tokens_need(
    device: VirtualDevice, name: str, tokens: str, bytes_of_token: int
) -> None:
    sizes = [workspace_size(device, num_tokens, 416, BY_NAME[name], tokens) for num_tokens in (256, 4096)]
    assert sizes[1] - sizes[0] == (4096 - 256) * bytes_of_token


# One MMA multiplies two blocks; the second may be beyond K, where scales are NaN here.
@pytest.mark.parametrize("name", ["dense_mxfp4_m64_gemm_mxfp4", "dense_mxfp4_m128_gemm_mxfp4"])
@pytest.mark.parametrize("seed", [101, 102])
def test_random_shapes_and_scales_of_mxfp4_tokens(device: VirtualDevice, name: str, seed: int) -> None:
    rng, tile = random.Random(seed), BY_NAME[name].block_n
    m, n, k = rng.choice((tile - 1, tile, tile + 1)), 2 * rng.randrange(1, 150) + 1, 32 * (2 * rng.randrange(20) + 1)
    case = DenseCase(m, n, k, tokens="mxfp4", out_dtype=torch.float32)
    print("seed", seed, case)
    inputs, blocks = make_dense_inputs(case, seed), k // 32
    weight_scales, token_scales = inputs.arguments[2], inputs.named["x_scale"]

    def change(swizzled: torch.Tensor, rows: int) -> None:
        """Scales near both ends of what float32 sums hold, a NaN, and NaN wherever nothing is."""
        scales = unswizzle_scales(swizzled, rows, blocks)
        row, nan_row = rng.randrange(rows), rng.randrange(rows)
        scales[row] += rng.choice((-60, 60))
        scales[nan_row, rng.randrange(blocks)] = 255
        used = swizzle_scales(torch.ones_like(scales)).bool()
        swizzled.copy_(torch.where(used, swizzle_scales(scales), 255))

    change(weight_scales, n)
    change(token_scales, m)
    out = run(inputs, case, name)
    reference, bound = dense_reference(inputs)
    nan = reference.isnan()
    assert nan.all(0).any() and nan.all(1).any() and not nan.all()  # that of a weight's row, and that of a token
    check_within_bound(out, reference, bound, f"{case}, seed {seed}")


@pytest.mark.parametrize("k", [416, 192])
def test_linear_token_scales_may_start_anywhere_where_they_are_no_words(device: VirtualDevice, k: int) -> None:
    inputs = make_dense_inputs(DenseCase(8, 130, k, "mxfp8", "mxfp8_linear"), 16)
    x, *weight = inputs.arguments
    x, scales = x[1:], inputs.named["x_scale"][1:]
    assert scales.data_ptr() % 4 != 0
    inputs.arguments, inputs.named["x_scale"] = (x, *weight), scales
    out = dense_block_scaled(*inputs.arguments, **inputs.named, tactic="dense_mxfp8_m64_gemm_mxfp8")
    check_within_bound(out, *dense_reference(inputs), "rows from the second on")


def test_upstreams_names(device: VirtualDevice) -> None:
    """Tokens may be columns of a wider tensor, whose rows are 8 bytes more than a multiple of 16 apart."""
    m, n, k = 7, 40, 192

    def columns(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros((m, rows.shape[1] + 8), dtype=torch.uint8).view(rows.dtype)
        wide[:, : rows.shape[1]].view(torch.uint8).copy_(rows.view(torch.uint8))
        return wide[:, : rows.shape[1]]

    for weights, tokens in (("mxfp4", "mxfp4"), ("mxfp8", "mxfp8"), ("mxfp4", "bf16"), ("mxfp8", "bf16")):
        inputs = make_dense_inputs(DenseCase(m, n, k, weights, tokens), 18)
        (x, weight, scale), x_scale = inputs.arguments, inputs.named.get("x_scale")
        if tokens == "mxfp4":
            named = {"block_size": 32, "use_nvfp4": False, "backend": "sm12x"}
            out = flashinfer.mm_fp4(columns(x), weight.t(), x_scale, scale, **named)
        elif tokens == "mxfp8":
            out = flashinfer.mm_mxfp8(columns(x), weight.t(), x_scale, scale, backend="sm12x")
        elif weights == "mxfp4":
            out = flashinfer.mm_bf16_fp4(x, weight, scale, backend="sm12x", block_size=32)
        else:
            out = flashinfer.gemm.mm_bf16_mxfp8(x, weight, scale)
        check_within_bound(out, *dense_reference(inputs), f"{weights} weights, {tokens} tokens")
    assert len(device.launches) >= 4


@pytest.mark.parametrize(("dequantized_rows", "dequantized_tokens"), [(128, 2048), (300, 13), (90, 7), (5, 2048)])
@pytest.mark.parametrize("weights", WEIGHTS)
def test_weights_are_dequantized_in_pieces(
    device: VirtualDevice, weights: str, dequantized_rows: int, dequantized_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuBLAS gets the weights piece by piece from the kernel that dequantizes; whole chunks of 128 rows, however many
    fit."""
    k, n = 192, 700
    case = DenseCase(20, n, k, weights, "mxfp8_linear", torch.float32, True, True, torch.float32)
    inputs = make_dense_inputs(case, 19)
    x, weight, weight_scale = inputs.arguments
    pieces = []

    class Module:
        @staticmethod
        def sm12x_dequantize_rows(*arguments: Any) -> None:
            module = device.module(gen_dense_module, weights)
            device.call(module.sm12x_dequantize_rows, *arguments, writes=arguments[:1])
            pieces.append(arguments[1].shape[0])

    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    monkeypatch.setattr(sm12x_dense_launch, "DEQUANTIZED_BYTES", dequantized_rows * 2 * k)
    monkeypatch.setattr(sm12x_dense_launch, "DEQUANTIZED_ROWS", dequantized_tokens)
    out = torch.full((20, n), torch.nan)
    named = inputs.named
    call = sm12x_dense_launch.DenseCall(**dict.fromkeys(sm12x_dense_launch.DenseCall._fields))._replace(  # type: ignore[arg-type]
        out=out,
        x=x,
        weight=weight,
        weight_scale=weight_scale,
        weight_format=weights,
        **{key: named[key] for key in ("x_scale", "alpha", "bias", "residual")},
    )
    sm12x_dense_launch._multiply_dequantized(Module, call, FORMATS.index("mxfp8_linear"))
    check_within_bound(out, *dense_reference(inputs, ANY_ORDER), f"{dequantized_rows} rows at a time")
    whole = max(128, dequantized_rows // 128 * 128)
    assert pieces == [20, *[whole] * (n // whole), n % whole]


@pytest.mark.parametrize(
    "row", [row for row in DENSE_INSTANCES if row.compute_dtype != "bf16"], ids=lambda row: row.name
)
def test_fragments_have_few_bank_conflicts(device: VirtualDevice, row: Instance) -> None:
    check(device, DenseCase(row.block_n, 20 * 128, 512, row.weights, row.compute_dtype), 15, row.name)
    counters = device.launches[-1].counters
    assert counters.shared_bank_conflicts < 0.06 * counters.shared_wavefronts


@pytest.mark.parametrize(("n", "blocks"), [(128 * 19, SMS), (128 * 20, 20), (128 * SMS, SMS)])
def test_units_are_cut_where_they_are_few(device: VirtualDevice, n: int, blocks: int) -> None:
    """Nothing is written for the sums of parts, and read again, where whole units keep the device busy."""
    check(device, DenseCase(5, n, 256, "mxfp4", "mxfp8"), 14, "dense_mxfp4_m64_gemm_mxfp8")
    launch = device.launches[-1]
    assert launch.grid[0] == blocks
    assert (launch.counters.by_class["atomic"] > 0) == (n == 128 * 19)


@pytest.mark.parametrize("tokens", [1, 8, 9, 20, 40])
def test_what_is_chosen_runs(device: VirtualDevice, tokens: int) -> None:
    for weights in ("mxfp4", "mxfp8"):
        check(device, DenseCase(tokens, 96, 288, weights), tokens)


def test_quantized_tokens_go_to_block_scaled_mmas(device: VirtualDevice) -> None:
    """Many of them: what is chosen for an SM12x; bfloat16 ones are multiplied as they are."""
    for weights, tokens, operand in (
        ("mxfp8", "bf16", "ElementE2E"),
        ("mxfp8", "mxfp4", "ElementE0E"),
        ("mxfp4", "mxfp8", "ElementE0E"),
        ("mxfp4", "mxfp4", "ElementE3E"),
    ):
        check(device, DenseCase(130, 96, 288, weights, tokens), 13)
        assert operand in device.launches[-1].kernel


def run_both(
    device: VirtualDevice, rows: list[Instance], calls: list[tuple[torch.Tensor, ...]], constant_weights: bool
) -> None:
    """Launch two layers ``(out, x, weight, weight_scale)`` one after the other, as programmatic dependents."""
    loaded = [device.module(gen_dense_module, row.weights) for row in rows]
    # The sizes are those of the largest of these layers.
    spaces = [None if row.split_k else device.empty(workspace_size(device, 16, 160, row)) for row in rows]

    def launch(*_tensors: torch.Tensor) -> None:
        for row, module, (out, x, weight, scale), space in zip(rows, loaded, calls, spaces, strict=True):
            operands, token_format = (out, x, None, weight, scale, None, None, None), FORMATS.index(tokens_for(row))
            module.sm12x_dense_run(*operands, space, token_format, row.index, None, constant_weights, True)

    known = {tensor.data_ptr(): tensor for call in reversed(calls) for tensor in call}
    device.call(launch, *known.values(), writes=[out for out, *_ in calls])
    assert all(found.programmatic for found in device.launches[-2:])


@pytest.mark.parametrize(
    "names",
    [("m8_w2", "m8_w2"), ("m32_gemm", "m8_w2"), ("m8_w2", "m32_gemm"), ("m64_gemm_mxfp8", "m64_gemm_mxfp8")],
    ids="-".join,
)
@pytest.mark.parametrize("weights", ["mxfp4", "mxfp8"])
def test_a_layer_reads_what_the_one_before_it_writes(
    device: VirtualDevice, weights: str, names: tuple[str, str]
) -> None:
    """Weights are on their way before the launch in front has ended, tokens are not."""
    rows = [BY_NAME[f"dense_{weights}_{name}"] for name in names]
    first = make_dense_inputs(DenseCase(5, 96, 160, weights, tokens_for(rows[0])), 60)
    second = make_dense_inputs(DenseCase(5, 80, 96, weights, tokens_for(rows[1])), 61)
    between, out = (torch.full((5, n), torch.nan, dtype=torch.bfloat16) for n in (96, 80))
    second.arguments = (between, *second.arguments[1:])
    run_both(device, rows, [(between, *first.arguments), (out, *second.arguments)], constant_weights=True)
    check_within_bound(between, *dense_reference(first), "first")
    check_within_bound(out, *dense_reference(second), "second")


# Rings of a GB10 whose units are several stages.
@pytest.mark.parametrize(
    ("name", "k"),
    [
        ("dense_mxfp4_m8_w2", 2880),
        ("dense_mxfp8_m8_w2", 2880),
        ("dense_mxfp4_m8_w3", 2048),
        ("dense_mxfp8_m8_w3", 4096),
    ],
)
@pytest.mark.parametrize("rounds", [60, 300])
def test_copies_that_others_pass(name: str, k: int, rounds: int) -> None:
    with virtual_device("sm_121a", watch=ALL_CHECKERS - RACES, late_copies=rounds) as device:
        check(device, DenseCase(5, 16 * SMS * (6 if rounds == 60 else 3), k, BY_NAME[name].weights), 1, name)


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_that_the_layer_in_front_writes(device: VirtualDevice, name: str) -> None:
    """``constant_weights=False``: the second layer's weights are the bytes that the first one is still writing."""
    row = BY_NAME[f"dense_mxfp4_{name}"]
    first, second = (
        make_dense_inputs(DenseCase(m, 64, 128, tokens=tokens_for(row)), seed) for m, seed in ((16, 70), (5, 71))
    )
    written = torch.full((16, 64), torch.nan, dtype=torch.bfloat16)
    x, _, scale = second.arguments  # of 64 rows and 128 elements, of which 32 rows are used
    weight, out = written.view(torch.uint8).view(32, 64), torch.full((5, 32), torch.nan, dtype=torch.bfloat16)
    second.arguments = (x, weight, scale)
    run_both(device, [row, row], [(written, *first.arguments), (out, *second.arguments)], constant_weights=False)
    check_within_bound(written, *dense_reference(first), "first")
    check_within_bound(out, *dense_reference(second), "second")


@pytest.mark.parametrize("tokens", FORMATS)
def test_rows_are_dequantized_exactly(device: VirtualDevice, tokens: str) -> None:
    """For very many tokens cuBLAS multiplies bfloat16 values; each equals its quantized value, NaN and infinity
    included."""
    module = device.module(gen_dense_module, "mxfp4")
    for what, inputs in dense_inputs_with_not_numbers(DenseCase(37, 8, 416, tokens=tokens), 80):
        wide = torch.full((37, 416), torch.nan, dtype=torch.bfloat16)
        rows, scale = inputs.arguments[0], inputs.named.get("x_scale")
        device.call(module.sm12x_dequantize_rows, wide, rows, scale, FORMATS.index(tokens), writes=(wide,))
        exact = inputs.multiplied().values
        torch.testing.assert_close(wide, exact.bfloat16(), rtol=0, atol=0, equal_nan=True, msg=what)
        assert torch.equal(wide.double(), exact) or what != "numbers"


@pytest.mark.parametrize("form", ["mxfp6", "mxint8", "nvfp4"])
@pytest.mark.parametrize("k", [32, 96, 416])
def test_weights_are_dequantized_exactly(device: VirtualDevice, form: str, k: int) -> None:
    module = device.module(gen_dense_module, form)
    for what, inputs in dense_inputs_with_not_numbers(DenseCase(2, 37, k, form), 82):
        _, weight, scales = inputs.arguments
        weight.view(torch.uint8).copy_(torch.randint(0, 256, weight.shape, dtype=torch.uint8))
        wide = torch.full((37, k), torch.nan, dtype=torch.bfloat16)
        rows = sm12x_dense_launch._ROWS_OF_WEIGHTS[form]
        device.call(module.sm12x_dequantize_rows, wide, weight, scales, rows, writes=(wide,))
        exact = inputs.weights().values
        torch.testing.assert_close(wide, exact.bfloat16(), rtol=0, atol=0, equal_nan=True, msg=what)
        assert torch.equal(wide.double(), exact) or what != "numbers"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_values_are_rounded_to_mxfp4(device: VirtualDevice, dtype: torch.dtype) -> None:
    """The values have every size, with subnormal ones, zeros, infinity and NaN among them; both kernels that round are
    run."""
    print("seed", 81)
    generator = torch.Generator().manual_seed(81)
    mantissa, exponents = (7, 255) if dtype is torch.bfloat16 else (10, 31)
    least = torch.randint(0, exponents - 4, (96, 13, 1), generator=generator)
    exponent = least + torch.randint(0, 5, (96, 13, 32), generator=generator)
    bits = torch.randint(0, 1 << mantissa, (96, 13, 32), generator=generator) | exponent << mantissa
    bits[0, 0, 3], bits[1, 1, 31] = exponents << mantissa, (exponents << mantissa) + 1  # infinity, NaN
    bits[2, 2], bits[3, 3, 1:] = 0, 0
    signs = torch.randint(0, 2, bits.shape, generator=generator) << 15
    x = (bits | signs).flatten(1).to(torch.int16).view(dtype)
    expected = dequantize_mxfp4(*quantize_mxfp4(x.float(), saturates=True))
    name = "bf16_to_mxfp4" if dtype is torch.bfloat16 else "f16_to_mxfp4"
    wide, module = torch.full((96, 416), torch.nan, dtype=torch.bfloat16), device.module(gen_dense_module, "mxfp4")
    device.call(module.sm12x_dequantize_rows, wide, x, None, FORMATS.index(name), writes=(wide,))
    torch.testing.assert_close(wide, expected.bfloat16(), rtol=0, atol=0, equal_nan=True)
    inputs = make_dense_inputs(DenseCase(96, 40, 416, tokens=name, out_dtype=torch.float32), 81)
    inputs.arguments = (x, *inputs.arguments[1:])
    out = dense_block_scaled(*inputs.arguments, **inputs.named, tactic="dense_mxfp4_m64_gemm_mxfp4")
    check_within_bound(out, *dense_reference(inputs), name)
    assert out[1].isnan().all()
