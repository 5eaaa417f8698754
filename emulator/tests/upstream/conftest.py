# SPDX-License-Identifier: Apache-2.0
"""The shim's compiler fixtures serve here too."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[1] / "shim" / "conftest.py"
_SPEC = importlib.util.spec_from_file_location("shim_conftest", _PATH)
assert _SPEC is not None and _SPEC.loader is not None
_MODULE = importlib.util.module_from_spec(_SPEC)
sys.modules["shim_conftest"] = _MODULE
_SPEC.loader.exec_module(_MODULE)
toolkit, shim, compile_cuda = _MODULE.toolkit, _MODULE.shim, _MODULE.compile_cuda
