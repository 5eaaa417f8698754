# SPDX-License-Identifier: Apache-2.0
"""gpt-oss's decode attention with rope and the append to the KV cache: one launch where vLLM's layers take three."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .api_logging import flashinfer_api
from .jit.sm12x.modules import gen_decode_module
from .sm12x.backend import Backend, checks_values, kernels, plain_torch, workspace_size
from .sm12x.checks import (
    ELEMENT,
    POINTER_ALIGNMENT,
    Span,
    describe,
    is_held,
    is_traced,
    place_of,
    require_apart,
    require_choice,
    require_computing_device,
    require_float,
    require_int,
    require_memory,
    require_rank,
    require_switches,
    require_tensor,
    require_tensor_type,
    span,
    strides_overlap,
)
from .sm12x.devices import require_served
from .sm12x.operator import define

HEAD = 64
GROUP = 8  # query heads of a KV head
CHUNK = 16  # positions that a kernel takes per step; a page holds whole chunks
MAX_Q_LEN = 64
CACHE_DTYPES = (torch.bfloat16, torch.float8_e4m3fn)
ROPE_DTYPES = (torch.bfloat16, torch.float32)
SMALLEST_SCALE = 2.0**-100  # as float32 normal, and its inverse
LOG2_E = 1.4426950408889634
LAYOUTS = ("HND", "NHD")

_workspaces: dict[tuple[int, int | None], torch.Tensor] = {}
"""Default workspaces by device and stream; None as stream: the one of captured graphs."""


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
    """Attention of a sequence's newest tokens over its paged cache; with ``key`` and ``value``, after rope and append.

    The last ``q_len_per_req`` positions of a sequence are its new tokens. With ``rope_table``, query and key are
    rotated by their positions, in float32 and rounded to bfloat16. ``key`` and ``value`` are then appended to the
    cache, divided by ``k_scale`` and ``v_scale`` and rounded to e4m3 if the cache is e4m3. Attention reads all
    positions from the cache, so results do not depend on whether a position is new. A token sees its own position and
    ``window_left`` before it (negative: all). A sink adds its score to a head's softmax, and has no value. (A value
    that is not finite reaches all of a sequence's new tokens, even those before it.) Scores and sums are float32;
    softmax weights are rounded to bfloat16 for their product with values. Results are the same on every run.

    On SM12x (and, with ``FLASHINFER_SM12X_MOE=1``, on compute capability 9.0) this is a kernel of this fork; CPU
    tensors are computed on the CPU.

    Parameters
    ----------
    query : torch.Tensor
        ``[m, 8 * num_kv_heads, 64]`` bfloat16, ``m = num_sequences * q_len_per_req``; rows may lie apart, as in the
        output of a QKV projection.
    kv_cache : torch.Tensor or tuple
        ``[num_pages, 2, num_kv_heads, page_size, 64]`` (HND) or ``[num_pages, 2, page_size, num_kv_heads, 64]`` (NHD),
        or two tensors without the dimension of 2; bfloat16 or ``float8_e4m3fn``; ``page_size`` a power of two from 16
        on. Written if ``key`` is given.
    block_tables : torch.Tensor
        ``[num_sequences, max_pages]`` int32; only entries of pages that a sequence sees are read.
    seq_lens : torch.Tensor
        ``[num_sequences]`` int32, new tokens included. If a length is less than ``q_len_per_req``, the rows of the
        first tokens, which do not exist, are zero and are not appended. At most the positions of a table row's pages,
        and of ``rope_table``. Lengths, and the pages that a sequence sees, are checked on the CPU, and on CUDA with
        ``FLASHINFER_SM12X_CHECK=1``.
    key, value : torch.Tensor, optional
        ``[m, num_kv_heads, 64]`` bfloat16, rows like those of ``query``; None: the cache already holds the new
        positions.
    rope_table : torch.Tensor, optional
        ``[positions, 64]`` bfloat16 or float32: 32 cosines, then 32 sines, for pairs of dims ``i`` and ``i + 32``.
    sinks : torch.Tensor, optional
        ``[8 * num_kv_heads]`` float32.
    q_len_per_req : int
        New tokens of each sequence, at most 64.
    sm_scale : float, optional
        The scale of scores; 1/8 when omitted.
    window_left : int
        Positions before its own that a token sees.
    k_scale, v_scale : float
        The factor by which an element of the cache is multiplied.
    kv_layout : str
        ``"HND"`` or ``"NHD"``.
    constant_cache : bool
        True: the launches that wrote ``block_tables``, ``seq_lens`` and the cache's positions that are not new have
        completed, as an earlier step's have. The kernel may then read these while the launch before it still runs.
    workspace_buffer : torch.Tensor, optional
        uint8, of :func:`decode_workspace_size` bytes, zero before its first use; calls that may run at the same time
        need one each. By default each device and stream has one, and all graphs captured on a device share another:
        these must then not be replayed at the same time, nor have parallel branches that call this function.
    out : torch.Tensor, optional
        ``[m, 8 * num_kv_heads, 64]`` bfloat16, contiguous; may be ``query`` itself, and else shares memory with no
        argument.
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
        A graph is being captured, and neither an earlier call nor :func:`prepare_decode_attention` made the default
        workspace.
    NotImplementedError
        The GPU has no kernels of this family.
    """
    keys, values = split_cache(kv_cache, kv_layout)
    require_tensor_type("query", query)
    call = DecodeCall(
        out=out,
        keys=keys,
        values=values,
        workspace_buffer=workspace_buffer,
        query=query,
        key=key,
        value=value,
        block_tables=block_tables,
        seq_lens=seq_lens,
        rope_table=rope_table,
        sinks=sinks,
        q_len_per_req=q_len_per_req,
        window_left=window_left,
        sm_scale=HEAD**-0.5 if sm_scale is None else sm_scale,
        k_scale=k_scale,
        v_scale=v_scale,
        constant_cache=constant_cache,
        enable_pdl=enable_pdl,
    )
    traced = is_traced(call)
    if not traced:
        call = validate(call)
    if call.out is None:
        call = call._replace(out=torch.empty(query.shape, dtype=torch.bfloat16, device=query.device))
    if traced:
        traced_decode(call)
    else:
        compute(call)
    attended: Any = call.out
    return attended


class DecodeCall(NamedTuple):
    """The arguments of one call of :func:`decode_attention`; keys and values are
    ``[num_pages, num_kv_heads, page_size, 64]``.

    The fields that the kernel reads stand in the order of its module.
    """

    out: torch.Tensor | None
    keys: torch.Tensor
    values: torch.Tensor
    workspace_buffer: torch.Tensor | None
    query: torch.Tensor
    key: torch.Tensor | None
    value: torch.Tensor | None
    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    rope_table: torch.Tensor | None
    sinks: torch.Tensor | None
    q_len_per_req: int
    window_left: int
    sm_scale: float
    k_scale: float
    v_scale: float
    constant_cache: bool
    enable_pdl: bool | None


_FIRST_OPERAND, _BEHIND_OPERANDS = DecodeCall._fields.index("query"), DecodeCall._fields.index("q_len_per_req")


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
        current = torch.device("cuda", torch.cuda.current_device())
        backend = kernels(current)
        assert backend is not None
        _workspace(backend, current, None)


def decode_workspace_size(device: torch.device) -> int:
    """Bytes of a workspace for :func:`decode_attention` on a device; 0 where none is needed, as on the CPU."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    backend = kernels(device)
    return 0 if backend is None else _workspace_bytes(backend, device)


