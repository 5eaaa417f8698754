# SPDX-License-Identifier: Apache-2.0
"""The topics, in the order in which pull requests are to be opened (``docs/development.md``)."""

from __future__ import annotations

from . import bugs, gemm, kernels, moe
from .topic import Topic

TOPICS: dict[str, Topic] = {
    topic.name: topic
    for topic in (
        bugs.ARCHITECTURES,
        bugs.CUBLAS_HEADERS,
        bugs.GROUP_GEMM_SCALES,
        bugs.XQA_COPIES,
        kernels.LEAN_MODULE,
        gemm.GROUP_GEMM,
        gemm.DENSE,
        moe.MOE,
        moe.STREAMED_LAYER,
    )
}
