"""``backend="sm12x"`` of group_gemm_mxfp4_nt_groupwise against a float64 reference, within the bound of its roundings."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import pytest
import torch

from flashinfer import gemm
from flashinfer.gemm import group_gemm_sm12x
from flashinfer.jit.sm12x.heuristics import choose_group_gemm
from flashinfer.jit.sm12x.instances import GEMM_INSTANCES
from tests.test_helpers.mx_error_bounds import (
    ANY_ORDER,
    Accumulation,
    accumulation_on,
    check_within_bound,
    dot_error,
)
from tests.test_helpers.mx_formats import (
    BLOCK,
    Operand,
    sm12x_device,
    swizzle_scales,
    swizzled_place,
    unswizzle_scales,
    with_nan_padding,
    with_not_numbers,
)
from tests.test_helpers.sm12x_moe import Data, _Source, _weights, same_bits

device = pytest.fixture(sm12x_device, name="device")
group_gemm_mxfp4_nt_groupwise = functools.partial(gemm.group_gemm_mxfp4_nt_groupwise, backend="sm12x")


# take flashinfer/testing/gemm_reference.py: padded_group_offsets group_gemm_reference
# take flashinfer/testing/moe_inputs.py: make_group_gemm_inputs _scales_of_groups group_gemm_inputs_with_not_numbers


def _check(sizes, n, k, device, seed=0, dtype=torch.float8_e4m3fn, out_dtype=torch.float16, data="normal"):
    """Within the bound, and the same bits when it is repeated."""
    inputs = make_group_gemm_inputs(sizes, n, k, seed, device, dtype, data)
    reference, bound = group_gemm_reference(**inputs, accumulation=accumulation_on(device))
    if data == "lattice":
        assert (bound == 0).all(), "lattice data is exact"
    results = []
    for _ in range(2):
        out = torch.full((sum(sizes), n), torch.nan, dtype=out_dtype, device=device)
        assert group_gemm_mxfp4_nt_groupwise(**inputs, out=out) is out
        results.append(out)
    check_within_bound(results[0], reference, bound, f"sizes {sizes}, n {n}, k {k}, seed {seed}")
    assert same_bits(*results), "a second run differs"


# Groups of any size, the multiples of 4 rows among them; N and K at both ends and around
# the tiles of 128.
CORNERS = [
    ([1], 8, 128),
    ([4, 0, 9], 136, 384),
    ([0, 0, 130, 1], 120, 256),
    ([128, 128], 128, 128),
    ([257, 3], 32, 256),
]


@pytest.mark.parametrize("sizes,n,k", CORNERS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("data", ["normal", "lattice"])
def test_corners(sizes, n, k, dtype, data, device):
    out_dtype = torch.bfloat16 if n == 136 else torch.float16
    _check(sizes, n, k, device, n + k, dtype, out_dtype, data)


@pytest.mark.parametrize("row", GEMM_INSTANCES, ids=lambda row: row.name)
@pytest.mark.parametrize("sizes", [[3, 0, 6], [70, 1, 133]], ids=["few", "many"])
def test_every_row(row, sizes, device, monkeypatch):
    monkeypatch.setattr(group_gemm_sm12x, "choose_group_gemm", lambda *sizes: row)
    _check(sizes, 136, 256, device, 20)


# Experts of gpt-oss-20b with the rows of a prompt, and of gpt-oss-120b with those of a step.
@pytest.mark.parametrize("sizes,n,k", [([0, 300, 17, 1] * 8, 5760, 2944), ([1, 0, 0, 2] * 32, 2880, 2944)])
def test_layers_of_models(sizes, n, k, device):
    _check(sizes, n, k, device, 21)


def test_all_groups_empty(device):
    inputs = make_group_gemm_inputs([0, 0], 64, 128, 2, device)
    assert group_gemm_mxfp4_nt_groupwise(**inputs).shape == (0, 64)


def test_allocates_and_takes_out(device):
    inputs = make_group_gemm_inputs([3, 5], 64, 128, 3, device)
    expected = group_gemm_mxfp4_nt_groupwise(**inputs)
    assert (expected.dtype, expected.shape) == (torch.bfloat16, (8, 64))
    half = group_gemm_mxfp4_nt_groupwise(**inputs, out_dtype=torch.float16)
    out = torch.empty_like(half)
    assert group_gemm_mxfp4_nt_groupwise(**inputs, out=out) is out
    assert same_bits(out, half)
    # The tile arguments are the other backend's.
    for tile_n in (32, 64, 128):
        for swap_ab in (True, False):
            again = group_gemm_mxfp4_nt_groupwise(**inputs, tile_n=tile_n, swap_ab=swap_ab)
            assert same_bits(again, expected)


def test_inputs_are_not_written(device):
    inputs = make_group_gemm_inputs([3, 0, 20], 64, 128, 4, device)
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    group_gemm_mxfp4_nt_groupwise(**inputs)
    for name, tensor in inputs.items():
        assert same_bits(tensor, before[name]), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_what_is_no_number_stays_in_its_row_or_column(dtype, device):
    inputs = make_group_gemm_inputs([9, 0, 5], 136, 256, 10, device, dtype)
    for what, call in group_gemm_inputs_with_not_numbers(inputs, 11):
        out = torch.full((14, 136), torch.nan, dtype=torch.float16, device=device)
        group_gemm_mxfp4_nt_groupwise(**call, out=out)
        check_within_bound(out, *group_gemm_reference(**call, accumulation=accumulation_on(device)), what)


def test_replays_from_a_cuda_graph(device):
    inputs = make_group_gemm_inputs([3, 40, 0, 5], 128, 256, 8, device)
    expected = group_gemm_mxfp4_nt_groupwise(**inputs)
    out = torch.empty_like(expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        group_gemm_mxfp4_nt_groupwise(**inputs, out=out)
    out.fill_(torch.nan)
    graph.replay()
    assert same_bits(out, expected)


BAD = [
    ({"a": lambda a: a.bfloat16()}, "a must be a float8_e4m3fn or float8_e5m2 tensor, but got torch.bfloat16"),
    ({"a": lambda a: a[:, :64].contiguous()}, r"a.shape\[1\] must equal k"),
    ({"a": lambda a: a.T.contiguous().T}, "a must be contiguous and start at a multiple of 16 bytes"),
    ({"b": lambda b: b.to(torch.int32)}, "b must be a uint8 tensor"),
    ({"b": lambda b: b[:, :60].contiguous()}, "n must be a multiple of 8, but got n=60"),
    ({"b": lambda b: b[..., :40].contiguous(), "a": lambda a: a[:, :80]}, "k must be a multiple of 128, but got k=80"),
    ({"b": lambda b: b[:1]}, r"b.shape\[0\] must equal num_groups"),
    ({"b": lambda b: torch.cat([b.flatten()[:8], b.flatten()])[8:].view(b.shape)}, "b must be .* multiple of 16 bytes"),
    ({"a_scale": lambda s: s[:128]}, r"a_scale must have shape \(>= 256, 4\), got \(128, 4\)"),
    ({"a_scale": lambda s: s[:, :3]}, r"a_scale must have shape \(>= 256, 4\), got \(256, 3\)"),
    ({"a_scale": lambda s: s.flatten()}, r"a_scale must have shape \(>= 256, 4\), got \(1024,\)"),
    ({"a_scale": lambda s: s.repeat(1, 2)[:, ::2]}, "a_scale must be contiguous"),
    ({"b_scale": lambda s: s[:, :64]}, r"b_scale must have shape \(2, 128, 4\), got \(2, 64, 4\)"),
    ({"b_scale": lambda s: s.float()}, "b_scale must be a uint8 tensor"),
    ({"b_scale": lambda s: s.mT.contiguous().mT}, "b_scale must be contiguous"),
    ({"m_indptr": lambda i: i.long()}, "m_indptr must be a int32 tensor"),
    ({"m_indptr": lambda i: i.repeat_interleave(2)[::2]}, "m_indptr must be contiguous"),
    ({"out": torch.float32}, "out_dtype must be either torch.bfloat16 or torch.float16"),
    ({"tile_n": 256}, "tile_n must be 32, 64, or 128"),
]


@pytest.mark.parametrize("changes,message", BAD, ids=[message[:60] for _, message in BAD])
def test_errors_come_before_a_launch(changes, message, device, monkeypatch):
    monkeypatch.setattr(group_gemm_sm12x, "get_sm12x_group_gemm_module", lambda: pytest.fail("launched"))
    inputs = make_group_gemm_inputs([3, 5], 64, 128, 6, device)
    for name, change in changes.items():
        if isinstance(change, torch.dtype):
            inputs[name] = torch.empty(8, 64, dtype=change, device=device)
        else:
            inputs[name] = change(inputs[name]) if callable(change) else change
    with pytest.raises(ValueError, match=message):
        group_gemm_mxfp4_nt_groupwise(**inputs)


@pytest.mark.parametrize("shape", [(64, 8), (9, 64)])
def test_an_output_that_does_not_fit_is_refused(shape, device):
    inputs = make_group_gemm_inputs([3, 5], 64, 128, 7, device)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    message = "out must be contiguous" if shape == (64, 8) else "out.shape must be"
    with pytest.raises(ValueError, match=message):
        group_gemm_mxfp4_nt_groupwise(**inputs, out=out.T if shape == (64, 8) else out)


@pytest.mark.parametrize("cum_m,groups,tile", [(4, 4, 8), (128, 1, 128), (60, 2, 32)])
def test_the_tile_follows_the_rows_of_a_group(cum_m, groups, tile):
    assert choose_group_gemm(cum_m, groups).block_n >= min(cum_m // groups, tile)


def test_compute_capabilities():
    supported = gemm.group_gemm_mxfp4_nt_groupwise.is_backend_supported
    assert supported("sm12x", 120) and supported("sm12x", 121)
    assert not supported("sm12x", 100) and supported("cutlass", 100)
