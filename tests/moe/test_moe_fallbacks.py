# SPDX-License-Identifier: Apache-2.0
"""Every way in which a MoE call may get its tactics and workspace, crossed with every form of the call.

A backend that records stands in for the kernels; what each call launches is compared with :func:`expected`, which knows
a GB10's choices by their names.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch
from moe_recording import WORKSPACE, RecordingModule, layer_arguments

from flashinfer.fused_moe import SM12xMoELayer, moe_step
from flashinfer.sm12x import tune
from flashinfer.sm12x.checks import padded_scales
from flashinfer.sm12x.instances import INSTANCES, tactic

HIDDEN, INTER, EXPERTS, TOP_K = 64, 32, 8, 3
TOKENS = (10, 11, 40)
"""30 pairs, whose experts a fused MoE kernel chooses itself; 33, which it does not; what the two-kernel path
computes."""

STREAM, FIRST, SECOND = "stream", "first", "second"

# A GB10's two-kernel tactics, by an expert's rows.
W4A8 = ((6, "mxfp8_m8_k256"), (14, "mxfp8_m16_k256"), (28, "mxfp8_m32_k256"), (64, "mxfp8_m64_k128"))
W4A16 = ((6, "bf16_m8_k128"), (28, "bf16_m32_k128"), (36, "bf16_m40_k128"), (64, "bf16_m64_k128"))
NVFP4 = ((6, "nvfp4_bf16_m8_k128"), (28, "nvfp4_bf16_m32_k128"), (64, "nvfp4_bf16_m64_k128"))


class Kind(NamedTuple):
    """A mode: its number for a call and for a launch, its stream, its pairs, and two of them that are not the planner's
    here."""

    mode: int
    stream: str
    pairs: tuple[tuple[int, str], ...]
    others: tuple[str, str]
    weights: str = "mxfp4"

    @property
    def named(self) -> dict[int | str, str]:
        """The tactics of :class:`Way`."""
        return {STREAM: self.stream, FIRST: self.others[0], SECOND: self.others[1]}

    def forced(self, way: Way) -> dict[str, Any]:
        """The argument that forces tactics."""
        named = self.named
        return {"profile_ids": [-1 if each == -1 else tactic(named[each]) for each in way.forced]} if way.forced else {}

    def tuned(self, way: Way) -> tuple[str | None, ...] | None:
        """What the tuner holds for FC1 and FC2."""
        named = self.named
        return (
            None if way.tuned is None else tuple(named.get(each, "gone") if each != -1 else None for each in way.tuned)
        )


KINDS = {
    "W4A8, MXFP8 tokens": Kind(0, "stream_mxfp8_as_bf16_m8", W4A8, ("mxfp8_m128_k128", "mxfp8_m8_k128")),
    "W4A8": Kind(1, "stream_mxfp8_as_bf16_m8", W4A8, ("mxfp8_m128_k128", "mxfp8_m8_k128")),
    "W4A16": Kind(2, "stream_bf16_m8", W4A16, ("bf16_m24_k128", "bf16_m16_k128")),
    "by its tokens": Kind(3, "stream_bf16_m8", W4A16, ("bf16_m24_k128", "bf16_m16_k128")),
    "NVFP4": Kind(2, "nvfp4_stream_bf16_m8", NVFP4, ("nvfp4_bf16_m64_k128", "nvfp4_bf16_m16_k128"), "nvfp4"),
}


class Form(NamedTuple):
    """A form of the call. ``routing``: what chooses the experts."""

    tokens: int
    routing: str
    ahead: bool
    ranks: str
    barrier: bool

    @property
    def by_logits(self) -> bool:
        return self.routing.startswith("logits")


ROUTINGS = ("ids", "ids without weights", "ids of padding", "logits", "logits and padding")
FORMS = [
    Form(*form, barrier=i % 7 < 3)
    for i, form in enumerate(itertools.product(TOKENS, ROUTINGS, (False, True), ("one", "second of two", "all-to-all")))
]


class Way(NamedTuple):
    """A way to tactics. ``forced`` and ``tuned`` name FC1's and FC2's: the stream, one of the others, or none (-1)."""

    forced: tuple[int | str, int | str] | None = None
    tuned: tuple[int | str, int | str] | None = None
    few_sms: bool = False


WAYS = {
    "planned": Way(),
    "planned, fewer SMs": Way(few_sms=True),
    "forced stream": Way((STREAM, STREAM)),
    "forced stream for FC1": Way((STREAM, -1)),
    "forced stream for FC1 and a pair's for FC2": Way((STREAM, SECOND)),
    "forced stream, fewer SMs": Way((STREAM, STREAM), few_sms=True),
    "forced pair": Way((FIRST, SECOND)),
    "forced pair, fewer SMs": Way((FIRST, SECOND), few_sms=True),
    "forced FC1": Way((FIRST, -1)),
    "forced FC2": Way((-1, SECOND)),
    "forced nothing": Way((-1, -1)),
    "forced nothing, fewer SMs": Way((-1, -1), few_sms=True),
    "tuned to the default": Way(tuned=(-1, -1)),
    "tuned stream": Way(tuned=(STREAM, -1)),
    "tuned stream, fewer SMs": Way(tuned=(STREAM, -1), few_sms=True),
    "tuned pair": Way(tuned=(FIRST, SECOND)),
    "tuned pair, fewer SMs": Way(tuned=(FIRST, SECOND), few_sms=True),
    "tuned FC1": Way(tuned=(FIRST, -1)),
    "tuned FC2": Way(tuned=(-1, SECOND)),
    "tuned to what there is no more": Way(tuned=("gone", "gone")),
    "tuned stream, forced pair": Way((FIRST, SECOND), (STREAM, -1)),
    "tuned pair, forced stream": Way((STREAM, STREAM), (FIRST, SECOND)),
}


class Expected(NamedTuple):
    """What :func:`expected` says: the launch's mode, FC1's and FC2's tactics, and whether logits reach it."""

    mode: int
    tactics: tuple[str, str]
    chooses: bool
    refused: str = ""


