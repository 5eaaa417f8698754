# SPDX-License-Identifier: Apache-2.0
"""A kernel that others wrote runs unchanged on the virtual device: upstream's SM120 MXFP4 grouped GEMM, from the wheel.

Its CUTLASS builder kernel exercises what this project's kernels do not: tensor maps that the kernel itself edits and
publishes, 4-bit tensor copies, ``ldmatrix`` with expansion, a persistent tile scheduler, the store path through TMA.
The two tiles that are counted take about a minute of compiler; all six: ``emulator/tests/upstream``.
"""

from __future__ import annotations

import emulate_peers
import pytest
import torch
from perfmodel.moe import Work, fits_in
from perfmodel.peers import FITS, PEERS

from flashinfer.sm12x.models import MODELS
from flashinfer.testing import TENSOR_CORE, check_within_bound, group_gemm_reference, make_group_gemm_inputs
from flashinfer.testing.virtual_device import virtual_device


@pytest.mark.parametrize("tile", [64, 128])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [([5, 3], 128, 256), ([100, 0, 156], 256, 512), ([1], 384, 128)],
    ids=["two groups", "ragged and empty", "one row"],
)
def test_it_keeps_the_bound(tile: int, rows: list[int], n: int, k: int) -> None:
    call = make_group_gemm_inputs(rows, n, k, 21)
    out = torch.full((sum(rows), n), float("nan"), dtype=torch.bfloat16)
    with virtual_device("sm_121a") as device:
        emulate_peers.upstreams_gemm(device, tile)(**call, out=out)
        assert len(device.launches) == 2
        assert all(launch.clean for launch in device.launches)
    check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE))


def test_kept_counts_are_those_of_a_run() -> None:
    """FC2 of a Spark of two, three experts that the counts were not taken from: ``benchmarks/emulate_peers.py`` renews
    them."""
    rows, (hidden, inter) = [7, 65, 1], PEERS["CUTLASS"].padded(MODELS["gpt-oss-120b"].split(2).moe)
    with virtual_device("sm_121a") as device:
        emulate_peers.cutlass(device, 64)(rows, hidden, inter)
        found = device.launches[1].counters
    fit = fits_in(FITS, kernel="CUTLASS", hidden=hidden, inter=inter, tile=64)[1]
    fitted = fit.at(Work(sum(rows), experts=3, tiles=4, rows=sum(rows)))
    assert fitted.mma_flops == pytest.approx(found.mma_flops, rel=1e-6)
    assert fitted.instructions == pytest.approx(found.warp_instructions, rel=0.02)
    assert fitted.bytes == pytest.approx(found.global_distinct_bytes, rel=0.02)
    assert fitted.wavefronts == pytest.approx(found.shared_wavefronts, rel=0.02)
