# SPDX-License-Identifier: Apache-2.0
"""A kernel that others wrote runs unchanged on the virtual device: upstream's SM120 MXFP4 grouped GEMM, from the wheel.

Its CUTLASS builder kernel exercises what this project's kernels do not: tensor maps that the kernel itself edits and
publishes, 4-bit tensor copies, ``ldmatrix`` with expansion, a persistent tile scheduler, the store path through TMA.
They take about a minute of compiler; ``FLASHINFER_TEST_ALL_TILES=1`` runs all six tiles.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from flashinfer.jit.sm12x.spec import JitSpecSm12x
from flashinfer.sm12x.models import MODELS
from flashinfer.sm12x.perfmodel.moe import Work, fits_in
from flashinfer.sm12x.perfmodel.peers import FITS, PEERS
from flashinfer.testing import TENSOR_CORE, check_within_bound, group_gemm_reference, make_group_gemm_inputs
from flashinfer.testing.virtual_device import VirtualDevice, virtual_device

SOURCE = Path(__file__).with_name("upstream_group_gemm.cu")
TILES = [(128, False), (64, True)]
ALL_TILES = os.environ.get("FLASHINFER_TEST_ALL_TILES") == "1"
if ALL_TILES:
    TILES += [(128, True), (64, False), (32, True), (32, False)]
WORKSPACE = 8 << 20


@pytest.fixture(scope="module")
def library() -> Path:
    flags = ["-std=c++17", "-O3", "-DNDEBUG", "-w", "--compress-mode=none", "-DCUTLASS_ENABLE_GDC_FOR_SM100=1"]
    flags += ["-gencode=arch=compute_121a,code=compute_121a"]  # no machine code: nothing reads it
    flags += ["-DALL_TILES"] * ALL_TILES
    spec = JitSpecSm12x(
        name=f"test_upstream_group_gemm{'_all' * ALL_TILES}",
        sources=[SOURCE],
        extra_cflags=[],
        extra_cuda_cflags=flags,
        extra_ldflags=None,
        extra_include_dirs=[],
        architectures=((12, "1a"),),
    )
    spec.build(need_lock=True)
    return spec.plan.library


def launch(
    device: VirtualDevice, library: Path, tile: tuple[int, bool], call: Mapping[str, torch.Tensor], out: torch.Tensor
) -> None:
    """The two launches of a grouped GEMM: the one that fills in arguments, and the GEMM."""
    tile_n, swap = tile
    function = ctypes.CDLL(str(library))[f"group_gemm_{tile_n}_{str(swap).lower()}"]
    integers, floats = device.empty(WORKSPACE), device.empty(WORKSPACE)
    (groups, n, _), k = call["b"].shape, call["a"].shape[1]

    def run(*tensors: torch.Tensor) -> None:
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        size = ctypes.c_size_t(WORKSPACE)
        status = function(pointers[0], size, pointers[1], size, *pointers[2:], n, k, groups)
        if status != 0:
            raise RuntimeError(f"the launcher answered {status}")

    *operands, m_indptr = call.values()
    device.call(run, integers, floats, *operands, out, m_indptr, writes=(integers, floats, out))
    assert len(device.launches) == 2
    assert all(launch.clean for launch in device.launches)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"128x{tile[0]}x128{' swapped' if tile[1] else ''}")
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [([5, 3], 128, 256), ([100, 0, 156], 256, 512), ([1], 384, 128)],
    ids=["two groups", "ragged and empty", "one row"],
)
def test_it_keeps_the_bound(library, tile, rows, n, k):
    call = make_group_gemm_inputs(rows, n, k, 21)
    out = torch.full((sum(rows), n), float("nan"), dtype=torch.bfloat16)
    with virtual_device("sm_121a") as device:
        launch(device, library, tile, call, out)
    check_within_bound(out, *group_gemm_reference(**call, accumulation=TENSOR_CORE))


def test_kept_counts_are_those_of_a_run(library):
    """FC2 of a Spark of two, three experts that the counts were not taken from: ``benchmarks/emulate_peers.py`` renews them."""
    rows, (hidden, inter) = [7, 65, 1], PEERS["CUTLASS"].padded(MODELS["gpt-oss-120b"].split(2).moe)
    out = torch.empty((sum(rows), hidden), dtype=torch.bfloat16)
    with virtual_device("sm_121a") as device:
        launch(device, library, (64, True), make_group_gemm_inputs(rows, hidden, inter, 0), out)
        found = device.launches[1].counters
    fit = fits_in(FITS, kernel="CUTLASS", hidden=hidden, inter=inter, tile=64)[1]
    told = fit.at(Work(sum(rows), experts=3, tiles=4, rows=sum(rows)))
    assert told.mma_flops == pytest.approx(found.mma_flops, rel=1e-6)
    assert told.instructions == pytest.approx(found.warp_instructions, rel=0.02)
    assert told.bytes == pytest.approx(found.global_distinct_bytes, rel=0.02)
    assert told.wavefronts == pytest.approx(found.shared_wavefronts, rel=0.02)
