# SPDX-License-Identifier: Apache-2.0
"""What a GPU does: its memory, MMAs, launches and the order of its arrivals; the layers' results and times on it.

``python -m flashinfer sm12x-doctor --probe`` asks for one of :data:`.parts.PARTS` at a time, each in a process of its own.
On the virtual SM121 (``FLASHINFER_VIRTUAL_DEVICE=sm_121a``) the same kernels run and their results are the same; nothing is
timed there.
"""
