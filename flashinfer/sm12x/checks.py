# SPDX-License-Identifier: Apache-2.0
"""The checks of arguments for all operators of the SM12x family, on whatever device.

Errors name the argument, what it was and what it may be.  Nothing here looks at an element.  A call that passes is good
on a GPU, on the virtual one and on the CPU alike: addresses and overlaps are checked on each.
"""

from __future__ import annotations

import bisect
import functools
import operator
import reprlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import UninitializedTensorMixin  # type: ignore[attr-defined]

INT32_MAX = 2**31 - 1  # rows, columns, expert ids: the kernels count in int32
BLOCK_SIZE = 32  # elements that share one UE8M0 scale (OCP MX v1.0, section 5.2)
K_ALIGNMENT = 32  # the kernels' smallest step along K
POINTER_ALIGNMENT = 16  # bytes; bulk copies and vector loads
SCALE_WORD = 4  # bytes; the kernels load scales of tokens as 32-bit words
MOST_ACTIVATION_BYTES = 16 << 32  # check_activations in host/tile_gemm.cuh
ELEMENT = 0  # as an alignment: that of the tensor's own elements
OUTPUT_DTYPES = (torch.bfloat16, torch.float16)
UE8M0_DTYPES = (torch.uint8, torch.float8_e8m0fnu)


Span = tuple[int, int]
"""A range of memory: its first address, and one past its last."""


class BlockScales(NamedTuple):
    """The scales of a format: their name, their dtypes, and how many elements share one."""

    name: str
    dtypes: tuple[torch.dtype, ...]
    block: int


UE8M0 = BlockScales("UE8M0", UE8M0_DTYPES, BLOCK_SIZE)
NVFP4_SCALES = BlockScales("E4M3", (torch.uint8, torch.float8_e4m3fn), 16)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


def padded_scales(rows: int, blocks: int) -> tuple[int, int]:
    """Rows and scales a row of the 128x4 layout that holds the scales of ``rows`` rows and ``blocks`` scale blocks."""
    return round_up(rows, 128), round_up(blocks, 4)


def has_no_shape(tensor: torch.Tensor) -> bool:
    """Whether torch raises an error of its own if asked for the shape: nested tensors, uninitialized parameters."""
    return tensor.is_nested or isinstance(tensor, UninitializedTensorMixin)


def describe(value: Any) -> str:
    """``value`` as an error message shows it: never its elements."""
    if isinstance(value, torch.Tensor):
        if has_no_shape(value):
            return f"a {type(value).__name__} without a shape"
        text = f"{value.dtype} {tuple(value.shape)} on {value.device}"
        if value.layout is not torch.strided:
            return f"{text}, layout {value.layout}"
        return text if value.is_contiguous() else f"{text}, strides {tuple(value.stride())}"
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {len(value)}"
    if not isinstance(value, type) and hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"a {type(value).__module__}.{type(value).__name__}, {value.dtype} {tuple(value.shape)}"
    return reprlib.repr(value)


# --- calls that are not checked here ----------------------------------------------------------------------------------

_ORDINARY = {torch.Tensor, torch.nn.Parameter, torch.dtype, type(None), bool, int, float, str}
_PLAIN = torch.Tensor.__torch_dispatch__
# A private count of active modes (FakeTensorMode and others); a torch without it is asked by the tensors' types alone.
_modes: Callable[[], int] = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)


def is_traced(call: Sequence[Any]) -> bool:
    """Whether a compiler, a dispatch mode or a tensor subclass must see this call, so that it goes to the operator."""
    if torch.compiler.is_compiling() or _modes():
        return True
    return not _ORDINARY.issuperset(map(type, call)) and _has_subclass(call)


def _has_subclass(values: Sequence[Any]) -> bool:
    for value in values:
        if type(value) in _ORDINARY:
            continue
        if isinstance(value, (list, tuple)):
            if _has_subclass(value):
                return True
        elif isinstance(value, torch.Tensor) and type(value).__torch_dispatch__ is not _PLAIN:
            return True
    return False


