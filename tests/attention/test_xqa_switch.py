# SPDX-License-Identifier: Apache-2.0
"""``FLASHINFER_SM12X_DECODE``: XQA's calls on this fork's kernel, and which ones stay upstream's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flashinfer import decode
from flashinfer.testing.decode_reference import check_decoded, make_decode_case


def xqa_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Of ``decode_attention``'s call that of upstream's function, as vLLM makes it."""
    names = ("query", "kv_cache", "block_tables", "seq_lens", "window_left", "sinks", "kv_layout", "q_len_per_req")
    device = arguments["query"].device
    return {name: arguments.get(name) for name in names} | {
        "workspace_buffer": torch.zeros(1, dtype=torch.uint8, device=device),
        "max_seq_len": int(arguments["seq_lens"].max()),
        "bmm1_scale": 0.125 * arguments["k_scale"],
        "bmm2_scale": arguments["v_scale"],
    }


@pytest.fixture
def upstreams(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls that reach upstream's function."""
    decode._tell.cache_clear()
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        decode._upstream, "xqa_batch_decode_with_kv_cache", lambda *_, **named: calls.append(named) or named["query"]
    )
    return calls


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_a_call_of_gpt_oss(
    monkeypatch: pytest.MonkeyPatch, upstreams: list[dict[str, Any]], device: torch.device, layout: str, fp8: bool
) -> None:
    monkeypatch.setenv(decode.DECODE_VARIABLE, "1")
    case = make_decode_case(
        [300, 20], 2, 1, layout=layout, fp8=fp8, appends=False, rope=None, window_left=127, device=device
    )
    out = torch.empty_like(case.arguments["query"])
    assert decode.xqa_batch_decode_with_kv_cache(**xqa_arguments(case.arguments), out=out) is out
    check_decoded(out, case)
    assert upstreams == []


def test_a_captured_first_call_stays_upstreams(
    monkeypatch: pytest.MonkeyPatch, upstreams: list[dict[str, Any]], device: torch.device
) -> None:
    """Zeros for its workspace would be the graph's; an error would end a server that captures before it decodes."""
    monkeypatch.setenv(decode.DECODE_VARIABLE, "1")
    monkeypatch.setattr(decode, "lacks_workspace", lambda asked: asked == device)
    case = make_decode_case([20], 2, 1, appends=False, rope=None, device=device)
    with pytest.warns(UserWarning, match=r"captured before decode_attention was ever called; prepare_decode_att"):
        decode.xqa_batch_decode_with_kv_cache(**xqa_arguments(case.arguments))
    assert len(upstreams) == 1


def test_a_cache_as_vllm_has_it(
    monkeypatch: pytest.MonkeyPatch, upstreams: list[dict[str, Any]], device: torch.device
) -> None:
    """Keys and values side by side in each position of a page, given as two views; lengths unsigned as upstream says."""
    monkeypatch.setenv(decode.DECODE_VARIABLE, "1")
    case = make_decode_case([300, 20], 2, 3, appends=False, rope=None, device=device)
    pages = torch.cat(case.arguments["kv_cache"].unbind(1), dim=-1)
    case.arguments["kv_cache"] = pages.split(64, dim=-1)
    arguments = xqa_arguments(case.arguments) | {"mask": None, "q_cu_seq_lens": None, "kv_cache_sf": None}
    arguments["seq_lens"] = arguments["seq_lens"].view(torch.uint32)
    check_decoded(decode.xqa_batch_decode_with_kv_cache(**arguments), case)
    assert upstreams == []


@pytest.mark.parametrize("value", ["", "0"])
def test_it_is_off_by_default(
    monkeypatch: pytest.MonkeyPatch, upstreams: list[dict[str, Any]], value: str, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setenv(decode.DECODE_VARIABLE, value)
    case = make_decode_case([30], 1, 1, appends=False, rope=None)
    decode.xqa_batch_decode_with_kv_cache(**xqa_arguments(case.arguments))
    assert len(upstreams) == 1
    assert not recwarn.list


def test_a_value_that_means_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(decode.DECODE_VARIABLE, "yes")
    with pytest.raises(ValueError, match="FLASHINFER_SM12X_DECODE is 'yes'; it may be 0, 1 or unset"):
        decode.xqa_batch_decode_with_kv_cache()


OTHERS: list[tuple[str, Any, str]] = [
    ("mask", torch.zeros(1), "mask is given"),
    ("kv_cache_sf", torch.zeros(1), "kv_cache_sf is given"),
    ("q_cu_seq_lens", torch.zeros(2), "q_cu_seq_lens is given"),
    ("q_len_per_req", 2, "q_len_per_req is 2"),
    ("o_scale", 0.5, "o_scale is 0.5"),
    ("bmm1_scale", torch.ones(1), "bmm1_scale is torch.float32"),
    ("query", lambda t: t.half(), "query is torch.float16"),
    ("out", torch.zeros(1), "out is torch.float32"),
    ("kv_cache", lambda t: t.half(), "kv_cache has torch.float16"),
    ("query", lambda t: t[:, :4], r"query is .* must be torch.bfloat16 \(1, 8, 64\)"),
    ("kv_cache", lambda t: t[..., :8, :], "kv_cache has pages of 8"),
    ("sinks", lambda t: t.bfloat16(), "sinks is torch.bfloat16"),
    ("seq_lens", lambda t: t.long(), "seq_lens is torch.int64"),
    ("block_tables", lambda t: t.long(), "block_tables is torch.int64"),
]


@pytest.mark.parametrize(("name", "value", "why"), OTHERS, ids=[f"{n}-{i}" for i, (n, *_) in enumerate(OTHERS)])
def test_other_calls_stay_upstreams_and_are_told(
    monkeypatch: pytest.MonkeyPatch, upstreams: list[dict[str, Any]], name: str, value: Any, why: str
) -> None:
    monkeypatch.setenv(decode.DECODE_VARIABLE, "1")
    arguments = xqa_arguments(make_decode_case([30], 1, 1, appends=False, rope=None).arguments)
    arguments[name] = value(arguments[name]) if callable(value) else value
    with pytest.warns(UserWarning, match=f"upstream's XQA computes this call, since {why}"):
        decode.xqa_batch_decode_with_kv_cache(**arguments)
    assert upstreams[0][name] is arguments[name]
