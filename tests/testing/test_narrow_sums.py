# SPDX-License-Identifier: Apache-2.0
"""The bound on tensor cores' sums covers the adder that it models, at every width and for the worst of inputs."""

from __future__ import annotations

import pytest
import torch

from flashinfer.jit.sm12x import modules
from flashinfer.testing import SM120_SUM_BITS, Accumulation
from flashinfer.testing.error_bounds import STEP, dot_error
from flashinfer.testing.mxfp_formats import BLOCK, Operand
from flashinfer.testing.tensor_core_sums import add_up, operand

HOPPER, SM120, B200 = 13, min(SM120_SUM_BITS.values()), 25


def operands(data: str, k: int, seed: int, tokens: str) -> tuple[Operand, Operand]:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(rows, k, generator=generator) for rows in (12, 20))
    if data == "one sign":
        x, w = x.abs(), w.abs()
    elif data == "wide":  # blocks at scales from 2^-12 to 2^12
        exponents = torch.randint(-12, 13, (1, k // BLOCK), generator=generator).repeat_interleave(BLOCK, -1)
        x = torch.ldexp(x, exponents)
    elif data == "tiny":  # most elements subnormal
        x[:, ::BLOCK], w[:, 1::BLOCK] = 1e4, 1e4
        x[:, 2::3] *= 2.0**-8
    elif data == "cancelling":  # large sums that the last block takes away again
        x[:, -BLOCK:], w[:, -BLOCK:] = 100 * x[:, :BLOCK], -100 * w[:, :BLOCK]
        x[:, :BLOCK], w[:, :BLOCK] = x[:, -BLOCK:], -w[:, -BLOCK:]
    return operand(x, tokens), operand(w, "mxfp4")


@pytest.mark.parametrize("bits", [9, HOPPER, SM120, B200])
@pytest.mark.parametrize("k", [32, 512, 544])
@pytest.mark.parametrize("data", ["normal", "one sign", "wide", "tiny", "cancelling"])
@pytest.mark.parametrize("tokens", ["bf16", "mxfp8", "mxfp4"])
def test_it_covers_every_order(tokens: str, data: str, k: int, bits: int) -> None:
    seed = k + bits
    print("seed", seed)
    x, w = operands(data, k, seed, tokens)
    along_k = dot_error(x, w, Accumulation(bits))
    bound = dot_error(x, w, Accumulation(bits), along_k=False)
    assert torch.equal(dot_error(x, w, Accumulation(bits), x_error=torch.zeros_like(x.values)), along_k)
    assert (along_k <= bound).all()
    exact, used = x.values @ w.values.T, {}
    generator = torch.Generator().manual_seed(seed)
    for elements in (STEP, 16, 32):
        steps = -(-k // elements)
        parts = zip(x.values.split(elements, 1), w.values.split(elements, 1), strict=True)
        sums = torch.stack([(a @ b.T).mean() for a, b in parts])
        orders = {
            "forward": list(range(steps)),
            "backward": list(range(steps))[::-1],
            "random": torch.randperm(steps, generator=generator).tolist(),
            "positive first": sums.argsort(descending=True).tolist(),
        }
        for name, order in orders.items():
            distance = (add_up(x, w, bits, elements, order) - exact).abs()
            limit = along_k if name in ("forward", "backward") else bound
            used[name, elements] = float((distance / limit.clamp(min=1e-300)).max())
    print(
        used, "of the bound; the bound is at most", float((bound / (x.values.abs() @ w.values.abs().T)).max()), "of A"
    )
    assert max(used.values()) <= 1


@pytest.mark.parametrize("bits", [9, HOPPER, SM120, B200])
@pytest.mark.parametrize("data", ["normal", "one sign", "cancelling"])
def test_along_k_it_covers_ranges_and_any_order_within_a_block(data: str, bits: int) -> None:
    """Three parts of K by themselves, elements of a block permuted as fragments permute them, added up in float32."""
    print("seed", bits)
    x, w = operands(data, 544, bits, "mxfp8")
    generator = torch.Generator().manual_seed(bits)
    order = torch.cat([torch.randperm(BLOCK, generator=generator) + first for first in range(0, 544, BLOCK)])
    parts = []
    for part in order.split(192):
        blocks = slice(int(part.min()) // BLOCK, int(part.max()) // BLOCK + 1)
        taken = (Operand(each.form, each.values[:, part], each.least[:, blocks]) for each in (x, w))
        parts.append(add_up(*taken, bits, STEP).float())
    total = (parts[0] + parts[1] + parts[2]).double()
    distance, bound = (total - x.values @ w.values.T).abs(), dot_error(x, w, Accumulation(bits))
    print(f"{float((distance / bound).max()):.1%} of the bound")
    assert (distance <= bound).all()


@pytest.mark.parametrize("bits", [HOPPER, SM120, B200])
@pytest.mark.parametrize("tokens", ["bf16", "mxfp8"])
def test_it_covers_what_is_only_known_to_within_an_interval(tokens: str, bits: int) -> None:
    """Half of the elements are moved by as much as their error allows: anything that the format has may be
    multiplied."""
    print("seed", bits)
    x, w = operands("normal", 512, bits, tokens)
    generator = torch.Generator().manual_seed(bits)
    size = 2.0 ** torch.randint(-8, 2, x.values.shape, generator=generator)
    error = torch.where(torch.rand(x.values.shape, generator=generator) < 0.5, 0.0, size * x.values.abs() + 2.0**-20)
    push = torch.where(torch.rand(x.values.shape, generator=generator) < 0.5, -1.0, 1.0)
    multiplied = operand((x.values + push * error).float(), tokens)
    error = torch.maximum((multiplied.values - x.values).abs(), error)
    # Exponents of x's blocks may be above those of what is multiplied, and are not below.
    multiplied = Operand(tokens, multiplied.values, torch.maximum(multiplied.least, x.least))
    x = Operand(tokens, x.values, multiplied.least)
    distance = (add_up(multiplied, w, bits, 32) - multiplied.values @ w.values.T).abs()
    bound = dot_error(x, w, Accumulation(bits), x_error=error)
    print(f"{float((distance / bound).max()):.1%} of the bound")
    assert (distance <= bound).all()


@pytest.mark.parametrize("bits", range(13, 26))
@pytest.mark.parametrize("elements", [STEP, 16, 32])
def test_it_covers_products_that_are_just_too_small(bits: int, elements: int) -> None:
    """One large product, then thousands a little below the adder's unit beside it: every one of them is lost."""
    k = 2880
    tokens = torch.full((1, k), (2 - 2.0**-7) * 2.0 ** -(bits + 1))
    tokens[:, 0] = 1.0
    x, w = operand(tokens, "bf16"), operand(torch.ones(1, k), "bf16")
    error = float((add_up(x, w, bits, elements) - x.values @ w.values.T).abs())
    bound = float(dot_error(x, w, Accumulation(bits)))
    print(f"lost {error:.3g}, {error / bound:.1%} of the bound")
    assert 0.5 * bound < error <= bound


@pytest.mark.parametrize("bits", [24, B200])
def test_it_covers_sums_that_float32_cuts(bits: int) -> None:
    """A product a step whose last bit is the adder's: nothing of it is lost, but float32 has not those bits of the
    sum."""
    k = 2880
    tokens = torch.zeros(1, k)
    tokens[:, STEP::STEP] = (2.0 ** (bits - 23) - 1) * 2.0**-bits
    tokens[:, 0] = 1.0
    x, w = operand(tokens, "bf16"), operand(torch.ones(1, k), "bf16")
    error = float((add_up(x, w, bits, STEP) - x.values @ w.values.T).abs())
    bound = float(dot_error(x, w, Accumulation(bits)))
    print(f"lost {error:.3g}, {error / bound:.1%} of the bound")
    assert error == pytest.approx((k // STEP - 1) * float(tokens[0, STEP]))
    assert 0.2 * bound < error <= bound


def test_subnormal_elements_count_with_their_formats_exponent() -> None:
    """All elements of a block may be subnormal: its products are then aligned to an exponent above theirs."""
    tiny = torch.full((1, 32), 2.0**-9).to(torch.float8_e4m3fn)
    x = Operand.of_mxfp8(tiny, torch.full((1, 1), 127, dtype=torch.uint8))
    w = operand(torch.full((1, 32), 6.0), "mxfp4")
    exact = x.values @ w.values.T
    lost = {bits: float((exact - add_up(x, w, bits, 32)).abs()) for bits in (2, 3, 4)}
    assert lost[2] == float(exact)  # 6 * 2^-9 counts with the exponent 2 - 6, and lies below 2^-6
    assert lost[3] > 0 == lost[4]
    for bits, error in lost.items():
        assert error <= float(dot_error(x, w, Accumulation(bits)))


def test_it_is_not_loose_by_orders() -> None:
    """At a layer's K the bound stays below a share of a typical result: 10 % at an SM120's width, and the shares below
    for Hopper's and a B200's."""
    x, w = operands("normal", 2880, 1, "mxfp8")
    exact = (x.values @ w.values.T).abs().mean()
    for bits, most in ((HOPPER, 12.0), (SM120, 0.1), (B200, 0.003)):
        share = float(dot_error(x, w, Accumulation(bits)).mean() / exact)
        print(f"{bits} bits: the bound is {share:.2%} of a typical result")
        assert share < most


def test_a_lattice_is_exact() -> None:
    """Small integers lose nothing while their sums fit the width; where they do not, they may."""
    print("seed", 3)
    generator = torch.Generator().manual_seed(3)
    x = torch.randint(-2, 3, (5, 32), generator=generator)
    w = Operand.of_bf16(torch.randint(-1, 2, (7, 32), generator=generator))
    assert (dot_error(Operand.of_bf16(x), w, Accumulation(HOPPER)) == 0).all()
    wide = Operand.of_bf16(1024 * x + 1)
    assert (dot_error(wide, w, Accumulation(HOPPER)) > 0).any()
    assert (dot_error(wide, w, Accumulation(B200)) == 0).all()


@pytest.mark.parametrize(("bits", "k"), [(16, 2880), (18, 2880), (18, 8192), (SM120, 8192), (SM120, 32768)])
def test_what_a_width_costs_a_sum_of_one_sign(bits: int, k: int) -> None:
    """The rule that decides whether an MMA is used assumes the loss that the adder has of MXFP8 x MXFP4."""
    x, w = operands("one sign", k, bits, "mxfp8")
    exact = x.values @ w.values.T
    lost = float(((exact - add_up(x, w, bits, BLOCK)) / exact).mean())
    share = lost / modules.drift(bits, k)
    print(f"{lost:.3g} is lost, {share:.2f} of what the rule says")
    assert 0.8 < share < 1.2