# --- numbers ----------------------------------------------------------------------------------------------------------


def require_int(name: str, value: Any, low: int, high: int = INT32_MAX, why: str = "") -> int:
    """``value`` as an ``int`` of ``[low, high]``; ``why`` explains the bounds.

    Raises
    ------
    TypeError
        Not an integer. Anything that Python takes as an index is one, so ``True`` is 1.
    ValueError
        Out of bounds.
    """
    if isinstance(value, int) and low <= value <= high:
        return value
    expected = f"an integer in [{low}, {high}]{f', {why}' if why else ''}"
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {describe(value)}; it must be {expected}") from None
    if not low <= number <= high:
        raise ValueError(f"{name} is {number}; it must be {expected}")
    return number


def require_switches(call: Any, *names: str) -> None:
    """Raise, as :func:`require_int` does, unless those fields of a call, and ``enable_pdl``, are True or False.

    ``enable_pdl`` may be None, the device's default.
    """
    for name in names:
        require_int(name, getattr(call, name), 0, 1, "True or False")
    if call.enable_pdl is not None:
        require_int("enable_pdl", call.enable_pdl, 0, 1, "True, False or None")


def require_float(name: str, value: Any, low: float, high: float, why: str = "") -> float:
    """``value``, a Python number of ``[low, high]``, which NaN is not; a captured launch holds it, so no tensor is one.

    Raises
    ------
    TypeError
        Not a number.
    ValueError
        Out of bounds.
    """
    if isinstance(value, (int, float)) and low <= value <= high:
        return float(value)
    expected = f"a number in [{low:g}, {high:g}]{f', {why}' if why else ''}"
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {describe(value)}; it must be {expected}")
    raise ValueError(f"{name} is {value}; it must be {expected}")


