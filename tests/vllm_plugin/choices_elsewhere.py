# SPDX-License-Identifier: Apache-2.0
"""Run in a process of its own: vLLM's choices for a gpt-oss without the plugin, and after it was registered, as
JSON."""

from __future__ import annotations

import json
import sys
import time

import served


def choices(folder: str) -> dict[str, object]:
    words = ("--compilation-config", '{"mode": 0}')
    config = served.engine_config(folder, *words)
    with served.parallel_groups(config):
        model = served.built(config)
        return {
            **served.kernels(model),
            "lm_head class": type(model.lm_head).__qualname__,
            "quantization": type(config.quant_config).__qualname__,
            "graphs": config.compilation_config.cudagraph_capture_sizes,
            "additional": config.additional_config,
            "attention": model.model.layers[0].attn.attn.attn_backend.get_name(),
        }


if __name__ == "__main__":
    before = choices(sys.argv[1])
    began = time.process_time()
    import flashinfer_sm12x.vllm

    flashinfer_sm12x.vllm.register()
    seconds = time.process_time() - began
    imported = sorted(name for name in sys.modules if name.startswith("flashinfer_sm12x.vllm."))
    after = choices(sys.argv[1])
    print("RESULT", json.dumps({"before": before, "after": after, "imported": imported, "seconds": seconds}))
