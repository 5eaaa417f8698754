#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""transformers' gpt-oss with its experts on ``flashinfer.fused_moe.cutlass_fused_moe``, weights left in MXFP4.

    examples/transformers_gpt_oss.py openai/gpt-oss-20b "The streets of"
    scripts/random_checkpoint.py /tmp/small --layers 1 && examples/transformers_gpt_oss.py /tmp/small "t5 t7"

``flashinfer_sm12x/quantize/gpt_oss.py`` has the experts: how a checkpoint's weights are laid out, and the call. Runs on
the GPU, or on the CPU where there is none. Needs transformers, safetensors and this fork; on Hopper set
FLASHINFER_SM12X_MOE=1.
"""

from __future__ import annotations

import argparse
import sys

import torch

from flashinfer_sm12x.quantize import models
from flashinfer_sm12x.quantize.endings import in_a_line, running


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def main() -> int:
    return in_a_line("transformers_gpt_oss", lambda: write(parse()))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name on the Hugging Face hub")
    parser.add_argument("prompt")
    parser.add_argument("--activations", choices=("a8", "a16"), default="a8")
    parser.add_argument("--tokens", type=positive, default=32)
    return parser.parse_args()


def write(given: argparse.Namespace) -> int:
    models.need("transformers", "safetensors")
    from flashinfer_sm12x.quantize.gpt_oss import load

    folder = models.fetched(given.model)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tokenizer = models.tokenizer(folder)
    with running(str(folder), "opened"):
        model = load(folder, given.activations, device)
    with running(str(folder), "run"):
        tokens = tokenizer(given.prompt, return_tensors="pt").to(device)
        answer = model.generate(
            input_ids=tokens["input_ids"],
            attention_mask=tokens["attention_mask"],
            max_new_tokens=given.tokens,
            do_sample=False,
        )
    print(tokenizer.decode(answer[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
