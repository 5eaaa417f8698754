# SPDX-License-Identifier: Apache-2.0
from programs import compile_cuda, run_on_shim, shim, toolkit

__all__ = ["compile_cuda", "run_on_shim", "shim", "toolkit"]
