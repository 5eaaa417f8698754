# SPDX-License-Identifier: Apache-2.0
"""Numbers at which operators change their course, one below, at, and one above: generated from the tables that hold
them."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from recording_backend import RecordingBackend, recording_tuner

from flashinfer import sm12x_decode
from flashinfer.fused_moe import sm12x_planner
from flashinfer.fused_moe.sm12x_planner import choose, expected_rows, most_exact_tokens, plan_mode, wanted_tactics
from flashinfer.fused_moe.sm12x_validation import Mode, MoEProblem, require_pairs
from flashinfer.gemm import (
    dense_block_scaled,
    dense_block_scaled_top_k,
    rmsnorm_dense_block_scaled,
    sm12x_dense_launch,
    sm12x_dense_norm,
    sm12x_dense_tuning,
)
from flashinfer.quantization.block_scaled import WEIGHT_FORMATS, quantize_weight
from flashinfer.sm12x import backend, models, tune
from flashinfer.sm12x.device_class import CLASSES, GB10, HOPPER, DeviceClass
from flashinfer.sm12x.instances import DENSE_INSTANCES, FORMATS, INSTANCES, Instance
from flashinfer.testing import DenseCase, make_dense_inputs

EACH_CLASS = pytest.mark.parametrize("known", CLASSES, ids=lambda known: known.key)
LAYER = (64, 64)


# --- the planner of experts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", [1, 2, 3, 8, 128, 512])
def test_rows_are_the_mean_over_experts_that_are_hit(experts: int) -> None:
    for pairs in (*range(1, 40), 256, 1536, 1537, 40_000):
        hit = experts * (1 - Fraction(experts - 1, experts) ** pairs)
        assert math.isclose(expected_rows(pairs, experts), pairs / hit, rel_tol=2**-30)
    assert expected_rows(0, experts) == 0


def wanted_tile(limits: tuple[tuple[float, int], ...], rows: float) -> int:
    """The tile of the first limit that is not exceeded; 0 past the last."""
    return next((tile for limit, tile in limits if not rows > limit), 0)


def edges(limits: tuple[tuple[float, int], ...]) -> list[float]:
    return [each for limit, _ in limits if limit < math.inf for each in (limit, math.nextafter(limit, math.inf))]


@EACH_CLASS
@pytest.mark.parametrize("weights", ["mxfp4", "nvfp4"])
@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_a_tile_is_taken_up_to_its_limit(
    activation: Any, weights: str, known: DeviceClass, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (activation, weights) == ("mxfp8", "nvfp4"):
        return
    pairs = known.two_kernel_w4a16 if activation == "bf16" else known.two_kernel
    rows = [
        row for row in known.table if (row.activation, row.weights, row.block_k != 384) == (activation, weights, True)
    ]
    streams = {row.block_n for row in rows if row.split_k}
    tiles = sorted({row.block_n for row in rows if not row.split_k})
    seen = set()
    for number in edges((*known.fused_moe, *pairs)):
        monkeypatch.setattr(sm12x_planner, "expected_rows", lambda *_, number=number: number)
        for all_sms in (True, False):
            chosen = choose(activation, 8, 8, known, LAYER, all_sms, weights).instance
            tile = wanted_tile(known.fused_moe, number)
            if all_sms and tile in streams:
                assert (chosen.split_k, chosen.block_n) == (True, tile), number
            else:
                widest = [each for each in tiles if each >= wanted_tile(pairs, number)]
                assert (chosen.split_k, chosen.block_n) == (False, (widest or tiles[-1:])[0]), number
                longest = max(row.block_k for row in rows if not row.split_k and row.block_n == chosen.block_n)
                assert chosen.block_k == longest
            assert (chosen.activation, chosen.weights) == (activation, weights)
            seen.add(chosen)
    assert len(seen) > 3


@EACH_CLASS
def test_a_grouped_gemms_tile_is_taken_up_to_its_limit(known: DeviceClass, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows in edges(known.gemms):
        monkeypatch.setattr(sm12x_planner, "expected_rows", lambda *_, rows=rows: rows)
        chosen = INSTANCES[sm12x_planner.plan_group_gemm(8, 8, known)]
        there = sorted({row.block_n for row in sm12x_planner.GEMM_INSTANCES})
        assert chosen.block_n == next(tile for tile in there if tile >= wanted_tile(known.gemms, rows))
        assert chosen in sm12x_planner.GEMM_INSTANCES and not chosen.split_k


@EACH_CLASS
def test_auto_is_exact_up_to_its_limit(known: DeviceClass, monkeypatch: pytest.MonkeyPatch) -> None:
    at = known.w4a16_rows if known.w4a16_rows < math.inf else 1e30
    for rows, mode in ((at, Mode.W4A16), (math.nextafter(at, math.inf), Mode.BF16_INPUT)):
        monkeypatch.setattr(sm12x_planner, "expected_rows", lambda *_, rows=rows: rows)
        assert plan_mode(Mode.AUTO, 1, 1, 1, known) is (Mode.W4A16 if known.w4a16_rows == math.inf else mode)
        for other in set(Mode) - {Mode.AUTO}:
            assert plan_mode(other, 1, 1, 1, known) is other


@pytest.mark.parametrize(
    ("top_k", "experts"), [(1, 1), (4, 32), (4, 128), (8, 128), (10, 512), (32, 512), (25, 32), (24, 24)]
)
def test_the_most_tokens_that_are_exact(top_k: int, experts: int) -> None:
    """Against a count from one token on, and whatever the limit is: none, one, all."""
    for limit in (0.5, 1.0, 1.1, 4.5, 24.0):
        known = dataclasses.replace(GB10, w4a16_rows=limit)
        counted = 0
        while expected_rows((counted + 1) * top_k, experts) <= limit:
            counted += 1
        assert most_exact_tokens(top_k, experts, known) == counted
    assert most_exact_tokens(top_k, experts, HOPPER) == math.inf


@EACH_CLASS
def test_a_stream_takes_its_last_pair(known: DeviceClass) -> None:
    """By the planner, the tuner's candidates and a forced tactic alike: 1,536 routed rows, of 8 slots 192 tokens."""
    streams = [row for row in known.table if row.split_k]
    assert streams
    for pairs, taken in ((1535, True), (1536, True), (1537, False)):
        assert {row.takes(pairs, *LAYER) for row in streams} == {taken}
        for weights in ("mxfp4", "nvfp4"):
            assert any(row.split_k for row in known.candidates(pairs, *LAYER, weights)) is taken
            assert choose("bf16", pairs, 512, known, LAYER, weights=weights).instance.split_k is taken
    for tokens, taken in ((192, True), (193, False)):
        problem = MoEProblem(Mode.W4A16, tokens, *LAYER, 512, 8, 0, 512, 512)
        row = next(row for row in streams if row.activation == "bf16" and row.weights == "mxfp4")
        if taken:
            assert wanted_tactics([row.profile_id, row.profile_id], problem, known.tactics) == (row.index, row.index)
        else:
            with pytest.raises(ValueError, match=rf"{row.name} takes at most 1536 .* has 1544 routed rows"):
                wanted_tactics([row.profile_id, row.profile_id], problem, known.tactics)


