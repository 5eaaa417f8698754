# SPDX-License-Identifier: Apache-2.0
"""cub's ``DeviceScan`` and ``DeviceReduce`` from the wheel's CCCL. On SM12x the scan's blocks take over one another's
tiles with ``clusterlaunchcontrol`` and copy them with bulk copies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(compile_upstream) -> Path:
    return compile_upstream("cub", Path(__file__).with_name("cub.cu"))


# Between the init of an mbarrier and the bulk copy that signals it, the scan has a block barrier and no fence. cub's
# sources (kernel_transform.cuh) say that CUDA's memory model allows that; the checker is stricter.
UNPUBLISHED = {"missing proxy fence": ("cp.async.bulk.shared::cta.global.mbarrier",)}


@pytest.mark.parametrize("count", [1, 1000, 4099, 100_003])
@pytest.mark.parametrize("what", ["scan", "reduce"])
def test_sums(program, run_checked, tmp_path, monkeypatch, what, count):
    monkeypatch.setenv("VSM_THREADS", "1")  # which tiles a block takes over repeats
    print("seed", count)
    values = np.random.default_rng(count).integers(-(2**31), 2**31, count, np.int32)
    values.tofile(tmp_path / "input")
    known = {}
    if what == "scan" and count > 1:  # one item is copied without a bulk copy
        known |= UNPUBLISHED
    if what == "scan" and count < 100_003:
        # A scan whose only tile is not full adds what lies behind its items in shared memory, and drops those sums.
        known |= {"uninitialized read": ("ld.shared",)}
    _, launches = run_checked(program, what, tmp_path / "input", tmp_path / "output", known=known)
    for report in (report for launch in launches for report in launch["reports"]):
        assert report["kind"] != "missing proxy fence" or "with no fence.mbarrier_init" in report["text"]
    output = np.fromfile(tmp_path / "output", np.int32)
    sums = np.cumsum(values, dtype=np.int32)
    assert np.array_equal(output, sums if what == "scan" else sums[-1:])
    if what == "scan":
        scan = next(launch for launch in launches if "DeviceScanKernel" in launch["kernel"])
        assert scan["counters"]["blocks"] == 1  # it waits for no other, so it takes over all of them
        assert scan["grid"][0] == (13 if count == 100_003 else 1)
