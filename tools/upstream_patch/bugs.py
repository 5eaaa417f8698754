# SPDX-License-Identifier: Apache-2.0
"""Topics without a kernel of this fork: the list of architectures, and upstream's plain bugs with their reproducers."""

from __future__ import annotations

from .compose import New, Take, Text
from .edits import Edit, Place
from .topic import Topic

_CONTEXT = "flashinfer/compilation_context.py"
_FORK_CONTEXT = "flashinfer/compilation_context.py"

ARCHITECTURES = Topic(
    name="architectures",
    message=Text("messages/architectures.txt"),
    edits=(
        Edit(Place(_CONTEXT), "import os", "import re"),
        Edit(
            Place(_CONTEXT, "CompilationContext.__init__", sha="fb87e1c1055c"),
            'for arch in os.environ["FLASHINFER_CUDA_ARCH_LIST"].split(" "):',
            """\
            for major, minor, suffix in split_arch_list(os.environ[ARCH_LIST_VARIABLE]):
                # If the user already provided a suffix (e.g. "12.0f"),
                # respect it as-is; otherwise normalise.
                if suffix:
                    self.TARGET_CUDA_ARCHS.add((major, minor + suffix))
                else:
                    self.TARGET_CUDA_ARCHS.add(
                        self._normalize_cuda_arch(major, int(minor))
                    )
""",
            "replace",
            through=")",
        ),
        Edit(
            Place(_CONTEXT, "CompilationContext"),
            "class CompilationContext:",
            Take(_FORK_CONTEXT, ("ARCH_LIST_VARIABLE", "_ENTRY", "_EXAMPLE", "split_arch_list", "_split_entry")),
            "before",
        ),
        Edit(
            Place("docs/installation.rst", first="   Build ``flashinfer-jit-cache`` (customize", sha="cb9aecae50a7"),
            "Build ``flashinfer-jit-cache`` (customize",
            "   Build ``flashinfer-jit-cache`` (customize ``FLASHINFER_CUDA_ARCH_LIST`` for your target GPUs;\n"
            "   spaces or semicolons separate its entries):",
            "replace",
        ),
    ),
    new=(New("tests/jit/test_cuda_arch_list.py", (Text("tests/jit/test_cuda_arch_list.py"),)),),
)

_CUDA_UTILS = "csrc/nv_internal/include/tensorrt_llm/common/cudaUtils.h"
_TRTLLM_CUDA_UTILS = "include/flashinfer/trtllm/common/cudaUtils.h"
_GUARDED_INCLUDES = """\
#include <cuda_fp16.h>

// Only the names of cuBLAS's errors are used here, and toolkits from PyPI come without
// its headers.
#if __has_include(<cublas_v2.h>)
#define TLLM_HAS_CUBLAS 1
#include <cublasLt.h>
#include <cublas_v2.h>
#else
#define TLLM_HAS_CUBLAS 0
#endif
"""

CUBLAS_HEADERS = Topic(
    name="cublas-headers",
    message=Text("messages/cublas-headers.txt"),
    edits=(
        Edit(
            Place(_CUDA_UTILS, first="#include <cublasLt.h>", lines=2, sha="9d276a283611"),
            "#include <cublasLt.h>",
            _GUARDED_INCLUDES,
            "replace",
            through="#include <cublas_v2.h>",
        ),
        Edit(Place(_CUDA_UTILS), "#include <cinttypes>", "#include <cmath>"),
        Edit(
            Place(
                _CUDA_UTILS, first="static char const* _cudaGetErrorEnum(cublasStatus_t", lines=34, sha="f30e94c48347"
            ),
            "static char const* _cudaGetErrorEnum(cublasStatus_t",
            "#if TLLM_HAS_CUBLAS\n",
            "before",
        ),
        Edit(
            Place(
                _CUDA_UTILS, first="static char const* _cudaGetErrorEnum(cublasStatus_t", lines=34, sha="f30e94c48347"
            ),
            'return "<unknown>";',
            '  return "<unknown>";\n}\n#endif  // TLLM_HAS_CUBLAS\n',
            "replace",
            through="}",
        ),
        Edit(
            Place(_TRTLLM_CUDA_UTILS, first="#include <cublasLt.h>", lines=2, sha="9d276a283611"),
            "#include <cublasLt.h>",
            "#include <cuda_fp16.h>",
            "replace",
            through="#include <cublas_v2.h>",
        ),
    ),
    new=(New("tests/jit/test_headers_without_cublas.py", (Text("tests/jit/test_headers_without_cublas.py"),)),),
)

_XQA = "csrc/xqa/mha.cu"

XQA_COPIES = Topic(
    name="xqa-copies",
    message=Text("messages/xqa-copies.txt"),
    edits=(
        Edit(
            Place(
                _XQA,
                first="      smem.warpRowSum[warpIdx.y][warpIdx.x].storeFromReg<false>(warp, regRowSum);",
                lines=5,
                sha="b5d6cf4daf91",
            ),
            "} else {",
            """\
    // Tiles of K beyond the sequence were fetched too, as zeros. The output is staged where they
    // land.
    ldgsts::waitGroup<0>();
""",
            "before",
        ),
        Edit(
            Place(_XQA, first="    auto const fullRescaleMask = UniformRescaleMask::filled(~0U);", sha="315bbb5d9561"),
            "auto const fullRescaleMask",
            """\
    // As behind gemm0's loop, of V.
    ldgsts::waitGroup<0>();

""",
            "before",
        ),
    ),
    new=(New("tests/attention/test_xqa_short_sequences.py", (Text("tests/attention/test_xqa_short_sequences.py"),)),),
)


_FP8_GROUPS = "include/flashinfer/gemm/group_gemm_fp8_groupwise_sm120.cuh"

GROUP_GEMM_SCALES = Topic(
    name="group-gemm-scales",
    message=Text("messages/group-gemm-scales.txt"),
    edits=(
        Edit(
            Place(
                _FP8_GROUPS,
                first="    layout_SFA[i] = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(max_m, n, k, 1));",
                sha="4b17dd66b6a0",
            ),
            "layout_SFA[i] = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(max_m, n, k, 1));",
            """\
    // Strides of the whole tensor, but this group's rows only: counted from its first row, max_m
    // rows would end behind the tensor.
    auto const all_rows = ScaleConfig::tile_atom_to_shape_SFA(cute::make_shape(max_m, n, k, 1));
    auto const rows = cute::make_shape(cute::get<0, 0>(all_rows.shape()),
                                       cute::ceil_div(m, scale_granularity_m));
    layout_SFA[i] = cute::make_layout(
        cute::make_shape(rows, cute::get<1>(all_rows.shape()), cute::get<2>(all_rows.shape())),
        all_rows.stride());
""",
            "replace",
        ),
    ),
    new=(
        New(
            "tests/gemm/test_group_gemm_fp8_short_groups.py", (Text("tests/gemm/test_group_gemm_fp8_short_groups.py"),)
        ),
    ),
)
