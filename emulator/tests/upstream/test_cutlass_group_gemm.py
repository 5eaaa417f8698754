# SPDX-License-Identifier: Apache-2.0
"""A kernel that others wrote, unchanged: upstream's stock SM120 MXFP4 grouped GEMM from the installed wheel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INCLUDES = ("include", "csrc", "cutlass/include", "cutlass/tools/util/include", "cccl/libcudacxx/include", "cccl/cub",
            "cccl/thrust", "spdlog/include")  # fmt: skip
DEFINES = ("-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4", "-DFLASHINFER_ENABLE_FP8_E8M0", "-DFLASHINFER_ENABLE_FP4_E2M1",
           "-DCUTLASS_ENABLE_GDC_FOR_SM100=1")  # fmt: skip


@pytest.fixture(scope="module")
def headers() -> Path:
    """The data folder of the flashinfer-python wheel."""
    try:
        found = importlib.metadata.distribution("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the flashinfer-python wheel is not installed")
    return Path(str(found.locate_file("flashinfer/data")))


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["true", "false"], ids=["swapped", "plain"])
@pytest.mark.parametrize("tile_n", [32, 64, 128])
def test_gives_the_reference_numbers(compile_cuda, shim, headers, tmp_path, tile_n, swap):
    """Ragged groups, one of them empty, every watcher on. The compiler takes about a minute and 3 GB for each."""
    flags = ("-O3", "--expt-relaxed-constexpr", "-w", f"-DTILE_N={tile_n}", f"-DSWAP_AB={swap}", *DEFINES,
             "-gencode", "arch=compute_121a,code=compute_121a", *(f"-I{headers / i}" for i in INCLUDES))  # fmt: skip
    program = compile_cuda("group_gemm", HERE / "group_gemm_mxfp4.cu", flags=flags)
    trace = tmp_path / "trace.json"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(shim),
        "VSM_WATCH": "all",
        "VSM_STRICT": "1",
        "VSM_TRACE": str(trace),
    }
    done = subprocess.run([program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "bad 0 of 32256\n"
    launches = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [launch["reports"] for launch in launches] == [[], []]
    assert launches[1]["counters"]["mma_flops"] >= 2 * 168 * 192 * 384
