"""Tables of the compiled kernels.

One CUDA source is rendered per row, and heuristics and autotuner choose among the
rows. A row fixes everything that is fixed at compile time. Its name is what cache
files of the autotuner hold; interfaces that take an integer (``profile_ids``) take
its number, which says the same in digits. Its place in ``INSTANCES``, by which the
compiled module knows it, may differ between versions.

``stages`` and ``shared_bytes`` repeat what the C++ templates compute; the rendered
sources assert at compile time that they agree.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal, NamedTuple

# take flashinfer/sm12x/instances.py: MAX_EXPERTS FUSED_MOE_ROUTED_ROWS Format Layer ElementFormat FORMATS _COMPUTE
# take flashinfer/sm12x/instances.py: MOE_WEIGHTS Instance
# take flashinfer/sm12x/instances.py: _BF16 _MXFP8_M8 TWO_KERNEL NVFP4_TWO_KERNEL
INSTANCES: tuple[Instance, ...] = (*TWO_KERNEL, *NVFP4_TWO_KERNEL)
_INDICES = {row.name: place for place, row in enumerate(INSTANCES)}
# take flashinfer/sm12x/instances.py: _NAMES tactic index_of