@functools.cache
def rows_of_a_hit_expert(pairs: int, experts: int) -> Fraction:
    """The mean of an expert's pairs over those experts that any of the pairs falls on."""
    return pairs / (experts * (1 - (1 - Fraction(1, experts)) ** pairs))


def expected(kind: Kind, form: Form, way: Way) -> Expected:
    """What a call launches."""
    pairs = form.tokens * TOP_K
    spread = EXPERTS // 2 if form.ranks == "all-to-all" else EXPERTS
    rows = rows_of_a_hit_expert(pairs, spread)
    named = kind.named
    if kind.mode == 3:
        kind = kind._replace(mode=2)
        if rows > 24:  # whose tactics are W4A8's
            kind, named = KINDS["W4A8"], {}
            if way.forced and set(way.forced) != {-1}:
                return Expected(kind.mode, ("", ""), False, "^profile_ids is .* in mode BF16_INPUT")
    pair = next(name for limit, name in kind.pairs if rows <= limit)
    default = kind.stream if rows <= Fraction(9, 2) else pair
    asked = way.forced or way.tuned or (-1, -1)
    fc1, fc2 = map(named.get, asked)
    first, second = fc1 or default, fc2 or default
    if kind.stream in (first, second) and first != second:  # one of them serves both
        first = second = second if fc1 is None and fc2 else first
    if first == kind.stream and way.few_sms:
        refused = rf"^profile_ids asks for {kind.stream}, .*this stream has fewer" if way.forced else ""
        return Expected(kind.mode, (pair, pair), False, refused)
    tuner_asked = way.tuned is not None and way.forced is None
    chooses = form.by_logits and first == kind.stream and pairs <= 32 and not tuner_asked
    return Expected(kind.mode, (first, second), chooses)


@functools.cache
def plain_arguments(kind: Kind, tokens: int, ranks: int) -> dict[str, Any]:
    """Arguments that all forms have, of the last of so many ranks."""
    sizes = {"num_tokens": tokens, "hidden": HIDDEN, "inter": INTER, "num_experts": EXPERTS, "top_k": TOP_K}
    mode = 2 if kind.mode == 3 else kind.mode
    return layer_arguments(mode, **sizes, ep_size=ranks, ep_rank=ranks - 1, weights=kind.weights)


