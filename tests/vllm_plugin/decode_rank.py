# SPDX-License-Identifier: Apache-2.0
"""One rank of a parallel gpt-oss, as ``rank.py``: prefill and decode steps of the executor, then the same of vLLM's layers."""

from __future__ import annotations

import sys

import paged
import served
import torch
from test_vllm_decode import ON_THE_CPU, answers
from vllm.model_executor.layers.attention import Attention

if __name__ == "__main__":
    rank, port, folder, target, *words = sys.argv[1:]
    Attention.forward = paged.forward
    config = served.engine_config(folder, *ON_THE_CPU, "--attention-backend", "FLASHINFER", *words)
    config.parallel_config.rank = int(rank)
    with served.parallel_groups(config, int(rank), int(port)):
        model = served.load_model(config)
        model.model.embedding.use_fused_embedding = False  # a CUDA kernel; the other way is PyTorch
        steps = paged.Paged(config, model)
        found, batches = answers(steps)
        assert not any(batch.stock for batch in batches)
        model.decode_steps = None
        vllms, batches = answers(steps)
        assert all(batch.stock for batch in batches)
        if rank == "0":
            torch.save((found, vllms), target)
