# SPDX-License-Identifier: Apache-2.0
"""Every byte that a block scale can be, in each reader of scales, on the virtual SM121 against the float64 reference.

A row has one byte as the scale of all its blocks, so that no other scale hides what it gives. Neighbouring rows have
neighbouring bytes, then random ones: kernels ask of several rows together whether their scales fold into the weights.
"""

from __future__ import annotations

import pytest
import torch
from virtual_devices import virtual_fixture
from virtual_group_gemm import launch_group_gemm
from virtual_moe import run_moe

from flashinfer.gemm import dense_block_scaled, sm12x_dense_launch
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.sm12x.instances import DENSE_INSTANCES, GEMM_INSTANCES, INSTANCES, Instance, index_of
from flashinfer.testing import (
    TENSOR_CORE,
    DenseCase,
    DenseInputs,
    MoECase,
    MoEInputs,
    check_within_bound,
    dense_reference,
    group_gemm_reference,
    make_dense_inputs,
    make_group_gemm_inputs,
    make_moe_inputs,
    moe_reference,
    swizzle_scales,
)
from flashinfer.testing.dense_reference import TOKENS as FORMATS
from flashinfer.testing.dense_reference import WEIGHTS
from flashinfer.testing.virtual_device import VirtualDevice

BYTES = torch.arange(256, dtype=torch.uint8)
AT_MOST_1_5 = 0xBB  # of two e2m1 codes: 2^127 times such a value is a bfloat16
NAN = 255  # of UE8M0; E4M3 has 0x7F and 0xFF
K = 160  # the last word of scales has one block, or two

TOKENS_WITH_SCALES = {"bf16": "bf16", "mxfp8": "mxfp8", "mxfp4": "mxfp4"}
"""Tokens that an instance reads as they are, by its operand."""

device = virtual_fixture()
NEIGHBOURS = pytest.mark.parametrize("neighbours", ["in order", "at random"])
# One of each way to read scales: a stream, MMAs in bfloat16, MMAs that take scales.
ROWS = [
    row
    for row in DENSE_INSTANCES
    if row.name.endswith(("m8_w2", "m16_w2", "m32_gemm", "m64_gemm_mxfp8", "m64_gemm_mxfp4"))
]


def each_byte(neighbours: str, seed: int) -> torch.Tensor:
    print("seed", seed)
    return (
        BYTES if neighbours == "in order" else BYTES[torch.randperm(256, generator=torch.Generator().manual_seed(seed))]
    )


def of_rows(rows: torch.Tensor, blocks: int) -> torch.Tensor:
    """128x4 scales of rows with one byte each."""
    return swizzle_scales(rows[:, None].expand(-1, blocks).contiguous())


def small_integers(shape: torch.Size, exponent: int) -> torch.Tensor:
    """1 to 3 times a power of two, either sign."""
    numbers = torch.arange(shape.numel())
    signs = torch.where(numbers * 11 % 13 % 3 == 0, -1.0, 1.0)
    return (signs * (numbers * 5 % 17 % 3 + 1)).view(shape) * 2.0**exponent


