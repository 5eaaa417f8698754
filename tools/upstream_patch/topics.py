# SPDX-License-Identifier: Apache-2.0
"""The topics, in the order in which pull requests are to be opened (``docs/development.md``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .compose import cxx_files, with_definitions
from .edits import Edit, read

TEXT = Path(__file__).parent / "text"


@dataclass(frozen=True)
class Topic:
    """One pull request: a branch with one commit, made from ``text/NAME`` and some of the fork's C++.

    ``message.txt`` is the commit's message. ``edits.txt`` changes files of upstream, of earlier topics, or of this one.
    Every other file of the folder is new, at its path in upstream's tree.

    Attributes:
        name: The branch's name after ``sm12x/``.
        after: The topic whose branch it starts from; empty: upstream's own.
        cxx: Path of a C++ source in the fork -> path in upstream's tree; their headers come along.
    """

    name: str
    after: str = ""
    cxx: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> str:
        """The commit's message."""
        return (TEXT / self.name / "message.txt").read_text(encoding="utf-8")

    @property
    def edits(self) -> list[Edit]:
        return read((TEXT / self.name / "edits.txt").read_text(encoding="utf-8"))

    @property
    def tests(self) -> list[str]:
        """Paths of its test files in upstream's tree."""
        folder = TEXT / self.name
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("test_*.py"))

    def files(self) -> dict[str, str]:
        """Texts of the files that it adds, before they are formatted."""
        folder = TEXT / self.name
        python = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
        return {**cxx_files(self.cxx, MOVED), **{path: with_definitions(text) for path, text in python.items()}}


_MOE_GEMM = "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm"
_LAUNCHER = f"{_MOE_GEMM}/launchers/moe_gemm_sm120_mixed_input_launcher"
_BACKEND = "csrc/fused_moe/cutlass_backend"

_TOPICS = (
    Topic("architectures"),
    Topic("cublas-headers"),
    Topic("group-gemm-scales"),
    Topic("xqa-copies"),
    Topic(
        "lean-module",
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
        cxx={
            "csrc/group_gemm_mxfp4_sm12x_binding.cu": "csrc/sm12x/sm12x_group_gemm_binding.cu",
            "csrc/gemm/sm12x_group_gemm_instance.cu.jinja": "csrc/sm12x/sm12x_group_gemm_instance.jinja",
            "include/flashinfer/gemm/group_gemm_mxfp4_groupwise_sm120.cuh": "csrc/sm12x/sm12x_group_gemm.cuh",
        },
    ),
    Topic(
        "dense",
        after="group-gemm",
        cxx={
            "csrc/dense_mx_sm12x_binding.cu": "csrc/sm12x/sm12x_dense_binding.cu",
            "csrc/gemm/sm12x_dense_instance.cu.jinja": "csrc/sm12x/sm12x_dense_instance.jinja",
        },
    ),
    Topic("moe", after="dense"),
    Topic("streamed-layer", after="moe"),
)
TOPICS: dict[str, Topic] = {topic.name: topic for topic in _TOPICS}
# The fork's C++ that lies elsewhere in upstream's tree, whichever topic brings it.
MOVED: dict[str, str] = {source: place for topic in _TOPICS for source, place in topic.cxx.items()}
