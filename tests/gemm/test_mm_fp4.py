# SPDX-License-Identifier: Apache-2.0
"""``mm_fp4`` with MXFP4 operands where upstream has no kernel."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
from flashinfer.utils import BackendSupportedError

import flashinfer
from flashinfer.gemm import gemm_base, gemm_bf16_fp4, sm12x_mm
from flashinfer.quantization import mx_cpu
from flashinfer.quantization.block_scaled import quantize_weight
from flashinfer.sm12x import devices


def test_the_signature_is_upstreams():
    def described(function):
        return [(p.name, p.default) for p in inspect.signature(function).parameters.values() if p.name != "skip_check"]

    assert described(gemm_base.mm_fp4) == described(gemm_base._upstream.mm_fp4)
    assert described(gemm_base.mm_mxfp8) == described(gemm_base._upstream.mm_mxfp8)
    assert described(gemm_bf16_fp4.mm_bf16_fp4) == described(gemm_bf16_fp4._upstream.mm_bf16_fp4)
    prepare = gemm_bf16_fp4.prepare_bf16_fp4_weights, gemm_bf16_fp4._upstream.prepare_bf16_fp4_weights
    assert described(prepare[0]) == described(prepare[1])


@pytest.mark.parametrize(
    ("backend", "nvfp4", "sm12x", "ours"),
    [
        ("cute-dsl", False, True, True),
        ("cute-dsl", True, True, False),
        ("cudnn", False, True, False),
        ("auto", False, True, False),
        ("cute-dsl", False, False, False),
        ("sm12x", False, False, True),
        ("sm12x", True, True, False),
    ],
)
def test_only_what_upstream_refuses_on_sm12x_is_taken_from_it(monkeypatch, backend, nvfp4, sm12x, ours):
    monkeypatch.setattr(sm12x_mm, "_serves_sm12x", lambda index: sm12x)
    assert sm12x_mm.takes_mm_fp4(torch.device("cuda", 0), backend, nvfp4) is ours


@pytest.mark.parametrize("k", [160, 192])
def test_each_function_is_a_call_of_dense_block_scaled(k):
    """Bits are compared with ``dense_block_scaled``, whose own tests check its results."""
    m, n = 3, 70
    print("seed", 8)
    generator = torch.Generator().manual_seed(8)
    x, w = (torch.randn(rows, k, generator=generator).bfloat16() for rows in (m, n))
    (x4, x4_sf), (w4, w4_sf), (x8, x8_sf), (w8, w8_sf) = (
        (values, mx_cpu.swizzle_128x4(scales))
        for quantize in (mx_cpu.quantize_mxfp4_linear, mx_cpu.quantize_mxfp8_linear)
        for values, scales in map(quantize, (x, w))
    )
    alpha, out = torch.tensor([0.5]), torch.empty(m, n, dtype=torch.float16)
    dense = flashinfer.gemm.dense_mx
    options = {"block_size": 32, "backend": "cute-dsl", "use_nvfp4": False}
    got = flashinfer.mm_fp4(x4, w4.t(), x4_sf, w4_sf.t(), alpha, torch.float16, out, **options)
    assert got is out
    assert torch.equal(got, dense(x4, w4, w4_sf, x_scale=x4_sf, alpha=alpha, out_dtype=torch.float16))
    got = flashinfer.mm_fp4(x4, w4.t(), x4_sf, w4_sf.t(), **options)
    assert torch.equal(got, dense(x4, w4, w4_sf, x_scale=x4_sf))
    wide = torch.cat((x8.view(torch.uint8), x8.view(torch.uint8)[:, :8]), 1).view(x8.dtype)
    for a in (x8, wide[:, :k]):
        got = flashinfer.mm_mxfp8(a, w8.t(), x8_sf.flatten(), w8_sf.flatten(), backend="sm12x")
        assert torch.equal(got, dense(x8, w8, w8_sf, x_scale=x8_sf))
    weights = flashinfer.gemm.prepare_bf16_fp4_weights(w4, w4_sf, alpha, backend="sm12x", block_size=32)
    got = flashinfer.mm_bf16_fp4(x, *weights, backend="sm12x", block_size=32)
    assert torch.equal(got, dense(x, w4, w4_sf, alpha=alpha))
    nv = quantize_weight(w, "nvfp4")
    weights = flashinfer.gemm.prepare_bf16_fp4_weights(*nv, backend="sm12x")
    got = flashinfer.mm_bf16_fp4(x, *weights, backend="sm12x")
    expected = flashinfer.gemm.dense_block_scaled(x, *nv[:2], weight_format="nvfp4", alpha=nv.global_scale)
    assert torch.equal(got, expected)
    got = flashinfer.gemm.mm_bf16_mxfp8(x, w8, w8_sf, out_dtype=torch.float16)
    assert torch.equal(got, dense(x, w8, w8_sf, out_dtype=torch.float16))


@pytest.mark.parametrize("name", ["mm_fp4", "mm_mxfp8", "mm_bf16_fp4"])
def test_the_backend_is_among_those_that_a_function_lists(name):
    function = getattr(flashinfer.gemm, name)
    assert [function.is_backend_supported("sm12x", cc) for cc in (None, 120, 121, 90, 100)] == [True] * 4 + [False]
    assert function.is_backend_supported("cudnn")
    assert not function.is_backend_supported("nonsense")


@pytest.mark.parametrize(
    ("backend", "on_sm12x", "refuses", "answer"),
    [
        ("auto", True, False, "upstream"),
        ("auto", True, True, "ours"),
        ("auto", False, True, None),
        ("cudnn", True, True, None),
    ],
)
def test_auto_is_ours_on_sm12x_where_upstream_has_no_backend(
    monkeypatch: pytest.MonkeyPatch, backend: str, on_sm12x: bool, refuses: bool, answer: str | None
) -> None:
    results = {name: torch.zeros(1) for name in ("upstream", "ours")}

    def upstreams() -> torch.Tensor:
        if refuses:
            raise BackendSupportedError("No suitable auto backends found")
        return results["upstream"]

    monkeypatch.setattr(sm12x_mm, "_serves_sm12x", lambda _index: on_sm12x)
    call = functools.partial(sm12x_mm.automatic, torch.device("cuda", 0), backend, upstreams, lambda: results["ours"])
    if answer is None:
        with pytest.raises(BackendSupportedError, match="No suitable"):
            call()
    else:
        assert call() is results[answer]


@pytest.mark.parametrize("name", ["mm_fp4", "mm_mxfp8"])
def test_upstreams_names_ask_upstream_first(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def first(_device: Any, backend: str, upstreams: Any, _ours: Any) -> Any:
        return backend, upstreams()

    monkeypatch.setattr(sm12x_mm, "automatic", first)
    monkeypatch.setattr(
        gemm_base._upstream, name, lambda *_, **named: named["backend"]
    )  # by name: upstream looks there
    x = torch.empty(4, 64, dtype=torch.uint8, device="meta")
    given = {"block_size": 32, "use_nvfp4": False} if name == "mm_fp4" else {}
    assert getattr(flashinfer, name)(x, x.t(), x, x, **given) == ("auto", "auto")


@pytest.mark.parametrize(("switch", "served"), [("0", False), ("", True)])
def test_the_forks_switch_leaves_them_to_upstream(monkeypatch: pytest.MonkeyPatch, switch: str, served: bool) -> None:
    monkeypatch.setattr(devices, "_capability", lambda _index: (12, 1))
    monkeypatch.setenv("FLASHINFER_SM12X_MOE", switch)
    assert sm12x_mm._serves_sm12x(0) is served
    assert sm12x_mm.takes_mm_fp4(torch.device("cuda", 0), "cute-dsl", False) is served
