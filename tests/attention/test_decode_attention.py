# SPDX-License-Identifier: Apache-2.0
"""``decode_attention`` on the CPU, and on a GPU that serves the family: bounds, arguments, graphs, compilation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decode_cases import *  # noqa: F403
from operator_calls import on
from recording_backend import RecordingBackend

from flashinfer import sm12x_decode
from flashinfer.decode import decode_attention, prepare_decode_attention
from flashinfer.testing.decode_reference import (
    DecodeCase,
    check_decoded,
    far_away,
    make_decode_case,
    random_decode_case,
)
from flashinfer.testing.error_bounds import FLOAT32_ROUNDOFF, check_within_bound
from flashinfer_sm12x.doctor.probe.mma import accumulation_on


@pytest.fixture
def place(device: torch.device) -> torch.device:
    return device


@pytest.fixture
def attend(device: torch.device) -> Any:
    def attend(case: DecodeCase) -> torch.Tensor:
        out = decode_attention(**case.arguments)
        check_decoded(out, case, accumulation_on(device))
        return out

    return attend


def test_random_shapes(device: torch.device) -> None:
    for _ in range(12 if device.type == "cpu" else 60):
        seed = int(torch.randint(2**31, ()))
        print("seed", seed)
        case = random_decode_case(seed, 400 if device.type == "cpu" else 4000, device=device)
        check_decoded(decode_attention(**case.arguments), case, accumulation_on(device))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_elements_beyond_32_bits(fp8: bool) -> None:
    case = make_decode_case([70, 61, 45], 2, 33, q_len=2, window_left=40, page_size=1024, fp8=fp8)
    check_decoded(far_away(case, decode_attention), case, accumulation_on(torch.device("cpu")))


def test_keys_and_values_as_two_tensors(device: torch.device) -> None:
    case = make_decode_case([70, 20], 2, 1, device=device)
    keys, values = (part.contiguous() for part in case.arguments["kv_cache"].unbind(1))
    case.arguments["kv_cache"] = (keys, values)
    check_decoded(decode_attention(**case.arguments), case, accumulation_on(device))


def test_out_is_written_and_given_back(device: torch.device) -> None:
    case = make_decode_case([70, 20], 1, 1, device=device)
    out = torch.full(case.arguments["query"].shape, torch.nan, dtype=torch.bfloat16, device=device)
    assert decode_attention(**case.arguments, out=out) is out
    check_decoded(out, case, accumulation_on(out.device))


def test_what_is_appended_is_as_if_it_had_been_there(device: torch.device) -> None:
    """The step behind an append sees the same cache and gives the same output, to the bit."""
    case = make_decode_case([70, 20, 129], 2, 6, fp8=True, rope=None, device=device)
    appended = decode_attention(**case.arguments)
    cached = decode_attention(**{**case.arguments, "key": None, "value": None})
    assert torch.equal(appended, cached)


def test_rope_against_complex_numbers() -> None:
    """The rows that reference and CPU share, by another way: a pair is a complex number, and is turned by another."""
    seed = 12
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(40, 3, 64, generator=generator).bfloat16()
    angles = torch.randn(100, 32, generator=generator).float()
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = torch.randint(100, (40,), generator=generator)
    turned = sm12x_decode.rope_rows(rows, positions, table)
    pairs = torch.complex(*rows.double().chunk(2, dim=-1))
    turn = torch.complex(*(part.double() for part in table[positions].chunk(2, dim=-1))).unsqueeze(1)
    exact = torch.cat([(pairs * turn).real, (pairs * turn).imag], dim=-1)
    size = torch.cat([pairs.abs()] * 2, dim=-1)
    check_within_bound(turned, exact, 2 * FLOAT32_ROUNDOFF * size, "rope")


def test_no_sequences(device: torch.device) -> None:
    arguments = make_decode_case([5], 1, 1, device=device).arguments
    for name in ("query", "key", "value", "block_tables", "seq_lens"):
        arguments[name] = arguments[name][:0]
    assert decode_attention(**arguments).shape == (0, 8, 64)


def zeros(q_len: int) -> dict[str, torch.Tensor]:
    """Two sequences of three pages, and of four; the first one's fourth is none."""
    return {
        "query": torch.zeros(2 * q_len, 8, 64, dtype=torch.bfloat16),
        "kv_cache": torch.zeros(8, 2, 1, 16, 64, dtype=torch.bfloat16),
        "block_tables": torch.tensor([[0, 1, 2, -7], [4, 5, 6, 7]], dtype=torch.int32),
        "seq_lens": torch.tensor([48, 61], dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("name", "place", "value", "text"),
    [
        ("seq_lens", (1,), 65, r"seq_lens\[1\] is 65; it must be from 0 to 64, 4 pages of 16, as block_tables has"),
        ("seq_lens", (0,), -1, r"seq_lens\[0\] is -1; it must be from 0 to 64"),
        ("seq_lens", (1,), 62, r"seq_lens\[1\] is 62; it must be from 0 to 61, as many positions as rope_table has"),
        ("block_tables", (0, 2), 8, r"block_tables\[0, 2\] is 8; pages that a sequence sees must be from 0 to 7"),
        ("block_tables", (1, 0), -1, r"block_tables\[1, 0\] is -1; "),
    ],
)
def test_a_position_that_is_not_there_is_named(
    name: str, place: tuple[int, ...], value: int, text: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU the check is opt-in. Table entries that a sequence does not see are not checked."""
    monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    arguments = on(device, zeros(1) | {"rope_table": torch.zeros(61 if "rope" in text else 64, 64)})
    arguments["block_tables"][1, 0] = 99
    window = 15 if name == "seq_lens" else 47
    if name == "seq_lens":
        decode_attention(**arguments, window_left=window)
    else:
        arguments["block_tables"][1, 0] = 4
    arguments[name][place] = value
    with pytest.raises(ValueError, match=text):
        decode_attention(**arguments, window_left=window)


@pytest.mark.parametrize(
    ("q_len", "window_left", "place", "is_seen"),
    [
        (1, -1, (1, 3), True),  # a page of which the sequence has a part
        (1, 15, (1, 3), True),
        (1, 31, (0, 0), False),  # seq_lens[0] ends with a page
        (1, 32, (0, 0), True),
        (2, 43, (1, 0), False),  # the first token's window begins with page 1
        (2, 44, (1, 0), True),
        (64, 0, (1, 0), True),  # a sequence shorter than its tokens
    ],
)
def test_the_pages_that_windows_see_are_checked(
    q_len: int, window_left: int, place: tuple[int, int], is_seen: bool, device: torch.device, monkeypatch: Any
) -> None:
    monkeypatch.setenv("FLASHINFER_SM12X_CHECK", "1")
    arguments = on(device, zeros(q_len))
    arguments["block_tables"][place] = 8
    named = {"window_left": window_left, "q_len_per_req": q_len}
    if not is_seen:
        decode_attention(**arguments, **named)
        return
    with pytest.raises(ValueError, match=rf"block_tables\[{place[0]}, {place[1]}\] is 8; pages that a sequence sees"):
        decode_attention(**arguments, **named)


def test_workspaces_of_streams_and_of_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, capturing = [1], [True]
    monkeypatch.setattr(sm12x_decode, "_workspaces", {})
    backend = RecordingBackend(SimpleNamespace(sm12x_decode_workspace_size=lambda _: 64))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=stream[0]))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    device = torch.device("cpu")
    with pytest.raises(RuntimeError, match="captured before it was ever called"):
        sm12x_decode._workspace(backend, device, None)
    capturing[0] = False
    one = sm12x_decode._workspace(backend, device, None)
    assert not one.any()
    stream[0] = 2
    two = sm12x_decode._workspace(backend, device, None)
    capturing[0] = True
    graphs = sm12x_decode._workspace(backend, device, None)
    assert len({each.data_ptr() for each in (one, two, graphs)}) == 3
    assert sm12x_decode._workspace(backend, device, None) is graphs
    with pytest.raises(ValueError, match=r"workspace_buffer's size is 63; it must be an integer in \[64, "):
        sm12x_decode._workspace(backend, device, torch.zeros(63, dtype=torch.uint8))
    given = torch.zeros(64, dtype=torch.uint8)
    assert sm12x_decode._workspace(backend, device, given) is given


@pytest.mark.gpu
def test_a_prepared_device_captures_its_first_call(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    monkeypatch.setattr(sm12x_decode, "_workspaces", {})
    case = make_decode_case([4000, 17], 8, 7, device=device)
    prepare_decode_attention()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(**case.arguments)
    out.fill_(torch.nan)
    graph.replay()
    check_decoded(out, case, accumulation_on(out.device))


@pytest.mark.gpu
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_captured_graph_replays(device: torch.device, q_len: int) -> None:
    """Lengths are read at replay; a longer sequence takes more of the same grid's splits."""
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    cases = [make_decode_case([length, 17], 8, 7, q_len=q_len, device=device) for length in (4000, 4001, 4120)]
    static = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in cases[2].arguments.items()}
    decode_attention(**static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(**static)
    for case in cases:
        for name, value in case.arguments.items():
            if isinstance(value, torch.Tensor):
                into = static[name]
                into[tuple(slice(size) for size in value.shape)].copy_(value)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        case.arguments["kv_cache"] = static["kv_cache"][: len(case.arguments["kv_cache"])]
        check_decoded(out, case, accumulation_on(out.device))
