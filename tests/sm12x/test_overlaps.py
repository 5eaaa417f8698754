# SPDX-License-Identifier: Apache-2.0
"""Checks of which tensors share memory, against sets of bytes: small tensors of all shapes, strides and distances."""

from __future__ import annotations

import collections
import itertools
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch

from flashinfer.sm12x.checks import are_apart, bounds_of, elements_overlap, require_apart, strides_overlap

MEMORY = 96
Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides, in elements


def place(memory: bytearray, layout: Layout, start: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor from byte ``start`` on, at any address."""
    shape, strides = layout
    flat = torch.frombuffer(memory, dtype=dtype, offset=start, count=(MEMORY - start) // dtype.itemsize)
    return flat.as_strided(shape, strides, 0)


def elements_of(tensor: torch.Tensor) -> list[range]:
    """Addresses of each element's bytes."""
    places = itertools.product(*map(range, tensor.shape))
    first, width = tensor.data_ptr(), tensor.element_size()
    starts = [first + width * sum(map(int.__mul__, at, tensor.stride())) for at in places]
    return [range(start, start + width) for start in starts]


def bytes_of(tensor: torch.Tensor) -> set[int]:
    return set().union(*elements_of(tensor))


def spans(layout: Layout) -> bool:
    """Whether each stride is at least the span of the dimensions with smaller strides."""
    span = 1
    for stride, extent in sorted(zip(*reversed(layout), strict=True)):
        if extent > 1:
            if stride < span:
                return False
            span += (extent - 1) * stride
    return True


def layouts(strides: range, *extents: int) -> Iterator[Layout]:
    for rank in range(4):
        for shape in itertools.product(extents, repeat=rank):
            for chosen in itertools.product(strides, repeat=rank):
                if sum((extent - 1) * stride for extent, stride in zip(shape, chosen, strict=True)) < 20:
                    yield shape, chosen


def test_tensors_of_one_layout_share_what_their_elements_do() -> None:
    """Those that are several bytes apart, and by parts of an element; dimensions of stride 0 repeat them."""
    memory, tried, shared = bytearray(MEMORY), 0, 0
    for layout in layouts(range(6), 1, 2, 3):
        kept = [(extent, stride) for extent, stride in zip(*layout, strict=True) if stride]
        if not spans((tuple(extent for extent, _ in kept), tuple(stride for _, stride in kept))):
            continue
        for dtype, step in ((torch.uint8, 1), (torch.int16, 1), (torch.float32, 3)):
            first = place(memory, layout, 44 if dtype.itemsize == 1 else 24, dtype)
            if max(bytes_of(first)) - first.data_ptr() > 40:
                continue
            used = bytes_of(first)
            for distance in range(-20, 21, step):
                second = place(memory, layout, first.data_ptr() - _address(memory) + distance, dtype)
                expected = any(address + distance in used for address in used)
                assert elements_overlap(first, second) == expected, (layout, dtype, distance)
                tried, shared = tried + 1, shared + expected
    assert 1000 < shared < tried - 1000


def _address(memory: bytearray) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def test_a_tensor_without_elements_shares_nothing() -> None:
    memory = bytearray(MEMORY)
    for layout in layouts(range(3), 0, 2):
        if 0 in layout[0]:
            assert not elements_overlap(*(place(memory, layout, 8, torch.uint8) for _ in range(2))), layout


def test_elements_of_a_tensor_share_what_their_addresses_do() -> None:
    """Interleaved strides are taken for shared ones, whether they are or not."""
    memory, answers = bytearray(MEMORY), set()
    for layout in layouts(range(7), 1, 2, 3):
        tensor = place(memory, layout, 0, torch.uint8)
        expected = len(bytes_of(tensor)) < tensor.numel()
        found = strides_overlap(tensor)
        assert found == (expected or not spans(layout)), layout
        answers.add((found, expected))
    assert answers == {(False, False), (True, True), (True, False)}


class Call(NamedTuple):
    """Arguments of an operator: ``out`` may be ``same``, ``kept`` nothing else."""

    out: torch.Tensor | None
    same: torch.Tensor | None
    others: list[torch.Tensor]
    kept: torch.Tensor | None
    number: int


WRITTEN = {"out": ("same",), "kept": ()}


def extent_of(tensor: torch.Tensor) -> range:
    """Addresses from a tensor's first byte to its last."""
    used = bytes_of(tensor)
    return range(min(used), max(used) + 1) if used else range(0)


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.stride() == other.stride()


def forbidden(call: Call) -> set[tuple[str, str]]:
    """Pairs of fields that may not be what they are, by the sets of their bytes.

    Tensors of different layouts are apart where nothing of one lies between the other's first and last byte.
    """
    found = set()
    named = [("out", call.out), ("same", call.same), *(("others", each) for each in call.others), ("kept", call.kept)]
    for (target, written), (name, other) in itertools.product(named, repeat=2):
        if target not in WRITTEN or target == name or written is None or other is None:
            continue
        if alike(written, other) and spans((tuple(other.shape), other.stride())):
            itself = name in WRITTEN[target] and written.data_ptr() == other.data_ptr()
            if bytes_of(written) & bytes_of(other) and not itself:
                found.add((target, name))
        elif set(extent_of(written)) & set(extent_of(other)):
            found.add((target, name))
    return found


@pytest.mark.parametrize("differing", [0.0, 0.3, 1.0], ids=["one layout", "nearly one layout", "any layouts"])
def test_what_is_written_shares_nothing_with_another_argument(differing: float) -> None:
    """The calls refused, of calls at random, are those that the sets of bytes tell, and by those names.

    Tensors of a call differ in dtype, shape or strides, each as often as ``differing`` says.
    """
    seed = random.randrange(1 << 16)
    print("seed", seed)
    source, memory = random.Random(seed), bytearray(MEMORY)
    nested = [layout for layout in layouts(range(6), 0, 1, 2, 3) if spans(layout)]
    of_shape, of_strides = collections.defaultdict(list), collections.defaultdict(list)
    for layout in nested:
        of_shape[layout[0]].append(layout)
        of_strides[layout[1]].append(layout)
    dtypes = [torch.uint8, torch.int16]
    refused = passed = 0
    for _ in range(4000):
        common, dtype = source.choice(nested), source.choice(dtypes)

        def tensor(common: Layout = common, dtype: torch.dtype = dtype) -> torch.Tensor:
            if source.random() < differing:
                common = source.choice(of_strides[common[1]])
            if source.random() < differing:
                common = source.choice(of_shape[common[0]])
            if source.random() < differing:
                dtype = source.choice(dtypes)
            return place(memory, common, source.choice([0, 2, source.randrange(24)]), dtype)

        given = [tensor() if source.random() < 0.7 else None for _ in range(3)]
        call = Call(given[0], given[1], [tensor() for _ in range(source.randrange(3))], given[2], 7)
        expected = forbidden(call)
        try:
            require_apart(call, WRITTEN, {"others": "one of the others"})
        except ValueError as error:
            named = {(target, "one of the others" if name == "others" else name) for target, name in expected}
            assert any(str(error).startswith(f"{target} overlaps {name}; ") for target, name in named), (error, call)
            assert ("be same itself" in str(error)) == str(error).startswith("out"), error
            refused += 1
        else:
            assert not expected, (expected, call)
            passed += 1
    assert min(refused, passed) > 400, (refused, passed)


def test_spans_are_apart_if_they_share_no_byte() -> None:
    """What a call writes, what it reads, and its layer's memory, all of a few bytes, in all orders; none of them
    empty."""
    seed = random.randrange(1 << 16)
    print("seed", seed)
    source = random.Random(seed)
    met = collections.Counter[bool]()
    for _ in range(4000):
        written, read, layer = (
            [(start, start + source.randrange(1, 5)) for start in source.sample(range(32), count)]
            for count in (source.randrange(1, 4), source.randrange(3), source.randrange(5))
        )
        spans = [*written, *read]
        others = [spans[place + 1 :] + layer for place in range(len(written))]
        apart = all(set(range(*one)).isdisjoint(range(*two)) for one, all_ in zip(written, others) for two in all_)
        assert are_apart(spans, len(written), bounds_of(layer)) == apart, (written, read, layer)
        met[apart] += 1
    assert min(met[True], met[False]) > 200, met
    assert bounds_of([(5, 5), (7, 9), (1, 3), (2, 6), (6, 6)]) == (1, 6, 7, 9)