@EACH_CLASS
def test_a_row_takes_its_longest_k_on_either_side(known: DeviceClass) -> None:
    for row in known.table:
        longest = row.longest_k if row.split_k else 1 << 24
        for hidden, inter in ((longest, 32), (32, longest)):
            assert row.takes(8, hidden, inter)
        for hidden, inter in ((longest + 32, 32), (32, longest + 32)):
            assert row.takes(8, hidden, inter) is not row.split_k


def test_layers_of_the_first_and_last_sizes() -> None:
    for experts, top_k in ((1, 1), (512, 1), (512, 512)):
        sm12x_planner.Layer(32, 32, experts, top_k).check()
    for layer, text in (
        ((32, 32, 0, 1), r"experts is 0; it must be in \[1, 512\]"),
        ((32, 32, 513, 1), r"experts is 513; it must be in \[1, 512\]"),
        ((32, 32, 8, 0), r"top_k is 0; it must be in \[1, 8\]"),
        ((32, 32, 8, 9), r"top_k is 9; it must be in \[1, 8\]"),
        ((31, 32, 8, 1), "hidden"),
        ((32, 0, 8, 1), "inter"),
    ):
        with pytest.raises(ValueError, match=text):
            sm12x_planner.Layer(*layer).check()


@pytest.mark.parametrize("top_k", [1, 3, 32, 512])
def test_as_many_pairs_as_the_kernels_count(top_k: int) -> None:
    most = (2**31 - 1) // 2 // top_k
    require_pairs("tokens", most, top_k)
    with pytest.raises(ValueError, match=f"tokens is {most + 1}; with top_k {top_k} it must be at most {most}"):
        require_pairs("tokens", most + 1, top_k)


