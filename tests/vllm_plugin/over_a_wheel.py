# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own, with vLLM's own loading of plugins: what vLLM makes of a gpt-oss and finds in
FlashInfer."""

from __future__ import annotations

import json
import logging
import sys

import served

if __name__ == "__main__":
    logged: list[str] = []
    logging.getLogger("vllm.flashinfer_sm12x").addFilter(lambda record: logged.append(record.getMessage()) or True)
    config = served.engine_config(sys.argv[1], "--compilation-config", '{"mode": 0}')
    with served.parallel_groups(config):
        model = served.built(config)
        from vllm.utils import flashinfer as seen

        import flashinfer
        import flashinfer_sm12x.vllm

        found = {
            "outcome": flashinfer_sm12x.vllm.outcome,
            "log": logged,
            "flashinfer": [flashinfer.__file__, hasattr(flashinfer, "__fork_version__")],
            "kernels": served.kernels(model),
            "class": type(model).__name__,
            "head": type(model.lm_head).__name__,
            "quantization": type(config.quant_config).__name__,
            "attention": model.model.layers[0].attn.attn.attn_backend.get_name(),
            "asked": [seen.has_flashinfer(), seen.has_flashinfer_moe(), seen.has_flashinfer_cutlass_fused_moe()],
        }
    print("RESULT", json.dumps(found))