def require_k_alignment(name: str, value: Any) -> int:
    """The K extent ``value``, a positive multiple of the kernels' step; raises as :func:`require_int` does."""
    value = require_int(name, value, 1, INT32_MAX // 2, f"a multiple of {K_ALIGNMENT}")
    if value % K_ALIGNMENT:
        raise ValueError(
            f"{name} is {value}; it must be a positive multiple of {K_ALIGNMENT} "
            f"(pad the weights with zeros to {round_up(value, K_ALIGNMENT)})"
        )
    return value


def require_activation_bytes(name: str, rows: int, row_bytes: int) -> None:
    """Raise ``ValueError`` where ``rows`` of activations take 64 GiB or more: kernels count 16-byte pieces in 32
    bits."""
    if rows * row_bytes >= MOST_ACTIVATION_BYTES:
        raise ValueError(
            f"{name} is {rows}; with {row_bytes} bytes a row these are activations of 64 GiB and more, it must be at "
            f"most {(MOST_ACTIVATION_BYTES - 1) // row_bytes}: split the batch"
        )


def require_output_dtype(name: str, value: Any, allowed: Sequence[torch.dtype] = OUTPUT_DTYPES) -> torch.dtype:
    """``value``, one of the dtypes ``allowed``; ``ValueError`` otherwise."""
    for dtype in allowed:
        if value is dtype:
            return dtype
    raise ValueError(f"{name} is {describe(value)}; it must be {' or '.join(map(str, allowed))}")


def require_choice(name: str, value: Any, allowed: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of the strings ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        *others, last = map(repr, allowed)
        raise ValueError(f"{name} is {describe(value)}; it must be {', '.join(others)} or {last}")


# --- tensors ----------------------------------------------------------------------------------------------------------


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor that may be asked for its shape."""
    return isinstance(value, torch.Tensor) and not (value.is_nested or isinstance(value, UninitializedTensorMixin))


def require_tensor_type(name: str, value: Any, expected: str = "a torch.Tensor") -> None:
    """Raise ``TypeError`` unless ``value`` is a tensor; ``expected`` says which one it must be."""
    if not is_tensor(value):
        raise TypeError(f"{name} is {describe(value)}; it must be {expected}")


def require_rank(name: str, value: Any, rank: int, expected: str = "") -> None:
    """Raise unless ``value`` is a tensor of ``rank`` dimensions; ``expected`` says which one it must be."""
    if is_tensor(value) and value.ndim == rank:
        return
    expected = expected or f"a {rank}-D tensor"
    require_tensor_type(name, value, expected)
    raise ValueError(f"{name} is {describe(value)}; it must be {expected}")


def require_computing_device(name: str, tensor: Any) -> None:
    """Raise unless ``tensor`` is one that is where something computes: CUDA or the CPU."""
    require_tensor_type(name, tensor)
    if tensor.device.type not in ("cuda", "cpu"):
        raise ValueError(f"{name} is {describe(tensor)}; it must be on a CUDA device or the CPU")


def require_storage(name: str, tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` where a storage was resized and holds a tensor no more; torch itself reads beyond it."""
    try:
        held = tensor.untyped_storage().nbytes() - tensor.storage_offset() * tensor.element_size()
    except RuntimeError:  # a wrapper without a storage of its own
        return
    if _bytes(tensor) > held and tensor.numel():
        raise ValueError(f"{name} is {describe(tensor)}, of which its storage holds {held} bytes; it was resized")


def require_memory(name: str, tensor: torch.Tensor, alignment: int = POINTER_ALIGNMENT) -> None:
    """Raise ``ValueError`` unless memory holds a tensor's values, from a multiple of ``alignment`` bytes on.

    Kernels read what lies there: not the sign that a view with the negative bit adds, nor what a storage that was
    resized has no more.
    """
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} is {describe(tensor)}; it must be dense")
    try:
        start = tensor.data_ptr()
    except RuntimeError:
        start = None
    if not start and (not tensor.numel() or tensor.is_meta):
        return
    if start is None:
        raise ValueError(f"{name} has no memory of its own, as under torch.func's vmap, grad and jvp")
    alignment = alignment or tensor.element_size()
    if start % alignment:
        raise ValueError(
            f"{name} starts at address {start:#x}; it must be aligned to {alignment} bytes "
            "(torch.empty is; clone() a view that is not)"
        )
    if tensor.is_neg():
        raise ValueError(f"{name} is a view with the negative bit; it must hold its values (resolve_neg() does)")
    require_storage(name, tensor)
    if not start:
        raise ValueError(f"{name} is {describe(tensor)}, at no address")


def place_of(tensor: torch.Tensor, device: torch.device, alignment: int = POINTER_ALIGNMENT) -> Span | None:
    """The memory of a tensor that a quick check shows to be contiguous, on ``device``, aligned and in its storage.

    None may also mean that the quick check cannot tell; :func:`require_tensor` then decides.
    """
    try:
        start, storage = tensor.data_ptr(), tensor.untyped_storage()
        end = start + tensor.nbytes
        if (
            tensor.device == device
            and tensor.is_contiguous()
            and start > 0
            and start % (alignment or tensor.itemsize) == 0
            and not tensor.is_neg()
            and end <= storage.data_ptr() + storage.nbytes()
        ):
            return start, end
    except RuntimeError:  # without an address, strides or a storage of its own
        pass
    return None


def is_held(tensor: torch.Tensor, size: int, alignment: int = POINTER_ALIGNMENT) -> bool:
    """Whether a quick check shows that the tensor's storage holds ``size`` bytes from its first element on, aligned.

    False may also mean that the quick check cannot tell; :func:`require_memory` then decides.
    """
    try:
        start, storage = tensor.data_ptr(), tensor.untyped_storage()
        inside = start > 0 and start + size <= storage.data_ptr() + storage.nbytes()
        return inside and start % alignment == 0 and not tensor.is_neg()
    except RuntimeError:
        return False


def require_tensor(
    name: str,
    value: Any,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    what: str = "",
    alignment: int = POINTER_ALIGNMENT,
) -> None:
    """Raise unless ``value`` is a contiguous tensor of one of ``shapes`` and ``dtypes`` on ``device``, aligned in
    bytes.

    Raises
    ------
    TypeError
        Not a tensor.
    ValueError
        Another shape, dtype or device, not contiguous, or another address.
    """
    try:
        if isinstance(value, torch.Tensor) and value.dtype in dtypes and value.shape in shapes:
            if place_of(value, device, alignment):
                return
            if value.device == device and value.is_contiguous():
                require_memory(name, value, alignment)
                return
    except RuntimeError:  # a layout without strides or addresses
        pass
    expected = (
        f"a contiguous tensor of {' or '.join(map(str, dtypes))}, shape {' or '.join(map(str, shapes))}, "
        f"on {device}{f' ({what})' if what else ''}"
    )
    require_tensor_type(name, value, expected)
    raise ValueError(f"{name} is {describe(value)}; it must be {expected}")


class Unchanged:
    """Tensors that passed their checks; :meth:`holds` tells quickly whether the same ones would still pass.

    It keeps weak references to the objects, and of each its address, its offset in its storage and that one's size,
    shape, strides and dtype. ``tensor.data = other``, ``set_`` and a resized storage change one of them. The address
    alone does not tell: a storage that was resized twice may be back at its first address, smaller. Nor does it with
    the size: a storage of that size that starts below the address ends earlier.
    """

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self._known = [
            None
            if each is None
            else (
                weakref.ref(each),
                each.data_ptr(),
                each.storage_offset(),
                each.untyped_storage().nbytes(),
                each.shape,
                None if each.is_contiguous() else each.stride(),  # cheaper to ask again
                each.dtype,
            )
            for each in tensors
        ]

    def holds(self, *tensors: torch.Tensor | None) -> bool:
        """Whether these are the same tensors, none of the facts above has changed, and none has a negative bit."""
        if len(tensors) != len(self._known):
            return False
        for tensor, known in zip(tensors, self._known, strict=True):
            if known is None:
                if tensor is not None:
                    return False
                continue
            reference, start, offset, size, shape, strides, dtype = known
            if (
                tensor is None
                or reference() is not tensor
                or tensor.data_ptr() != start
                or tensor.storage_offset() != offset
                or tensor.untyped_storage().nbytes() != size
                or tensor.shape != shape
                or (not tensor.is_contiguous() if strides is None else tensor.stride() != strides)
                or tensor.dtype is not dtype
                or tensor.is_neg()
            ):
                return False
        return True


def require_read_ahead(value: Any, device: torch.device) -> None:
    """Raise unless ``next_weights`` is None or contiguous memory on ``device``, from a multiple of 16 bytes on."""
    if value is None:
        return
    expected = f"a contiguous tensor on {device}"
    require_tensor_type("next_weights", value, expected)
    if has_no_shape(value) or value.device != device or value.layout is not torch.strided or not value.is_contiguous():
        raise ValueError(f"next_weights is {describe(value)}; it must be {expected}")
    require_memory("next_weights", value)


def swizzled_size(rows: int, blocks: int) -> int:
    """Bytes of the 128x4 scales of a matrix of ``rows`` rows and ``blocks`` scale blocks."""
    padded_rows, padded_blocks = padded_scales(rows, blocks)
    return padded_rows * padded_blocks


def require_scales(
    name: str,
    scales: Any,
    rows: int,
    k: int,
    device: torch.device,
    swizzled: bool = True,
    alignment: int = POINTER_ALIGNMENT,
    formats: BlockScales = UE8M0,
) -> None:
    """Raise unless ``scales`` are the bytes of a matrix ``[rows, k]``, in any shape that holds as many as the layout.

    Raises
    ------
    TypeError, ValueError
        Not a tensor; another dtype, size, device or address, or not contiguous.
    """
    blocks = k // formats.block
    needed = swizzled_size(rows, blocks) if swizzled else rows * blocks
    if is_tensor(scales) and scales.numel() == needed:
        require_tensor(name, scales, [scales.shape], formats.dtypes, device, f"{formats.name} block scales", alignment)
        return
    layout = "128x4" if swizzled else "linear"
    expected = (
        f"{needed} contiguous bytes: {layout} scales of {rows} rows and {blocks} blocks of {formats.block}, "
        f"{' or '.join(map(str, formats.dtypes))}, on {device}"
    )
    require_tensor_type(name, scales, expected)
    raise ValueError(f"{name} is {describe(scales)}; it must be {expected}")


# --- memory that several arguments name -------------------------------------------------------------------------------


def span(tensor: torch.Tensor) -> Span:
    """The range of memory from a tensor's first byte to its last."""
    start = tensor.data_ptr()
    return start, start + _bytes(tensor)


def spans_meet(some: Sequence[Span], others: Sequence[Span]) -> bool:
    """Whether one of ``some`` shares a byte with one of ``others``. If not, no arguments overlap; if so, their elements
    may still lie apart, which :func:`require_apart` finds out."""
    return any(first < end and start < last for first, last in some for start, end in others)


def bounds_of(spans: Sequence[Span]) -> tuple[int, ...]:
    """Starts and ends of the memory of ``spans``, ascending: those that meet are one, empty ones none."""
    bounds: list[int] = []
    for start, end in sorted(spans):
        if bounds and start <= bounds[-1]:
            bounds[-1] = max(end, bounds[-1])
        elif start < end:
            bounds += start, end
    return tuple(bounds)


def are_apart(spans: Sequence[Span], written: int, bounds: Sequence[int]) -> bool:
    """Whether none of the first ``written`` of ``spans`` has a byte of another one, or of the memory in ``bounds``
    (:func:`bounds_of`)."""
    for place in range(written):
        first, last = spans[place]
        for start, end in spans[place + 1 :]:
            if first < end and start < last:
                return False
        behind = bisect.bisect_right(bounds, first)  # odd: first lies between a start and its end
        if behind % 2 or (behind < len(bounds) and bounds[behind] < last):
            return False
    return True


_PLAIN_OPTIONS = {int, bool, type(None)}


class CallCache:
    """The call cache: results of checks of a layer's valid calls, by the metadata of their tensors.

    Checks of metadata say the same of the same metadata. So a call with the options of an earlier one, whose tensors
    have the types, dtypes and shapes of that one's, is valid if its tensors lie where they may, which is checked in
    each call. No tensor is cached.

    Parameters
    ----------
    device : torch.device
        The layer's.
    bounds : sequence of int
        Of the memory of the layer's own tensors (:func:`bounds_of`).
    written : int
        The first ``written`` tensors of a call are written.
    """

    MOST = 128
    """Signatures in the cache; one more clears it."""

    def __init__(self, device: torch.device, bounds: Sequence[int], written: int) -> None:
        self.bounds = bounds
        self._device, self._written = device, written
        self._found: dict[Any, Any] = {}

    def find(self, tensors: Sequence[Any], *options: Any) -> Any:
        """What :meth:`add` was given for such a call; None: it must be checked, since a quick check cannot tell.

        ``tensors`` are the arguments that must be tensors or None, ``options`` all others that checks look at.
        """
        signature, spans = [*options, *map(type, options)], []  # of their types, too: 1 equals True and 1.0
        try:
            for tensor in tensors:
                if tensor is None:
                    signature.append(None)
                else:
                    signature += type(tensor), tensor.dtype, tensor.shape
            found = self._found.get(tuple(signature))
            if found is None:
                return None
            known, written, sizes = found
            for place, size in sizes:  # place_of() with a known size: a call per tensor takes 0.1 us longer
                tensor = tensors[place]
                start, storage = tensor.data_ptr(), tensor.untyped_storage()
                if not (
                    tensor.device == self._device
                    and tensor.is_contiguous()
                    and start > 0
                    and start % POINTER_ALIGNMENT == 0
                    and not tensor.is_neg()
                    and start + size <= storage.data_ptr() + storage.nbytes()
                ):
                    return None
                spans.append((start, start + size))
        except (AttributeError, TypeError, ValueError, RuntimeError):  # no tensor, no hash, no shape, no address
            return None
        return known if not written or are_apart(spans, written, self.bounds) else None

    def add(self, known: Any, tensors: Sequence[Any], *options: Any) -> None:
        """Cache the result of a valid call's checks, anything but None, if its options are plain."""
        if not _PLAIN_OPTIONS.issuperset(map(type, options)):
            return  # a tensor of one integer may be one; it would be cached
        if len(self._found) >= self.MOST:
            self._found.clear()
        signature = [*options, *map(type, options)]
        for each in tensors:
            signature += (None,) if each is None else (type(each), each.dtype, each.shape)
        sizes = [(place, each.nbytes) for place, each in enumerate(tensors) if each is not None]
        self._found[tuple(signature)] = known, sum(place < self._written for place, _ in sizes), sizes


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first byte to its last, gaps included."""
    if tensor.is_contiguous() or not tensor.numel():
        return tensor.nbytes
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@functools.cache
def _tensor_fields(kind: type) -> list[tuple[int, str]]:
    """Places and names of a call's fields that hold tensors, or lists of them."""
    annotated = enumerate(kind.__annotations__.items())
    return [(place, field) for place, (field, annotation) in annotated if "Tensor" in str(annotation)]


def require_apart(
    call: Any,
    written: Mapping[str, Sequence[str]],
    names: Mapping[str, str] | None = None,
) -> None:
    """Raise ``ValueError`` where an argument that is written shares memory with another one.

    Parameters
    ----------
    call : NamedTuple
        The arguments: tensors, sequences of tensors, others.
    written : mapping
        Fields that are written, each with the fields that it may be itself: the same elements at the same addresses.
    names : mapping, optional
        The caller's name for a field, where it is not the field's name.
    """
    given = [(field, tensor) for field in written if (tensor := getattr(call, field)) is not None]
    targets = [(field, tensor, start := tensor.data_ptr(), start + _bytes(tensor)) for field, tensor in given]
    if not targets:
        return
    for place, field in _tensor_fields(call.__class__):
        value = call[place]
        if value is None:
            continue
        for other in (value,) if isinstance(value, torch.Tensor) else value:
            start, end = other.data_ptr(), 0
            for target, tensor, first, last in targets:
                if start >= last or field == target:
                    continue
                end = end or start + _bytes(other)
                if first >= end:  # also of an empty one, whose address is 0
                    continue
                alike = other.dtype == tensor.dtype, other.shape == tensor.shape, other.stride() == tensor.stride()
                if all(alike) and (field in written[target] if start == first else not elements_overlap(tensor, other)):
                    continue
                named = [(names or {}).get(name, name) for name in (target, field, *written[target])]
                unless = f", or be {' or '.join(named[2:])} itself" if written[target] else ""
                raise ValueError(f"{named[0]} overlaps {named[1]}; it must be memory of its own{unless}")


def _meet(distance: int, width: int, dims: Sequence[tuple[int, int]]) -> bool:
    """Whether an element of one tensor overlaps one of another that lies ``distance`` bytes further and has the same
    extents and strides (``dims``, in bytes); elements have ``width`` bytes."""
    if not dims:
        return abs(distance) < width
    (extent, stride), rest = dims[0], dims[1:]
    if stride == 0:
        return _meet(distance, width, rest)
    below = distance // stride
    return any(abs(steps) < extent and _meet(distance - steps * stride, width, rest) for steps in (below, below + 1))


def strides_overlap(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor may share memory, as those of an expanded one do.

    Exact if each dimension's stride is at least the span of the dimensions with smaller strides; otherwise the answer
    is yes.
    """
    span = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if extent > 1:
            if stride < span:
                return True
            span += (extent - 1) * stride
    return False


def elements_overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of the same shape and strides share memory; within each tensor elements do not overlap."""
    width = first.element_size()
    dims = sorted(zip(first.stride(), first.shape, strict=True), reverse=True)
    in_bytes = [(extent, stride * width) for stride, extent in dims if extent > 1]  # other strides mean nothing
    return first.numel() > 0 and _meet(second.data_ptr() - first.data_ptr(), width, in_bytes)
