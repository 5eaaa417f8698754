# SPDX-License-Identifier: Apache-2.0
"""Each operator on virtual GPUs with few SMs and with many, and where a stream may use a part of them.

Compiled modules ask for the number of SMs once, so each number has a process of its own, which runs ``sm_counts.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashinfer.testing.virtual_device import virtual_device

CHECKS = Path(__file__).with_name("sm_counts.py")


@pytest.mark.parametrize("sms", ["1,0", "5,0", "170,0", "48,5"], ids=["1 SM", "5 SMs", "170 SMs", "5 of 48 SMs"])
def test_each_operator(sms: str) -> None:
    plugins = ["-p", "separate_instances"] if "separate_instances" in sys.modules else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *plugins, str(CHECKS)]
    done = subprocess.run(
        command, env={**os.environ, "FLASHINFER_TEST_SMS": sms}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert ("skipped" in done.stdout) == (sms != "1,0")  # some checks need one SM


def test_other_numbers_are_refused() -> None:
    for counts in ({"sm_count": -1}, {"stream_sms": 49}, {"stream_sms": -1}):
        with pytest.raises((ValueError, RuntimeError), match=r"SMs|sm_count"), virtual_device("sm_121a", **counts):
            pass
    with virtual_device("sm_121a") as device:
        assert device.sm_count == 48
