# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: the image, the driver's rules (cuTensorMapEncodeTiled), tensormap.replace (PTX ISA 9.0, 9.7.9.26)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pure_functions as vsm
import pytest
from pure_functions import Descriptor

U4, U4P, U6P = 13, 14, 15  # 16U4_ALIGN8B, 16U4_ALIGN16B, 16U6_ALIGN16B
BASE = Descriptor(0x10000, 9, [512, 64, 8], [1024, 65536], [64, 16, 2], [1, 1, 1], swizzle=3, promotion=2)
PACKED = Descriptor(0x10000, U4P, [256, 64], [128], [128, 16], [1, 1], swizzle=3)


def test_image_round_trip() -> None:
    for d in (
        BASE,
        PACKED,
        replace(
            BASE,
            dims=[1 << 32, 7, 9, 11, 13],
            strides=[16, 32, 48, (1 << 40) - 16],
            box=[256, 1, 2, 3, 4],
            element_strides=[1, 2, 3, 4, 8],
            fill=1,
            interleave=1,
        ),
    ):
        image = d.encode()
        assert np.array_equal(vsm.tma_decode(image), d.fields())


def test_other_memory_is_no_tensor_map() -> None:
    image = BASE.encode()
    assert vsm.tma_decode(np.zeros(128, np.uint8)) is None
    for cut in (8, 64, 120):  # copied in part
        partial = image.copy()
        partial[cut:] = 0
        assert vsm.tma_decode(partial) is None
        partial = image.copy()
        partial[:cut] = 0xFF
        assert vsm.tma_decode(partial) is None


def test_good_maps() -> None:
    for d in (
        BASE, PACKED, replace(PACKED, swizzle=0), replace(PACKED, swizzle=4), replace(PACKED, type=U6P, swizzle=6, dims=[128, 64], strides=[96]),
        replace(BASE, dims=[1 << 32, 64, 8]), replace(BASE, strides=[(1 << 40) - 16, 16]), replace(BASE, box=[64, 256, 1]),
        replace(BASE, element_strides=[8, 8, 8]), replace(BASE, fill=1), replace(BASE, swizzle=0, box=[256, 1, 1]),
        replace(BASE, interleave=1, swizzle=0), replace(BASE, interleave=2, swizzle=1), Descriptor(0x10010, 0, [16], [], [16]),
        replace(PACKED, type=U4, dims=[2, 64], strides=[16], box=[32, 4], swizzle=1),
    ):  # fmt: skip
        assert d.check() == "", d


BROKEN = [
    (replace(BASE, address=0), "globalAddress is null"),
    (replace(BASE, address=0x10008), "globalAddress is 65544, must be a multiple of 16"),
    (replace(PACKED, address=0x10010), "globalAddress is 65552, must be a multiple of 32"),
    (replace(BASE, type=16), "tensorDataType is 16, must be 0 to 15"),
    (replace(BASE, rank=0), "tensorRank is 0, must be 1 to 5"),
    (replace(BASE, rank=6), "tensorRank is 6, must be 1 to 5"),
    (replace(BASE, interleave=3), "interleave is 3, must be 0 to 2"),
    (replace(BASE, swizzle=7), "swizzle is 7, must be 0 to 6"),
    (replace(BASE, promotion=4), "l2Promotion is 4, must be 0 to 3"),
    (replace(BASE, fill=2), "oobFill is 2, must be 0 or 1"),
    (replace(BASE, dims=[512, 0, 8]), "globalDim[1] is 0, must be 1 to 2^32"),
    (replace(BASE, dims=[(1 << 32) + 1, 64, 8]), "globalDim[0] is 4294967297, must be 1 to 2^32"),
    (replace(PACKED, dims=[192, 64]), "globalDim[0] is 192, must be a multiple of 128 with this packed type"),
    (replace(PACKED, type=U4, dims=[255, 64]), "globalDim[0] is 255, must be a multiple of 2 with this packed type"),
    (replace(BASE, strides=[1032, 65536]), "globalStrides[0] is 1032, must be a multiple of 16"),
    (replace(PACKED, strides=[144]), "globalStrides[0] is 144, must be a multiple of 32"),
    (replace(BASE, strides=[1024, 1 << 40]), "globalStrides[1] is 1099511627776, must be less than 2^40"),
    (replace(BASE, box=[64, 0, 2]), "boxDim[1] is 0, must be 1 to 256"),
    (replace(BASE, box=[64, 257, 2]), "boxDim[1] is 257, must be 1 to 256"),
    (replace(PACKED, box=[64, 16]), "boxDim[0] is 64, must be 128 with this packed type"),
    (replace(BASE, box=[12, 16, 2]), "boxDim[0] times the element size is 24, must be a multiple of 16 bytes"),
    (replace(BASE, element_strides=[1, 0, 1]), "elementStrides[1] is 0, must be 1 to 8"),
    (replace(BASE, element_strides=[1, 1, 9]), "elementStrides[2] is 9, must be 1 to 8"),
    (replace(BASE, box=[72, 16, 2]), "boxDim[0] times the element size is 144, must be at most the swizzle's 128 bytes"),
    (replace(BASE, swizzle=2), "boxDim[0] times the element size is 128, must be at most the swizzle's 64 bytes"),
    (replace(BASE, type=1, fill=1), "the NaN fill needs a floating-point type"),
    (replace(PACKED, fill=1), "the NaN fill needs a floating-point type"),
    (replace(PACKED, swizzle=1), "boxDim[0] times the element size is 64, must be at most the swizzle's 32 bytes"),
    (replace(PACKED, swizzle=2), "swizzle is 2, must be none, 128B or 128B_ATOM_32B with this packed type"),
    (replace(PACKED, swizzle=6), "swizzle is 6, must be none, 128B or 128B_ATOM_32B with this packed type"),
    (replace(PACKED, dims=[256, 64, 4], strides=[128, 8192], box=[128, 16, 1], element_strides=[1, 1, 1], swizzle=0, interleave=1), "this packed type cannot be interleaved"),
    (replace(BASE, dims=[512, 64], interleave=1), "tensorRank is 2, must be at least 3 with an interleaved layout"),
    (replace(BASE, interleave=2), "an interleave of 32B needs the 32B swizzle"),
]  # fmt: skip


