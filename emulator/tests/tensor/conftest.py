# SPDX-License-Identifier: Apache-2.0
"""Makes ``pure_functions`` and the golden file's modules importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "golden")]
