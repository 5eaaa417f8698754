"""Which row of the tables a problem gets by default."""

from __future__ import annotations

from collections.abc import Sequence

from .instances import GEMM_INSTANCES, Instance
