# SPDX-License-Identifier: Apache-2.0
"""``dense_block_scaled_rescored`` on the CPU, and on a GPU that serves the family: which rows are rescored, the layer
object, graphs, compilation."""

from __future__ import annotations

import pytest
import torch
from rescored_cases import UNUSUAL, Head, make_head, unusual_head

from flashinfer.gemm import (
    RescoredLayer,
    dense_block_scaled,
    dense_block_scaled_rescored,
    dense_block_scaled_rescored_top_k,
    sm12x_dense_rescored,
)
from flashinfer.gemm.sm12x_dense_rescored import rescores
from flashinfer.sm12x.device_class import CARD, GB10, HOPPER
from flashinfer.sm12x.models import MODELS
from flashinfer.testing import check_within_bound
from flashinfer.testing.rescored_reference import rescored_reference, rescored_rows, rows_of_groups
from flashinfer.testing.row_top_k_reference import largest_of_rows


def rescored(head: Head, groups: int, most: int, **named: object) -> torch.Tensor:
    arguments = head.x, *head.coarse, *head.fine, head.bias
    options = {"fine_format": head.fine_format, "groups": groups, "rescored": most, **named}
    return dense_block_scaled_rescored(*arguments, **head.named, **options)


def test_tiles_of_16_rows_go_to_the_groups_in_turn() -> None:
    groups = rows_of_groups(100, 3)
    assert [rows.tolist() for rows in groups] == [
        [*range(16), *range(48, 64), *range(96, 100)],
        [*range(16, 32), *range(64, 80)],
        [*range(32, 48), *range(80, 96)],
    ]


@pytest.fixture
def all_are_rescored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls rescore also where a device's fine weight would have fewer bytes: on Hopper MXINT8's always has."""
    monkeypatch.setattr(sm12x_dense_rescored, "rescores", lambda *_: True)


@pytest.mark.usefixtures("all_are_rescored")
@pytest.mark.parametrize("fine", ["bf16", "mxint8"])
@pytest.mark.parametrize("m", [1, 8, 31])
def test_it_keeps_its_bound(device: torch.device, m: int, fine: str) -> None:
    seed = int(torch.randint(2**31, ()))
    groups, most = 3 + seed % 9, 1 + seed % 16
    n = groups * most * 5 + seed % 1000
    out_dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    head = make_head(m, n, 320, seed, "nvfp4", fine, torch.float32, out_dtype).to(device)
    coarse = dense_block_scaled(head.x, *head.coarse, head.bias, **head.named)
    out = rescored(head, groups, most)
    reference = rescored_reference(coarse, head.x, head.operand(), head.bias, groups, most)
    check_within_bound(out, *reference, f"{head}, {groups} groups of {most}, seed {seed}")
    for top_k in (1, 5):
        arguments = head.x, *head.coarse, *head.fine, head.bias
        named = {"fine_format": fine, "groups": groups, "rescored": most, "top_k": top_k, "first_index": 7}
        found = dense_block_scaled_rescored_top_k(*arguments, **head.named, **named)
        values, indices = largest_of_rows(out, top_k)
        assert torch.equal(found.values, values)
        assert torch.equal(found.indices, indices + 7)


@pytest.mark.usefixtures("all_are_rescored")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_ties_and_what_is_no_number(device: torch.device, kind: str) -> None:
    head, coarse = unusual_head(kind, 5, 2500, torch.bfloat16)
    expected = torch.where(rescored_rows(coarse, 7, 9), head.expected_fine(), coarse)
    out = rescored(head.to(device), 7, 9).cpu()
    assert torch.equal(out.nan_to_num(9e9), expected.nan_to_num(9e9))


@pytest.mark.usefixtures("all_are_rescored")
def test_alpha_is_of_the_coarse_product_alone(device: torch.device) -> None:
    """With an alpha of 0 all coarse logits are the bias, and the lowest rows of each group are rescored."""
    head = make_head(2, 640, 64, 3, out_dtype=torch.float32).to(device)
    head.named["alpha"] = torch.zeros(1, device=device)
    out = rescored(head, 2, 5)
    chosen = torch.zeros(640, dtype=torch.bool)
    chosen[[*range(5), *range(16, 21)]] = True
    assert not out[:, ~chosen].any()
    torch.testing.assert_close(out[:, chosen].cpu(), head.x.cpu().float() @ head.fine[0][chosen].cpu().float().T)


def test_the_fine_weight_has_all_rows_where_it_has_fewer_bytes(device: torch.device) -> None:
    for fine, bias, out_dtype in (("bf16", None, torch.bfloat16), ("bf16", torch.float16, torch.float32),
                                  ("mxint8", torch.float32, torch.bfloat16)):  # fmt: skip
        head = make_head(40, 500, 96, 6, "nvfp4", fine, bias, out_dtype).to(device)
        assert not rescores(40, 500, "nvfp4", fine)  # type: ignore[arg-type]
        out = rescored(head, 48, 16)
        product = head.x.double() @ head.operand().values.T + (0 if head.bias is None else head.bias.double())
        torch.testing.assert_close(out.double(), product, rtol=2**-8, atol=1e-3)
        arguments = head.x, *head.coarse, *head.fine, head.bias
        found = dense_block_scaled_rescored_top_k(*arguments, **head.named, fine_format=fine, top_k=2)
        assert torch.equal(found.indices, largest_of_rows(out, 2)[1])


def test_the_planner_compares_bytes() -> None:
    """gpt-oss's head: 4.5 of 16 bits, and 768 rows of 201,088 for each token."""
    n, _ = MODELS["gpt-oss-120b"].matrices["LM head"]
    assert n == 201_088
    most = [max(m for m in range(1, 300) if rescores(m, n, "nvfp4", device=each)) for each in (GB10, CARD, HOPPER)]
    assert most == [188, 83, 32]
    assert not rescores(1, n, "mxint8", "mxint8")
    # Groups that are empty, and rows that a group has not, are not read.
    assert rescores(1, 40, "nvfp4", "bf16", groups=10**6, rescored=9)
    assert not rescores(2, 40, "nvfp4", "bf16", groups=10**6, rescored=16)


