# SPDX-License-Identifier: Apache-2.0
"""The topics, in the order in which pull requests are to be opened (``docs/development.md``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from . import edits
from .compose import TEXT, cxx_files, text_of


@dataclass(frozen=True)
class Topic:
    """One pull request: a branch with one commit. Its message is ``text/messages/NAME.txt``.

    Attributes:
        name: Of the branch, behind ``sm12x/``.
        after: The topic whose branch it starts from; empty: upstream's own.
        new: Files that upstream has not; their texts are at the same paths in ``text/``.
        cxx: From paths of C++ sources in the fork to paths in upstream's tree; their headers come along.
    """

    name: str
    after: str = ""
    new: Sequence[str] = ()
    cxx: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """The commit's, with figures still to be filled in."""
        return (TEXT / "messages" / f"{self.name}.txt").read_text(encoding="utf-8")

    @property
    def edits(self) -> list[edits.Edit]:
        """Changes of files of upstream's, or of topics in front of this one: ``text/edits/NAME.txt``."""
        file = TEXT / "edits" / f"{self.name}.txt"
        return edits.read(file.read_text(encoding="utf-8")) if file.is_file() else []

    @property
    def tests(self) -> list[str]:
        """Test files among :attr:`new`."""
        return [path for path in self.new if path.rpartition("/")[2].startswith("test_")]

    def files(self, moved: Mapping[str, str]) -> dict[str, str]:
        """Texts of the files that it adds, before they are formatted; ``moved`` as in :func:`cxx_files`."""
        return {**cxx_files(self.cxx, moved), **{path: text_of(path) for path in self.new}}


_MOE_GEMM = "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm"
_LAUNCHER = f"{_MOE_GEMM}/launchers/moe_gemm_sm120_mixed_input_launcher"
_BACKEND = "csrc/fused_moe/cutlass_backend"

_TOPICS = (
    Topic("architectures", new=("tests/jit/test_cuda_arch_list.py",)),
    Topic("cublas-headers", new=("tests/jit/test_headers_without_cublas.py",)),
    Topic("group-gemm-scales", new=("tests/gemm/test_group_gemm_fp8_short_groups.py",)),
    Topic("xqa-copies", new=("tests/attention/test_xqa_short_sequences.py",)),
    Topic(
        "lean-module",
        new=(
            "flashinfer/jit/sm12x/__init__.py",
            "flashinfer/jit/sm12x/common.py",
            "flashinfer/jit/sm12x/instances.py",
            "flashinfer/jit/sm12x/moe.py",
            "tests/moe/test_sm12x_moe_module.py",
            "tests/test_helpers/mx_formats.py",
            "tests/test_helpers/sm12x_moe.py",
        ),
        cxx={
            f"{_LAUNCHER}.cu": "csrc/sm12x/sm12x_launcher.cu",
            f"{_LAUNCHER}.h": "csrc/sm12x/sm12x_launcher.h",
            f"{_LAUNCHER}.inl": "csrc/sm12x/sm12x_launcher.inl",
            f"{_MOE_GEMM}/sm12x_arch_config.h": "csrc/sm12x/sm12x_arch_config.h",
            "csrc/sm12x_registry.cu": "csrc/sm12x/sm12x_registry.cu",
            "csrc/sm12x_binding_utils.h": "csrc/sm12x/sm12x_binding_utils.h",
            f"{_BACKEND}/flashinfer_sm12x_fused_moe_binding.cu": "csrc/sm12x/sm12x_moe_binding.cu",
            f"{_BACKEND}/sm12x_moe_instance.cu.jinja": "csrc/sm12x/sm12x_moe_instance.jinja",
        },
    ),
    Topic(
        "group-gemm",
        after="lean-module",
        new=(
            "benchmarks/bench_group_gemm_mxfp4_sm12x.py",
            "flashinfer/gemm/group_gemm_sm12x.py",
            "flashinfer/jit/sm12x/group_gemm.py",
            "flashinfer/jit/sm12x/heuristics.py",
            "tests/gemm/test_group_gemm_mxfp4_sm12x.py",
        ),
        cxx={
            "csrc/group_gemm_mxfp4_sm12x_binding.cu": "csrc/sm12x/sm12x_group_gemm_binding.cu",
            "csrc/gemm/sm12x_group_gemm_instance.cu.jinja": "csrc/sm12x/sm12x_group_gemm_instance.jinja",
            "include/flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh": "csrc/sm12x/sm12x_group_gemm.cuh",
        },
    ),
    Topic(
        "dense",
        after="group-gemm",
        new=(
            "flashinfer/gemm/gemm_sm12x_mx.py",
            "flashinfer/jit/sm12x/dense.py",
            "tests/gemm/test_gemm_sm12x_mx.py",
        ),
        cxx={
            "csrc/dense_mx_sm12x_binding.cu": "csrc/sm12x/sm12x_dense_binding.cu",
            "csrc/gemm/sm12x_dense_instance.cu.jinja": "csrc/sm12x/sm12x_dense_instance.jinja",
        },
    ),
    Topic(
        "moe",
        after="dense",
        new=(
            "flashinfer/fused_moe/sm12x_moe.py",
            "flashinfer/fused_moe/sm12x_moe_checks.py",
            "tests/moe/test_sm12x_fused_moe.py",
        ),
    ),
    Topic("streamed-layer", after="moe", new=("tests/moe/test_sm12x_streamed_moe.py",)),
)
TOPICS: dict[str, Topic] = {topic.name: topic for topic in _TOPICS}
