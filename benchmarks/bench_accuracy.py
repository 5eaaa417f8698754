# SPDX-License-Identifier: Apache-2.0
"""Accuracy lost and tokens/s gained by each format and mode, on a trained language model.

    python benchmarks/bench_accuracy.py                                  # SmolLM2-135M: 15 minutes of two cores at most
    python benchmarks/bench_accuracy.py --model ~/gpt-oss-20b            # a checkpoint's folder, or a GGUF file
    python benchmarks/bench_accuracy.py --text notes.txt --choices "spark;spark-mxfp8;qkv=mxfp8,o=mxfp8,lm_head=mxfp4"

The model reads text. For each choice its next token's distribution is compared with its own without quantization: the
mean of the KL divergence in nats and its 99th percentile, with 95 % bootstrap intervals over windows of text, how often
the most likely token stays the same, and the perplexity. The table adds the bytes that gpt-oss-120b reads per token and
its tokens/s on a GB10, as ``bench_token.py --predict`` gives them. All arithmetic is float32, so formats alone make the
difference. The operators' own quantizers quantize the weights. A model without experts has MLPs in their place; their
weights are not quantized, as gpt-oss's experts are not.

A KL holds for the model that it was measured on. Small models feel errors more than large ones: from the default model
the order and the ratios can be expected to carry over to gpt-oss, the figures cannot.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import tempfile
from pathlib import Path

import torch
from accuracy_bench import choices, experts, feedback, masks, results

from flashinfer_sm12x.files import replace_bytes
from flashinfer_sm12x.quantize import choice, formats, measure, models, texts
from flashinfer_sm12x.quantize.endings import in_a_line, running
from flashinfer_sm12x.quantize.files import read_text, require_writable

EXPERTS = (
    'Experts under "moe": "auto", a layer of random weights with gpt-oss-120b\'s experts and top-k: a decode step is '
    "exact, "
    "each chunk of a long prompt is rounded. Error of the outputs; times of gpt-oss-120b's own layer, predicted."
)
MASKED = (
    "Heads alone, with the choices that a mask leaves, as constrained decoding sets it: the KL of the distribution of "
    "these, and its first choice."
)
DRAFTS = "A rescored head as a draft's, with fewer rows: how often its first choice is the bf16 head's."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def parse(argv: list[str] | None) -> argparse.Namespace:
    def several(text: str) -> list[choice.Choice]:
        try:
            return list(dict.fromkeys(choices.parse(item) for item in text.split(";") if item.strip()))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    def positive(text: str) -> int:
        if not text.isdecimal() or int(text) < 1:
            raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
        return int(text)

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", type=Path, help="a checkpoint's folder or a GGUF file; default: SmolLM2-135M-Instruct"
    )
    parser.add_argument("--text", type=Path, help="a file to read; default: the texts that come with the benchmark")
    parser.add_argument(
        "--tokens", type=positive, default=6144, help="at most so many of the text (default: %(default)s)"
    )
    parser.add_argument("--window", type=positive, default=256, help="tokens in a row (default: %(default)s)")
    parser.add_argument(
        "--choices",
        type=several,
        help="with ; between: a preset, a format, pairs such as "
        '"qkv=mxfp8,o=mxfp8,lm_head=mxfp4,moe=mxfp4-a8,kv=fp8", or '
        "folder= and what sm12x-quantize made of the same model",
    )
    parser.add_argument(
        "--masks", action="store_true", help="also under masks over the vocabulary; without --choices it is always so"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of all but the experts (default: %(default)s)"
    )
    parser.add_argument("--name", default="accuracy", help="of the files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder of the files")
    arguments = parser.parse_args(argv)
    if not re.fullmatch(r"\w[\w.-]*", arguments.name):
        parser.error(f"--name is {arguments.name!r}; it must be a file's name without a path: --out is its folder")
    if arguments.window < 2:
        parser.error("--window: of one token none is predicted")
    return arguments


def report(subject: models.Subject, windows: list[list[int]], text: str, found: list[results.Result]) -> str:
    weights = [each for each in found if not each.choice.modes or each.published]
    modes = [each for each in found if each.choice.modes and not each.published]
    tokens = sum(len(window) - 1 for window in windows)
    output = [
        f"{subject.name}: {tokens:,} predicted tokens in {len(windows)} windows of {text}; in brackets 95 % intervals."
    ]
    if subject.note:
        output.append(f"The reference: {subject.note}.")
    if weights:
        output.append(results.table(weights, subject.name, results.frontier(weights)))
        output.append("Bold: the frontier. Nothing that is predicted faster loses less.")
    if modes:
        output.append(results.table(modes, subject.name))
    return "\n\n".join(output)


def main(argv: list[str] | None = None) -> int:
    return in_a_line("bench", lambda: run(parse(argv)))


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")
    models.require_device(arguments.device)
    read = texts.texts("evaluation") if arguments.text is None else [read_text(arguments.text)]
    require_writable(arguments.out, "--out")  # before the model is downloaded
    subject = models.load(arguments.model, DTYPES[arguments.dtype], arguments.device)
    windows = texts.windows(read, subject.encode, arguments.window, arguments.tokens)
    if not windows:
        print("bench: --text: there are fewer than 16 tokens in it", file=sys.stderr)
        return 2
    by_default = not arguments.choices
    wanted = arguments.choices or choices.default()
    if not formats.has_gguf():
        print(f"{choices.LLAMA_CPP_NAME} is left out: its quantizer is gguf's (pip install gguf)", file=sys.stderr)
    if subject.packed_experts:  # whose operator takes no tokens of llama.cpp's
        wanted = [dataclasses.replace(each, experts="bf16") if each.is_llama_cpp else each for each in wanted]
    bootstrap = measure.Bootstrap(windows)
    drafts: list[choice.Choice] = []
    with running(subject.name, "run"), tempfile.TemporaryDirectory() as scratch:
        if by_default:
            folders = [
                feedback.quantized_once(subject, each, Path(scratch, str(index)))
                for index, each in enumerate(choices.fed_back())
            ]
            drafts = [each for head in (choices.RESCORED_HEAD, folders[0]) for each in choices.of_drafts(head)]
            wanted += folders
        masked = [each for each in wanted if not each.modes and (each.body == choice.Choice() or not by_default)]
        of_masks = masks.masks(subject.encode) if by_default or arguments.masks else {}
        scores = measure.scores(subject, windows, list(dict.fromkeys([*wanted, *drafts])), of_masks, masked)
    found = [results.result(each, scores[each], bootstrap) for each in wanted]
    output = report(subject, windows, str(arguments.text or "the benchmark's texts"), found)
    if of_masks:
        output += f"\n\n{MASKED}\n\n{results.masked_table(scores, bootstrap, subject.name)}"
    if by_default:
        output += f"\n\n{DRAFTS}\n\n{results.drafts_table({each: scores[each] for each in drafts}, bootstrap)}"
        output += f"\n\n{EXPERTS}\n\n{experts.table()}"
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}.md"
    replace_bytes(path, (output + "\n").encode())
    print(f"\n{output}\n\nwrote {path}")
    picture = path.with_suffix(".svg")
    weights = [each for each in found if not each.choice.modes or each.published]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            results.draw(weights, subject.name, Path(scratch, picture.name))
            replace_bytes(picture, Path(scratch, picture.name).read_bytes())
        print(f"wrote {picture}")
    except ImportError as error:
        print(f"no picture: {error}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{path} is written, its picture is not") from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
