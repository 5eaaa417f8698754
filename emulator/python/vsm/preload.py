# SPDX-License-Identifier: Apache-2.0
"""``python -m vsm.preload`` prints the library that ``LD_PRELOAD`` must name for torch to run on the virtual GPU.

A torch that brings CUDA loads its runtime when it is imported, before :func:`~vsm.runtime.activate_runtime` can put the
shim in its place. Prints nothing for a torch without CUDA.
"""

from __future__ import annotations

import torch

from ._library import shim_directory

RUNTIME = "libcudart.so.13"


def preload() -> str:
    """The shim's path; empty for a torch without CUDA."""
    return str(shim_directory() / RUNTIME) if torch.version.cuda else ""


if __name__ == "__main__":
    print(preload())
