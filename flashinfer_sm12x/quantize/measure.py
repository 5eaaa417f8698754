# SPDX-License-Identifier: Apache-2.0
"""The effect of quantization on the next token's distribution: KL divergences from the model's own, token by token.

Hidden states of each choice are computed once. Layer by layer, QKV and O are quantized while their originals are kept.
LM heads multiply the hidden states in chunks, so that the logits of all tokens never exist at once. Masks leave some
of the choices, as constrained decoding does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.functional import linear
from tqdm import tqdm

from flashinfer.gemm.sm12x_dense_rescored import rows_to_rescore
from flashinfer.sm12x_decode import to_cache

from .choice import GROUPS, RESCORED_ROWS, Choice
from .folder import Folder
from .formats import BF16, round_tokens, round_weight
from .manifest import COARSE, HEAD
from .models import Subject

_Key = TypeVar("_Key")

BATCH_TOKENS = 2048
CHUNK_LOGITS = 1 << 24
"""Logits that are computed at once: 64 MB in float32; some six such tensors exist at a time."""
RESAMPLES, SEED = 1000, 0


@dataclasses.dataclass
class Scores:
    """Scores of each predicted token, float32 or bool ``[tokens]``: KL against the reference, its first choice kept,
    and -log p; KL and first choice also under each mask, by its name."""

    kl: torch.Tensor
    same: torch.Tensor
    nll: torch.Tensor
    masked: dict[str, Compared] = dataclasses.field(default_factory=dict)


class Compared(NamedTuple):
    """Of each token: the KL of its distribution against the reference's, and whether the first choice is the same."""

    kl: torch.Tensor
    same: torch.Tensor


Mask = Callable[[torch.Tensor, int], torch.Tensor]
"""Of the reference's logits ``[tokens, vocabulary]`` and the first token's position in the text: int64 ``[tokens,
left]``, the choices that are left. A distribution is then one of these."""


