# SPDX-License-Identifier: Apache-2.0
"""``dense_block_scaled_top_k`` on the CPU, and on a GPU that serves the family: ties, arguments, ranks, graphs,
compilation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from operator_calls import on

from flashinfer.gemm import dense_block_scaled, dense_block_scaled_top_k
from flashinfer.testing import DenseCase, make_dense_inputs
from flashinfer.testing.row_top_k_reference import largest_of_rows, with_unusual_outputs


def random_arguments(device: torch.device, case: DenseCase, seed: int) -> dict[str, Any]:
    print("seed", seed, case)
    inputs = make_dense_inputs(case, seed)
    return on(device, dict(zip(("x", "weight", "weight_scale"), inputs.arguments, strict=True)) | inputs.named)


# A stream, two passes of one, a GEMM; on Hopper 256 tokens are cuBLAS's.
@pytest.mark.parametrize("m", [1, 16, 30, 64, 256])
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_it_is_a_search_of_the_layers_outputs(device: torch.device, m: int, top_k: int) -> None:
    seed = int(torch.randint(2**31, ()))
    n = 8 + seed % 5000
    out_dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    case = DenseCase(m, n, 320, "mxfp8" if seed % 2 else "mxfp4", "quantize_bf16", torch.bfloat16, out_dtype=out_dtype)
    arguments = random_arguments(device, case, seed)
    logits = torch.full((m, n), torch.nan, dtype=out_dtype, device=device)
    found = dense_block_scaled_top_k(**arguments, top_k=top_k, first_index=5, logits=logits)
    assert torch.equal(logits, dense_block_scaled(**arguments))
    values, indices = largest_of_rows(logits, top_k)
    assert torch.equal(found.values, values)
    assert torch.equal(found.indices, indices + 5)
    alone = dense_block_scaled_top_k(**arguments, top_k=top_k, first_index=5)
    assert torch.equal(alone.values, values)
    assert torch.equal(alone.indices, indices + 5)


@pytest.mark.parametrize("kind", ["equal", "nan", "first nan", "-inf", "inf", "zeros"])
@pytest.mark.parametrize("m", [3, 40])
def test_ties_and_what_is_no_number(device: torch.device, kind: str, m: int) -> None:
    arguments, logits = with_unusual_outputs(kind, m, 2500)
    for top_k in (1, 8):
        values, indices = largest_of_rows(logits, top_k)
        found = dense_block_scaled_top_k(**on(device, arguments), top_k=top_k)
        assert torch.equal(found.indices.cpu(), indices)
        assert torch.equal(found.values.cpu().nan_to_num(9e9), values.nan_to_num(9e9))
        assert torch.equal(indices[:, 0], logits.argmax(1))  # torch's, on the CPU


def test_a_vocabulary_in_parts(device: torch.device) -> None:
    """Each rank's largest, and the largest of those: the whole vocabulary's, ties between ranks included."""
    for m in (4, 40):
        case = DenseCase(m, 3 * 256, 96)
        arguments = random_arguments(device, case, m)
        arguments["weight"][256:] = arguments["weight"][:256].repeat(2, 1)  # three times the same logits
        arguments["weight_scale"] = arguments["weight_scale"].reshape(6, -1)[:2].repeat(3, 1)
        whole = dense_block_scaled_top_k(**arguments)
        assert int(whole.indices.max()) < 256
        parts = []
        for rank in (0, 1, 2):
            weight, scale = arguments["weight"][256 * rank :][:256], arguments["weight_scale"][2 * rank :][:2]
            part = arguments | {"weight": weight, "weight_scale": scale}
            parts.append(dense_block_scaled_top_k(**part, first_index=256 * rank))
        values, indices = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
        best = values.argmax(1, keepdim=True)
        assert torch.equal(indices.gather(1, best), whole.indices)
        assert torch.equal(values.gather(1, best), whole.values)


def test_no_tokens(device: torch.device) -> None:
    arguments = random_arguments(device, DenseCase(1, 64, 64), 9)
    arguments["x"] = arguments["x"][:0]
    found = dense_block_scaled_top_k(**arguments, top_k=3)
    assert found.values.shape == found.indices.shape == (0, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 40])
@pytest.mark.parametrize("top_k", [1, 4])
def test_a_captured_graph_replays(device: torch.device, m: int, top_k: int) -> None:
    """Other calls use the same memory between replays."""
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    arguments = random_arguments(device, DenseCase(m, 6400, 2880), 12)
    eager = dense_block_scaled_top_k(**arguments, top_k=top_k, constant_weights=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = dense_block_scaled_top_k(**arguments, top_k=top_k, constant_weights=True)
    for _ in range(3):
        captured.indices.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured.indices, eager.indices)
        assert torch.equal(captured.values, eager.values)
        dense_block_scaled_top_k(**{**arguments, "x": -arguments["x"]}, top_k=top_k)
