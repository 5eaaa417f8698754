# SPDX-License-Identifier: Apache-2.0
"""``python <checkout>/flashinfer/sm12x_doctor``: the doctor where ``import flashinfer`` is what is wrong."""

import importlib
import sys
from pathlib import Path

# Python put this folder first; the package, by its own name, is in the one above, and nothing else of that one is meant.
sys.path[0] = str(Path(__file__).resolve().parents[1])
doctor = importlib.import_module("sm12x_doctor")
del sys.path[0]
raise SystemExit(doctor.main(sys.argv[1:]))
