# SPDX-License-Identifier: Apache-2.0
"""The trace template of ``mm_bf16_fp4`` with MXFP4 weights: the template, its example, its test.

``tests/`` is in a checkout and not in the wheel (``tree.IN_WHEEL``). The example's JSON is what running it dumps, and
holds upstream's sources: it is made on a GPU and committed there (``docs/development.md``).
"""

from __future__ import annotations

from .compose import Text
from .edits import Edit, Place

_TEMPLATES = "flashinfer/trace/templates/gemm.py"
_DISPATCH = Place(_TEMPLATES, "mm_bf16_fp4_trace_dispatch", sha="19ed49f091aa")
_EXAMPLE = "tests/trace/example.py"
_CORRECTNESS = Place(
    "tests/trace/test_mm_bf16_fp4_reference_correctness.py",
    "test_mm_bf16_fp4_reference_correctness",
    sha="abd48ea422c2",
)

MM_BF16_FP4_TRACE = (
    Edit(_DISPATCH, "def mm_bf16_fp4_trace_dispatch(", Text("flashinfer/trace/mm_bf16_fp4_sm12x.py"), "before"),
    Edit(
        _DISPATCH,
        'b = kwargs.get("b")',
        """\
    if kwargs.get("backend") == "sm12x":
        return mm_bf16_fp4_sm12x_trace
""",
        "before",
    ),
    Edit(
        Place(_TEMPLATES, first="mm_bf16_fp4_trace_dispatch.templates = [", lines=7, sha="4a405854097d"),
        "mm_bf16_fp4_cudnn_trace,",
        "    mm_bf16_fp4_sm12x_trace,",
    ),
    Edit(
        Place(_EXAMPLE, first="mm_bf16_fp4_cute_dsl_N2048_K7168_block_size16.json", sha="88e8073770a5"),
        "mm_bf16_fp4_cute_dsl_N2048_K7168_block_size16.json",
        "mm_bf16_fp4_sm12x_N2880_K2880_block_size32.json",
    ),
    Edit(
        Place(_EXAMPLE, first="# ── GQA paged decode (Llama-3.1-8B", sha="6831c4094cf2"),
        "# ── GQA paged decode (Llama-3.1-8B",
        """\
try:
    M, K, N, BSW = 128, 2880, 2880, 32
    a_w4 = torch.zeros(M, K, dtype=torch.bfloat16, device=device)
    # sm12x layout: MXFP4 weight + 128x4 E8M0 scales, N and K padded.
    b_w4 = torch.zeros(N, K // 2, dtype=torch.uint8, device=device)
    sf_w4 = torch.full((2944, 92), 127, dtype=torch.uint8, device=device)
    flashinfer.mm_bf16_fp4(a_w4, b_w4, sf_w4, backend="sm12x", block_size=BSW)
except Exception:
    pass  # Requires SM120/SM121

""",
        "before",
    ),
    Edit(
        _CORRECTNESS,
        '@pytest.mark.parametrize("backend", ["cudnn", "cute-dsl"])',
        '@pytest.mark.parametrize("backend", ["cudnn", "cute-dsl", "sm12x"])',
        "replace",
    ),
    Edit(_CORRECTNESS, "mm_bf16_fp4_cute_dsl_trace,", "        mm_bf16_fp4_sm12x_trace,"),
    Edit(_CORRECTNESS, '"cute-dsl": mm_bf16_fp4_cute_dsl_trace,', '        "sm12x": mm_bf16_fp4_sm12x_trace,'),
)