@pytest.mark.parametrize("d,text", BROKEN, ids=[text.split(",")[0] for _, text in BROKEN])
def test_broken_rules(d: Descriptor, text: str) -> None:
    assert d.check() == text


FIELD = {
    "address": 0,
    "rank": 1,
    "type": 2,
    "interleave": 3,
    "swizzle": 4,
    "fill": 5,
    "dims": 7,
    "strides": 12,
    "box": 16,
    "element_strides": 21,
}


@pytest.mark.parametrize(
    "field,ordinal,value,where,stored",
    [
        ("global_address", 0, 0x123456789AB0, "address", 0x123456789AB0),
        ("rank", 0, 4, "rank", 5),
        ("global_dim", 4, 0xFFFFFFFF, "dims", 0xFFFFFFFF),
        ("global_stride", 3, (1 << 40) - 16, "strides", (1 << 40) - 16),
        ("box_dim", 2, 256, "box", 256),
        ("element_stride", 1, 8, "element_strides", 8),
        ("interleave_layout", 0, 2, "interleave", 2),
        ("swizzle_mode", 0, 1, "swizzle", 1),
        ("swizzle_atomicity", 0, 1, "swizzle", 4),
        ("swizzle_atomicity", 0, 2, "swizzle", 5),
        ("swizzle_atomicity", 0, 3, "swizzle", 6),
        ("fill_mode", 0, 1, "fill", 1),
        # Table 33's numbers are not the driver's: f64, bf16, f32.ftz stand elsewhere.
        *(
            ("elemtype", 0, ptx, "type", driver)
            for ptx, driver in enumerate([0, 1, 2, 3, 4, 5, 6, 7, 10, 8, 9, 11, 12, 13, 14, 15])
        ),
    ],
)
def test_replace(field: str, ordinal: int, value: int, where: str, stored: int) -> None:
    image = BASE.encode()
    before = vsm.tma_decode(image)
    assert vsm.tma_replace(image, field, ordinal, value) == ""
    after = vsm.tma_decode(image)
    expected = before.copy()
    expected[FIELD[where] + (ordinal if where in ("dims", "strides", "box", "element_strides") else 0)] = stored
    assert np.array_equal(after, expected), "this field changes, no other"


@pytest.mark.parametrize(
    "field,ordinal,value,text",
    [
        ("rank", 0, 5, ".rank is 5, must be 0 to 4 (the rank less one)"),
        ("box_dim", 0, 257, ".box_dim is 257, must be 1 to 256"),
        ("global_stride", 4, 16, "the ordinal of .global_stride is 4, must be a dimension of the map"),
        ("global_dim", 5, 16, "the ordinal of .global_dim is 5, must be a dimension of the map"),
        ("element_stride", 0, 9, ".element_stride is 9, must be 1 to 8"),
        ("elemtype", 0, 16, ".elemtype is 16, must be 0 to 15"),
        ("swizzle_mode", 0, 4, "the 96B swizzle is not on sm_121a"),
        ("swizzle_mode", 0, 5, ".swizzle_mode is 5, must be 0 to 3"),
        ("swizzle_atomicity", 0, 4, ".swizzle_atomicity is 4, must be 0 to 3"),
        ("fill_mode", 0, 2, ".fill_mode is 2, must be 0 or 1"),
        ("interleave_layout", 0, 3, ".interleave_layout is 3, must be 0 to 2"),
        ("colour", 0, 0, "a tensor map has no field .colour"),
    ],
)
def test_replace_refuses(field: str, ordinal: int, value: int, text: str) -> None:
    image = BASE.encode()
    before = image.copy()
    assert vsm.tma_replace(image, field, ordinal, value) == text
    assert np.array_equal(image, before)


def test_replace_needs_a_tensor_map() -> None:
    assert vsm.tma_replace(np.zeros(128, np.uint8), "rank", 0, 1) == "the 128 bytes at the address are not a tensor map"


def test_replace_of_a_32_bit_field_takes_the_low_half() -> None:
    image = BASE.encode()
    assert vsm.tma_replace(image, "global_dim", 0, 0xABCD00000040) == ""
    assert vsm.tma_decode(image)[FIELD["dims"]] == 0x40
