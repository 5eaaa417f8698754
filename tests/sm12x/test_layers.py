# SPDX-License-Identifier: Apache-2.0
"""Layer objects against their functions: the same results and the same words, whatever becomes of what they were made
of."""

from __future__ import annotations

import functools
import gc
import inspect
import re
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from operator_calls import (
    OPERATORS,
    WRONG,
    Arguments,
    changes,
    get_tensor,
    name_of,
    outcome,
    places,
)

from flashinfer import sm12x_decode_layer
from flashinfer.decode import DecodeAttentionLayer
from flashinfer.fused_moe import SM12xMoELayer, cutlass_fused_moe, moe_step, sm12x_operator, sm12x_validation
from flashinfer.gemm import DenseLayer, RescoredLayer, sm12x_dense_layer
from flashinfer.sm12x.checks import CallCache, Unchanged, bounds_of, span


def _afresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` that forgets all experts before each call, as if it saw them for the first time."""

    @functools.wraps(function)
    def run(*arguments: Any, **named: Any) -> Any:
        sm12x_validation._cached.clear()
        return function(*arguments, **named)

    return run


class Layer(NamedTuple):
    """A class, a method of it, and the call of :data:`OPERATORS` that it takes apart."""

    made: type
    method: str
    operator: str

    @property
    def function(self) -> Callable[..., Any]:
        """The function that the method stands for; it checks everything in each call."""
        return _afresh(moe_step) if self.made is SM12xMoELayer else OPERATORS[self.operator][0]

    def make(self) -> Arguments:
        """The arguments of a right call."""
        return OPERATORS[self.operator][1]()

    @property
    def names(self) -> set[str]:
        """Arguments that the object is made of."""
        return set(inspect.signature(self.made).parameters) - set(self.signature.parameters)

    def kept(self, arguments: Arguments) -> Arguments:
        """Those that the object is made of."""
        return {name: value for name, value in arguments.items() if name in self.names}

    def given(self, arguments: Arguments) -> Arguments:
        """Those of each call."""
        return {name: value for name, value in arguments.items() if name not in self.names}

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(getattr(self.made, self.method))

    def once(self) -> Callable[..., Any]:
        """The function by an object that is made for each call."""

        def run(**arguments: Any) -> Any:
            return getattr(self.made(**self.kept(arguments)), self.method)(**self.given(arguments))

        parameters = {**inspect.signature(self.made).parameters, **self.signature.parameters}
        keyword = inspect.Parameter.KEYWORD_ONLY
        of_both = set(inspect.signature(self.function).parameters) & set(parameters)
        signature = inspect.Signature([parameters[name].replace(kind=keyword) for name in sorted(of_both)])
        run.__signature__ = signature  # type: ignore[attr-defined]
        return run

    def of(self, arguments: Arguments) -> Callable[..., Any]:
        """An object's method, which takes a call's own arguments out of all."""
        method = getattr(self.made(**self.kept(arguments)), self.method)
        return lambda **every: method(**self.given(every))


LAYERS = {
    **{
        f"DenseLayer, {form}": Layer(DenseLayer, "run", form)
        for form in ("dense_block_scaled", "dense_block_scaled, MXFP8 tokens", "dense_block_scaled, linear scales")
    },
    **{
        f"RescoredLayer, {form}": Layer(RescoredLayer, "run", form)
        for form in ("dense_block_scaled_rescored", "dense_block_scaled_rescored, MXINT8")
    },
    "RescoredLayer, top-k": Layer(RescoredLayer, "run_top_k", "dense_block_scaled_rescored_top_k"),
    "DenseLayer behind a norm": Layer(DenseLayer, "run_behind_norm", "rmsnorm_dense_block_scaled"),
    **{f"SM12xMoELayer, {name}": Layer(SM12xMoELayer, "run", name) for name in ("MoE 0", "MoE 1", "MoE 2", "moe_step")},
    "DecodeAttentionLayer": Layer(DecodeAttentionLayer, "run", "decode"),
    "DecodeAttentionLayer, fp8": Layer(DecodeAttentionLayer, "run", "decode, fp8"),
}


def _alike(one: Any, other: Any) -> bool:
    """Whether two outcomes have the same error, or the same bits."""
    # A MoE layer has no input when it is made. The two W4A8 modes take the same scales, and its error names the first.
    kinds = [
        (kind, text.replace("BF16_INPUT takes the 4", "MXFP8_INPUT takes the 4")) for kind, text, _ in (one, other)
    ]
    if kinds[0] != kinds[1]:
        return False
    return len(one[2]) == len(other[2]) and all(
        first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))
        for first, second in zip(one[2], other[2], strict=True)
    )


def test_smoke() -> None:
    """The example of docs/kernels.md."""
    arguments = OPERATORS["dense_block_scaled"][1]()
    layer = DenseLayer(
        arguments["weight"],
        arguments["weight_scale"],
        arguments["bias"],
        weight_format="mxfp4",
        alpha=arguments["alpha"],
    )
    out = layer.run(arguments["x"], residual=arguments["residual"])
    assert torch.equal(out, OPERATORS["dense_block_scaled"][0](**arguments))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("reused", [False, True], ids=["made", "reused"])
def test_a_layer_raises_and_computes_what_its_function_does(name: str, reused: bool) -> None:
    """Each argument is wrong in each way. ``reused``: only arguments of a call change, and one object gets all
    calls."""
    layer = LAYERS[name]
    own = layer.make()
    same = layer.of(own) if reused else layer.once()
    different, tried, refused, absent = [], 0, 0, object()
    for named, what, change in changes(layer.once(), layer.make):
        if (named, what) == ("out_dtype", "None"):
            continue  # the dtype is the layer's own
        by_function, by_layer = layer.make(), layer.make()
        before = dict(by_layer)
        change(by_function)
        change(by_layer)
        if reused:
            if any(by_layer.get(kept, absent) is not before.get(kept, absent) for kept in layer.names):
                continue
            for place in places(layer.kept(own)):
                get_tensor(own, place).copy_(get_tensor(before, place))  # a cache is written
            by_layer |= layer.kept(own)
        expected, got = outcome(layer.function, by_function), outcome(same, by_layer)
        if what == "on meta":  # the device is the layer's own
            assert got[0] == "ValueError", (named, got)
            assert re.match(rf"{re.escape(named)}(?!\w).* on meta.*; ", got[1]), (named, got)
            continue
        tried, refused = tried + 1, refused + bool(expected[0])
        if not _alike(expected, got):
            different.append((named, what, expected[:2], got[:2]))
    assert not different, "\n".join(map(str, different))
    assert 10 < refused < tried


def _put(tensor: torch.Tensor, other: Any) -> bool:
    """``tensor.data = other``, where torch does it."""
    try:
        tensor.data = other
    except (RuntimeError, TypeError):
        return False
    return True


@pytest.mark.parametrize("name", LAYERS)
def test_what_a_layer_was_made_of_may_change(name: str) -> None:
    """``tensor.data`` in each wrong way, and in right ones: a call says and computes what the function does with it."""
    layer = LAYERS[name]
    arguments = layer.make()
    run = layer.of(arguments)
    different, put = [], 0
    for place in places(layer.kept(arguments)):
        tensor = get_tensor(arguments, place)
        right = tensor.data
        other = torch.zeros_like(right)
        other.view(torch.uint8).copy_(right.view(torch.uint8).flip(0))
        changed = {what: wrong(right) for what, wrong in WRONG.items()} | {"other values": other, "right": right}
        for what, data in changed.items():
            if what == "on meta" or not _put(tensor, data):
                continue
            put += 1
            expected, got = outcome(layer.function, arguments), outcome(run, arguments)
            if not _alike(expected, got):
                different.append((name_of(place), what, expected[:2], got[:2]))
            assert _put(tensor, right)
            if outcome(run, arguments)[0] or (what == "right" and expected[0]):
                different.append((name_of(place), what, expected[:2], outcome(run, arguments)[:2]))
    assert not different, "\n".join(map(str, different))
    assert put > 30


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_sleeps(name: str) -> None:
    """Storages lose their memory and get other memory, as vLLM's sleep levels and FSDP do; refused in between."""
    layer = LAYERS[name]
    arguments = layer.make()
    run = layer.of(arguments)
    expected = outcome(layer.function, arguments)
    assert _alike(expected, outcome(run, arguments))
    for place in places(layer.kept(arguments)):
        storage = get_tensor(arguments, place).untyped_storage()
        saved, size = storage.clone(), storage.nbytes()
        storage.resize_(0)
        kind, text, _ = outcome(run, arguments)
        assert kind == "ValueError"
        assert "its storage holds 0 bytes; it was resized" in text
        storage.resize_(size)
        storage.copy_(saved)
        assert _alike(outcome(layer.function, arguments), outcome(run, arguments))


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("DenseLayer, dense_block_scaled", "_require_weight"),
        ("RescoredLayer, dense_block_scaled_rescored", "_require_weights"),
        ("DecodeAttentionLayer", "_require_cache"),
        ("SM12xMoELayer, MoE 0", "_require_experts"),
    ],
)
def test_a_layer_is_checked_when_it_is_made_and_when_it_changed(
    name: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = LAYERS[name]
    checked: list[Any] = []
    original = getattr(layer.made, check)
    monkeypatch.setattr(layer.made, check, lambda made: checked.append(made) or original(made))
    arguments = layer.make()
    run = layer.of(arguments)
    for _ in range(3):
        run(**arguments)
    assert len(checked) == 1
    for number, place in enumerate(places(layer.kept(arguments)), start=2):
        tensor = get_tensor(arguments, place)
        tensor.data = tensor.data.clone()
        for _ in range(3):
            run(**arguments)
        assert len(checked) == number, place


MOE = ["MoE 0", "MoE 1", "MoE 2"]


@pytest.mark.parametrize("name", MOE)
def test_a_function_that_knows_its_experts_raises_and_computes_the_same(name: str) -> None:
    """Each argument is wrong in each way, while the others are the same objects as in a valid call."""
    function, make = OPERATORS[name]
    own, different, tried, refused = make(), [], 0, 0
    for named, what, change in changes(function, make):
        arguments = make()
        before = dict(arguments)
        change(arguments)
        beside = {key: own[key] if key in own and value is before[key] else value for key, value in arguments.items()}
        for key in own.keys() & before.keys():
            if isinstance(own[key], torch.Tensor):
                own[key].copy_(before[key])
        expected = outcome(_afresh(function), arguments)
        assert not outcome(function, own)[0]
        got = outcome(function, beside)
        tried, refused = tried + 1, refused + bool(expected[0])
        if not _alike(expected, got):
            different.append((named, what, expected[:2], got[:2]))
    assert not different, "\n".join(map(str, different))
    assert 10 < refused < tried


@pytest.mark.parametrize("name", MOE)
def test_a_function_checks_experts_once_and_when_something_changed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    original = sm12x_validation._check_parameters
    monkeypatch.setattr(sm12x_validation, "_check_parameters", lambda *given: checked.append(given) or original(*given))
    arguments = OPERATORS[name][1]()
    sm12x_validation._cached.clear()
    for _ in range(3):
        cutlass_fused_moe(**arguments)
    assert len(checked) == 1
    kept = LAYERS[f"SM12xMoELayer, {name}"].kept(arguments)
    for number, place in enumerate(places(kept), start=2):
        tensor = get_tensor(arguments, place)
        tensor.data = tensor.data.clone()
        for _ in range(3):
            cutlass_fused_moe(**arguments)
        assert len(checked) == number, place
    number = len(checked)
    for _ in range(3):  # an equal number that is another object, as a traced call's are
        cutlass_fused_moe(**arguments, tune_max_num_tokens=int("8192"))
    assert len(checked) == number
    with pytest.raises(TypeError, match=r"^ep_size is 1\.0"):
        cutlass_fused_moe(**{**arguments, "ep_size": 1.0})  # equal to 1, and no integer
    moved = {**arguments, "fc1_expert_biases": arguments["fc2_expert_biases"]}
    with pytest.raises(ValueError, match=r"^fc1_expert_biases is"):
        cutlass_fused_moe(**moved)


@pytest.mark.parametrize("name", MOE)
def test_a_function_that_knows_its_experts_writes_over_no_argument(name: str) -> None:
    function, make = OPERATORS[name]
    arguments = make() | {"output": None, "workspace_buffer": None}
    assert not outcome(function, arguments)[0]
    for place in places(arguments):
        memory = get_tensor(arguments, place).view(torch.uint8).flatten()
        kind, text, _ = outcome(function, {**arguments, "workspace_buffer": memory})
        assert (kind, text.split(";")[0]) == ("ValueError", f"workspace_buffer overlaps {place[0]}"), place


def test_a_function_keeps_no_experts_alive() -> None:
    arguments = OPERATORS["MoE 2"][1]()
    cutlass_fused_moe(**arguments)
    known = [weakref.ref(get_tensor(arguments, place)) for place in places(arguments)]
    del arguments
    gc.collect()
    assert known
    assert not any(each() is not None for each in known)


def test_a_function_remembers_a_bounded_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm12x_validation, "_MOST_CACHED", 3)
    sm12x_validation._cached.clear()
    layers = [OPERATORS["MoE 2"][1]() for _ in range(5)]
    for arguments in layers:
        cutlass_fused_moe(**arguments)
        assert len(sm12x_validation._cached) <= 3


def test_tokens_of_a_reused_layer_may_not_lie_in_its_cache() -> None:
    layer = LAYERS["DecodeAttentionLayer"]
    arguments = layer.make()
    run = layer.of(arguments)
    run(**arguments)
    key = arguments["key"]
    inside = arguments["kv_cache"].view(-1)[: key.numel()].view(key.shape)
    with pytest.raises(ValueError, match=r"^kv_cache's keys overlaps key; it must be memory of its own"):
        run(**{**arguments, "key": inside})


def test_each_fact_of_a_tensor_is_known() -> None:
    """One change at a time, with everything else as it was."""
    square = torch.ones(4, 4)
    columns = square.t()
    facts: dict[str, Callable[[], torch.Tensor]] = {
        "address": lambda: square.clone(),
        "shape": lambda: square[:3],
        "strides": lambda: columns,
        "dtype": lambda: square.view(torch.int32),
        "negative bit": lambda: torch._neg_view(square),
    }
    for what, changed in facts.items():
        tensor = torch.nn.Parameter(square.detach(), requires_grad=False)
        unchanged = Unchanged(None, tensor)
        assert unchanged.holds(None, tensor)
        tensor.data = changed()
        assert not unchanged.holds(None, tensor), what
        tensor.data = square
        assert unchanged.holds(None, tensor), what
    tensor.data = columns
    unchanged = Unchanged(tensor)
    assert unchanged.holds(tensor)
    for other in (square, square.as_strided((4, 4), (0, 1))):
        tensor.data = other
        assert not unchanged.holds(tensor), other.stride()


def test_where_a_storage_starts_is_a_fact_of_its_own() -> None:
    """Address, shape and the storage's size stay; a storage that starts earlier ends earlier, here 64 bytes before the
    first one, and a resize would let the tensor end after it."""
    memory, size = bytearray(512), 256
    first = next(
        place for place in range(64) if torch.frombuffer(memory, dtype=torch.uint8)[place].data_ptr() % 64 == 0
    )

    def view(start: int, offset: int) -> torch.Tensor:
        storage = torch.frombuffer(memory, dtype=torch.uint8, offset=first + start, count=size)
        assert storage.untyped_storage().nbytes() == size
        return storage[offset : offset + 128]

    tensor = torch.nn.Parameter(view(128, 0), requires_grad=False)
    unchanged, start = Unchanged(tensor), tensor.data_ptr()
    for before in (64, 128, 1):
        tensor.data = view(128 - before, before)
        assert (tensor.data_ptr(), tensor.untyped_storage().nbytes()) == (start, size)
        assert tensor.untyped_storage().data_ptr() + size == start + size - before
        assert not unchanged.holds(tensor), before
        tensor.set_(view(128, 0))
        assert unchanged.holds(tensor), before
        # What becomes the same tensor by other ways is the same: its storage is where it was.
        tensor.as_strided_((64,), (1,), 3)
        assert not unchanged.holds(tensor), before
        tensor.as_strided_((128,), (1,), 0)
        assert unchanged.holds(tensor), before


def _large_layer(name: str) -> tuple[Callable[[], Any], torch.Tensor]:
    """A call of a layer that was made or seen before, and one of its tensors, of more bytes than malloc keeps for
    itself."""
    if name == "DenseLayer":
        weight, scales = torch.zeros(1 << 17, 320, dtype=torch.uint8), torch.zeros(1 << 17, 20, dtype=torch.uint8)
        dense, x = DenseLayer(weight, scales, weight_format="mxfp4"), torch.zeros(1, 640).bfloat16()
        return lambda: dense.run(x), weight
    if name == "DecodeAttentionLayer":
        cache = torch.zeros(700, 2, 8, 64, 64, dtype=torch.bfloat16)
        decode, query = DecodeAttentionLayer(cache), torch.zeros(1, 64, 64).bfloat16()
        table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
        return lambda: decode.run(query, table, lengths), cache
    arguments = OPERATORS["MoE 2"][1]()
    experts, hidden, inter = 8, 4096, 2560
    arguments |= dict.fromkeys(
        ("fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    )
    arguments["fc1_expert_weights"] = torch.zeros(experts, 2 * inter, hidden // 2, dtype=torch.uint8)
    arguments["fc2_expert_weights"] = torch.zeros(experts, hidden, inter // 2, dtype=torch.uint8)
    arguments["quant_scales"] = [
        torch.zeros(experts, rows, k // 32, dtype=torch.uint8) for rows, k in ((2 * inter, hidden), (hidden, inter))
    ]
    arguments["input"] = torch.zeros(3, hidden).bfloat16()
    arguments["output"] = torch.zeros(3, hidden).bfloat16()
    if name == "SM12xMoELayer":
        layer = LAYERS["SM12xMoELayer, MoE 2"]
        run = layer.of(arguments)
        return lambda: run(**arguments), arguments["fc2_expert_weights"]
    cutlass_fused_moe(**arguments)
    return lambda: cutlass_fused_moe(**arguments), arguments["fc2_expert_weights"]


@pytest.mark.parametrize("name", ["DenseLayer", "DecodeAttentionLayer", "SM12xMoELayer", "cutlass_fused_moe"])
def test_a_storage_that_comes_back_smaller_to_its_address_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``resize_`` twice: same object, same shape, same address; the storage ends before the tensor does."""
    for module, computes in (
        (sm12x_operator, "moe_cpu"),
        (sm12x_dense_layer, "run_served"),
        (sm12x_decode_layer, "compute"),
    ):
        monkeypatch.setattr(module, computes, lambda *given: None)  # it would take seconds
    call, tensor = _large_layer(name)
    call()
    storage, start, size = tensor.untyped_storage(), tensor.data_ptr(), tensor.untyped_storage().nbytes()
    assert size > 32 << 20, "malloc maps memory of this size for itself, and unmaps it when it is freed"
    beside = torch.empty(size, dtype=torch.uint8)  # mapped below: the gap does not grow downwards
    storage.resize_(size + (1 << 20))
    others = [beside]  # they fill the gaps that the system would give first
    while (other := torch.empty(size - 16, dtype=torch.uint8)).data_ptr() != start:
        others.append(other)
        assert len(others) < 1000, "the first address was given to somebody else"
    del other
    storage.resize_(size - 16)
    assert tensor.data_ptr() == start
    with pytest.raises(ValueError, match=rf"of which its storage holds {size - 16} bytes; it was resized"):
        call()
    storage.resize_(size)
    call()


def test_the_size_of_a_storage_is_a_fact_of_its_own() -> None:
    """Everything else of the tensor stays as it was."""

    class Tensor:
        shape, dtype, size = (4, 4), torch.float32, 64

        def data_ptr(self) -> int:
            return 4096

        def storage_offset(self) -> int:
            return 0

        def untyped_storage(self) -> Any:
            return types.SimpleNamespace(nbytes=lambda: self.size)

        def is_contiguous(self) -> bool:
            return True

        def is_neg(self) -> bool:
            return False

    tensor: Any = Tensor()
    unchanged = Unchanged(tensor)
    assert unchanged.holds(tensor)
    for size in (63, 0, 65):
        tensor.size = size
        assert not unchanged.holds(tensor), size
    tensor.size = 64
    assert unchanged.holds(tensor)


def test_a_list_that_a_layer_was_made_of_stays_the_callers() -> None:
    """What the caller does to it later, the layer does not see."""
    for name, argument in (("SM12xMoELayer, MoE 0", "quant_scales"), ("DecodeAttentionLayer", "kv_cache")):
        layer = LAYERS[name]
        arguments = layer.make()
        if argument == "kv_cache":
            arguments[argument] = [part.contiguous() for part in arguments[argument].unbind(1)]
        given = list(arguments[argument])
        run = layer.of(arguments)
        expected = outcome(run, arguments)
        assert not expected[0], expected
        for change in (list.clear, list.reverse, lambda held: held.append(None), lambda held: held.insert(0, None)):
            held = arguments[argument]
            held[:] = given
            change(held)
            given[0].data = given[0].data.clone()  # the layer checks its tensors again, and not the caller's list
            if argument == "kv_cache":
                assert _alike(expected, outcome(run, layer.make() | {"kv_cache": given})), change
            else:
                assert _alike(expected, outcome(run, arguments)), change
            held[:] = given


def test_only_the_same_tensors_in_the_same_places_are_cached() -> None:
    first, second = torch.ones(4), torch.ones(4)
    unchanged = Unchanged(None, first)
    for others in ((None, second), (None, first.view(4)), (first, None), (first, first), (None,), (None, first, None)):
        assert not unchanged.holds(*others)
    assert unchanged.holds(None, first)


def test_each_fact_of_a_cached_call_is_checked() -> None:
    """One change at a time of a call that is known, with everything else as it was."""
    cpu, own = torch.device("cpu"), torch.zeros(64)
    written, read = torch.zeros(4, 8), torch.zeros(4, 8)
    calls = CallCache(cpu, bounds_of([span(own)]), written=1)
    assert calls.find((written, read, None), 1) is None
    calls.add("known", (written, read, None), 1)
    resized = torch.zeros(4, 8)
    resized.untyped_storage().resize_(4)
    # As what is written and as what is read.
    others = {
        "type": torch.nn.Parameter(read),
        "dtype": read.view(torch.int32),
        "shape": torch.zeros(8, 4),
        "rank": torch.zeros(32),
        "strides": torch.zeros(8, 4).t(),
        "address": torch.zeros(33)[1:].view(4, 8),
        "negative bit": torch._neg_view(torch.zeros(4, 8)),
        "storage": resized,
        "device": torch.zeros(4, 8, device="meta"),
        "layout": torch.zeros(4, 8).to_sparse(),
        "no shape": torch.nn.UninitializedParameter(),
        "absent": None,
        "no tensor": "tensor",
        "another library's": torch.zeros(4, 8).numpy(),
    }
    for what, other in others.items():
        assert calls.find((other, read, None), 1) is None, what
        assert calls.find((written, other, None), 1) is None, what
    row = torch.zeros(5, 8)
    for what, first, second in (
        ("the tensor that is read", read, read),
        ("a row of it", row[1:], row[:4]),
        ("the layer's", own[16:48].view(4, 8), read),
    ):
        assert calls.find((first, second, None), 1) is None, what
    assert calls.find((written, read, read), 1) is None
    for options in ((2,), (True,), (1.0,), ([1],), (), (1, 1)):
        assert calls.find((written, read, None), *options) is None, options
    for option in ([1], torch.tensor(1)):
        calls.add("known", (written, read, None), option)
        assert calls.find((written, read, None), option) is None
    elsewhere = CallCache(torch.device("meta"), (), written=1)
    elsewhere.add("known", (written, read, None), 1)
    assert elsewhere.find((written, read, None), 1) is None
    for right in ((torch.ones(4, 8), torch.ones(4, 8), None), (written, own[16:48].view(4, 8), None)):
        assert calls.find(right, 1) == "known"


def test_many_kinds_of_calls_are_cached_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallCache, "MOST", 3)
    calls = CallCache(torch.device("cpu"), (), written=0)
    for rows in range(1, 6):
        calls.add(rows, (torch.zeros(rows),))
        assert calls.find((torch.ones(rows),)) == rows
    known = [rows for rows in range(1, 6) if calls.find((torch.zeros(rows),)) is not None]
    assert known == [4, 5]


# A module, and a function of its that calls in full checks of each call, by the layer's class.
IN_FULL = {
    SM12xMoELayer: (sm12x_validation, "require_pairs"),
    DenseLayer: (sm12x_dense_layer, "require_tokens"),
}


@pytest.mark.parametrize(
    ("name", "by"),
    [(name, "object") for name, layer in LAYERS.items() if layer.made in IN_FULL]
    + [(name, "function") for name, layer in LAYERS.items() if layer.made is SM12xMoELayer],
)
def test_calls_of_one_kind_are_checked_in_full_once(name: str, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever their tensors are; again where the number of tokens is another, and where the layer's memory is."""
    layer = LAYERS[name]
    checked: list[Any] = []
    module, check = IN_FULL[layer.made]
    original = getattr(module, check)
    monkeypatch.setattr(module, check, lambda *given: checked.append(given) or original(*given))
    arguments = layer.make()
    run = layer.of(arguments) if by == "object" else moe_step

    def new(rows: int | None = None) -> Arguments:
        """The call's arguments, each a tensor of its own, of its first tokens."""
        made = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in layer.given(arguments).items()
        }
        if rows is not None:
            of_tokens = {"input", "x", "output", "out", "residual", "router_logits", "is_padding"}
            of_tokens |= {"token_selected_experts", "token_final_scales"}
            made = {key: value[:rows].clone() if key in of_tokens else value for key, value in made.items()}
        return {**layer.kept(arguments), **made}

    for _ in range(3):
        run(**new())
    assert len(checked) == 1
    one = not {"x_scale", "input_sf"} & arguments.keys()
    if one:  # else scales would be of as many tokens
        for _ in range(3):
            run(**new(1))
    run(**new())
    assert len(checked) == 1 + one
    tensor = get_tensor(arguments, places(layer.kept(arguments))[0])
    tensor.data = tensor.data.clone()
    for _ in range(3):
        run(**new())
    assert len(checked) == 2 + one


@pytest.mark.parametrize("name", [name for name, layer in LAYERS.items() if layer.made in IN_FULL])
def test_a_layer_keeps_no_tensor_of_a_call(name: str) -> None:
    layer = LAYERS[name]
    arguments = layer.make()
    run = layer.of(arguments)
    kept, given = layer.kept(arguments), layer.given(arguments)
    run(**arguments)
    known = [weakref.ref(get_tensor(given, place)) for place in places(given)]
    del arguments, given
    gc.collect()
    assert known
    assert kept
    assert not any(each() is not None for each in known)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_compiled_as_its_function(name: str) -> None:
    """Traced: one operator in a graph, which computes by whatever the tensors are when it runs."""
    layer = LAYERS[name]
    arguments = layer.make()
    torch._dynamo.reset()  # graphs of other layers count towards its limit
    run = torch.compile(layer.of(arguments), backend="eager", fullgraph=True)
    assert _alike(outcome(layer.function, arguments), outcome(run, arguments))
    tensor = get_tensor(arguments, places(layer.kept(arguments))[0])
    tensor.data = torch.zeros_like(tensor.data)
    assert _alike(outcome(layer.function, arguments), outcome(run, arguments))
