# SPDX-License-Identifier: Apache-2.0
"""The largest outputs of dense layers, as compiled for ``sm_121a``, on the virtual SM121 with its checkers on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual_devices import ALL_CHECKERS, virtual_fixture

from flashinfer.gemm import dense_block_scaled_top_k
from flashinfer.jit.sm12x.modules import gen_dense_module
from flashinfer.testing import DenseCase, check_within_bound, dense_reference, make_dense_inputs
from flashinfer.testing.row_top_k_reference import largest_of_rows, with_unusual_outputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

SMS = 48
SEARCH = ["chunk_top_k_kernel", "row_top_k_kernel"]

device = virtual_fixture(watch=ALL_CHECKERS)


def launched(device: VirtualDevice) -> list[str]:
    assert all(launch.clean for launch in device.launches), device.launches
    return [name for launch in device.launches for name in ("dense_layer_kernel", *SEARCH) if name in launch.kernel]


def check(device: VirtualDevice, case: DenseCase, seed: int, **named: Any) -> None:
    """With the logits, which keep their bound, and without: the same results, those of a search of the logits."""
    print("seed", seed, case, named)
    inputs = make_dense_inputs(case, seed)
    kept = {key: value for key, value in inputs.named.items() if key != "out_dtype"}
    logits = torch.full((case.num_tokens, case.n), torch.nan, dtype=case.out_dtype)
    both = dense_block_scaled_top_k(*inputs.arguments, **kept, **named, logits=logits)
    check_within_bound(logits, *dense_reference(inputs), f"{case}, seed {seed}")
    values, indices = largest_of_rows(logits, named.get("top_k", 1))
    alone = dense_block_scaled_top_k(*inputs.arguments, **inputs.named, **named)
    for found in (both, alone):
        assert torch.equal(found.values, values)
        assert torch.equal(found.indices, indices + named.get("first_index", 0))
    assert all(launch.clean for launch in device.launches), device.launches


# One unit, of 64 rows; fewer units than blocks; one for some blocks and two for others; three for each, one fewer than
# a block has epilogue warps, and five, one more; a last unit that is partly there; one tile of tokens, and several, of
# which the last is partly there.
@pytest.mark.parametrize("n", [1, 16 * SMS, 16 * SMS + 40, 16 * SMS * 6 - 9, 64 * SMS * 3 - 9, 64 * SMS * 5])
@pytest.mark.parametrize(("m", "tactic"), [(1, "m8_w2"), (8, "m8_w2"), (19, "m8_w2"), (37, "m16_w2"), (64, "m8_w3")])
def test_a_stream_compares_its_outputs(device: VirtualDevice, n: int, m: int, tactic: str) -> None:
    case = DenseCase(m, n, 160, "mxfp4" if m % 2 else "mxfp8", bias=torch.bfloat16)
    check(device, case, m + n, first_index=1000, tactic=f"dense_{case.weights}_{tactic}")
    assert launched(device) == ["dense_layer_kernel", SEARCH[1]] * 2


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_outputs_are_compared_as_their_type_holds_them(device: VirtualDevice, out_dtype: torch.dtype) -> None:
    """Few columns differ in bfloat16, more in float16; with all that an output may be made of."""
    case = DenseCase(8, 500, 2880, alpha=True, residual=True, bias=torch.float32, out_dtype=out_dtype)
    check(device, case, 3)
    assert launched(device) == ["dense_layer_kernel", SEARCH[1]] * 2


@pytest.mark.parametrize("tactic", ["dense_mxfp4_m8_w2", "dense_mxfp4_m64_gemm_mxfp8"])
@pytest.mark.parametrize("tokens", ["quantize_f16", "mxfp8", "mxfp8_linear", "mxfp4"])
def test_tokens_of_any_format(device: VirtualDevice, tokens: str, tactic: str) -> None:
    """The last word of scales of this K has two blocks."""
    check(device, DenseCase(9, 500, 320, tokens=tokens), 4, tactic=tactic)


@pytest.mark.parametrize("m", [33, 64])
def test_what_is_no_stream_is_searched(device: VirtualDevice, m: int) -> None:
    check(device, DenseCase(m, 2500, 96, "mxfp8"), m, constant_weights=True)
    assert launched(device) == SEARCH * 2
    assert "grouped_gemm_kernel" in device.launches[-3].kernel


@pytest.mark.parametrize("n", [8, 2050, 4096])
@pytest.mark.parametrize("top_k", [2, 5, 8])
def test_several_of_a_row(device: VirtualDevice, n: int, top_k: int) -> None:
    """Rows are searched in chunks of 2,048; the last may have fewer outputs than are asked for."""
    check(device, DenseCase(3, n, 64), n + top_k, top_k=top_k, first_index=7)
    assert launched(device) == ["dense_layer_kernel", *SEARCH] * 2


@pytest.mark.parametrize("tactic", ["dense_mxfp4_m8_w2", "dense_mxfp4_m32_gemm"])
@pytest.mark.parametrize("kind", ["equal", "nan", "first nan", "-inf", "inf", "zeros"])
def test_ties_and_what_is_no_number(device: VirtualDevice, tactic: str, kind: str) -> None:
    arguments, logits = with_unusual_outputs(kind, 9, 3000)
    for top_k in (1, 4):
        values, indices = largest_of_rows(logits, top_k)
        for kept in (None, torch.full((9, 3000), 9.0, dtype=torch.bfloat16)):
            found = dense_block_scaled_top_k(**arguments, top_k=top_k, logits=kept, tactic=tactic)
            assert torch.equal(found.indices, indices)
            assert torch.equal(found.values.nan_to_num(9e9), values.nan_to_num(9e9))
            assert kept is None or torch.equal(kept.nan_to_num(9e9), logits.nan_to_num(9e9))


@pytest.mark.parametrize("top_k", [1, 3])
def test_weak_memory(top_k: int) -> None:
    for seed in (1, 2):
        with virtual_device("sm_121a", watch=ALL_CHECKERS, weak_memory=seed) as device:
            check(device, DenseCase(9, 5000, 96, bias=torch.bfloat16), seed, top_k=top_k, tactic="dense_mxfp4_m8_w2")


@pytest.mark.parametrize("tactic", ["dense_mxfp4_m8_w2", "dense_mxfp4_m32_gemm"])
def test_a_search_behind_a_search(device: VirtualDevice, tactic: str) -> None:
    """Programmatic dependent launches that use one workspace in turn, full of what was there before."""
    module = device.module(gen_dense_module, "mxfp4")
    place = {"dense_mxfp4_m8_w2": 0, "dense_mxfp4_m32_gemm": 6}[tactic]
    made = [make_dense_inputs(DenseCase(5, 6000, 64), seed) for seed in (5, 6)]
    ranks = device.empty(int(device.call(module.sm12x_row_top_k_workspace_size, 5, 6000, 1)))
    space = device.empty(int(device.call(module.sm12x_dense_gemm_workspace_size, 5, 64, 6, 0)))
    for seed, memory in enumerate((ranks, space)):
        device.discard(memory, seed)
    calls = []
    for inputs in made:
        outputs = torch.full((5, 1), -1.0), torch.full((5, 1), -1), torch.full((5, 6000), 9.0, dtype=torch.bfloat16)
        calls.append((inputs.arguments, outputs))

    def launch(*_tensors: torch.Tensor) -> None:
        for (x, weight, scale), (values, indices, logits) in calls:
            operands = (logits, x, None, weight, scale, None, None, None)
            module.sm12x_dense_top_k_run(values, indices, 0, ranks, *operands, space, 0, place, True, True)

    writes = [tensor for _, outputs in calls for tensor in outputs]
    device.call(launch, *(tensor for inputs, _ in calls for tensor in inputs), *writes, writes=writes)
    assert all(found.programmatic for found in device.launches[-2:]), device.launches
    for values, indices, logits in (outputs for _, outputs in calls):
        expected = largest_of_rows(logits, 1)
        assert torch.equal(values, expected[0])
        assert torch.equal(indices, expected[1])
