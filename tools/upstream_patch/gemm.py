# SPDX-License-Identifier: Apache-2.0
"""Upstream's GEMMs with the kernels as a backend."""

from __future__ import annotations

from .benchmarks import DENSE_BENCHMARK
from .compose import New, Take, Text
from .edits import Edit, Place
from .kernels import in_aot, instances, text
from .topic import Topic
from .traces import MM_BF16_FP4_TRACE

_GEMM = "flashinfer/gemm/gemm_base.py"
_PLANNER = "flashinfer/fused_moe/sm12x_planner.py"

HEURISTICS = New(
    "flashinfer/jit/sm12x/heuristics.py",
    (
        Text("flashinfer/jit/sm12x/heuristics_header.py"),
        Take(_PLANNER, ("_END", "_SM12X_PAIRS", "expected_rows")),
        Text("flashinfer/jit/sm12x/heuristics_gemm.py"),
    ),
)

_GROUP = Place(_GEMM, "group_gemm_mxfp8_mxfp4_nt_groupwise", sha="800ea1b63bbd")
_GROUP_CHECK = Place(_GEMM, "_check_group_gemm_mxfp8_mxfp4_nt_groupwise_problem_size", sha="4dc563064591")
GROUP_GEMM = Topic(
    name="group-gemm",
    after="lean-module",
    message=Text("messages/group-gemm.txt"),
    edits=(
        *in_aot("gen_sm12x_group_gemm_module", "group_gemm"),
        Edit(
            _GROUP_CHECK,
            "out_dtype: Optional[torch.dtype] = None,",
            '    backend: Literal["cutlass", "sm12x"] = "cutlass",  # unused',
        ),
        Edit(
            _GROUP,
            "@backend_requirement(",
            """\
@supported_compute_capability([100, 103, 107, 110, 120, 121])
def _cutlass_group_gemm_mxfp8_mxfp4_requirement(
    a: torch.Tensor,  # unused
    b: torch.Tensor,  # unused
    a_scale: torch.Tensor,  # unused
    b_scale: torch.Tensor,  # unused
    m_indptr: torch.Tensor,  # unused
    mma_sm: int = 1,  # unused
    tile_m: int = 128,  # unused
    tile_n: int = 128,  # unused
    tile_k: int = 128,  # unused
    swap_ab: bool = True,  # unused
    out: Optional[torch.Tensor] = None,  # unused
    out_dtype: Optional[torch.dtype] = None,  # unused
    backend: Literal["cutlass", "sm12x"] = "cutlass",  # unused
):
    return True


@supported_compute_capability([120, 121])
def _sm12x_group_gemm_mxfp8_mxfp4_requirement(
    a: torch.Tensor,
    b: torch.Tensor,
    a_scale: torch.Tensor,
    b_scale: torch.Tensor,
    m_indptr: torch.Tensor,
    mma_sm: int = 1,  # unused
    tile_m: int = 128,  # unused
    tile_n: int = 128,  # unused
    tile_k: int = 128,  # unused
    swap_ab: bool = True,  # unused
    out: Optional[torch.Tensor] = None,
    out_dtype: Optional[torch.dtype] = None,  # unused
    backend: Literal["cutlass", "sm12x"] = "cutlass",  # unused
):
    return check_group_gemm_mxfp4_sm12x(a, b, a_scale, b_scale, m_indptr, out)


""",
            "before",
        ),
        Edit(
            _GROUP,
            "{},",
            """\
    {
        "cutlass": _cutlass_group_gemm_mxfp8_mxfp4_requirement,
        "sm12x": _sm12x_group_gemm_mxfp8_mxfp4_requirement,
    },
""",
            "replace",
        ),
        Edit(
            _GROUP,
            "out_dtype: Optional[torch.dtype] = None,",
            '    backend: Literal["cutlass", "sm12x"] = "cutlass",',
        ),
        Edit(
            _GROUP,
            "The data type of the output tensor, must be ``torch.bfloat16`` or ``torch.float16``.",
            """\

    backend: Literal["cutlass", "sm12x"]
        Backend to use, defaults to ``"cutlass"``. ``"sm12x"`` (SM120/SM121) keeps the
        weights packed in shared memory, chooses its tile by the number of rows and
        groups (``tile_n`` and ``swap_ab`` are ignored), and takes groups of any size,
        not only multiples of 4.
""",
        ),
        Edit(
            _GROUP,
            "int_workspace_buffer = _get_cache_buf(",
            """\
    if backend == "sm12x":
        if out is None:
            out = torch.empty(
                (a.shape[0], b.shape[1]),
                dtype=out_dtype or torch.bfloat16,
                device=a.device,
            )
        return group_gemm_mxfp4_sm12x(a, b, a_scale, b_scale, m_indptr, out)

""",
            "before",
        ),
        Edit(
            Place(_GEMM),
            "from .routergemm import get_tinygemm2_module",
            "from .group_gemm_sm12x import (\n    check_group_gemm_mxfp4_sm12x,\n    group_gemm_mxfp4_sm12x,\n)",
        ),
    ),
    cxx={
        "csrc/group_gemm_mxfp4_sm12x_binding.cu": "csrc/sm12x/sm12x_group_gemm_binding.cu",
        "csrc/gemm/sm12x_group_gemm_instance.cu.jinja": "csrc/sm12x/sm12x_group_gemm_instance.jinja",
        "include/flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh": "csrc/sm12x/sm12x_group_gemm.cuh",
    },
    new=(
        text("flashinfer/jit/sm12x/group_gemm.py"),
        instances(gemm=True),
        HEURISTICS,
        text("flashinfer/gemm/group_gemm_sm12x.py"),
        text("tests/gemm/test_group_gemm_mxfp4_sm12x.py"),
        text("benchmarks/bench_group_gemm_mxfp4_sm12x.py"),
    ),
)

