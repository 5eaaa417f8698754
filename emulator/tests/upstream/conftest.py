# SPDX-License-Identifier: Apache-2.0
from upstream_programs import compile_upstream, run_checked, wheel

__all__ = ["compile_upstream", "run_checked", "wheel"]
