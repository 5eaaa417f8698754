# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's decode attention with rope and the append to the KV cache: one launch where vLLM's layers take three."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from .api_logging import flashinfer_api
from .sm12x_arguments import (
    POINTER_ALIGNMENT,
    describe,
    require_alignment,
    require_computing_device,
    require_int,
    require_tensor,
    require_tensor_type,
)
from .testing import virtual_device
from .utils import device_support_pdl

HEAD = 64
GROUP = 8  # query heads of a KV head
CHUNK = 16  # positions of a kernel's step; pages are whole ones
MAX_Q_LEN = 64
CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
ROPE_DTYPES = (torch.bfloat16, torch.float32)
SMALLEST_SCALE = 2.0**-100  # as float32 normal, and its inverse
LOG2_E = math.log2(math.e)
LAYOUTS = ("HND", "NHD")

_workspaces: dict[tuple[int, int | None], torch.Tensor] = {}
"""By device and stream; None in place of a stream: that of captured graphs."""


@flashinfer_api
def decode_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    key: torch.Tensor | None = None,
    value: torch.Tensor | None = None,
    rope_table: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    q_len_per_req: int = 1,
    sm_scale: float | None = None,
    window_left: int = -1,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    kv_layout: str = "HND",
    constant_cache: bool = False,
    workspace_buffer: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Attention of a sequence's newest tokens over its paged cache; with ``key`` and ``value``, behind rope and append.

    The last ``q_len_per_req`` positions of a sequence are its new tokens. With ``rope_table``, query and key are turned by
    their positions: in float32, rounded to bfloat16. ``key`` and ``value`` then go to the cache, divided by ``k_scale`` and
    ``v_scale`` and rounded to e4m3 where it is of that, and attention reads all as the cache holds it. So results do not
    depend on whether a position is new. A token sees its own position, and ``window_left`` before it (negative: all); a
    sink takes part in a head's softmax with that score, and has no value. (A value that is no finite number reaches all of a
    sequence's new tokens, those before it, too.) Scores and sums are float32, softmax weights are
    rounded to bfloat16 for their product with values. Results are the same on every run.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) this is a kernel of this fork; CPU tensors are
    computed on the CPU.

    Parameters
    ----------
    query : torch.Tensor
        ``[m, 8 * num_kv_heads, 64]`` bfloat16, ``m = num_sequences * q_len_per_req``; rows may lie apart, as in the output
        of a QKV projection.
    kv_cache : torch.Tensor or tuple
        ``[num_pages, 2, num_kv_heads, page_size, 64]`` (HND) or ``[num_pages, 2, page_size, num_kv_heads, 64]`` (NHD), or two
        tensors without the dimension of 2; bfloat16 or ``float8_e4m3fn``; ``page_size`` a power of two from 16 on. Written
        where ``key`` is given.
    block_tables : torch.Tensor
        ``[num_sequences, max_pages]`` int32; only entries of pages that a sequence sees are read.
    seq_lens : torch.Tensor
        ``[num_sequences]`` int32, new tokens included; where there are fewer than ``q_len_per_req``, the first tokens'
        rows are zero and nothing of them is appended. No longer than the pages of a table's row, nor than
        ``rope_table``. Lengths, and the pages that a sequence sees, are checked on the CPU, and on CUDA with
        ``FLASHINFER_SM12X_CHECK=1``.
    key, value : torch.Tensor, optional
        ``[m, num_kv_heads, 64]`` bfloat16, as ``query``; without them the cache holds the new positions already.
    rope_table : torch.Tensor, optional
        ``[positions, 64]`` bfloat16 or float32: 32 cosines, then 32 sines, for pairs of dims ``i`` and ``i + 32``.
    sinks : torch.Tensor, optional
        ``[8 * num_kv_heads]`` float32.
    q_len_per_req : int
        New tokens of each sequence, at most 64.
    sm_scale : float, optional
        Of scores; 1/8 when omitted.
    window_left : int
        Positions before its own that a token sees.
    k_scale, v_scale : float
        What an element of the cache is multiplied with.
    kv_layout : str
        ``"HND"`` or ``"NHD"``.
    constant_cache : bool
        ``block_tables``, ``seq_lens`` and the positions of the cache that are not new were written by launches that have
        completed, as those of an earlier step have: they may be read while the launch in front still runs.
    workspace_buffer : torch.Tensor, optional
        uint8, :func:`decode_workspace_size` of them, zero before its first use; calls that may run at the same time need one
        each. By default one for each device and stream, and one for all that is captured on a device, kept: graphs then must
        not be replayed at the same time, nor have branches that call this at the same time.
    out : torch.Tensor, optional
        ``[m, 8 * num_kv_heads, 64]`` bfloat16, contiguous.
    enable_pdl : bool, optional
        Launch as a programmatic dependent; by default where the device can.

    Returns
    -------
    torch.Tensor
        ``out``, or a new tensor like it.

    Raises
    ------
    TypeError, ValueError
        Before any launch, naming the argument, what it was and what it may be.
    RuntimeError
        A graph is captured, and neither a call before nor :func:`prepare_decode_attention` made the default workspace.
    NotImplementedError
        The GPU has no kernels of this family.
    """
    keys, values = split_cache(kv_cache, kv_layout)
    if out is None:
        require_tensor_type("query", query)
        out = torch.empty(query.shape, dtype=torch.bfloat16, device=query.device)
    run = torch.ops.flashinfer.sm12x_decode_attention if torch.compiler.is_compiling() else _run
    run(
        out,
        keys,
        values,
        workspace_buffer,
        query,
        key,
        value,
        block_tables,
        seq_lens,
        rope_table,
        sinks,
        q_len_per_req,
        window_left,
        HEAD**-0.5 if sm_scale is None else sm_scale,
        k_scale,
        v_scale,
        constant_cache,
        enable_pdl,
    )
    return out


def prepare_decode_attention(device: torch.device | None = None) -> None:
    """Build the kernel, or find it built, and make the default workspaces of the current stream and of captured graphs.

    For who captures :func:`decode_attention` before it was ever called, and to have the compiler run before there are
    requests.

    Parameters
    ----------
    device : torch.device, optional
        A CUDA device; the current one when omitted.

    Raises
    ------
    RuntimeError
        A graph is being captured, or the kernel could not be built.
    """
    with torch.cuda.device(device):
        _dispatch().decode_module()
        _workspace(torch.device("cuda", torch.cuda.current_device()), None)


def decode_workspace_size(device: torch.device) -> int:
    """Bytes of a workspace for :func:`decode_attention` on a CUDA device."""
    return _workspace_bytes(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _workspace_bytes(index: int) -> int:
    return int(_dispatch().decode_module().sm12x_decode_workspace_size(index))


def _dispatch() -> Any:
    from .fused_moe import sm12x_dispatch

    return sm12x_dispatch


def split_cache(kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, ``[num_pages, num_kv_heads, page_size, 64]`` whatever their strides."""
    if kv_layout not in LAYOUTS:
        raise ValueError(f"kv_layout is {kv_layout!r}; it may be {' or '.join(map(repr, LAYOUTS))}")
    if isinstance(kv_cache, (tuple, list)):
        if len(kv_cache) != 2:
            raise ValueError(f"kv_cache is {describe(kv_cache)}; it must be one tensor, or keys and values")
        parts = tuple(kv_cache)
        for part in parts:
            require_tensor_type("kv_cache", part)
    else:
        require_tensor_type("kv_cache", kv_cache, "a torch.Tensor, or two")
        if kv_cache.ndim != 5 or kv_cache.shape[1] != 2:
            raise ValueError(f"kv_cache is {describe(kv_cache)}; it must be 5-D, its second dimension 2")
        parts = kv_cache.unbind(1)
    if any(part.ndim != 4 for part in parts):
        raise ValueError(f"kv_cache has {describe(parts[0])}; keys and values must be 4-D")
    if kv_layout == "NHD":
        parts = tuple(part.transpose(1, 2) for part in parts)
    return parts[0], parts[1]