def folder_weight(folder: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The weight that ``sm12x-quantize`` made of layers that are one matrix, float32 on the CPU.

    Raises
    ------
    FolderError
        The folder was made of other weights than these, by name, or is damaged.
    """
    found = Folder(Path(folder))
    for name, weight in weights.items():
        found.require_source(name, weight)
    return found.dequantized(list(weights))


@contextlib.contextmanager
def quantized(subject: Subject, choice: Choice) -> Iterator[None]:
    """QKV and O as ``choice`` has them; afterwards they are as before.

    Queries, keys and values are quantized as the one matrix that they are in a server: NVFP4 has a scale of the whole
    matrix.
    """
    originals: list[tuple[nn.Linear, torch.Tensor]] = []
    names = {module: name for name, module in subject.model.named_modules()}
    try:
        for attention in subject.attentions:
            for layers, name in ((subject.qkv(attention), choice.qkv), ([attention.o_proj], choice.o)):
                if name == BF16:
                    continue
                originals += [(layer, layer.weight.data) for layer in layers]
                if choice.folder:
                    whole = folder_weight(choice.folder, {names[layer]: layer.weight for layer in layers})
                    whole = whole.to(subject.device)
                else:
                    whole = round_weight(torch.cat([layer.weight.data for layer in layers]), name)
                for layer, rows in zip(layers, whole.split([layer.out_features for layer in layers]), strict=True):
                    layer.weight.data = rows.to(layer.weight.dtype)
        yield
    finally:
        for layer, weight in originals:
            layer.weight.data = weight


@contextlib.contextmanager
def rounding(subject: Subject, choice: Choice) -> Iterator[None]:
    """Tokens of dense layers and of experts, and the KV cache, as ``choice`` rounds them."""
    from transformers.cache_utils import Cache

    def rounds(name: str) -> Any:
        return lambda _, given: (round_tokens(given[0], name), *given[1:])

    cache: Any = Cache
    unrounded = cache.update

    def update_rounded(self: Cache, keys: torch.Tensor, values: torch.Tensor, *more: Any, **named: Any) -> Any:
        stored = (to_cache(each, torch.float8_e4m3fn, 1.0).to(each.dtype) for each in (keys, values))
        return unrounded(self, *stored, *more, **named)

    with contextlib.ExitStack() as undo:
        for attention in subject.attentions:
            for layers, name in ((subject.qkv(attention), choice.qkv), ([attention.o_proj], choice.o)):
                if choice.tokens != BF16 and name != BF16:
                    for layer in layers:
                        undo.callback(layer.register_forward_pre_hook(rounds(choice.tokens)).remove)
        if choice.experts != BF16:
            for layer in subject.mlps:
                undo.callback(layer.register_forward_pre_hook(rounds(choice.experts)).remove)
            for experts in subject.packed_experts:
                assert choice.experts == "mxfp8"
                experts.a8 = True
                undo.callback(setattr, experts, "a8", False)
        if choice.kv != BF16:
            cache.update = update_rounded
            undo.callback(setattr, Cache, "update", unrounded)
        yield


def batch(windows: Sequence[Sequence[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows as rows ``[windows, tokens]``, and where their tokens are: no token sees those after it, so that what
    fills a row up is never seen."""
    size = max(map(len, windows))
    ids = torch.tensor([[*window, *[0] * (size - len(window))] for window in windows], device=device)
    lengths = torch.tensor([len(window) for window in windows], device=device)
    return ids, torch.arange(size, device=device) < lengths[:, None]


def hidden_states(subject: Subject, windows: Sequence[Sequence[int]], choice: Choice) -> torch.Tensor:
    """The hidden states ``[tokens, hidden]`` of the tokens that predict one of their window: all but its last."""
    found = []
    rows = max(1, BATCH_TOKENS // max(map(len, windows)))
    with torch.inference_mode(), quantized(subject, choice), rounding(subject, choice):
        for at in range(0, len(windows), rows):
            part = windows[at : at + rows]
            hidden = subject.model.base_model(
                batch(part, subject.device)[0], use_cache=choice.kv != BF16
            ).last_hidden_state
            found += [row[: len(window) - 1] for row, window in zip(hidden, part, strict=True)]
    return torch.cat(found)


class Case(NamedTuple):
    """A model's states before its LM head ``[tokens, hidden]``, and the head: its name, its weight made from the
    float32 one of the reference, to what it rounds its tokens, and how many rows of each group it rescores. Heads of
    one name are made once."""

    states: torch.Tensor
    head: str
    weight: Callable[[torch.Tensor], torch.Tensor]
    tokens: str = BF16
    rescored: int = 0


def rescore(coarse: torch.Tensor, fine: torch.Tensor, groups: int = GROUPS, rows: int = RESCORED_ROWS) -> torch.Tensor:
    """Coarse logits ``[tokens, n]``, the ``rows`` largest of each group replaced by the fine ones, as
    ``flashinfer.gemm.dense_block_scaled_rescored`` does for a few tokens."""
    tokens, n = coarse.shape
    chosen = rows_to_rescore(coarse, groups, rows).clamp(max=n)  # a group with fewer rows has others from n on
    replaced = torch.zeros(tokens, n + 1, dtype=torch.bool, device=coarse.device)
    return torch.where(replaced.scatter_(1, chosen, True)[:, :n], fine, coarse)


class Expected:
    """The reference's logits ``[tokens, vocabulary]``, as a distribution of all choices, or of those ``[tokens, left]``
    that are left."""

    def __init__(self, logits: torch.Tensor, left: torch.Tensor | None = None) -> None:
        self.left = left
        self.logarithms = self.distribution(logits)
        self.probabilities, self.first = self.logarithms.exp(), self.logarithms.argmax(-1)

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """The logarithms of the choices' probabilities."""
        return (logits if self.left is None else logits.gather(-1, self.left)).log_softmax(-1)

    def compare(self, got: torch.Tensor) -> Compared:
        """With another distribution of the same choices."""
        kl = (self.probabilities * (self.logarithms - got)).sum(-1)
        return Compared(kl.cpu(), (got.argmax(-1) == self.first).cpu())


def losses(
    subject: Subject,
    windows: Sequence[Sequence[int]],
    reference: torch.Tensor,
    cases: Mapping[_Key, Case],
    masks: Mapping[str, Mask] | None = None,
    masked: Sequence[_Key] = (),
) -> dict[_Key, Scores]:
    """Each case against the model's own head on the states ``reference``; the cases ``masked`` also under the masks."""
    targets = torch.tensor([token for window in windows for token in window[1:]], device=subject.device)
    found: dict[_Key, list[Scores]] = {key: [] for key in cases}
    weight, bias = (None if each is None else each.data.float() for each in (subject.head.weight, subject.head.bias))
    assert weight is not None
    rows = max(1, CHUNK_LOGITS // len(weight))
    progress = tqdm(total=len(cases) * len(targets), desc="LM heads", unit="token")
    with torch.inference_mode(), progress:
        for name in dict.fromkeys(case.head for case in cases.values()):
            of_head = {key: case for key, case in cases.items() if case.head == name}
            rounded = next(iter(of_head.values())).weight(weight)
            for at in range(0, len(targets), rows):
                part = slice(at, at + rows)
                own = linear(reference[part].float(), weight, bias)
                expected = Expected(own)
                under = {name: Expected(own, mask(own, at)) for name, mask in (masks or {}).items()}
                for key, case in of_head.items():
                    states = case.states[part]
                    if case.tokens != BF16:
                        states = round_tokens(states, case.tokens)
                    got = linear(states.float(), rounded, bias)
                    if case.rescored:
                        fine = own if case.states is reference else linear(states.float(), weight, bias)
                        got = rescore(got, fine, rows=case.rescored)
                    whole = expected.distribution(got)
                    nll = -whole.gather(-1, targets[part, None]).squeeze(-1)
                    of_masks = {
                        name: each.compare(each.distribution(got)) for name, each in under.items() if key in masked
                    }
                    found[key].append(Scores(*expected.compare(whole), nll.cpu(), of_masks))
                    progress.update(len(nll))
            del rounded
    return {key: _joined(parts) for key, parts in found.items()}


def _joined(parts: Sequence[Scores]) -> Scores:
    """The scores of tokens that follow each other."""
    kl, same, nll = (torch.cat([getattr(part, field) for part in parts]) for field in ("kl", "same", "nll"))
    under = {
        name: Compared(*map(torch.cat, zip(*(part.masked[name] for part in parts), strict=True)))
        for name in parts[0].masked
    }
    return Scores(kl, same, nll, under)


def scores(
    subject: Subject,
    windows: Sequence[Sequence[int]],
    choices: Sequence[Choice],
    masks: Mapping[str, Mask] | None = None,
    masked: Sequence[Choice] = (),
) -> dict[Choice, Scores]:
    """Compare each choice with the unquantized model on the same tokens; the choices ``masked`` also under the
    masks."""
    reference = Choice()
    bodies = list(dict.fromkeys([reference, *(choice.body for choice in choices)]))
    hidden = {body: hidden_states(subject, windows, body) for body in tqdm(bodies, "QKV, O and tokens", unit="choice")}

    def case(choice: Choice) -> Case:
        states, rows = hidden[choice.body], choice.rescored * choice.rescores
        if choice.lm_head == BF16:
            return Case(states, BF16, lambda weight: weight)
        if choice.folder:
            of_folder = lambda weight: folder_weight(choice.folder, {HEAD: weight}).to(weight)  # noqa: E731
            return Case(states, choice.folder, of_folder, choice.tokens, rows)
        head = COARSE.get(choice.lm_head, choice.lm_head)
        return Case(states, head, lambda weight: round_weight(weight, head), choice.tokens, rows)

    cases = {choice: case(choice) for choice in choices}
    return losses(subject, windows, hidden[reference], cases, masks, masked)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A statistic of the tokens, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class Bootstrap:
    """Statistics of tokens with intervals from windows drawn again: tokens of one window are not independent."""

    def __init__(self, windows: Sequence[Sequence[int]]) -> None:
        generator = torch.Generator().manual_seed(SEED)
        lengths = torch.tensor([len(window) - 1 for window in windows])
        drawn = torch.randint(len(windows), (RESAMPLES, len(windows)), generator=generator)
        times = torch.zeros(RESAMPLES, len(windows)).scatter_add_(1, drawn, torch.ones_like(drawn, dtype=torch.float32))
        self._times = torch.repeat_interleave(times, lengths, dim=1)  # of each token, in each resample

    def _interval(self, value: float, resampled: torch.Tensor) -> Estimate:
        low, high = torch.quantile(resampled.double(), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return Estimate(value, low, high)

    def mean(self, values: torch.Tensor) -> Estimate:
        resampled = self._times @ values.float() / self._times.sum(1)
        return self._interval(float(values.double().mean()), resampled)

    def quantile(self, values: torch.Tensor, share: float) -> Estimate:
        """The least value that at least ``share`` of the tokens do not exceed."""
        ordered, order = values.double().sort()
        reached = self._times[:, order].cumsum(1)
        at = torch.searchsorted(reached, share * reached[:, -1:]).squeeze(1)  # the last column reaches all
        return self._interval(float(ordered[math.ceil(round(share * len(values), 6)) - 1]), ordered[at])