# --- dense layers -----------------------------------------------------------------------------------------------------


def dense(
    weights: str, tokens: int, n: int, k: int, known: DeviceClass = GB10, operand: Any = "bf16"
) -> Instance | None:
    return sm12x_dense_launch.choose(weights, tokens, n, k, known, operand, known.sm_count)


@EACH_CLASS
@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_cublas_begins_at_its_tokens(weights: str, known: DeviceClass) -> None:
    """Later where the dequantized weight exceeds 64 MiB, by one row of 128 elements; of quantized tokens never."""
    n, k = 1 << 18, 128
    for rows, at in (
        (n, known.cublas_tokens),
        (n + 1, known.cublas_tokens_in_pieces.get(weights, known.cublas_tokens)),
    ):
        assert dense(weights, at, rows, k, known) is None
        assert dense(weights, at - 1, rows, k, known) is not None
        operand = (
            "mxfp8" if any(row.compute_dtype == "mxfp8" and row.weights == weights for row in DENSE_INSTANCES) else None
        )
        if operand:
            chosen = dense(weights, at, rows, k, known, operand)
            assert chosen is not None and chosen.compute_dtype == operand


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_streams_take_two_passes_over_twelve_mebibytes(weights: str) -> None:
    """Of elements; scales are not counted. Of one pass a stream takes 16 tokens, with a K above 3,072 eight."""
    bits = FORMATS[weights].bits
    for k, widest in ((3072, 16), (4096, 8)):
        last = (12 << 20) * 8 // bits // k
        for n, passes in ((last, 2), (last + 1, 1)):
            for tokens in range(1, 4 * widest):
                chosen = dense(weights, tokens, n, k)
                assert chosen is not None
                assert chosen.split_k == (tokens <= passes * widest), (n, k, tokens, chosen.name)
                if chosen.split_k:
                    assert chosen.block_n == (8 if tokens <= 8 else widest)
    for k, expected in ((3072, "w2"), (3104, "w3"), (4608, "w3"), (4640, "gemm")):
        chosen = dense(weights, 1, 128, k)
        assert chosen is not None and chosen.name.endswith(expected)


def test_of_two_gemms_the_cheaper_is_taken() -> None:
    """Where no tile is small enough to run at once: by the tiles of tokens and the cost of each."""
    for weights in WEIGHT_FORMATS:
        for operand, costs in sm12x_dense_launch.GEMM_TILE_COST.items():
            rows = [
                row
                for row in DENSE_INSTANCES
                if not row.split_k and (row.weights, row.compute_dtype) == (weights, operand)
            ]
            for tokens in range(33, 400) if rows else ():
                chosen = dense(weights, tokens, 201_088, 2880, GB10, operand)
                assert chosen is not None
                spent = {row.block_n: math.ceil(tokens / row.block_n) * costs[row.block_n] for row in rows}
                assert spent[chosen.block_n] == min(spent.values()), (weights, operand, tokens)


