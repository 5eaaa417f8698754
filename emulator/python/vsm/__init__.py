# SPDX-License-Identifier: Apache-2.0
"""A virtual CUDA GPU (SM121: GB10) that executes PTX on the CPU, from Python.

Two faces, both thin:

* :class:`Device` loads PTX text and launches its kernels: for tests of instructions and of single kernels.
* :func:`activate_runtime` puts the virtual GPU behind CUDA's runtime interface, so that a shared library which nvcc
  built (with its PTX embedded, uncompressed) runs unmodified, launcher and all.

The libraries are built with ``make`` on first use and kept up to date with their sources.
"""

from ._library import VsmError, build, library_path, shim_directory
from .device import ACCUMULATION_KINDS, Device, Kernel, Module, Watch, pack
from .results import Counters, Launch, Prediction, Report
from .runtime import Runtime, activate_runtime

__all__ = [
    "ACCUMULATION_KINDS",
    "Counters",
    "Device",
    "Kernel",
    "Launch",
    "Module",
    "Prediction",
    "Report",
    "Runtime",
    "VsmError",
    "Watch",
    "activate_runtime",
    "build",
    "library_path",
    "pack",
    "shim_directory",
]