def tokens_of(inputs: DenseInputs, exponent: int) -> None:
    """Tokens of about 2^exponent, in their own format."""
    x, scale = inputs.arguments[0], inputs.named.get("x_scale")
    if scale is None:
        x.copy_(small_integers(x.shape, exponent))
        return
    if x.dtype is not torch.uint8:
        x.copy_(small_integers(x.shape, 0).to(x.dtype))
    scale.copy_(of_rows(torch.full((len(x),), 127 + exponent, dtype=torch.uint8), K // 32).view(scale.shape))


@NEIGHBOURS
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_weights_of_a_dense_layer(device: VirtualDevice, row: Instance, neighbours: str) -> None:
    """The outputs neither overflow nor vanish: the tokens are small with large scales, and large with small ones."""
    tokens = TOKENS_WITH_SCALES[row.compute_dtype]
    inputs = make_dense_inputs(DenseCase(3, 256, K, row.weights, tokens, out_dtype=torch.float32), 1)
    order = each_byte(neighbours, 2)
    x, weight, scales = inputs.arguments
    if row.weights == "mxfp8":  # its least values times the least scales are no bfloat16
        weight.copy_(small_integers(weight.shape, 0).to(weight.dtype))
    nan = order & 0x7F == 0x7F if row.weights == "nvfp4" else order == NAN
    scales.copy_(of_rows(order, K // WEIGHTS[row.weights].elements_per_scale).view(scales.shape))
    numbers = 0
    for exponent in (-20, 20):
        tokens_of(inputs, exponent)
        out = dense_block_scaled(*inputs.arguments, **inputs.named, tactic=row.name)
        reference, bound = dense_reference(inputs)
        seen = nan | (row.weights == "nvfp4") | ((order >= 96) == (exponent < 0))
        check_within_bound(out[:, seen], reference[:, seen], bound[:, seen], f"{row.name}, tokens of 2^{exponent}")
        assert torch.isnan(out[:, nan]).all()
        assert not torch.isnan(out[:, seen & ~nan & (order < 246)]).any(), "beyond, weights are no bfloat16"
        numbers += int((torch.isfinite(bound) & torch.isfinite(reference) & (reference != 0))[:, seen].any(0).sum())
    assert numbers >= 240


# Scales up to some fold into the weights' expansion: 128 of MXFP4, 134 of MXFP8.
FOLDING = [*range(3), *range(126, 138), 252, 253, 254]


@pytest.mark.parametrize("row", [row for row in ROWS if row.weights != "nvfp4"], ids=lambda row: row.name)
def test_where_scales_begin_to_fold(device: VirtualDevice, row: Instance) -> None:
    """All scales that a warp sees are alike, so that the largest is each of them."""
    rows = torch.tensor(FOLDING, dtype=torch.uint8).repeat_interleave(128)
    inputs = make_dense_inputs(
        DenseCase(2, len(rows), K, row.weights, TOKENS_WITH_SCALES[row.compute_dtype], out_dtype=torch.float32), 12
    )
    inputs.arguments[2].copy_(of_rows(rows, K // 32).view(inputs.arguments[2].shape))
    for exponent in (-20, 20):
        tokens_of(inputs, exponent)
        seen = (rows >= 96) == (exponent < 0)
        out = dense_block_scaled(*inputs.arguments, **inputs.named, tactic=row.name)
        reference, bound = dense_reference(inputs)
        check_within_bound(out[:, seen], reference[:, seen], bound[:, seen], f"{row.name}, tokens of 2^{exponent}")


@pytest.mark.parametrize("row", [row for row in ROWS if row.weights != "nvfp4"], ids=lambda row: row.name)
def test_one_scale_that_does_not_fold(device: VirtualDevice, row: Instance) -> None:
    """Among those of 16 rows and of two times 16 rows that an MMA and a warp take, at each place in turn."""
    tiles = torch.arange(32)
    inputs = make_dense_inputs(
        DenseCase(2, 128 * len(tiles), K, row.weights, TOKENS_WITH_SCALES[row.compute_dtype], out_dtype=torch.float32),
        14,
    )
    linear = torch.full((128 * len(tiles), K // 32), 127, dtype=torch.uint8)
    linear[128 * tiles + 64 * (tiles // 16) + 16 * (tiles % 4) + tiles % 16, tiles % (K // 32)] = 200
    inputs.arguments[2].copy_(swizzle_scales(linear).view(inputs.arguments[2].shape))
    tokens_of(inputs, -20)
    out = dense_block_scaled(*inputs.arguments, **inputs.named, tactic=row.name)
    check_within_bound(out, *dense_reference(inputs), row.name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_nan_is_no_infinity(device: VirtualDevice, row: Instance) -> None:
    """Ones, whose products with infinity would neither be NaN nor cancel."""
    inputs = make_dense_inputs(
        DenseCase(9, 40, K, row.weights, TOKENS_WITH_SCALES[row.compute_dtype], out_dtype=torch.float32), 13
    )
    x, weight, scales = inputs.arguments
    weight.copy_(WEIGHTS[row.weights].quantize(torch.ones(40, K))[0])
    one = 0x38 if row.weights == "nvfp4" else 127
    linear = torch.full((40, K // WEIGHTS[row.weights].elements_per_scale), one, dtype=torch.uint8)
    linear[25, 3] = 0x7F if row.weights == "nvfp4" else NAN
    scales.copy_(swizzle_scales(linear).view(scales.shape))
    of_tokens = torch.full((9, K // 32), 127, dtype=torch.uint8)
    if x.dtype is torch.uint8:
        x.fill_(0x22)
    else:
        x.copy_(torch.ones(x.shape).to(x.dtype))
    if "x_scale" in inputs.named:
        of_tokens[4, 2] = NAN
        inputs.named["x_scale"].copy_(swizzle_scales(of_tokens).view(inputs.named["x_scale"].shape))
    out = dense_block_scaled(*inputs.arguments, **inputs.named, tactic=row.name)
    nan = torch.zeros(9, 40, dtype=torch.bool)
    nan[:, 25] = True
    nan[4] |= "x_scale" in inputs.named
    assert torch.equal(torch.isnan(out), nan)
    assert not torch.isinf(out).any()


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        (row.name, tokens)
        for row in ROWS
        if row.weights in ("mxfp4", "mxfp8")
        for tokens in ("mxfp8", "mxfp8_linear", "mxfp4")
        if row.compute_dtype == "bf16" or tokens.startswith(row.compute_dtype)
    ],
)
def test_tokens_of_a_dense_layer(device: VirtualDevice, name: str, tokens: str) -> None:
    row = {row.name: row for row in ROWS}[name]
    inputs = make_dense_inputs(DenseCase(256, 24, K, row.weights, tokens, out_dtype=torch.float32), 3)
    x, _, scales = inputs.arguments
    if x.dtype is not torch.uint8:
        x.copy_(small_integers(x.shape, 0).to(x.dtype))
    named = inputs.named
    linear = BYTES[:, None].expand(-1, K // 32).contiguous()
    named["x_scale"] = linear if tokens == "mxfp8_linear" else swizzle_scales(linear)
    for exponent in (-20, 20):
        scales.copy_(of_rows(torch.full((24,), 127 + exponent, dtype=torch.uint8), K // 32).view(scales.shape))
        out = dense_block_scaled(*inputs.arguments, **named, tactic=name)
        reference, bound = dense_reference(inputs)
        seen = (BYTES >= 96) == (exponent < 0)
        seen[NAN] = True
        check_within_bound(out[seen], reference[seen], bound[seen], f"{name}, {tokens}, weights of 2^{exponent}")
        judged = seen & ((BYTES < 253) | (BYTES == NAN))  # with those between, a token of 6 is no bfloat16
        assert torch.isnan(out[judged]).all(1).tolist() == (BYTES[judged] == NAN).tolist()


@pytest.mark.parametrize("tokens", [form for form in FORMATS if form.startswith("mxf")])
def test_dequantized_tokens(device: VirtualDevice, tokens: str) -> None:
    """Exact, and what a bfloat16 cannot hold rounded once."""
    inputs = make_dense_inputs(DenseCase(256, 8, K, tokens=tokens), 4)
    linear = BYTES[:, None].expand(-1, K // 32).contiguous()
    inputs.named["x_scale"] = linear if tokens == "mxfp8_linear" else swizzle_scales(linear)
    wide, module = torch.full((256, K), torch.nan, dtype=torch.bfloat16), device.module(gen_dense_module, "mxfp4")
    arguments = (wide, inputs.arguments[0], inputs.named["x_scale"], FORMATS.index(tokens))
    device.call(module.sm12x_dequantize_rows, *arguments, writes=(wide,))
    torch.testing.assert_close(wide, inputs.multiplied().values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("form", WEIGHTS)
def test_dequantized_weights(device: VirtualDevice, form: str) -> None:
    inputs = make_dense_inputs(DenseCase(1, 256, K, form), 5)
    _, weight, scales = inputs.arguments
    scales.copy_(of_rows(BYTES, K // WEIGHTS[form].elements_per_scale).view(scales.shape))
    wide, module = torch.full((256, K), torch.nan, dtype=torch.bfloat16), device.module(gen_dense_module, form)
    arguments = (wide, weight, scales, sm12x_dense_launch._ROWS_OF_WEIGHTS[form])
    device.call(module.sm12x_dequantize_rows, *arguments, writes=(wide,))
    torch.testing.assert_close(wide, inputs.weights().values.bfloat16(), rtol=0, atol=0, equal_nan=True)


KINDS = [
    INSTANCES[index_of(name)]
    for name in (
        "stream_mxfp8_as_bf16_m8",
        "stream_bf16_m8",
        "nvfp4_stream_bf16_m8",
        "mxfp8_m8_k128",
        "bf16_m8_k128",
        "nvfp4_bf16_m8_k128",
    )
]


def check_layer(device: VirtualDevice, inputs: MoEInputs, row: Instance, what: str) -> torch.Tensor:
    output = run_moe(device, inputs, 2 if row.activation == "bf16" else 0, [row.index] * 2)
    check_within_bound(output, *moe_reference(inputs, TENSOR_CORE), f"{row.name}, {what}")
    return output


def small_layer(row: Instance, tokens: int, hidden: int, inter: int) -> MoEInputs:
    mode = 2 if row.activation == "bf16" else 0
    case = MoECase(tokens, hidden, inter, 1, 1, mode, biases=False, swiglu_parameters=False, weights=row.weights)
    return make_moe_inputs(case, 6)


@NEIGHBOURS
@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.name)
def test_fc2_of_experts(device: VirtualDevice, row: Instance, neighbours: str) -> None:
    """A row of FC2 is an output of its own, NaN included."""
    inputs, order = small_layer(row, 3, 256, 64), each_byte(neighbours, 7)
    if row.weights != "nvfp4":  # activations of about 2^-20, so that nothing overflows
        up_and_gate = torch.tensor([100, 121], dtype=torch.uint8).repeat_interleave(64)
        inputs.fc1_scales.copy_(of_rows(up_and_gate, 8)[None])
        inputs.fc2_weights.view(torch.uint8).bitwise_and_(AT_MOST_1_5)
    inputs.fc2_scales.copy_(of_rows(order, 64 // (16 if row.weights == "nvfp4" else 32))[None])
    output = check_layer(device, inputs, row, "FC2")
    assert torch.isnan(output).all(0).sum() == (2 if row.weights == "nvfp4" else 1)


@NEIGHBOURS
@pytest.mark.parametrize("row", KINDS, ids=lambda row: row.name)
def test_fc1_of_experts(device: VirtualDevice, row: Instance, neighbours: str) -> None:
    """FC2 passes each of its inputs on alone; a scale that is NaN would make NaN of all. W4A8 rounds 32 inputs
    together."""
    order = each_byte(neighbours, 8)
    nan = order & 0x7F == 0x7F if row.weights == "nvfp4" else order == NAN
    order = torch.where(nan, 100, order)
    of_block = 16 if row.weights == "nvfp4" else 32
    for half in order.chunk(2):
        inputs = small_layer(row, 3, 128, 128)
        gate = torch.full((128,), 0x38 if row.weights == "nvfp4" else 121, dtype=torch.uint8)
        inputs.fc1_scales.copy_(of_rows(torch.cat([half, gate]), 128 // of_block)[None])
        if row.weights != "nvfp4":
            inputs.fc1_weights.view(torch.uint8).bitwise_and_(AT_MOST_1_5)
        inputs.fc2_weights.zero_()
        one = torch.where(torch.arange(128) % 2 == 0, 0x02, 0x20).to(torch.uint8)
        inputs.fc2_weights.view(torch.uint8)[0, torch.arange(128), torch.arange(128) // 2] = one
        inputs.fc2_scales.fill_(0x38 if row.weights == "nvfp4" else 127)
        if row.activation == "bf16":
            inputs.input.mul_(2.0**-20)
        else:
            assert inputs.input_sf is not None
            inputs.input_sf.clamp_(min=20).sub_(20)
        check_layer(device, inputs, row, "FC1")


@pytest.mark.parametrize("swizzled", [True, False], ids=["swizzled", "linear"])
@pytest.mark.parametrize("row", [row for row in KINDS if row.activation == "mxfp8"], ids=lambda row: row.name)
def test_input_of_experts(device: VirtualDevice, row: Instance, swizzled: bool) -> None:
    """A token is a row of its own, NaN included; its limit keeps the activation within float32."""
    case = MoECase(256, 160, 32, 1, 1, 0, biases=False, swizzled_input_sf=swizzled)
    inputs = make_moe_inputs(case, 9)
    inputs.input.copy_(small_integers(inputs.input.shape, 0).sign().to(inputs.input.dtype))
    inputs.fc1_scales.clamp_(min=20).sub_(20)
    linear = BYTES[:, None].expand(-1, 5).contiguous()
    inputs.input_sf = swizzle_scales(linear).flatten() if swizzled else linear
    output = check_layer(device, inputs, row, "input")
    assert torch.isnan(output).all(1)[NAN]
    assert not torch.isnan(output[:NAN]).any()


@NEIGHBOURS
def test_a_grouped_gemm(device: VirtualDevice, neighbours: str) -> None:
    order = each_byte(neighbours, 10)
    for what, rows, n in (("b_scale", 5, 256), ("a_scale", 256, 24)):
        call = make_group_gemm_inputs([rows], n, K, 11)
        call[what].copy_(of_rows(order, K // 32).view(call[what].shape))
        other = {"a_scale": "b_scale", "b_scale": "a_scale"}[what]
        for exponent in (-20, 20):
            call[other].fill_(127 + exponent)
            out = launch_group_gemm(device, call, GEMM_INSTANCES[0].index)
            reference, bound = group_gemm_reference(**call, accumulation=TENSOR_CORE)
            seen = (order >= 96) == (exponent < 0)
            seen |= order == NAN
            where = (slice(None), seen) if what == "b_scale" else (seen,)
            check_within_bound(out[where], reference[where], bound[where], f"{what}, 2^{exponent}")
