# SPDX-License-Identifier: Apache-2.0
"""Decode attention, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from decode_cases import *  # noqa: F403
from virtual_devices import ALL_CHECKERS, virtual_fixture

from flashinfer.decode import decode_attention
from flashinfer.jit.sm12x.modules import gen_decode_module
from flashinfer.testing.decode_reference import (
    DecodeCase,
    check_decoded,
    far_away,
    make_decode_case,
    random_decode_case,
)
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

DISTINCT = 8  # counts what is touched: a bit for every sector
SMS = 48

device = virtual_fixture(watch=ALL_CHECKERS)
# Writes reach other blocks late, unless something orders them.
weak_device = virtual_fixture(watch=ALL_CHECKERS, weak_memory=7)


def run(device: VirtualDevice, case: DecodeCase, **named: Any) -> torch.Tensor:
    out = torch.full(case.arguments["query"].shape, torch.nan, dtype=torch.bfloat16)
    decode_attention(**case.arguments, out=out, **named)
    assert all(launch.clean for launch in device.launches), device.launches
    check_decoded(out, case)
    return out


@pytest.fixture
def place() -> torch.device:
    return torch.device("cpu")


@pytest.fixture
def attend(device: VirtualDevice) -> Any:
    return partial(run, device)


# Lengths around a chunk, a page, a block's eight chunks; two splits and more; one token alone; none.
LENGTHS = [[1, 15, 16, 17], [127, 128, 129], [255], [300, 0, 31]]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(device: VirtualDevice, lengths: list[int], fp8: bool) -> None:
    run(device, make_decode_case(lengths, 2, sum(lengths), fp8=fp8))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("constant_cache", [False, True], ids=["waits", "cache first"])
def test_splits(weak_device: VirtualDevice, fp8: bool, constant_cache: bool) -> None:
    """The grid has its most splits. Their parts are unequal, and the shorter sequence leaves some without work."""
    run(weak_device, make_decode_case([1700, 260], 1, 3, fp8=fp8), constant_cache=constant_cache)
    assert weak_device.launches[-1].grid[0] == 2 * SMS


def test_more_chunks_of_a_warp_than_lanes(device: VirtualDevice) -> None:
    """A lane holds the page of one chunk of 32; so many sequences that nothing is split."""
    run(device, make_decode_case([4300] + [1] * 95, 1, 4, page_size=32))
    assert device.launches[-1].grid[0] == 96


@pytest.mark.parametrize("window_left", [0, 15, 16, 127, 2**31 - 1])
@pytest.mark.parametrize("q_len", [1, 3])
def test_windows(device: VirtualDevice, window_left: int, q_len: int) -> None:
    run(device, make_decode_case([140, 16, 3, 170], 1, window_left, window_left=window_left, q_len=q_len))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_elements_beyond_32_bits(fp8: bool) -> None:
    case = make_decode_case([70, 61, 45], 2, 33, q_len=2, window_left=40, page_size=1024, fp8=fp8)
    with virtual_device("sm_121a", watch=ALL_CHECKERS & ~DISTINCT) as device:
        check_decoded(far_away(case, decode_attention), case)
        assert all(launch.clean for launch in device.launches), device.launches


# Two and four tokens a block, tiles in part, sequences shorter than the call's tokens, new tokens in several chunks.
@pytest.mark.parametrize("q_len", [2, 4, 5, 64])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_several_tokens(device: VirtualDevice, q_len: int, fp8: bool) -> None:
    run(device, make_decode_case([q_len + 130, 7, q_len, 1], 1, q_len, q_len=q_len, fp8=fp8))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page_size", [16, 64])
def test_pages(device: VirtualDevice, layout: str, page_size: int) -> None:
    run(device, make_decode_case([70, 128, 65], 2, page_size, layout=layout, page_size=page_size))


@pytest.mark.parametrize("rope", [None, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("appends", [False, True], ids=["cached", "appends"])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_parts(device: VirtualDevice, rope: torch.dtype | None, appends: bool, sinks: bool) -> None:
    run(device, make_decode_case([40, 9], 1, 5, rope=rope, appends=appends, sinks=sinks, q_len=2))


def test_random_shapes(device: VirtualDevice) -> None:
    for _ in range(6):
        seed = int(torch.randint(2**31, ()))
        print("seed", seed)
        case = random_decode_case(seed, 200, kv_heads=2)
        run(device, case, constant_cache=seed % 2 == 0)


@pytest.mark.parametrize("position", [0, 15, 127, 128, 767, 768, 895, 896, 1022, 1023])
def test_one_position_that_all_heads_want(device: VirtualDevice, position: int) -> None:
    """One position's key outweighs the thousand others together; it lies at each seam of splits, warps and chunks."""
    case = make_decode_case([1024], 1, 11, rope=None, sinks=False)
    keys, values = case.cache()
    page = int(case.arguments["block_tables"][0, position // 16])
    wanted = case.arguments["query"][0, 3].float()
    row = (wanted * 8 / wanted.square().mean().sqrt()).bfloat16()
    if position == 1023:
        case.arguments["key"][0, 0] = row
        expected = case.arguments["value"][0, 0]
    else:
        keys[page, 0, position % 16] = row
        case.keys[page, 0, position % 16] = row
        expected = values[page, 0, position % 16]
    out = run(device, case)
    torch.testing.assert_close(out[0, 3], expected, rtol=2**-7, atol=1e-3)


def test_a_used_workspace_and_another_size(device: VirtualDevice) -> None:
    """Counters are zero again after each call, whatever the splits were."""
    workspace = torch.zeros(4 << 20, dtype=torch.uint8)
    for lengths in ([600, 512], [1500], [40] * 5, [600, 512]):
        run(device, make_decode_case(lengths, 1, len(lengths)), workspace_buffer=workspace)
    assert not workspace[: 2 * SMS * 4].any()


@pytest.mark.parametrize("q_len", [1, 2, 3, 5])
@pytest.mark.parametrize("window_left", [-1, 500])
def test_splits_of_several_tokens_and_of_windows(device: VirtualDevice, q_len: int, window_left: int) -> None:
    run(device, make_decode_case([1000, 5, 610], 1, q_len, q_len=q_len, window_left=window_left))


@pytest.mark.parametrize("lengths", [[40, 7], [300], [1200]], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_where_nothing_is_rounded_but_the_output(
    device: VirtualDevice, lengths: list[int], sinks: bool, fp8: bool
) -> None:
    """Weights are powers of two: the bound is a ten-thousandth of what bf16 weights need, whatever is split."""
    run(device, make_decode_case(lengths, 1, 9, lattice=True, sinks=sinks, fp8=fp8))


def test_nothing_is_written_without_new_keys(device: VirtualDevice) -> None:
    """The cache is read-only then: a write would be reported."""
    run(device, make_decode_case([90], 1, 2, appends=False))


def run_two(device: VirtualDevice, constant_cache: bool, lengths_too: bool) -> None:
    """A layer's attention after another's, whose results are its queries, and which wrote its cache: in flight
    together."""
    module = device.module(gen_decode_module)
    first = make_decode_case([340, 35], 1, 21)
    second = make_decode_case([341, 36], 1, 22)
    workspace = torch.zeros(int(module.sm12x_decode_workspace_size(0)), dtype=torch.uint8)
    out = [torch.full(first.arguments["query"].shape, torch.nan, dtype=torch.bfloat16) for _ in range(2)]
    second.arguments["query"] = out[0]
    if lengths_too:  # the second reads what the first appended
        second.arguments |= {name: first.arguments[name] for name in ("kv_cache", "block_tables", "seq_lens")}
        second.arguments |= {"key": None, "value": None, "rope_table": None}

    def arguments(case: DecodeCase, at: int) -> tuple[Any, ...]:
        a = case.arguments
        keys, values = case.cache()
        tensors = (a.get(name) for name in ("query", "key", "value", "block_tables", "seq_lens", "rope_table", "sinks"))
        scales = (0.125 * math.log2(math.e), 1.0, 1.0)
        return (out[at], keys, values, workspace, *tensors, 1, -1, *scales, constant_cache, True)

    calls = [arguments(first, 0), arguments(second, 1)]
    tensors = [part for call in calls for part in call if isinstance(part, torch.Tensor)]
    storages = {
        part.untyped_storage().data_ptr(): torch.empty(0, dtype=torch.uint8).set_(part.untyped_storage())
        for part in tensors
    }
    device.call(lambda *_: [module.sm12x_decode_run(*call) for call in calls], *storages.values())
    assert all(launch.clean for launch in device.launches), device.launches
    check_decoded(out[0], first)
    if lengths_too:
        second.keys, second.values = (part.clone() for part in first.cache())
        for name in ("key", "value", "rope_table"):
            del second.arguments[name]
    check_decoded(out[1], second)


def test_queries_that_the_launch_in_front_writes(device: VirtualDevice) -> None:
    run_two(device, True, False)


def test_a_cache_that_the_launch_in_front_writes(device: VirtualDevice) -> None:
    run_two(device, False, True)
