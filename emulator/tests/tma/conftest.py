# SPDX-License-Identifier: Apache-2.0
"""Makes ``pure_functions`` (tests/tensor) importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / "tensor"), str(Path(__file__).parents[1] / "tensor" / "golden")]
