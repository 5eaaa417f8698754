# SPDX-License-Identifier: Apache-2.0
"""Tests of ``decode_attention`` that are the same on the CPU, on a GPU and on the virtual SM121.

Whoever imports them has two fixtures: ``attend`` calls it and checks the cache and the output, ``place`` is where its
tensors lie.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flashinfer.testing.decode_reference import (
    OPERANDS,
    check_one_element,
    make_decode_case,
    put_apart,
    put_one_element,
)

Attend = Callable[..., torch.Tensor]


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_smallest_strides(attend: Attend, place: torch.device, layout: str, fp8: bool) -> None:
    case = make_decode_case([70, 20, 3], 2, 31, layout=layout, fp8=fp8, q_len=2, device=place)
    put_apart(case)
    attend(case)


# Windows within a tile's tokens and across tiles; those that no sequence fills, some behind int32's end.
@pytest.mark.parametrize("window_left", [0, 2, 15, 30, 2**30 + 1, 2**31 - 65, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("q_len", [5, 64])
def test_windows_against_new_tokens(attend: Attend, place: torch.device, q_len: int, window_left: int) -> None:
    attend(make_decode_case([q_len + 30, q_len, 3, 0], 1, 32, window_left=window_left, q_len=q_len, device=place))


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_scores_that_are_all_minus_infinity(attend: Attend, place: torch.device, sinks: bool) -> None:
    """Only a sink leaves a quotient then: NaN without, zeros with it."""
    case = make_decode_case([50, 20], 1, 35, rope=None, sinks=sinks, device=place)
    for keys in (case.keys, case.arguments["key"]):
        keys[..., 5] = -1 - keys[..., 5].abs()
    case.cache()[0].copy_(case.keys)
    case.arguments["query"][1, 3, 5] = torch.inf
    attend(case)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("operand", OPERANDS)
@pytest.mark.parametrize(
    ("fp8", "lengths", "window_left"),
    [(False, [40, 70, 2], 30), (True, [40, 70, 2], 30), (False, [40, 300, 0], -1), (False, [40, 2], -1)],
    ids=["bf16", "fp8", "split", "short"],
)
def test_what_is_no_number_stays_where_it_belongs(
    attend: Attend, place: torch.device, fp8: bool, lengths: list[int], window_left: int, operand: str, value: float
) -> None:
    sinks = operand == "sinks" or value == torch.inf
    outputs = []
    for changes in (False, True):
        case = make_decode_case(lengths, 2, 34, q_len=3, window_left=window_left, fp8=fp8, sinks=sinks, device=place)
        if changes:
            put_one_element(case, operand, value)
        outputs.append(attend(case))
    check_one_element(*outputs, case, operand)
