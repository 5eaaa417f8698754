# SPDX-License-Identifier: Apache-2.0
"""A type checker sees both directories: names of the fork typed, names of the wheel never an error."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from layer_toys import REPO

PROGRAM = """\
import flashinfer
import flashinfer.decode
from flashinfer import fp4_quantize
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.fused_moe import cutlass_fused_moe
from flashinfer.fused_moe.core import ActivationType
from flashinfer.jit.core import JitSpec
from flashinfer._layer import fork_root

wrong_version: int = flashinfer.__version__
wrong_root: str = fork_root()
"""


def test_mypy_on_a_users_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "program.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(REPO)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.stdout.splitlines() == [
        'program.py:10: error: Incompatible types in assignment (expression has type "str", variable has type "int")'
        "  [assignment]",
        'program.py:11: error: Incompatible types in assignment (expression has type "Path", variable has type "str")'
        "  [assignment]",
        "Found 2 errors in 1 file (checked 1 source file)",
    ]
