# SPDX-License-Identifier: Apache-2.0
"""One rank of a tensor- or expert-parallel gpt-oss, in a process of its own; rank 0 saves the logits."""

from __future__ import annotations

import sys

import reference_attention
import served
import torch
from test_vllm_models import ON_THE_CPU, TOKENS
from vllm.model_executor.layers.attention import Attention

if __name__ == "__main__":
    rank, port, folder, target, *words = sys.argv[1:]
    Attention.forward = reference_attention.forward
    config = served.engine_config(folder, *ON_THE_CPU, *words)
    config.parallel_config.rank = int(rank)
    with served.parallel_groups(config, int(rank), int(port)):
        model = served.load_model(config)
        model.model.embedding.use_fused_embedding = False  # a CUDA kernel; the other way is PyTorch
        print(rank, served.kernels(model), tuple(model.model.layers[0].mlp.experts.routed_experts.w13_weight.shape))
        found = served.logits(config, model, TOKENS)
        if rank == "0":
            torch.save(found, target)