def test_a_layer_is_its_function(device: torch.device) -> None:
    head = make_head(3, 2000, 96, 8, "nvfp4", "bf16", torch.bfloat16).to(device)
    named = {**head.named, "groups": 5, "rescored": 7}
    layer = RescoredLayer(*head.coarse, *head.fine, head.bias, **named)
    expected = rescored(head, 5, 7)
    memory = torch.full_like(expected, torch.nan)
    assert layer.run(head.x, out=memory) is memory
    assert torch.equal(memory, expected)
    for _ in range(2):  # the second call is known
        assert torch.equal(layer.run(head.x), expected)
        assert torch.equal(layer.run_top_k(head.x, top_k=3).indices, largest_of_rows(expected, 3)[1])
    other = make_head(3, 2000, 96, 9, "nvfp4", "bf16", torch.bfloat16).to(device)
    head.fine[0].data = other.fine[0]
    assert not torch.equal(layer.run(head.x), expected)
    head.fine[0].data = other.fine[0][:1000]
    with pytest.raises(ValueError, match=r"fine_weight is .*; it must be"):
        layer.run(head.x)
    with pytest.raises(ValueError, match="x is"):
        RescoredLayer(*other.coarse, *other.fine, **named).run(head.x[:, :64])


def test_compiled(device: torch.device) -> None:
    head = make_head(2, 1600, 64, 4).to(device)
    expected = rescored(head, 5, 6)
    layer = RescoredLayer(*head.coarse, *head.fine, **head.named, groups=5, rescored=6)

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = dense_block_scaled_rescored(x, *head.coarse, *head.fine, **head.named, groups=5, rescored=6)
        return logits, layer.run(x), layer.run_top_k(x, top_k=2).indices

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    logits, again, indices = compiled(head.x)
    assert torch.equal(logits, expected)
    assert torch.equal(again, expected)
    assert torch.equal(indices, largest_of_rows(expected, 2)[1])


def test_what_it_refuses(device: torch.device) -> None:
    head = make_head(2, 6200, 64, 4, fine="mxint8").to(device)
    for groups, message in ((0, "groups is 0"), (1, "groups is 1; with 6200 rows it must be at least 2")):
        with pytest.raises(ValueError, match=message):
            rescored(head, groups, 4)
    with pytest.raises(ValueError, match=r"rescored is 17; it must be an integer in \[1, 16\]"):
        rescored(head, 4, 17)
    with pytest.raises(TypeError, match="fine_scale is None"):
        dense_block_scaled_rescored(head.x, *head.coarse, head.fine[0], fine_format="mxint8", **head.named)
    plain = make_head(2, 400, 64, 4).to(device)
    with pytest.raises(ValueError, match="with fine_format='bf16' it must be None"):
        dense_block_scaled_rescored(plain.x, *plain.coarse, plain.fine[0], plain.coarse[1], **plain.named)
    with pytest.raises(ValueError, match="fine_format is 'mxfp4'; it must be 'bf16' or 'mxint8'"):
        rescored(plain._replace(fine_format="mxfp4"), 4, 4)
    with pytest.raises(ValueError, match="top_k is 9"):
        dense_block_scaled_rescored_top_k(plain.x, *plain.coarse, *plain.fine, **plain.named, top_k=9)
    long = make_head(1, 16, 14_368, 4).to(device)
    with pytest.raises(ValueError, match="the k of a rescored head is at most 14336"):
        rescored(long, 1, 1)
    none = make_head(0, 400, 64, 4).to(device)
    assert rescored(none, 4, 4).shape == (0, 400)
    assert dense_block_scaled_rescored_top_k(none.x, *none.coarse, *none.fine, **none.named).values.shape == (0, 1)


@pytest.mark.gpu
def test_a_captured_graph_replays(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("graphs are of CUDA")
    head = make_head(4, 50_000, 288, 12).to(device)
    layer = RescoredLayer(*head.coarse, *head.fine, **head.named, constant_weights=True)
    eager = layer.run(head.x), layer.run_top_k(head.x, top_k=3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer.run(head.x), layer.run_top_k(head.x, top_k=3)
    for _ in range(3):
        captured[0].fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured[0], eager[0])
        assert torch.equal(captured[1].indices, eager[1].indices)
        layer.run(-head.x)
