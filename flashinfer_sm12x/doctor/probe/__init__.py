# SPDX-License-Identifier: Apache-2.0
"""Measure a GPU: its memory, MMAs, launches and the order of its arrivals; the layers' results and times on it.

``python -m flashinfer sm12x-doctor --probe`` asks for one of :data:`PARTS` at a time, each in a process of its own.
On the virtual SM121 (``FLASHINFER_VIRTUAL_DEVICE=sm_121a``) the same kernels run and their results are the same;
nothing is timed there.
"""

PARTS = {
    "device": 1,
    "build": 10,
    "dram": 2,
    "mma": 2,
    "sums": 1,
    "launch": 1,
    "order": 2,
    "build-layers": 60,
    "tactics": 5,
    "layer": 5,
}
"""Functions of ``parts``, and the multiple of ``--timeout`` that each may take; those that compile take longest. The
order matters: a part may need modules that an earlier one built, or facts that it recorded."""

TOKENS = (1, 4, 64, 2048)
"""Numbers of tokens for which the layer is timed."""