def arguments(kind: Kind, form: Form, **more: Any) -> dict[str, Any]:
    """Arguments of ``moe_step``."""
    given = dict(plain_arguments(kind, form.tokens, 1 if form.ranks == "one" else 2))
    if kind.mode == 3:
        given["use_mxfp8_act_scaling"] = True
    given["enable_alltoall"] = form.ranks == "all-to-all"
    if form.ahead:
        given["next_weights"] = torch.zeros(64, dtype=torch.int16)
    if form.barrier:
        given["barrier"] = torch.zeros(2, dtype=torch.int32)
    if form.routing == "ids without weights":
        given["token_final_scales"] = None
    if form.routing == "ids of padding":
        given["token_selected_experts"] = given["token_selected_experts"].clone()
        given["token_selected_experts"][::2] = -1
    if form.by_logits:
        del given["token_selected_experts"], given["token_final_scales"]
        print("seed", form.tokens)
        generator = torch.Generator().manual_seed(form.tokens)
        given |= {"router_logits": torch.randn(form.tokens, EXPERTS, generator=generator), "top_k": TOP_K}
        if form.routing == "logits and padding":
            given["is_padding"] = torch.arange(form.tokens) % 2 == 0
    return given | more


def as_layer(given: dict[str, Any]) -> torch.Tensor:
    """The same call by the layer's object."""
    of_layer = inspect.signature(SM12xMoELayer).parameters
    layer = SM12xMoELayer(**{name: value for name, value in given.items() if name in of_layer})
    return layer.run(**{name: value for name, value in given.items() if name not in of_layer})


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str | None, ...] | None], list[Any]]:
    """Sets what the tuner holds for FC1 and FC2; the runners that it is asked with."""

    def hold(names: tuple[str | None, ...] | None) -> list[Any]:
        asked: list[Any] = []

        def answer(operator: str, runner: Any, most: int, inputs: list[torch.Tensor], gemm_idx: int) -> str | None:
            asked.append((gemm_idx, runner, inputs))
            assert operator == f"flashinfer::sm12x_moe::fc{gemm_idx}"
            assert names is not None
            return names[gemm_idx - 1]

        monkeypatch.setattr(tune, "is_idle", lambda: names is None)
        monkeypatch.setattr(tune, "tuned", answer)
        return asked

    return hold


def same(got: torch.Tensor | None, given: torch.Tensor | None) -> bool:
    """Whether a launch got the very memory that was given, or nothing of nothing."""
    if got is None or given is None:
        return got is given
    return got.data_ptr() == given.data_ptr() and got.shape == given.shape