class Operands(NamedTuple):
    """What a call reads beside the cache, in the order of ``sm12x_decode_run``."""

    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    rope_table: torch.Tensor | None
    sinks: torch.Tensor | None


def _require_rows(name: str, value: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """Rows of bf16 heads that may lie apart."""
    require_tensor_type(name, value)
    if tuple(value.shape) != shape or value.dtype != torch.bfloat16 or value.device != device:
        raise ValueError(f"{name} is {describe(value)}; it must be torch.bfloat16 {shape} on {device}")
    if value.stride(2) != 1 or value.stride(1) != HEAD or value.stride(0) % 8 or value.stride(0) < 0:
        raise ValueError(
            f"{name} is {describe(value)}; the heads of a token must lie one after the other, tokens a multiple of 8 "
            "elements apart"
        )


def _require_scale(name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {describe(value)}; it must be a number: a captured launch holds it")
    if not SMALLEST_SCALE <= value <= 1 / SMALLEST_SCALE:
        raise ValueError(f"{name} is {value}; it must be from {SMALLEST_SCALE} to {1 / SMALLEST_SCALE}")


def validate(
    out: torch.Tensor | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    operands: Operands,
    q_len: int,
    window_left: int,
    scales: dict[str, float],
) -> None:
    """Check a call's metadata; the exceptions of :func:`decode_attention`."""
    query, key, value, block_tables, seq_lens, rope_table, sinks = operands
    require_tensor_type("query", query)
    require_computing_device("query", query)
    device = query.device
    if not _dispatch().serves(device):
        raise NotImplementedError(
            f"decode_attention has no kernel for {torch.cuda.get_device_name(device)}: it is for compute capability 12.x "
            "(unless FLASHINFER_SM12X_MOE=0) and 9.0 (with FLASHINFER_SM12X_MOE=1)"
        )
    require_int("q_len_per_req", q_len, 1, MAX_Q_LEN)
    require_int("window_left", window_left, -(2**31))
    for name, scale in scales.items():
        _require_scale(name, scale)
    _, kv_heads, page_size, head = keys.shape
    if keys.dtype not in CACHE_DTYPES or keys.device != device:
        allowed = " or ".join(map(str, CACHE_DTYPES))
        raise ValueError(f"kv_cache has {describe(keys)}; it must be {allowed} on {device}")
    if keys.shape != values.shape or keys.stride() != values.stride() or keys.dtype != values.dtype:
        raise ValueError(f"kv_cache has keys {describe(keys)} and values {describe(values)}; both must be alike")
    require_int("the number of KV heads", kv_heads, 1)
    if head != HEAD:
        raise ValueError(f"kv_cache has heads of {head}; they must be of {HEAD}")
    if page_size < CHUNK or page_size & (page_size - 1):
        raise ValueError(f"kv_cache has pages of {page_size}; it must be a power of two from {CHUNK} on")
    step = POINTER_ALIGNMENT // keys.element_size()
    if keys.stride(3) != 1 or any(stride % step or stride < 0 for stride in keys.stride()[:3]):
        raise ValueError(
            f"kv_cache has strides {tuple(keys.stride())}; the last must be 1, the others multiples of {step} "
            f"({POINTER_ALIGNMENT} bytes)"
        )
    require_tensor_type("seq_lens", seq_lens)
    if seq_lens.ndim != 1:
        raise ValueError(f"seq_lens is {describe(seq_lens)}; it must be 1-D")
    sequences = seq_lens.shape[0]
    require_tensor("seq_lens", seq_lens, [(sequences,)], [torch.int32], device)
    require_tensor_type("block_tables", block_tables)
    if block_tables.ndim != 2 or block_tables.shape[0] != sequences or block_tables.dtype != torch.int32:
        raise ValueError(f"block_tables is {describe(block_tables)}; it must be int32 ({sequences}, max_pages)")
    if block_tables.device != device or block_tables.stride(1) != 1:
        raise ValueError(f"block_tables is {describe(block_tables)}; rows must be contiguous, on {device}")
    m, heads = sequences * q_len, GROUP * kv_heads
    _require_rows("query", query, (m, heads, HEAD), device)
    if (key is None) != (value is None):
        raise ValueError("key and value go together: the one is None and the other is not")
    for name, rows in (("key", key), ("value", value)):
        if rows is not None:
            _require_rows(name, rows, (m, kv_heads, HEAD), device)
    if rope_table is not None:
        require_tensor_type("rope_table", rope_table)
        if rope_table.ndim != 2:
            raise ValueError(f"rope_table is {describe(rope_table)}; it must be 2-D")
        require_tensor("rope_table", rope_table, [(rope_table.shape[0], HEAD)], ROPE_DTYPES, device)
    if sinks is not None:
        require_tensor("sinks", sinks, [(heads,)], [torch.float32], device)
    if out is not None:
        require_tensor("out", out, [(m, heads, HEAD)], [torch.bfloat16], device)


def check_values(num_pages: int, page_size: int, operands: Operands, q_len: int, window_left: int) -> None:
    """Check the numbers that ``seq_lens`` and ``block_tables`` hold, reading them back.

    Raises
    ------
    ValueError
        A sequence is longer than its table or ``rope_table``, or sees a page that the cache does not have.
    """
    max_pages = operands.block_tables.shape[1]
    longest, why = max_pages * page_size, f"{max_pages} pages of {page_size}, as block_tables has"
    if operands.rope_table is not None and operands.rope_table.shape[0] < longest:
        longest, why = operands.rope_table.shape[0], "as many positions as rope_table has"
    lengths, tables = operands.seq_lens.tolist(), operands.block_tables.tolist()
    for sequence, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        if not 0 <= length <= longest:
            raise ValueError(f"seq_lens[{sequence}] is {length}; it must be from 0 to {longest}, {why}")
        first = 0 if window_left < 0 else max(0, length - q_len - window_left) // page_size
        for place in range(first, -(-length // page_size)):
            if not 0 <= table[place] < num_pages:
                raise ValueError(
                    f"block_tables[{sequence}, {place}] is {table[place]}; pages that a sequence sees must be from 0 to "
                    f"{num_pages - 1}"
                )


def lacks_workspace(device: torch.device) -> bool:
    """Whether a call now would be captured without a default workspace, which is an error."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return capturing and (device.index, None) not in _workspaces


def _workspace(device: torch.device, given: torch.Tensor | None) -> torch.Tensor:
    size = decode_workspace_size(device)
    if given is not None:
        require_tensor_type("workspace_buffer", given)
        require_tensor("workspace_buffer", given, [(given.numel(),)], [torch.uint8], device)
        require_int("workspace_buffer's size", given.numel(), size, why="as decode_workspace_size() says")
        require_alignment({"workspace_buffer": given})
        return given
    graphs = (device.index, None)
    capturing = torch.cuda.is_current_stream_capturing()
    place = graphs if capturing else (device.index, torch.cuda.current_stream(device).cuda_stream)
    if place not in _workspaces:
        if capturing:  # its zeros would be one graph's own, written whenever that is replayed
            raise RuntimeError(
                "decode_attention is captured before it was ever called: call it or prepare_decode_attention() before the "
                "capture, or give it a workspace_buffer"
            )
        for each in (place, graphs):
            _workspaces.setdefault(each, torch.zeros(size, dtype=torch.uint8, device=device))
    return _workspaces[place]


def _run(
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    workspace: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    rope_table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    q_len: int,
    window_left: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
    constant_cache: bool,
    enable_pdl: bool | None,
) -> None:
    scales = {"sm_scale": sm_scale, "k_scale": k_scale, "v_scale": v_scale}
    operands = Operands(query, key, value, block_tables, seq_lens, rope_table, sinks)
    validate(out, keys, values, operands, q_len, window_left, scales)
    device = query.device
    virtual = virtual_device.active() if device.type == "cpu" else None
    on_cpu = device.type == "cpu" and virtual is None
    if on_cpu or (_dispatch().checks_values() and virtual is None and not torch.cuda.is_current_stream_capturing()):
        check_values(keys.shape[0], keys.shape[2], operands, q_len, window_left)
    if on_cpu:
        _compute_on_cpu(out, keys, values, operands, q_len, window_left, sm_scale, k_scale, v_scale)
        return
    named = {"query": query, "key": key, "value": value, "kv_cache": keys, "rope_table": rope_table, "out": out}
    require_alignment({**named, "kv_cache's values": values})
    pdl = enable_pdl is not False if virtual is not None or enable_pdl is not None else device_support_pdl(device)
    score_scale = sm_scale * k_scale * LOG2_E
    sizes = (q_len, window_left, score_scale, k_scale, v_scale, constant_cache, pdl)
    if virtual is not None:
        from .testing import virtual_operators

        virtual_operators.run_decode(virtual, (out, keys, values), workspace, (*operands, *sizes), key is not None)
    elif query.shape[0]:
        with torch.cuda.device(device):
            workspace = _workspace(device, workspace)
            _dispatch().decode_module().sm12x_decode_run(out, keys, values, workspace, *operands, *sizes)


_operator = torch.library.custom_op(
    "flashinfer::sm12x_decode_attention", _run, mutates_args=("out", "keys", "values", "workspace")
)


@_operator.register_fake
def _operator_fake(*_: Any) -> None:
    return None


def rope_rows(rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[m, heads, 64]`` bfloat16, turned as the kernel turns them.

    Where it fuses a multiplication and an addition, float64 holds the product exactly; its sum is rounded twice here, which
    a tie of the second rounding alone would show.
    """
    cosines, sines = table[positions].float().unsqueeze(1).chunk(2, dim=-1)
    first, second = rows.float().chunk(2, dim=-1)
    low = first.double() * cosines.double() - (second * sines).double()
    high = second.double() * cosines.double() + (first * sines).double()
    return torch.cat([low, high], dim=-1).float().to(rows.dtype)


def to_cache(rows: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """``rows`` as the cache holds them."""
    if dtype == torch.bfloat16:
        return rows
    largest = torch.finfo(dtype).max
    return (rows.float() / torch.tensor(scale, dtype=torch.float32)).clamp(-largest, largest).to(dtype)


def _compute_on_cpu(
    out: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    operands: Operands,
    q_len: int,
    window_left: int,
    sm_scale: float,
    k_scale: float,
    v_scale: float,
) -> None:
    query, key, value, block_tables, seq_lens, rope_table, sinks = operands
    page_size = keys.shape[2]
    for sequence, length in enumerate(seq_lens.tolist()):
        rows = slice(sequence * q_len, (sequence + 1) * q_len)
        positions = torch.arange(length - q_len, length)
        there = positions >= 0  # a sequence may be shorter than the call's tokens
        out[rows] = 0
        if not there.any():
            continue
        positions = positions[there]

        def turned(x: torch.Tensor, rows: slice = rows, at: torch.Tensor = positions) -> torch.Tensor:
            mine = x[rows][-len(at) :]
            return mine if rope_table is None else rope_rows(mine, at, rope_table)

        if key is not None and value is not None:
            pages = block_tables[sequence, positions // page_size].long()
            keys[pages, :, positions % page_size] = to_cache(turned(key), keys.dtype, k_scale)
            values[pages, :, positions % page_size] = to_cache(value[rows][-len(positions) :], values.dtype, v_scale)
        low = 0 if window_left < 0 else max(0, int(positions[0]) - window_left)
        seen = torch.arange(low, length)
        pages = block_tables[sequence, seen // page_size].long()
        k, v = (part[pages, :, seen % page_size].float() for part in (keys, values))  # [positions, kv_heads, 64]
        q = turned(query).float().view(len(positions), -1, GROUP, HEAD)
        scores = torch.einsum("mhgd,phd->mhgp", q, k) * (sm_scale * k_scale)
        behind = positions[:, None] - seen
        hidden = (behind < 0) | (behind > (length if window_left < 0 else window_left))
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        if sinks is not None:
            sink = sinks.view(1, -1, GROUP, 1).expand(len(positions), -1, -1, -1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        attended = torch.einsum("mhgp,phd->mhgd", weights, v) * v_scale
        out[rows][-len(positions) :] = attended.reshape(len(positions), -1, HEAD).to(out.dtype)