_DENSE_IMPORT = """\
from .gemm_sm12x_mx import (
    MXFP4_SWIZZLED,
    MXFP8_SWIZZLED,
    Sm12xDenseRunner,
    check_dense,
    check_scales,
    contiguous_scales,
)
"""
_MM_FP4 = Place(_GEMM, "mm_fp4", sha="d94c22396346")
_MM_MXFP8 = Place(_GEMM, "mm_mxfp8", sha="27f54639805a")
_BF16 = "flashinfer/gemm/gemm_bf16_fp4.py"
_MM_BF16 = Place(_BF16, "mm_bf16_fp4", sha="c8d034ddd8ef")
_PREPARE_BF16 = Place(_BF16, "prepare_bf16_fp4_weights", sha="5d39705242e8")
_BLOCK_SIZE = "block_size: SF block size.  Always 16 for FP4."
_BLOCK_SIZES = '        block_size: SF block size.  32 for ``"sm12x"`` (MXFP4), else 16.'
_CHECK_BF16 = Place(_BF16, "_check_mm_bf16_fp4_problem_size", sha="d17ca7d8feec")

DENSE = Topic(
    name="dense",
    after="group-gemm",
    message=Text("messages/dense.txt"),
    edits=(
        *in_aot("gen_sm12x_dense_module", "dense"),
        Edit(Place(_GEMM), "from .routergemm import get_tinygemm2_module", _DENSE_IMPORT, "before"),
        Edit(
            _MM_FP4,
            "@backend_requirement(",
            """\
@supported_compute_capability([120, 121])
def _sm12x_gemm_fp4_requirement(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,  # unused
    out_dtype: torch.dtype = torch.bfloat16,  # unused
    out: Optional[torch.Tensor] = None,
    block_size: int = 16,  # unused
    use_8x4_sf_layout: bool = False,
    backend: Literal["sm12x", "auto"] = "auto",
    use_nvfp4: bool = True,
    enable_pdl: bool = True,  # unused
):
    # Never auto-selected: the heuristics have no measurement of it on these GPUs.
    if backend != "sm12x":
        return False
    if use_nvfp4:
        raise ValueError("sm12x FP4 GEMM takes MXFP4 operands (use_nvfp4=False).")
    if use_8x4_sf_layout:
        raise ValueError("sm12x FP4 GEMM only supports 128x4 scale factor layout.")
    k = a.shape[1] * 2
    check_dense(a, b.t(), out, k)
    check_scales("a_descale", contiguous_scales(a_descale), a.shape[0], k)
    check_scales("b_descale", contiguous_scales(b_descale), b.shape[1], k)
    return True


""",
            "before",
        ),
        Edit(_MM_FP4, '"b12x": _b12x_gemm_fp4_requirement,', '        "sm12x": _sm12x_gemm_fp4_requirement,'),
        Edit(_MM_FP4, '"cake",', '        "sm12x",', "before"),
        Edit(
            _MM_FP4,
            "128 rows. Packed inputs and output retain their logical dimensions.",
            """\
        The ``"sm12x"`` backend (SM120/SM121, never auto-selected) takes MXFP4
        operands with 128x4 scale factors, ``b`` the column-major view of a
        contiguous ``(n, k)`` weight, and K divisible by 32.
""",
        ),
        Edit(
            _MM_FP4,
            '"b12x": lambda: _b12x_gemm_fp4_runner(',
            '        "sm12x": lambda: Sm12xDenseRunner(MXFP4_SWIZZLED, enable_pdl),',
            "before",
        ),
        Edit(
            _MM_MXFP8,
            "@backend_requirement(",
            """\
@supported_compute_capability([120, 121])
def _sm12x_gemm_mxfp8_requirement(
    a: torch.Tensor,
    b: torch.Tensor,
    a_descale: torch.Tensor,
    b_descale: torch.Tensor,
    out: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,  # unused
    use_8x4_sf_layout: bool = False,
    backend: Literal["sm12x", "auto"] = "auto",
):
    # Never auto-selected: the heuristics have no measurement of it on these GPUs.
    if backend != "sm12x":
        return False
    if use_8x4_sf_layout or a_descale.ndim != 1 or b_descale.ndim != 1:
        raise ValueError("sm12x MXFP8 GEMM only supports 1D swizzled 128x4 scales.")
    check_dense(a, b.t(), out, a.shape[1])
    check_scales("a_descale", a_descale, a.shape[0], a.shape[1])
    check_scales("b_descale", b_descale, b.shape[1], a.shape[1])
    return True


""",
            "before",
        ),
        Edit(_MM_MXFP8, '"b12x": _b12x_gemm_mxfp8_requirement,', '        "sm12x": _sm12x_gemm_mxfp8_requirement,'),
        Edit(
            _MM_MXFP8,
            '"cutlass", "cute-dsl", "cutedsl_low_latency", "trtllm", "cudnn", "b12x", "auto"',
            """\
        "cutlass",
        "cute-dsl",
        "cutedsl_low_latency",
        "trtllm",
        "cudnn",
        "b12x",
        "sm12x",
        "auto",
""",
            "replace",
        ),
        Edit(
            _MM_MXFP8,
            "layout (``use_8x4_sf_layout=False``) and is supported on SM100/103/110/120/121.",
            """\
        - The ``"sm12x"`` backend (SM120/SM121, never auto-selected) requires 1D
          swizzled 128x4 scales and K divisible by 32.
""",
        ),
        Edit(
            _MM_MXFP8,
            '"b12x": lambda: _b12x_gemm_mxfp8_runner(',
            '        "sm12x": lambda: Sm12xDenseRunner(MXFP8_SWIZZLED),',
            "before",
        ),
        Edit(Place(_BF16), '"blackwell-tiled",', '    "sm12x",'),
        Edit(
            _CHECK_BF16,
            "if block_size != 16:",
            """\
    if backend == "sm12x":
        if block_size != 32:
            raise ValueError(
                f"block_size must be 32 (MXFP4) for sm12x; got {block_size}"
            )
    elif block_size != 16:
""",
            "replace",
        ),
        Edit(
            _PREPARE_BF16,
            'if backend == "cute-dsl-native":',
            """\
    if backend == "sm12x":
        if block_size != 32:
            raise ValueError(
                f"block_size must be 32 (MXFP4) for sm12x; got {block_size}"
            )
        return b, b_descale, alpha
""",
            "before",
        ),
        Edit(
            _PREPARE_BF16,
            "backend returns the original canonical buffers without preparation.",
            """\
            So does ``"sm12x"``, which takes MXFP4 weights (``mxfp4_quantize``,
            ``block_size=32``) on SM120/121.
""",
        ),
        Edit(_PREPARE_BF16, _BLOCK_SIZE, _BLOCK_SIZES, "replace"),
        Edit(_MM_BF16, _BLOCK_SIZE, _BLOCK_SIZES, "replace"),
        Edit(
            _MM_BF16,
            "scales directly on SM120/121.",
            """\
            ``sm12x`` accepts MXFP4 weights on SM120/121 as ``mxfp4_quantize`` returns
            them, with ``block_size=32``.
""",
        ),
        Edit(
            _MM_BF16,
            "@backend_requirement(",
            """\
@supported_compute_capability([120, 121])
def _sm12x_bf16_fp4_requirement(
    a: torch.Tensor,
    b: torch.Tensor,
    b_descale: torch.Tensor,
    alpha: Optional[torch.Tensor] = None,  # unused
    *,
    backend: _Bf16Fp4Backend,  # unused
    out_dtype: Optional[torch.dtype] = None,  # unused
    out: Optional[torch.Tensor] = None,
    block_size: int = 16,  # unused
    enable_pdl: bool = True,  # unused
):
    if b.dim() != 2 or b.dtype != torch.uint8 or b.shape[1] * 2 != a.shape[1]:
        raise ValueError(
            f"sm12x expects the uint8 (N, K/2) weight with K={int(a.shape[1])}; "
            f"got {b.dtype} {tuple(b.shape)}"
        )
    check_dense(a, b, out, int(a.shape[1]))
    check_scales("b_descale", contiguous_scales(b_descale), b.shape[0], a.shape[1])
    return True


""",
            "before",
        ),
        Edit(
            _MM_BF16,
            '"blackwell-tiled": _blackwell_tiled_bf16_fp4_requirement,',
            '        "sm12x": _sm12x_bf16_fp4_requirement,',
        ),
        Edit(
            _MM_BF16,
            'if backend == "cute-dsl-native":',
            """\
    if backend == "sm12x":
        if out is None:
            out = torch.empty(
                (a.shape[0], b.shape[0]), dtype=out_dtype, device=a.device
            )
        scales = contiguous_scales(b_descale)
        return run_dense(out, a, None, b, scales, alpha, BF16, enable_pdl)
""",
            "before",
        ),
        Edit(
            Place(_BF16),
            "if CUDNN_AVAILABLE:",
            """\
from .gemm_sm12x_mx import (
    BF16,
    check_dense,
    check_scales,
    contiguous_scales,
    run_dense,
)

""",
            "before",
        ),
        *MM_BF16_FP4_TRACE,
        *DENSE_BENCHMARK,
    ),
    cxx={
        "csrc/dense_mx_sm12x_binding.cu": "csrc/sm12x/sm12x_dense_binding.cu",
        "csrc/gemm/sm12x_dense_instance.cu.jinja": "csrc/sm12x/sm12x_dense_instance.jinja",
    },
    new=(
        text("flashinfer/jit/sm12x/dense.py"),
        instances(gemm=True, dense=True),
        text("flashinfer/gemm/gemm_sm12x_mx.py"),
        text("tests/gemm/test_gemm_sm12x_mx.py"),
    ),
)
