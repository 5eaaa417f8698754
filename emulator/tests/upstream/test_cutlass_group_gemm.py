# SPDX-License-Identifier: Apache-2.0
"""Kernels that others wrote, unchanged: upstream's stock SM120 grouped GEMMs from the installed wheel.

The compiler takes about 75 s and 3 GB for each instance.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
DEFINES = ("-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1", "-DCUTLASS_ENABLE_GDC_FOR_SM100=1")


def check(
    run_checked, program: Path, rows: list[int], n: int, k: int, known: Mapping[str, tuple[str, ...]] | None = None
) -> list[dict]:
    """Every element within the program's bound; the launches' MMAs are at least the problem's. The GEMM's reports."""
    printed, launches = run_checked(program, n, k, *rows, known=known)
    assert printed == f"bad 0 of {sum(rows) * n}\n"
    assert len(launches) == 2, "the kernel that fills in the arguments, and the GEMM"
    assert launches[1]["counters"]["mma_flops"] >= 2 * sum(rows) * n * k
    return launches[1]["reports"]


@pytest.mark.parametrize("swap", ["true", "false"], ids=["swapped", "plain"])
@pytest.mark.parametrize("tile_n", [32, 64, 128])
def test_mxfp4_gives_the_reference_numbers(compile_upstream, run_checked, tile_n, swap):
    """Ragged groups, one of them empty; and 256 rows in one group."""
    flags = (*DEFINES, f"-DTILE_N={tile_n}", f"-DSWAP_AB={swap}")
    program = compile_upstream(f"mxfp4_{tile_n}_{swap}", HERE / "group_gemm_mxfp4.cu", flags=flags)
    check(run_checked, program, [40, 0, 128], 192, 384)
    check(run_checked, program, [256], 256, 512)


@pytest.mark.parametrize("scale_major", ["K", "MN"])
@pytest.mark.parametrize("rows_per_scale", [1, 128])
def test_fp8_gives_the_reference_numbers(compile_upstream, run_checked, rows_per_scale, scale_major):
    """A float32 scale for each row, or each 128 rows, by 128 along K; weights' scales are 128 x 128."""
    flags = (f"-DROWS_PER_SCALE={rows_per_scale}", f"-DSCALE_MAJOR_K={int(scale_major == 'K')}")
    name = f"fp8_{rows_per_scale}_{scale_major}"
    program = compile_upstream(name, HERE / "group_gemm_fp8.cu", flags=flags)
    if rows_per_scale == 128:
        # Scales do not tell where in 128 rows the next group begins: groups of whole blocks, but for the last.
        check(run_checked, program, [128, 0, 200], 192, 384)
        return
    check(run_checked, program, [128, 0, 256], 192, 384)
    # Scales that are major along K have rows of their own for each group. Beyond a group's rows the kernel copies none into
    # shared memory but multiplies with them all the same, in rows that it then does not store: what the checker says is
    # so, and no stored element shows it.
    known = {"uninitialized read": ("ld.shared",)} if scale_major == "K" else None
    for report in check(run_checked, program, [40, 0, 128], 192, 384, known=known):
        assert report["space"] == "shared" and "ld.shared.f32" in report["instruction"], report["summary"]
