# SPDX-License-Identifier: Apache-2.0
"""Fused MoE operators: upstream's, with ``cutlass_fused_moe`` for MXFP4 weights on SM12x and on the CPU.

=====================  =============================================================================
``core``               upstream's functions; where a call goes
``sm12x_validation``   what a call may look like
``sm12x_operator``     a call, from a function or a layer object; the operator that ``torch.compile`` sees
``sm12x_launch``       a launch: module, workspace, the planner's tactics
``sm12x_planner``      default tactics, and why; pairs of tactics, ``profile_ids``
``sm12x_autotuner``    tactics that upstream's autotuner has timed
``sm12x_cpu``          the layer on CPU tensors
``sm12x_router``       which experts a token goes to: norm, logits, top-k
=====================  =============================================================================

:mod:`flashinfer.sm12x` has the code that it shares with the other operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashinfer._layer import extend

_upstream = extend(globals())

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...


from .core import moe_step as moe_step
from .sm12x_operator import SM12xMoELayer as SM12xMoELayer
from .sm12x_router import router_logits as router_logits
from .sm12x_router import router_top_k as router_top_k
