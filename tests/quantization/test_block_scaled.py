# SPDX-License-Identifier: Apache-2.0
"""Quantized weights: what each format holds, the scale rules, rows in memory, errors."""

from __future__ import annotations

import pytest
import torch

from flashinfer.gemm import dense_block_scaled
from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import (
    CHUNK_ROWS,
    LAYOUTS,
    WEIGHT_FORMATS,
    BlockScaledWeight,
    dequantize_rows,
    dequantize_weight,
    quantize_rows,
    quantize_weight,
)
from flashinfer.testing import mxfp_formats

UNIT_ROUNDOFF = {"mxfp4": 1 / 4, "nvfp4": 1 / 4, "mxfp6": 1 / 16, "mxfp8": 1 / 16, "mxint8": 1 / 127}
"""Half a step over the block's largest magnitude, of values that do not saturate."""


def seeded(seed: int) -> torch.Generator:
    print("seed", seed)
    return torch.Generator().manual_seed(seed)


def weight(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    """Blocks of several sizes, some of zeros."""
    values = torch.randn(n, k // 32, 32, generator=generator)
    values *= torch.exp2(torch.randint(-6, 7, (n, k // 32, 1), generator=generator).float())
    values[torch.rand(n, k // 32, generator=generator) < 0.05] = 0.0
    return values.reshape(n, k)


def test_a_layer_of_a_quantized_weight() -> None:
    """A newcomer writes this: quantize, multiply."""
    generator = seeded(0)
    w, x = torch.randn(40, 96, generator=generator), torch.randn(3, 96, generator=generator).bfloat16()
    q = quantize_weight(w, "mxint8")
    out = dense_block_scaled(x, q.values, q.scales, weight_format="mxint8", out_dtype=torch.float32)
    torch.testing.assert_close(out, x.float() @ w.T, rtol=0.05, atol=0.3)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
@pytest.mark.parametrize("k", [32, 64, 96, 160, 416])
def test_values_are_as_near_as_the_format_allows(form: str, k: int) -> None:
    w = weight(CHUNK_ROWS + 5 if k == 96 else 133, k, seeded(k))
    for rule in mx_cpu.SCALE_RULES:
        q = quantize_weight(w, form, rule)
        layout = LAYOUTS[form]
        assert q.values.dtype is layout.dtype
        assert q.values.shape == (len(w), layout.columns(k))
        assert layout.k(q.values.shape[1]) == k
        assert (q.global_scale is not None) == (form == "nvfp4")
        found = dequantize_weight(q, form, k)
        size = layout.scales.block
        error, amax = ((v.reshape(len(w), -1, size)).abs().amax(-1) for v in (found - w, w))
        # Scales of NVFP4 are to nearest: a block's largest may saturate by a sixteenth.
        slack = 2.0**-4 * amax if form == "nvfp4" else 0.0
        least = 2.0**-10 * 6.0 * float(q.global_scale) if q.global_scale is not None else 0.0
        if rule == "amax":
            assert (error <= UNIT_ROUNDOFF[form] * amax + slack + least).all()
    by_rule = [
        (dequantize_weight(quantize_weight(w, form, rule), form, k) - w).square().sum() for rule in mx_cpu.SCALE_RULES
    ]
    assert by_rule[1] < by_rule[0] or form in ("mxfp8", "mxint8", "mxfp6")
    assert by_rule[1] <= by_rule[0]


@pytest.mark.parametrize("form", ["mxfp6", "mxint8", "nvfp4"])
def test_what_is_read_is_what_the_reference_reads(form: str) -> None:
    """Every byte of values and scales, the last word of a row whole and not."""
    generator = seeded(3)
    for k in (32, 64, 96, 128, 288):
        layout = LAYOUTS[form]
        values = torch.randint(0, 256, (300, layout.columns(k)), dtype=torch.uint8, generator=generator)
        scales = torch.randint(0, 256, (300, k // layout.scales.block), dtype=torch.uint8, generator=generator)
        reference = getattr(mxfp_formats, f"dequantize_{form}")
        expected = reference(values.view(layout.dtype), scales).float()
        q = BlockScaledWeight(values.view(layout.dtype), mx_cpu.swizzle_128x4(scales), None)
        torch.testing.assert_close(dequantize_weight(q, form, k), expected, rtol=0, atol=0, equal_nan=True)


def test_codes_of_mxfp6_come_back() -> None:
    codes = torch.arange(64, dtype=torch.uint8).repeat(5)[:288].view(1, 288)
    for k in (32, 96, 128, 160, 288):
        assert torch.equal(mx_cpu.unpack_e2m3(mx_cpu.pack_e2m3(codes[:, :k]), k), codes[:, :k])


def test_nvfp4s_scale_is_the_better_of_two() -> None:
    """The scale of a block is amax / 6 or amax / 4, by the squared error, and each is the better one somewhere."""
    w = torch.randn(200, 64, generator=seeded(4))
    unit = mx_cpu.nvfp4_global_scale(w)
    blocks = w.double().view(200, 4, 16) / float(unit)
    candidates = []
    for largest in (6.0, 4.0):
        scale = mxfp_formats.round_to_e4m3(blocks.abs().amax(-1) / largest).unsqueeze(-1)
        table = torch.tensor(mxfp_formats.E2M1_VALUES, dtype=torch.float64)
        nearest = ((blocks / scale).abs().unsqueeze(-1) - table).abs().argmin(-1)
        candidates.append(((table[nearest] * scale - blocks.abs()) ** 2).sum(-1))
    packed, scales = mx_cpu.quantize_nvfp4_linear(w, unit, "mse")
    found = ((mxfp_formats.dequantize_nvfp4(packed, scales).view(200, 4, 16) - blocks) ** 2).sum(-1)
    best = torch.stack(candidates).amin(0)
    assert (found <= best * (1 + 1e-5)).all()
    assert (candidates[0] < best * (1 + 1e-9)).any()
    assert (candidates[1] < candidates[0]).float().mean() > 0.1


@pytest.mark.parametrize(("amax", "expected"), [(2688.0, 1.0), (2689.0, 2.0), (1.0, 2.0**-11), (0.0, 1.0)])
def test_the_global_scale_is_a_power_of_two(amax: float, expected: float) -> None:
    w = torch.zeros(3, 32)
    w[1, 5] = -amax
    w[2, 0], w[2, 1] = torch.inf, torch.nan  # take no part
    assert float(mx_cpu.nvfp4_global_scale(w)) == expected


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_infinity_saturates_and_nan_is_the_blocks_or_the_elements(form: str) -> None:
    w = torch.ones(4, 64)
    w[1, 3], w[2, 40] = torch.inf, torch.nan
    found = dequantize_weight(quantize_weight(w, form), form, 64)
    assert torch.isfinite(found[[0, 3]]).all()
    assert torch.isfinite(found[1, 32:]).all()
    assert found[1, 3] > 100 or form == "nvfp4"
    assert found[2, 40].isnan()
    assert torch.isfinite(found[2, :32]).all()


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
def test_no_rows(form: str) -> None:
    q = quantize_weight(torch.zeros(0, 64), form)
    assert dequantize_weight(q, form, 64).shape == (0, 64)


def test_errors_name_what_is_wrong() -> None:
    w = torch.randn(8, 64)
    q = quantize_weight(w, "mxfp6")
    with pytest.raises(ValueError, match=r"weight_format is 'fp4'; it must be 'mxfp4', 'nvfp4', 'mxfp6', 'mxint8' or"):
        quantize_weight(w, "fp4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"weight is .* last dimension that is a positive multiple of 32"):
        quantize_weight(w[:, :33], "mxint8")
    with pytest.raises(ValueError, match=r"weight is .* it must be a float matrix"):
        quantize_weight(w[0], "mxint8")
    with pytest.raises(ValueError, match=r"scale_rule is 'best'"):
        quantize_weight(w, "mxint8", "best")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"values is torch.uint8 .*; it must be torch.uint8 \[n, 80\]"):
        dequantize_weight(q, "mxfp6", 96)
    with pytest.raises(ValueError, match=r"values is torch.uint8 .*; it must be torch.int8 \[n, 64\]"):
        dequantize_weight(q, "mxint8", 64)


@pytest.mark.parametrize("form", WEIGHT_FORMATS)
@pytest.mark.parametrize("linear", [False, True], ids=["128x4", "linear"])
def test_a_wrong_part_of_a_quantized_weight_is_named(form: str, linear: bool) -> None:
    """Before torch computes: the part, what it was, and what it may be."""
    dequantize, quantize = (dequantize_rows, quantize_rows) if linear else (dequantize_weight, quantize_weight)
    w = torch.randn(133, 96, generator=seeded(7))
    q = quantize(w, form)
    assert dequantize(q, form, 96).shape == w.shape
    s, v = q.scales, q.values
    scale_texts = r"^scales is .*; it must be \d+ contiguous bytes: (128x4|linear) scales of 133 rows and \d blocks of"
    short = s.clone()
    short.untyped_storage().resize_(s.nbytes - 1)
    cut = v.clone()
    cut.untyped_storage().resize_(v.nbytes - 1)
    bad: list[tuple[dict[str, object], int, str, type[Exception]]] = [
        ({}, 64, "^values is .*; it must be .*", ValueError),
        ({}, 128, "^values is .*; it must be .*", ValueError),
        ({}, 48, "^k is 48; it must be a positive multiple of 32", ValueError),
        ({}, 0, "^k is 0; it must be an integer", ValueError),
        ({"scales": s.flatten()[:-1]}, 96, scale_texts, ValueError),
        ({"scales": torch.cat([s, s])}, 96, scale_texts, ValueError),
        ({"scales": s[:, :1].contiguous()}, 96, scale_texts, ValueError),
        ({"scales": s.float()}, 96, "^scales is torch.float32", ValueError),
        ({"scales": s.to("meta")}, 96, "^scales is .* on meta", ValueError),
        ({"scales": short}, 96, "^scales is .*, of which its storage holds", ValueError),
        ({"scales": None}, 96, "^scales is None; it must be", TypeError),
        ({"values": cut}, 96, "^values is .*, of which its storage holds", ValueError),
        ({"values": v[0]}, 96, "^values is .*; it must be packed rows", ValueError),
        ({"values": None}, 96, "^values is None; it must be packed rows", TypeError),
        ({"values": v.float()}, 96, "^values is torch.float32", ValueError),
    ]
    if form == "nvfp4":
        bad += [
            ({"global_scale": 1.0}, 96, "^global_scale is 1.0; it must be", TypeError),
            ({"global_scale": torch.ones(2)}, 96, r"^global_scale is torch.float32 \(2,\)", ValueError),
            ({"global_scale": torch.ones(1).double()}, 96, "^global_scale is torch.float64", ValueError),
        ]
    else:
        bad.append(
            ({"global_scale": torch.ones(1)}, 96, f"^global_scale is .*; {form} has none, pass None", ValueError)
        )
    for changes, k, text, error in bad:
        with pytest.raises(error, match=text):
            dequantize(q._replace(**changes), form, k)
    with pytest.raises(TypeError, match=r"^weight is a tuple of 3; it must be a BlockScaledWeight"):
        dequantize(tuple(q), form, 96)  # type: ignore[arg-type]