def chosen(given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Routing weights and ids of logits, in float64 by a sort of Python's."""
    ids, weights = [], []
    is_padding = given.get("is_padding")
    for token, logits in enumerate(given["router_logits"].tolist()):
        order = sorted(range(EXPERTS), key=lambda expert: -logits[expert])[:TOP_K]
        ids.append([-1] * TOP_K if is_padding is not None and is_padding[token] else order)
        weights.append(torch.tensor([logits[expert] for expert in order], dtype=torch.float64).softmax(0).tolist())
    return torch.tensor(weights), torch.tensor(ids, dtype=torch.int32)


def check_launch(launch: dict[str, Any], given: dict[str, Any], result: torch.Tensor, wanted: Expected) -> None:
    """The launch has what was given; ids where logits were, unless it chooses the experts itself."""
    assert (INSTANCES[launch["tactic_fc1"]].name, INSTANCES[launch["tactic_fc2"]].name) == wanted.tactics
    for name in ("next_weights", "barrier"):
        assert same(launch[name], given.get(name)), name
    assert launch["first_expert"] == (EXPERTS // 2 if given["ep_size"] == 2 else 0)
    assert (launch["num_experts_total"], launch["top_k"]) == (EXPERTS, TOP_K)
    assert launch["output"].data_ptr() == result.data_ptr()
    ids, weights = launch["token_selected_experts"], launch["token_final_scales"]
    if "router_logits" not in given or wanted.chooses:
        for name in ("router_logits", "is_padding", "token_selected_experts", "token_final_scales"):
            assert same(launch[name], given.get(name)), name
    else:
        assert launch["router_logits"] is launch["is_padding"] is None
        want_weights, want_ids = chosen(given)
        assert torch.equal(ids, want_ids)
        assert torch.allclose(weights, want_weights.float(), rtol=2**-20, atol=0)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_call_launches_what_its_form_and_way_say(way: Way, kind: Kind, module: RecordingModule, tuned: Any) -> None:
    """Each way meets each form, with one kind or two: a quarter of the forms is each kind's share."""
    module.few_sms = way.few_sms
    share = list(WAYS.values()).index(way) + list(KINDS.values()).index(kind)
    for place, form in enumerate(FORMS[share % 4 :: 4]):
        wanted = expected(kind, form, way)
        asked = tuned(kind.tuned(way))
        given = arguments(kind, form, **kind.forced(way))
        module.launches.clear()
        call = as_layer if place % 2 else lambda given: moe_step(**given)
        if wanted.refused:
            with pytest.raises(ValueError, match=wanted.refused):
                call(given)
            assert module.launches == []
            continue
        result = call(given)
        assert len(module.launches) == 1, form
        check_launch(module.launches[0], given, result, wanted)
        assert module.launches[0]["mode"] == wanted.mode
        assert module.launches[0]["workspace"].shape == (WORKSPACE,)
        assert [gemm for gemm, *_ in asked] == ([1, 2] if way.tuned and not way.forced else [])
    # One size is asked for each number of tokens and of local experts.
    for tokens, _, _, experts, *_ in module.sizes:
        assert tokens in TOKENS and experts in (EXPERTS, EXPERTS // 2)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_way_is_remembered_for_the_next_call(kind: Kind, module: RecordingModule, tuned: Any) -> None:
    """One device, each way after another, in one order and back."""
    for way, form in itertools.product((*WAYS.values(), *reversed(WAYS.values())), (FORMS[0], FORMS[18], FORMS[75])):
        wanted = expected(kind, form, way)
        if wanted.refused:
            continue
        module.few_sms = way.few_sms
        tuned(kind.tuned(way))
        given = arguments(kind, form, **kind.forced(way))
        result = moe_step(**given)
        check_launch(module.launches[-1], given, result, wanted)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("few_sms", [False, True])
def test_what_the_tuner_times_has_ids_whatever_the_calls_form(
    few_sms: bool, kind: Kind, module: RecordingModule, tuned: Any
) -> None:
    """For another number of tokens than the call's, as a profile is; a stream that lacks SMs fails to be timed."""
    for form in FORMS[::9]:
        module.few_sms = False
        asked = tuned((None, None))
        given = arguments(kind, form)
        moe_step(**given)
        module.few_sms = few_sms
        for gemm, runner, (x, *weights) in asked:
            count = x.shape[0] if x.shape[0] == 40 else 4
            inputs = [x[:count], *weights]
            mode = int(runner.problem.mode)
            assert mode == expected(kind, form, WAYS["planned"]).mode
            for name in [-1, *runner.get_valid_tactics(inputs, None)]:
                module.launches.clear()
                if few_sms and name != -1 and INSTANCES[[row.name for row in INSTANCES].index(name)].split_k:
                    with pytest.raises(RuntimeError, match=f"tactic {name} needs all SMs"):
                        runner.forward(inputs, name)
                    assert module.launches == []
                    continue
                result = runner.forward(inputs, name)
                (launch,) = module.launches
                assert launch["router_logits"] is launch["is_padding"] is None
                ids = launch["token_selected_experts"]
                assert ids.shape == launch["token_final_scales"].shape == (count, TOP_K)
                assert all(len(set(row)) == TOP_K and 0 <= min(row) <= max(row) < EXPERTS for row in ids.tolist())
                assert launch["first_expert"] == (0 if form.ranks == "one" else EXPERTS // 2)
                assert launch["output"].data_ptr() == result.data_ptr() and result.shape == (count, HIDDEN)
                if kind.mode == 0:
                    assert launch["input_sf"].shape == padded_scales(count, HIDDEN // 32)
                if name != -1:
                    assert INSTANCES[launch[f"tactic_fc{gemm}"]].name == name
                elif few_sms:
                    assert not INSTANCES[launch["tactic_fc1"]].split_k


WORKSPACES = {"exact": (0, 0, None), "larger": (0, 16, None), "smaller": (0, -1, "workspace_buffer holds 4095 bytes")}
WORKSPACES |= {f"{at} bytes on": (at, 0, "workspace_buffer") for at in (1, 4, 8, 15)}
WORKSPACES |= {"16 bytes on": (16, 0, None)}


@pytest.mark.parametrize(
    "way", ["planned", "planned, fewer SMs", "forced pair", "tuned pair", "tuned stream, fewer SMs"]
)
@pytest.mark.parametrize(("start", "extra", "refused"), WORKSPACES.values(), ids=WORKSPACES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_a_given_workspace_is_used_or_refused_before_any_launch(
    dtype: torch.dtype, start: int, extra: int, refused: str | None, way: str, module: RecordingModule, tuned: Any
) -> None:
    kind, plan = KINDS["W4A16"], WAYS[way]
    module.few_sms = plan.few_sms
    memory = torch.zeros(WORKSPACE + 64, dtype=dtype)
    memory = memory[-memory.data_ptr() % 16 :]
    workspace = memory[start : start + WORKSPACE + extra]
    for form in FORMS[::11]:
        tuned(kind.tuned(plan))
        output = torch.full((form.tokens, HIDDEN), 7.0, dtype=torch.bfloat16)
        given = arguments(kind, form, workspace_buffer=workspace, output=output, **kind.forced(plan))
        module.launches.clear()
        for call in (as_layer, lambda given: moe_step(**given)):
            if refused is not None:
                with pytest.raises(ValueError, match=f"^{refused}"):
                    call(given)
                assert module.launches == [] and bool((output == 7).all())
            else:
                assert call(given) is output
                launch = module.launches.pop()
                assert same(launch["workspace"], workspace) and same(launch["output"], output)


REFUSED: dict[str, dict[str, Any]] = {
    "no such tactic": {"profile_ids": [4711, -1]},
    "three tactics": {"profile_ids": [-1, -1, -1]},
    "another mode's": {"profile_ids": [tactic("mxfp8_m8_k128"), -1]},
    "another format's": {"profile_ids": [tactic("nvfp4_bf16_m8_k128"), -1]},
    "a card's own": {"profile_ids": [tactic("stream_bf16_m16"), tactic("stream_bf16_m16")]},
    "a stream for FC2 alone": {"profile_ids": [-1, tactic("stream_bf16_m8")]},
    "next weights that lie apart": {"next_weights": torch.zeros(4, 4).T},
    "next weights elsewhere": {"next_weights": torch.zeros(4, device="meta")},
    "a barrier of three": {"barrier": torch.zeros(3, dtype=torch.int32)},
    "logits beside ids": {"router_logits": torch.zeros(10, EXPERTS), "top_k": TOP_K},
    "padding beside ids": {"is_padding": torch.zeros(10, dtype=torch.bool)},
    "a rank that is none": {"ep_rank": 2},
    "an id that is none": {"token_selected_experts": torch.full((10, TOP_K), EXPERTS, dtype=torch.int32)},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
@pytest.mark.parametrize("ways", [(False, None), (True, None), (False, ("bf16_m24_k128", "bf16_m16_k128"))])
def test_a_refused_call_launches_nothing(
    ways: tuple[bool, tuple[str, str] | None], change: dict[str, Any], module: RecordingModule, tuned: Any
) -> None:
    module.few_sms, names = ways
    asked = tuned(names)
    given = arguments(KINDS["W4A16"], Form(10, "ids", True, "second of two", True))
    moe_step(**given)
    module.launches.clear()
    asked.clear()
    with pytest.raises((ValueError, TypeError)) as raised:
        moe_step(**given | change)
    name = next(iter(change))
    assert name in str(raised.value)
    assert module.launches == [] and asked == []


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_tokens_launch_nothing_in_any_way(kind: Kind, module: RecordingModule, tuned: Any) -> None:
    for way in WAYS.values():
        module.few_sms = way.few_sms
        asked = tuned(kind.tuned(way))
        for routing in ("ids", "logits", "logits and padding"):
            given = arguments(kind, Form(0, routing, True, "one", True), **kind.forced(way))
            assert moe_step(**given).shape == (0, HIDDEN)
            assert as_layer(given).shape == (0, HIDDEN)
        assert module.launches == [] and asked == []


def test_pairs_of_a_streamed_layer_that_chooses_its_experts(module: RecordingModule, tuned: Any) -> None:
    """Up to 32, whatever their tokens and slots; among 128 experts all of these are one stream."""
    tuned(None)
    for tokens, top_k in ((1, 32), (32, 1), (33, 1), (8, 4), (16, 2), (17, 2), (11, 3), (3, 11), (2, 17)):
        given = layer_arguments(2, num_tokens=tokens, hidden=32, inter=32, num_experts=128, top_k=top_k)
        del given["token_selected_experts"], given["token_final_scales"]
        moe_step(**given, router_logits=torch.zeros(tokens, 128), top_k=top_k)
        launch = module.launches[-1]
        assert INSTANCES[launch["tactic_fc1"]].split_k
        kept = launch["router_logits"] is not None
        assert kept == (tokens * top_k <= 32), (tokens, top_k)
        assert kept == (launch["token_selected_experts"] is None)
