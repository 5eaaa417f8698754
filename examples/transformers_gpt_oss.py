#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""transformers' gpt-oss with its experts on ``flashinfer.fused_moe.cutlass_fused_moe``, weights left in MXFP4.

    examples/transformers_gpt_oss.py openai/gpt-oss-20b "The streets of"
    scripts/random_checkpoint.py /tmp/small --layers 1 && examples/transformers_gpt_oss.py /tmp/small "t5 t7"

``flashinfer_sm12x_quantize/gpt_oss.py`` has the experts: how a checkpoint's weights are laid out, and the call. Runs on
the GPU, or on the CPU where there is none. Needs transformers, safetensors and this fork; on Hopper set
FLASHINFER_SM12X_MOE=1.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from flashinfer_sm12x_quantize.gpt_oss import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("prompt")
    parser.add_argument("--activations", choices=("a8", "a16"), default="a8")
    parser.add_argument("--tokens", type=int, default=32)
    given = parser.parse_args()
    folder = Path(given.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(given.model, allow_patterns=["*.json", "*.jinja", "model*.safetensors"]))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(folder, given.activations, device)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(given.prompt, return_tensors="pt").to(device)
    answer = model.generate(
        input_ids=tokens["input_ids"],
        attention_mask=tokens["attention_mask"],
        max_new_tokens=given.tokens,
        do_sample=False,
    )
    print(tokenizer.decode(answer[0]))


if __name__ == "__main__":
    main()
