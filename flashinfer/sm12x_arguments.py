# SPDX-License-Identifier: Apache-2.0
"""Checks of single arguments, for all operators of the SM12x family and their CPU backends.

Errors name the argument, what it was and what it may be.  Nothing here looks at an element.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

INT32_MAX = 2**31 - 1  # rows, columns, expert ids: the kernels count in int32
K_ALIGNMENT = 32  # the kernels' smallest step along K
POINTER_ALIGNMENT = 16  # bytes; bulk copies and vector loads
SCALE_WORD = 4  # bytes; the kernels load scales of tokens as 32-bit words
OUTPUT_DTYPES = (torch.bfloat16, torch.float16)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def describe(value: Any) -> str:
    """``value`` as an error message shows it: never its elements."""
    if isinstance(value, torch.Tensor):
        text = f"{value.dtype} {tuple(value.shape)} on {value.device}"
        if value.layout is not torch.strided:
            return f"{text}, layout {value.layout}"
        return text if value.is_contiguous() else f"{text}, strides {tuple(value.stride())}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__module__}.{type(value).__name__}, {value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value)


def require_tensor_type(name: str, value: Any, expected: str = "a torch.Tensor") -> None:
    """Raise ``TypeError`` unless ``value`` is a tensor; ``expected`` says which one it must be."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} is {describe(value)}; it must be {expected}")


def require_computing_device(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless ``tensor`` is where something computes: CUDA or the CPU."""
    if tensor.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} is {describe(tensor)}; it must be on a CUDA device or the CPU")


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements lie in memory one after the other, in the order of the shape."""
    return tensor.layout is torch.strided and tensor.is_contiguous()


def require_tensor(
    name: str,
    value: Any,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    what: str = "",
) -> None:
    """Raise unless ``value`` is a contiguous tensor of one of ``shapes`` and ``dtypes`` on ``device``.

    Raises
    ------
    TypeError
        Not a tensor.
    ValueError
        Another shape, dtype, device, or not contiguous.
    """
    expected = (
        f"a contiguous tensor of {' or '.join(map(str, dtypes))}, shape {' or '.join(map(str, shapes))}, "
        f"on {device}{f' ({what})' if what else ''}"
    )
    require_tensor_type(name, value, expected)
    fits = value.dtype in dtypes and tuple(value.shape) in shapes and value.device == device
    if not fits or not is_dense(value):
        raise ValueError(f"{name} is {describe(value)}; it must be {expected}")


def require_int(name: str, value: Any, low: int, high: int = INT32_MAX, why: str = "") -> int:
    """``value`` as an ``int`` of ``[low, high]``; ``why`` explains the bounds.

    Raises
    ------
    TypeError
        Not an integer; what Python takes as an index is one, so that ``True`` is 1.
    ValueError
        Out of bounds.
    """
    expected = f"an integer in [{low}, {high}]{f', {why}' if why else ''}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {describe(value)}; it must be {expected}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}; it must be {expected}")
    return number


def require_k_alignment(name: str, value: Any) -> int:
    """The K extent ``value``, a positive multiple of the kernels' step; raises as :func:`require_int` does."""
    value = require_int(name, value, 1, INT32_MAX // 2, f"a multiple of {K_ALIGNMENT}")
    if value % K_ALIGNMENT:
        raise ValueError(
            f"{name} is {value}; it must be a positive multiple of {K_ALIGNMENT} "
            f"(pad the weights with zeros to {round_up(value, K_ALIGNMENT)})"
        )
    return value


def require_output_dtype(name: str, value: Any) -> torch.dtype:
    """``value``, a dtype that the operators write; ``ValueError`` otherwise."""
    for dtype in OUTPUT_DTYPES:
        if value is dtype:
            return dtype
    raise ValueError(f"{name} is {describe(value)}; it must be torch.bfloat16 or torch.float16")


def require_alignment(tensors: Mapping[str, torch.Tensor | None], alignment: int = POINTER_ALIGNMENT) -> None:
    """Raise unless every tensor starts at a multiple of ``alignment`` bytes, by default the kernels' widest access."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.data_ptr() % alignment:
            raise ValueError(
                f"{name} starts at address {tensor.data_ptr():#x}; it must be aligned to {alignment} bytes "
                "(torch.empty is; clone() a view that is not)"
            )