class DenseModule:
    """Keeps what was launched, by function."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith("workspace_size"):
            return lambda *sizes: 64
        return lambda *arguments: self.launched.append((name, arguments))


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of dense layers, of which launches are kept."""
    made = DenseModule()
    with recording_tuner(monkeypatch, RecordingBackend(made)):
        yield made


def tensors(tokens: int, n: int = 160, k: int = 64, weights: str = "mxfp4") -> tuple[torch.Tensor, ...]:
    return make_dense_inputs(DenseCase(tokens, n, k, weights), 0).arguments


def test_a_norm_is_one_launch_up_to_eight_tokens(recorded: DenseModule) -> None:
    for weights in WEIGHT_FORMATS:
        # Nine tokens are a tile of 16; of a longer K they are two of the tiles that norm.
        for k, tokens in itertools.product((64, 4096), (1, 7, 8, 9)):
            recorded.launched.clear()
            x, weight, scale = tensors(tokens, 8, k, weights)
            rmsnorm_dense_block_scaled(x, torch.ones(k).bfloat16(), weight, scale, weight_format=weights)
            ((name, _),) = recorded.launched
            assert name == ("sm12x_dense_normed_run" if tokens <= 8 else "sm12x_dense_run")
        for k, most in ((4608, 8), (4640, 0)):
            assert sm12x_dense_norm.most_tokens(weights, k) == most


def test_the_largest_outputs_of_a_row_are_one_to_eight(recorded: DenseModule) -> None:
    """And no more than there are; with one, of a stream, the logits have no memory."""
    for n, most in ((160, 8), (8, 8), (7, 7), (1, 1)):
        x, weight, scale = tensors(3, n=n)
        for top_k in (1, most):
            recorded.launched.clear()
            found = dense_block_scaled_top_k(x, weight, scale, weight_format="mxfp4", top_k=top_k, first_index=2**62)
            assert found.values.shape == (3, top_k)
            ((name, arguments),) = recorded.launched
            assert name == "sm12x_dense_top_k_run"
            logits = next(each for each in arguments if torch.is_tensor(each) and each.dtype is torch.bfloat16)
            assert logits.shape == ((0, n) if top_k == 1 else (3, n))
        for bad in (0, most + 1):
            with pytest.raises(ValueError, match=f"top_k is {bad}"):
                dense_block_scaled_top_k(x, weight, scale, weight_format="mxfp4", top_k=bad)
        with pytest.raises(ValueError, match="first_index is"):
            dense_block_scaled_top_k(x, weight, scale, weight_format="mxfp4", first_index=2**62 + 1)


def test_a_tuned_instance_serves_up_to_1024_tokens(recorded: DenseModule, monkeypatch: pytest.MonkeyPatch) -> None:
    """And with no tokens nobody is asked."""
    monkeypatch.setattr(tune, "is_idle", lambda: False)
    asked: list[int] = []

    def tuned(operator: str, runner: Any, most: int, inputs: list[torch.Tensor]) -> str:
        asked.append(inputs[0].shape[0])
        assert most == 1024
        return "dense_mxfp4_m32_gemm"

    monkeypatch.setattr(tune, "tuned", tuned)
    for tokens in (0, 1, 1023, 1024, 1025):
        recorded.launched.clear()
        x, weight, scale = tensors(tokens)
        dense_block_scaled(x, weight, scale, weight_format="mxfp4")
        if tokens == 0:
            assert recorded.launched == asked == []
            continue
        ((_, arguments),) = recorded.launched
        planned = dense("mxfp4", tokens, 160, 64)
        name = DENSE_INSTANCES[arguments[-4]].name
        assert planned is not None and planned.name != "dense_mxfp4_m32_gemm"
        assert name == ("dense_mxfp4_m32_gemm" if tokens <= 1024 else planned.name)


