# SPDX-License-Identifier: Apache-2.0
"""Parts of ``bench_cutlass_fused_moe_mxfp4.py``."""
