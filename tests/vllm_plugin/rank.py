# SPDX-License-Identifier: Apache-2.0
"""One rank of a tensor- or expert-parallel gpt-oss, in a process of its own. Rank 0 saves logits: of a prefill, or of
decode steps, the executor's and then those of vLLM's layers."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # documents

import paged
import reference_attention
import served
import torch
from test_vllm_decode import answers
from test_vllm_models import ON_THE_CPU, TOKENS
from vllm.model_executor.layers.attention import Attention

if __name__ == "__main__":
    kind, rank, port, folder, target, *words = sys.argv[1:]
    decodes = kind == "decode"
    if decodes:
        words += ["--attention-backend", "FLASHINFER"]
    Attention.forward = paged.forward if decodes else reference_attention.forward
    config = served.engine_config(folder, *ON_THE_CPU, *words)
    config.parallel_config.rank = int(rank)
    with served.parallel_groups(config, int(rank), int(port)):
        model = served.load_model(config)
        model.model.embedding.use_fused_embedding = False  # a CUDA kernel; the other way is PyTorch
        print(rank, served.kernels(model), tuple(model.model.layers[0].mlp.experts.routed_experts.w13_weight.shape))
        if decodes:
            steps = paged.Paged(config, model)
            executors, batches = answers(steps)
            assert not any(batch.stock for batch in batches)
            model.decode_steps = None
            vllms, batches = answers(steps)
            assert all(batch.stock for batch in batches)
            found = executors, vllms
        else:
            found = served.logits(config, model, TOKENS)
        if rank == "0":
            torch.save(found, target)