def _workspace_bytes(backend: Backend, device: torch.device) -> int:
    return workspace_size(backend, backend.module(gen_decode_module), "sm12x_decode_workspace_size", device.index or 0)


def split_cache(kv_cache: Any, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, ``[num_pages, num_kv_heads, page_size, 64]`` whatever their strides."""
    require_choice("kv_layout", kv_layout, LAYOUTS)
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
        if not is_traced((kv_cache,)):
            require_memory("kv_cache", kv_cache)  # a view of what was resized is torch's own error
        parts = kv_cache.unbind(1)
    if any(part.ndim != 4 for part in parts):
        raise ValueError(f"kv_cache has {describe(parts[0])}; keys and values must be 4-D")
    if kv_layout == "NHD":
        parts = tuple(part.transpose(1, 2) for part in parts)
    return parts[0], parts[1]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """A tensor's, 0 along dimensions of one element: torch gives these any stride."""
    return tuple(stride if extent > 1 else 0 for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _require_rows(name: str, value: Any, shape: tuple[int, ...], device: torch.device) -> Span:
    """Rows of bf16 heads that may lie apart, and where they lie."""
    require_tensor_type(name, value)
    if value.shape != shape or value.dtype != torch.bfloat16 or value.device != device:
        raise ValueError(f"{name} is {describe(value)}; it must be torch.bfloat16 {shape} on {device}")
    rows, heads, dims = value.stride()
    if dims != 1 or heads != HEAD or rows % 8 or rows < 0:
        rows, heads, _ = _strides(value)
        if dims != 1 or heads not in (0, HEAD) or rows % 8 or rows < 0:
            raise ValueError(
                f"{name} is {describe(value)}; the heads of a token must lie one after the other, tokens a multiple "
                "of 8 elements apart"
            )
    start = value.data_ptr()
    size = 2 * ((shape[0] - 1) * rows + shape[1] * HEAD) if shape[0] else 0
    if not is_held(value, size):
        require_memory(name, value)
    return start, start + size


def validate(call: DecodeCall) -> DecodeCall:
    """Check a call's metadata and addresses; the call with its numbers as Python's. Raises as
    :func:`decode_attention`."""
    require_computing_device("query", call.query)
    device = call.query.device
    require_served("decode_attention", device)
    call = require_cache(call, device)
    q_len = require_int("q_len_per_req", call.q_len_per_req, 1, MAX_Q_LEN)
    if q_len is not call.q_len_per_req:
        call = call._replace(q_len_per_req=q_len)
    require_tokens(call, device)
    require_disjoint(call)
    return call


def require_cache(call: DecodeCall, device: torch.device) -> DecodeCall:
    """Check what of a call is its layer's: the cache, rope, sinks, workspace and numbers; the call with these as
    Python's."""
    keys, values = call.keys, call.values
    require_switches(call, "constant_cache")
    window_left = require_int("window_left", call.window_left, -(2**31))
    bounds = SMALLEST_SCALE, 1 / SMALLEST_SCALE, "which a captured launch holds"
    sm_scale, k_scale, v_scale = (
        require_float(name, getattr(call, name), *bounds) for name in ("sm_scale", "k_scale", "v_scale")
    )
    _, kv_heads, page_size, head = keys.shape
    if keys.dtype not in CACHE_DTYPES or keys.device != device:
        allowed = " or ".join(map(str, CACHE_DTYPES))
        raise ValueError(f"kv_cache has {describe(keys)}; it must be {allowed} on {device}")
    strides = _strides(keys)
    if keys.shape != values.shape or strides != _strides(values) or keys.dtype != values.dtype:
        raise ValueError(f"kv_cache has keys {describe(keys)} and values {describe(values)}; both must be alike")
    require_int("the number of KV heads", kv_heads, 1)
    if head != HEAD:
        raise ValueError(f"kv_cache has heads of {head}; they must be of {HEAD}")
    if page_size < CHUNK or page_size & (page_size - 1):
        raise ValueError(f"kv_cache has pages of {page_size}; it must be a power of two from {CHUNK} on")
    step = POINTER_ALIGNMENT // keys.element_size()
    if keys.stride(3) != 1 or any(stride % step or stride < 0 for stride in strides[:3]):
        raise ValueError(
            f"kv_cache has strides {tuple(keys.stride())}; the last must be 1, the others multiples of {step} "
            f"({POINTER_ALIGNMENT} bytes)"
        )
    for name, part in (("kv_cache's keys", keys), ("kv_cache's values", values)):
        require_memory(name, part)
    if call.rope_table is not None:
        require_rank("rope_table", call.rope_table, 2)
        require_tensor("rope_table", call.rope_table, [(call.rope_table.shape[0], HEAD)], ROPE_DTYPES, device)
    if call.sinks is not None:
        require_tensor("sinks", call.sinks, [(GROUP * kv_heads,)], [torch.float32], device, alignment=ELEMENT)
    if call.workspace_buffer is not None:
        require_rank("workspace_buffer", call.workspace_buffer, 1)
        require_tensor("workspace_buffer", call.workspace_buffer, [call.workspace_buffer.shape], [torch.uint8], device)
    return call._replace(window_left=window_left, sm_scale=sm_scale, k_scale=k_scale, v_scale=v_scale)


def require_tokens(call: DecodeCall, device: torch.device) -> list[Span]:
    """Check what of a call is not its layer's, whose cache is on ``device``; where its tensors lie, ``out`` first if
    given."""
    block_tables, seq_lens, out, kv_heads = call.block_tables, call.seq_lens, call.out, call.keys.shape[1]
    require_rank("seq_lens", seq_lens, 1)
    sequences = seq_lens.shape[0]
    require_tensor("seq_lens", seq_lens, [(sequences,)], [torch.int32], device, alignment=ELEMENT)
    require_tensor_type("block_tables", block_tables)
    if block_tables.ndim != 2 or block_tables.shape[0] != sequences or block_tables.dtype != torch.int32:
        raise ValueError(f"block_tables is {describe(block_tables)}; it must be int32 ({sequences}, max_pages)")
    if place_of(block_tables, device, ELEMENT) is None:
        require_memory("block_tables", block_tables, ELEMENT)
        if block_tables.device != device or _strides(block_tables)[1] not in (0, 1):
            raise ValueError(f"block_tables is {describe(block_tables)}; rows must be contiguous, on {device}")
    m, heads = sequences * call.q_len_per_req, GROUP * kv_heads
    spans = [span(block_tables), span(seq_lens), _require_rows("query", call.query, (m, heads, HEAD), device)]
    if (call.key is None) != (call.value is None):
        missing, other = ("key", "value") if call.key is None else ("value", "key")
        raise ValueError(f"{missing} is None; it must be given where {other} is: key and value go together")
    for name, rows in (("key", call.key), ("value", call.value)):
        if rows is not None:
            spans.append(_require_rows(name, rows, (m, kv_heads, HEAD), device))
    if out is not None:
        require_tensor("out", out, [(m, heads, HEAD)], [torch.bfloat16], device)
        spans.insert(0, span(out))
    return spans


def require_disjoint(call: DecodeCall) -> None:
    """Raise ``ValueError`` where what a valid call writes shares memory with itself or with another argument."""
    written: dict[str, tuple[str, ...]] = {"out": ("query",), "workspace_buffer": ()}
    if call.key is not None:
        for name, part in (("kv_cache's keys", call.keys), ("kv_cache's values", call.values)):
            if strides_overlap(part):
                raise ValueError(
                    f"{name} are {describe(part)}; where key is given they are written, and may not be expanded"
                )
        written |= {"keys": (), "values": ()}
    require_apart(call, written, {"keys": "kv_cache's keys", "values": "kv_cache's values"})


def check_values(call: DecodeCall) -> None:
    """Check the numbers that ``seq_lens`` and ``block_tables`` hold, reading them back.

    Raises
    ------
    ValueError
        A sequence is longer than its table or ``rope_table``, or sees a page that the cache does not have.
    """
    num_pages, _, page_size, _ = call.keys.shape
    q_len, window_left = call.q_len_per_req, call.window_left
    max_pages = call.block_tables.shape[1]
    longest, why = max_pages * page_size, f"{max_pages} pages of {page_size}, as block_tables has"
    if call.rope_table is not None and call.rope_table.shape[0] < longest:
        longest, why = call.rope_table.shape[0], "as many positions as rope_table has"
    lengths, tables = call.seq_lens.tolist(), call.block_tables.tolist()
    for sequence, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        if not 0 <= length <= longest:
            raise ValueError(f"seq_lens[{sequence}] is {length}; it must be from 0 to {longest}, {why}")
        first = 0 if window_left < 0 else max(0, length - q_len - window_left) // page_size
        for place in range(first, -(-length // page_size)):
            if not 0 <= table[place] < num_pages:
                raise ValueError(
                    f"block_tables[{sequence}, {place}] is {table[place]}; pages that a sequence sees must be from 0 "
                    f"to {num_pages - 1}"
                )


def _workspace(backend: Backend, device: torch.device, given: torch.Tensor | None) -> torch.Tensor:
    size = _workspace_bytes(backend, device)
    if given is not None:
        require_int("workspace_buffer's size", given.numel(), size, why="as decode_workspace_size() says")
        return given
    if not backend.is_cuda:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    graphs = (device.index, None)
    capturing = torch.cuda.is_current_stream_capturing()
    place = graphs if capturing else (device.index, torch.cuda.current_stream(device).cuda_stream)
    if place not in _workspaces:
        if capturing:  # its zeros would be one graph's own, written whenever that is replayed
            raise RuntimeError(
                "decode_attention is captured before it was ever called: call it or prepare_decode_attention() "
                "before the capture, or give it a workspace_buffer"
            )
        for each in (place, graphs):
            _workspaces.setdefault(each, torch.zeros(size, dtype=torch.uint8, device=device))
    return _workspaces[place]


def compute(call: DecodeCall) -> None:
    """Compute a valid call that has its output."""
    device, out = call.query.device, call.out
    assert out is not None
    if checks_values(device):
        check_values(call)
    if call.query.shape[0] == 0:
        return
    backend = kernels(device)
    if backend is None:
        with plain_torch(device):
            _compute_on_cpu(call, out)
        return
    workspace = _workspace(backend, device, call.workspace_buffer)
    backend.call(
        backend.module(gen_decode_module).sm12x_decode_run,
        out,
        call.keys,
        call.values,
        workspace,
        *call[_FIRST_OPERAND:_BEHIND_OPERANDS],
        call.q_len_per_req,
        call.window_left,
        call.sm_scale * call.k_scale * LOG2_E,
        call.k_scale,
        call.v_scale,
        call.constant_cache,
        backend.pdl(call.enable_pdl),
        writes=(out, workspace, *(() if call.key is None else (call.keys, call.values))),
    )


def _run(call: DecodeCall) -> None:
    compute(validate(call))


traced_decode = define(
    "sm12x_decode_attention", DecodeCall, _run, mutates=("out", "keys", "values", "workspace_buffer")
)


def rope_rows(rows: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """``rows`` ``[m, heads, 64]`` bfloat16, rotated as the kernel rotates them.

    For each of the kernel's FMAs, float64 holds the product exactly. The sum is rounded twice here, to float64 and then
    to float32; that differs from the FMA only if the float64 sum is a tie of the second rounding.
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


def _compute_on_cpu(call: DecodeCall, out: torch.Tensor) -> None:
    keys, values, q_len, window_left = call.keys, call.values, call.q_len_per_req, call.window_left
    page_size = keys.shape[2]
    result = torch.zeros_like(out)  # which may be query itself
    for sequence, length in enumerate(call.seq_lens.tolist()):
        rows = slice(sequence * q_len, (sequence + 1) * q_len)
        positions = torch.arange(length - q_len, length)
        positions = positions[positions >= 0]  # a sequence may be shorter than the call's tokens
        if not len(positions):
            continue

        def turned(x: torch.Tensor, rows: slice = rows, at: torch.Tensor = positions) -> torch.Tensor:
            mine = x[rows][-len(at) :]
            return mine if call.rope_table is None else rope_rows(mine, at, call.rope_table)

        if call.key is not None and call.value is not None:
            pages = call.block_tables[sequence, positions // page_size].long()
            keys[pages, :, positions % page_size] = to_cache(turned(call.key), keys.dtype, call.k_scale)
            values[pages, :, positions % page_size] = to_cache(
                call.value[rows][-len(positions) :], values.dtype, call.v_scale
            )
        low = 0 if window_left < 0 else max(0, int(positions[0]) - window_left)
        seen = torch.arange(low, length)
        pages = call.block_tables[sequence, seen // page_size].long()
        k, v = (part[pages, :, seen % page_size].float() for part in (keys, values))  # [positions, kv_heads, 64]
        q = turned(call.query).float().view(len(positions), -1, GROUP, HEAD)
        scores = torch.einsum("mhgd,phd->mhgp", q, k) * (call.sm_scale * call.k_scale)
        behind = positions[:, None] - seen
        hidden = (behind < 0) | (behind > (length if window_left < 0 else window_left))
        scores.masked_fill_(hidden[:, None, None], -torch.inf)
        if call.sinks is not None:
            sink = call.sinks.view(1, -1, GROUP, 1).expand(len(positions), -1, -1, -1)
            weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        attended = torch.einsum("mhgp,phd->mhgd", weights, v) * call.v_scale
        result[rows][-len(positions) :] = attended.reshape(len(positions), -1, HEAD).to(out.dtype)
    out.copy_(result)