@pytest.mark.parametrize("weights", WEIGHT_FORMATS)
def test_a_stream_is_timed_up_to_four_passes(weights: str, recorded: DenseModule) -> None:
    x, weight, scale = tensors(1, weights=weights)
    call = sm12x_dense_launch.DenseCall(None, x, None, weight, scale, weight_format=weights)
    runner = sm12x_dense_tuning.SM12xDenseRunner(RecordingBackend(recorded), call, sm12x_dense_launch.BF16)
    for row in DENSE_INSTANCES:
        if row.weights == weights and row.split_k:
            assert row.name in runner.names(4 * row.block_n)
            assert row.name not in runner.names(4 * row.block_n + 1)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_dequantized_weights_come_in_whole_tiles_of_scales(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 rows at least, and as many multiples of it as the memory holds; tokens 2,048 at a time."""
    n, k, tokens = 300, 32, 4097
    pieces: list[tuple[int, int, int]] = []
    products: list[tuple[int, int]] = []

    class Module:
        def sm12x_dequantize_rows(self, out: torch.Tensor, rows: torch.Tensor, scales: Any, form: int) -> None:
            first = (rows.data_ptr() - weight.data_ptr()) // (k // 2)
            pieces.append((first, out.shape[0], scales.data_ptr() - scale.data_ptr()))
            assert out.shape[0] == rows.shape[0]
            out.zero_()

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        products.append((a.shape[0], b.shape[1]))
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    x, weight, scale = tensors(1, n=n, k=k)
    x = torch.zeros(tokens, k, dtype=torch.bfloat16)
    for rows in (1, 128, 256, 384):
        pieces.clear()
        products.clear()
        monkeypatch.setattr(sm12x_dense_launch, "DEQUANTIZED_BYTES", rows * 2 * k + spare)
        call = sm12x_dense_launch.DenseCall(None, x, None, weight, scale, out_dtype=torch.bfloat16)
        call = call.with_output(torch.full((tokens, n), torch.nan, dtype=torch.bfloat16))
        sm12x_dense_launch._multiply_dequantized(Module(), call, sm12x_dense_launch.BF16)
        step = max(128, (rows * 128 + spare) // 128 // 128 * 128)
        expected = [(first, min(step, n - first), first // 128 * 128 * 4) for first in range(0, n, step)]
        assert pieces == expected
        assert products == [(m, part) for _, part, _ in expected for m in (2048, 2048, 1)]
        assert call.out is not None and not call.out.isnan().any()


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_a_workspace_has_a_byte_at_least_and_is_asked_for_once() -> None:
    asked: list[tuple[int, ...]] = []

    class Module:
        def size(self, *sizes: int) -> int:
            asked.append(sizes)
            return sizes[0]

    recording = RecordingBackend(Module())
    for sizes, size in (((0, 1), 1), ((1, 1), 1), ((2, 1), 2), ((2, 2), 2), ((0, 1), 1), ((2, 1), 2)):
        assert backend.workspace_size(recording, recording.recorded, "size", *sizes) == size
    assert asked == [(0, 1), (1, 1), (2, 1), (2, 2)]


@pytest.mark.parametrize("weights", [*WEIGHT_FORMATS])
def test_a_matrix_has_the_bytes_that_quantizing_it_makes(weights: Any) -> None:
    """At the edges of what is padded: 128 rows, four blocks of scales, 16 bytes of a row."""
    for rows in (1, 127, 128, 129):
        for k in (32, 64, 96, 128, 160):
            made = quantize_weight(torch.zeros(rows, k, dtype=torch.bfloat16), weights)
            held = sum(each.nbytes for each in made if torch.is_tensor(each) and each.numel() > 1)
            assert models.matrix_bytes(rows, k, weights) == held, (rows, k)
    assert models.matrix_bytes(3, 64, "bf16") == 3 * 64 * 2
    assert models.matrix_bytes(3, 64, "q8_0") == 3 * 2 * 34


def test_a_layers_experts_have_the_bytes_of_both_matrices() -> None:
    for layer in (*models.MOE_LAYERS.values(), *models.NVFP4_LAYERS.values()):
        parts = 1 if layer.activation == "relu2" else 2
        assert layer.fc1_rows == parts * layer.inter
        of_each = models.matrix_bytes(parts * layer.inter, layer.hidden, layer.weights)
        assert layer.expert_bytes == of_each + models.matrix_bytes(layer.hidden, layer.inter, layer.weights)
        sm12x_planner.Layer(*layer[:4]).check()


# --- decode attention -------------------------------------------------------------------------------------------------


def test_decode_attention_at_its_edges() -> None:
    """The last number that is taken, and the first that is not."""

    def attend(pages: int = 16, **changes: Any) -> None:
        q_len = changes.get("q_len_per_req", 1)
        q_len = q_len if 1 <= q_len <= 64 else 1
        zeros = torch.zeros
        given: dict[str, Any] = {
            "query": zeros(q_len, 8, 64).bfloat16(),
            "kv_cache": zeros(8, 2, 1, pages, 64).bfloat16(),
            "block_tables": zeros(1, 8, dtype=torch.int32),
            "seq_lens": torch.tensor([q_len], dtype=torch.int32),
        }
        sm12x_decode.decode_attention(**given | changes)

    smallest = 2.0**-100
    for taken, refused in (
        ({"q_len_per_req": 1}, {"q_len_per_req": 0}),
        ({"q_len_per_req": 64}, {"q_len_per_req": 65}),
        ({"pages": 16}, {"pages": 8}),
        ({"pages": 32}, {"pages": 48}),
        ({"k_scale": smallest}, {"k_scale": math.nextafter(smallest, 0)}),
        ({"v_scale": 1 / smallest}, {"v_scale": math.nextafter(1 / smallest, math.inf)}),
        ({"sm_scale": smallest}, {"sm_scale": 0.0}),
        ({"window_left": -(2**31)}, {"window_left": -(2**31) - 1}),
        ({"window_left": 2**31 - 1}, {"window_left": 2**31}),
        ({"seq_lens": torch.tensor([128], dtype=torch.int32)}, {"seq_lens": torch.tensor([129], dtype=torch.int32)}),
        ({"rope_table": torch.zeros(1, 64)}, {"rope_table": torch.zeros(0, 64)}),
        ({"seq_lens": torch.tensor([0], dtype=torch.int32)}, {"seq_lens": torch.tensor([-1], dtype=torch.int32)}),
    ):
        attend(**taken)
        with pytest.raises(ValueError, match=next(iter(refused))):
            attend(**refused)


def test_decode_attention_takes_a_workspace_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[int] = []

    class Module:
        def sm12x_decode_workspace_size(self, device: int) -> int:
            return 4096

        def sm12x_decode_run(self, out: Any, keys: Any, values: Any, workspace: torch.Tensor, *_: Any) -> None:
            launched.append(workspace.numel())

    recording = RecordingBackend(Module())
    monkeypatch.setattr(sm12x_decode, "kernels", lambda device: recording)
    zeros = torch.zeros
    for size in (4095, 4096, 4097):
        given = {
            "query": zeros(1, 8, 64).bfloat16(),
            "kv_cache": zeros(8, 2, 1, 16, 64).bfloat16(),
            "block_tables": zeros(1, 8, dtype=torch.int32),
            "seq_lens": torch.tensor([1], dtype=torch.int32),
            "workspace_buffer": zeros(size, dtype=torch.uint8),
        }
        if size < 4096:
            with pytest.raises(ValueError, match=r"workspace_buffer's size is 4095; it must be an integer in \[4096,"):
                sm12x_decode.decode_attention(**given)
            assert launched == []
        else:
            sm12x_decode.decode_attention(**given)
            assert launched.pop() == size
    assert sm12x_decode.decode_workspace_size(torch.device("cpu")) == 4096
