# SPDX-License-Identifier: Apache-2.0
"""``decode_attention`` against float64: the cache to the bit, the output within a bound derived from its arithmetic."""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable
from typing import Any

import torch

from ..sm12x_decode import CHUNK, GROUP, HEAD, LAYOUTS, ROPE_DTYPES, rope_rows, to_cache
from .error_bounds import FLOAT32_ROUNDOFF, TENSOR_CORE, Accumulation, check_within_bound

BF16_ROUNDOFF = 2.0**-8  # of a significand of 8 bits
EXP2_ERROR = 2.0**-22  # relative, of ex2.approx.ftz (PTX ISA, section on ex2): 2 + 2^-22 ulp at most on [-126, 0]


@dataclasses.dataclass
class DecodeCase:
    """A call, and the cache before it."""

    arguments: dict[str, Any]
    keys: torch.Tensor
    values: torch.Tensor
    exact_weights: bool = False
    """Softmax weights are powers of two, and their products with values and all sums exact."""

    def cache(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the call, ``[pages, kv_heads, page_size, 64]``."""
        return as_hnd(self.arguments["kv_cache"], self.arguments["kv_layout"])


def as_hnd(
    kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor], layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of keys and values, heads before positions."""
    keys, values = kv_cache.unbind(1) if isinstance(kv_cache, torch.Tensor) else kv_cache
    return (keys.transpose(1, 2), values.transpose(1, 2)) if layout == "NHD" else (keys, values)


def make_decode_case(
    lengths: list[int],
    kv_heads: int,
    seed: int,
    *,
    page_size: int = 16,
    q_len: int = 1,
    fp8: bool = False,
    layout: str = "HND",
    appends: bool = True,
    rope: torch.dtype | None = torch.float32,
    sinks: bool = True,
    window_left: int = -1,
    lattice: bool = False,
    device: torch.device | str = "cpu",
) -> DecodeCase:
    """Random arguments. Positions of the cache that no token may see, or that the call appends, are NaN.

    ``lattice``: base-2 scores and values are small integers, so that only the output is rounded. Rope is left out,
    because its products are not integers.
    """
    generator = torch.Generator().manual_seed(seed)
    m, longest = len(lengths) * q_len, max(lengths)
    dtype = torch.float8_e4m3fn if fp8 else torch.bfloat16
    scales = (0.5, 1.75) if fp8 and not lattice else (1.0, 1.0)
    if lattice:
        rope = None

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        if lattice:
            return torch.randint(-3, 4, shape, generator=generator).float()
        return torch.randn(shape, generator=generator) * scale

    pages_each = max(1, -(-longest // page_size))
    num_pages = len(lengths) * pages_each + 1
    tables = torch.randperm(num_pages - 1, generator=generator).int().view(len(lengths), pages_each) + 1
    shape = (num_pages, 2, kv_heads, page_size, HEAD)
    cache = torch.full(shape, torch.nan).to(dtype)
    keys, values = cache.unbind(1)
    for sequence, length in enumerate(lengths):
        low = 0 if window_left < 0 else max(0, length - q_len - window_left)
        held = torch.arange(low, max(low, length - q_len if appends else length))
        pages = tables[sequence, held // page_size].long()
        for part, scale in ((keys, scales[0]), (values, scales[1])):
            part[pages, :, held % page_size] = normal(len(held), kv_heads, HEAD, scale=1 / scale).to(dtype)
        # Pages behind the sequence, or wholly before what it sees, are read by nobody: no page has such a number.
        used = torch.arange(pages_each)
        tables[sequence, (used < low // page_size) | (used >= -(-length // page_size))] = -(2**30)
    if layout == "NHD":
        cache = cache.transpose(2, 3).contiguous()
    # One tensor of rows, as a QKV projection gives them.
    heads = GROUP * kv_heads
    rows = normal(m, heads + 2 * kv_heads, HEAD).bfloat16()
    query, key, value = rows.split((heads, kv_heads, kv_heads), dim=1)
    if lattice:
        dims = torch.randint(HEAD, (m, heads, 1), generator=generator)
        query.zero_().scatter_(2, dims, 1.0)
    arguments: dict[str, Any] = {
        "query": query,
        "kv_cache": cache,
        "block_tables": tables,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "q_len_per_req": q_len,
        "window_left": window_left,
        "kv_layout": layout,
        "k_scale": scales[0],
        "v_scale": scales[1],
    }
    if appends:
        arguments |= {"key": key, "value": value}
    if rope is not None:
        angles = torch.arange(max(longest, 1))[:, None] * 0.7 ** torch.arange(HEAD // 2)
        arguments["rope_table"] = torch.cat([angles.cos() * 1.3, angles.sin() * 1.3], dim=1).to(rope)
    if sinks:
        # About as heavy as all positions together.
        seen = longest if window_left < 0 else min(longest, window_left + 1)
        arguments["sinks"] = normal(heads) + math.log(max(seen, 1))
        if lattice:
            arguments["sinks"] = (arguments["sinks"] * math.log2(math.e)).round() * math.log(2)
    if lattice:
        arguments["sm_scale"] = math.log(2)
    keys, values = (part.clone() for part in as_hnd(cache, layout))
    arguments = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in arguments.items()}
    return DecodeCase(arguments, keys, values, lattice)


OPERANDS = ("query", "key", "value", "keys", "values", "sinks")
"""The operands that :func:`put_one_element` can change."""


def put_one_element(case: DecodeCase, operand: str, value: float) -> None:
    """One element of an operand becomes ``value``, in the KV head that comes last and, sinks apart, in sequence 1.

    It is the last new token's; of ``keys`` and ``values``, the cache, of the first position its first token sees.
    """
    arguments, q_len = case.arguments, case.arguments["q_len_per_req"]
    if operand == "sinks":
        arguments[operand][-3] = value
    elif operand in ("query", "key", "value"):
        arguments[operand][2 * q_len - 1, -1, 5] = value
    else:
        length, window = int(arguments["seq_lens"][1]), arguments["window_left"]
        first = 0 if window < 0 else max(0, length - q_len - window)
        which, page_size = operand == "values", case.keys.shape[2]
        page = int(arguments["block_tables"][1, first // page_size])
        for parts in (case.cache(), (case.keys, case.values)):
            parts[which][page, -1, first % page_size, 5] = value


def check_one_element(before: torch.Tensor, after: torch.Tensor, case: DecodeCase, operand: str) -> None:
    """Assert that what :func:`put_one_element` changed is in no other sequence's output, nor in another KV head's; of a
    query, in no other token's or head's, of a sink, in no other head's.
    """
    q_len, last = case.arguments["q_len_per_req"], before.shape[1] - 1
    token, head = torch.arange(before.shape[0])[:, None], torch.arange(before.shape[1])
    reached = {"query": (token == 2 * q_len - 1) & (head == last), "sinks": (token >= 0) & (head == last - 2)}
    elsewhere = ~reached.get(operand, (token // q_len == 1) & (head > last - GROUP))
    assert torch.equal(before[elsewhere], after[elsewhere]), f"{operand} reached what does not depend on it"


def put_apart(case: DecodeCase) -> None:
    """Strides become the smallest that are allowed, none another's; what lies between is for nobody to read."""

    def apart(tensor: torch.Tensor, first: int, others: int = 0) -> torch.Tensor:
        strides = [1]
        for dimension in range(tensor.ndim - 1, 0, -1):
            gap = first if dimension == 1 else others
            strides.insert(0, tensor.shape[dimension] * strides[0] + gap)
        filling = torch.nan if tensor.is_floating_point() else -(2**30)
        memory = torch.full((max(tensor.shape[0], 1) * strides[0],), filling, device=tensor.device).to(tensor.dtype)
        return memory.as_strided(tensor.shape, strides).copy_(tensor)

    arguments = case.arguments
    for name, gap in (("query", 8), ("key", 16), ("value", 24)):
        if name in arguments:
            arguments[name] = apart(arguments[name], gap)
    arguments["block_tables"] = apart(arguments["block_tables"], 1)
    step = 16 // case.keys.element_size()
    arguments["kv_cache"] = apart(arguments["kv_cache"], step, step)


def far_away(case: DecodeCase, decode: Callable[..., torch.Tensor]) -> torch.Tensor:
    """``decode(**arguments)`` of the same tokens at positions, in pages and in rows whose elements lie beyond 2^32.

    Nearly all of that memory is never touched, so that it costs nothing. The case's own cache gets what was written.
    Each of its sequences fills the window; its tensors are on the CPU.
    """
    arguments, page_size = dict(case.arguments), case.keys.shape[2]
    cache, tables, table = (arguments[name] for name in ("kv_cache", "block_tables", "rope_table"))
    assert int(arguments["seq_lens"].min()) >= arguments["q_len_per_req"] + arguments["window_left"]

    def sparse(like: torch.Tensor, rows: int, stride: int) -> torch.Tensor:
        size = rows * stride * like.element_size()
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE, which `mmap` has from Python 3.13 on
        memory = torch.frombuffer(mmap.mmap(-1, size, flags=kind), dtype=torch.uint8).view(like.dtype)
        return memory.as_strided((rows, *like.shape[1:]), (stride, *like.stride()[1:]))

    for name in ("query", "key", "value"):
        stride = 2**32 // (len(arguments[name]) - 1) // 8 * 8 + 8
        arguments[name] = sparse(arguments[name], len(arguments[name]), stride).copy_(arguments[name])
    ahead = 2**32 // HEAD // page_size * page_size  # positions
    arguments["seq_lens"] = arguments["seq_lens"] + ahead
    far_table = sparse(table, ahead + len(table), HEAD)
    far_table[ahead:].copy_(table)
    far_tables = sparse(tables, len(tables), 2**32 // (len(tables) - 1) + 1)
    far_tables = far_tables.as_strided((len(tables), ahead // page_size + tables.shape[1]), (far_tables.stride(0), 1))
    spread = 2**32 // cache.stride(0) // (len(cache) - 1) + 1  # pages from one of the case's to the next
    far_tables[:, ahead // page_size :].copy_(torch.where(tables < 0, tables, tables * spread))
    far_cache = sparse(cache, (len(cache) - 1) * spread + 1, cache.stride(0))
    far_cache[::spread].copy_(cache)
    out = decode(**arguments | {"kv_cache": far_cache, "block_tables": far_tables, "rope_table": far_table})
    cache.copy_(far_cache[::spread])
    return out


def random_decode_case(seed: int, longest: int, *, kv_heads: int = 8, device: torch.device | str = "cpu") -> DecodeCase:
    """Every option of :func:`make_decode_case` drawn, and strides; sequences up to ``longest``, some of them empty."""
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int) -> int:
        return int(torch.randint(high, (), generator=generator))

    case = make_decode_case(
        [draw(longest) for _ in range(draw(5))] + [1 + draw(longest)],
        1 + draw(kv_heads),
        seed,
        page_size=16 << draw(4),
        q_len=1 + draw(9) if draw(2) else 1,
        fp8=draw(2) == 1,
        layout=LAYOUTS[draw(2)],
        appends=draw(4) > 0,
        rope=(None, *ROPE_DTYPES)[draw(3)],
        sinks=draw(2) == 1,
        window_left=draw(300) - 100,
        device=device,
    )
    if draw(2):
        put_apart(case)
    return case


def check_decoded(out: torch.Tensor, case: DecodeCase, accumulation: Accumulation = TENSOR_CORE) -> None:
    """Assert that every byte of the cache is right, and that ``out`` is a result that the call's arithmetic may give.

    ``accumulation``: the way the implementation sums scores and weighted values. If the float64 result is not finite,
    ``out`` must equal it. A value that is not finite may reach a token that does not see its position, if another token
    of the sequence does.

    Raises
    ------
    AssertionError
        One of them is wrong.
    """
    arguments: dict[str, Any] = {
        name: v.cpu() if isinstance(v, torch.Tensor) else v for name, v in case.arguments.items()
    }
    keys, values = case.keys.clone(), case.values.clone()
    q_len, window = arguments["q_len_per_req"], arguments["window_left"]
    k_scale, v_scale = arguments["k_scale"], arguments["v_scale"]
    table, page_size = arguments.get("rope_table"), keys.shape[2]
    expected = torch.zeros(arguments["query"].shape, dtype=torch.float64)
    bound = torch.zeros_like(expected)
    new = torch.zeros(keys.shape, dtype=torch.bool)
    for sequence, length in enumerate(arguments["seq_lens"].tolist()):
        tokens = range(max(0, q_len - length), q_len)
        if not tokens:
            continue
        rows = torch.tensor(tokens) + sequence * q_len
        positions = torch.tensor(tokens) + length - q_len
        query = arguments["query"][rows]
        if table is not None:
            query = rope_rows(query, positions, table)
        if "key" in arguments:
            key = arguments["key"][rows]
            key = key if table is None else rope_rows(key, positions, table)
            pages = arguments["block_tables"][sequence, positions // page_size].long()
            keys[pages, :, positions % page_size] = to_cache(key, keys.dtype, k_scale)
            values[pages, :, positions % page_size] = to_cache(arguments["value"][rows], values.dtype, v_scale)
            new[pages, :, positions % page_size] = True
        first = 0 if window < 0 else max(0, length - q_len - window)
        reached = torch.arange(first, length)
        for row, position, q in zip(rows.tolist(), positions.tolist(), query, strict=True):
            seen = torch.arange(0 if window < 0 else max(0, position - window), position + 1)
            pages = arguments["block_tables"][sequence, seen // page_size].long()
            k, v = (part[pages, :, seen % page_size].double() for part in (keys, values))
            grouped = q.double().view(-1, GROUP, HEAD)
            scale = arguments.get("sm_scale", HEAD**-0.5) * k_scale
            sinks = arguments.get("sinks")
            expected[row], bound[row] = _attend(grouped, k, v * v_scale, scale, sinks, case.exact_weights, accumulation)
            unseen = reached[(reached < seen[0]) | (reached > seen[-1])]
            pages = arguments["block_tables"][sequence, unseen // page_size].long()
            none = ~values[pages, :, unseen % page_size].float().isfinite().all(0)
            bound[row][none.repeat_interleave(GROUP, dim=0)] = torch.inf
    for name, ours, theirs in zip(("keys", "values"), case.cache(), (keys, values), strict=True):
        ours = ours.cpu()
        bits = torch.int16 if ours.element_size() == 2 else torch.uint8
        same = ours.contiguous().view(bits) == theirs.contiguous().view(bits)
        same |= new & ours.float().isnan() & theirs.float().isnan()  # which NaN is nobody's business
        assert same.all(), f"{name} of the cache differ in {int((~same).sum())} elements"
    check_within_bound(out.cpu(), expected, bound, "attention")


def _nothing_is_lost(count: int) -> float:
    return 0.0


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
    exact_weights: bool,
    accumulation: Accumulation,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token's output and bound, ``[heads, 64]``; ``q`` ``[kv_heads, 8, 64]``, ``k`` and ``v`` ``[positions, ...]``.

    ``scale`` is of scores. ``exact_weights`` as in :class:`DecodeCase`: a weight that meets a value is not rounded, and
    MMAs lose nothing of a sum that they have the width for.
    """
    unit, scale = FLOAT32_ROUNDOFF, scale * math.log2(math.e)
    gamma: Callable[[int], float] = accumulation.gamma
    rounding = BF16_ROUNDOFF
    if exact_weights:
        # Products are multiples of the least weight, 2^-6 of the largest; a sum is at most 3 of the largest a position.
        assert (accumulation.sum_bits or 23) >= 6 + math.log2(3 * max(len(k), 1)), accumulation
        gamma, rounding = _nothing_is_lost, 0.0
    chunks = len(k) // CHUNK + 2
    scores = torch.einsum("hgd,phd->hgp", q, k) * scale  # base 2
    size = torch.einsum("hgd,phd->hgp", q.abs(), k.abs()) * scale
    finite = scores.isfinite()  # minus infinity weighs nothing, and the others leave no finite output
    size, length = (torch.where(finite, of, 0.0) for of in (size, scores.abs()))
    # Sums of a dot product; the scale's own rounding, the product's, and that of the distance to the maximum.
    error = gamma(HEAD) * size + 2 * unit * length
    error = error.amax(-1, keepdim=True) + 2 * unit * length.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.double().view(*q.shape[:2], 1) * math.log2(math.e)
        # The constant, the product, the distance.
        error = error + 3 * unit * torch.where(sink.isfinite(), sink.abs(), 0.0)
        scores = torch.cat([scores, sink], dim=-1)
    shares = torch.softmax(scores * math.log(2), dim=-1)[..., : len(k)]
    out = torch.einsum("hgp,phd->hgd", shares, v)
    magnitude = torch.einsum("hgp,phd->hgd", shares, v.abs())
    # A weight meets its own exp2 and those of rescaling: at each later chunk of its warp, where the other warps, the
    # other splits and the sink come in. Warps and splits that have seen something are no more than chunks, and those
    # that have not multiply by exp2(0) = 1.
    weight = math.log(2) * error + (chunks + 4) * (EXP2_ERROR + 2 * unit)
    # Sums of weights and of products, by MMAs over all positions, and over warps and splits.
    sums = gamma(len(k)) + (chunks + 8 + 32) * unit
    bound = magnitude * (rounding + 2 * weight + 2 * sums + 4 * unit) + 2.0**-120
    bound = torch.where(out.isfinite(), bound, 0.0)
    return out.flatten(0, 1), bound.flatten(0, 1)
