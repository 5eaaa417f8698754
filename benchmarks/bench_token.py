# SPDX-License-Identifier: Apache-2.0
"""A whole decode step, or a whole prefill, of gpt-oss: where its time goes, kernel by kernel.

    python benchmarks/bench_token.py                          # without a GPU: the predicted GB10 token
    python benchmarks/bench_token.py --report spark.json      # beside what sm12x-doctor --probe found on a GB10
    python benchmarks/bench_token.py --models gpt-oss-20b --decode 1x1024,4x1024 --prefill 2048
    python benchmarks/bench_token.py --predict --draft eagle3 --drafted 0,1,2 --accepted 0.61  # when drafting pays on a
    GB10 python benchmarks/bench_token.py --hindcast               # without a GPU: others' figures, predicted by the
    same model python -m flashinfer sm12x-build --vllm bf16              # compile what they need
    python benchmarks/bench_token.py --check                  # small models: all stacks agree with torch
    python benchmarks/bench_token.py --render token.json      # tables and picture of an earlier run, no GPU needed

The model has gpt-oss' sizes, random weights and all layers, each with its own weights (a step reads gigabytes, L2 holds
megabytes), and a step is one CUDA graph: embedding, norms, QKV, rope, KV write, attention with sinks, O, router, top-k,
MoE, LM head and argmax. Stacks: ``vllm``, vLLM's own operators, with its Marlin experts and bf16 dense layers;
``fork``, this fork's experts and its dense layers in the formats of --dense, with vLLM's operators for the rest where
vLLM is installed and torch's where it is not. Each row of a table names who computed it; a stack that cannot be built
is told with the reason.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import emulate
import timing
import torch
from peers import load_marlin
from perfmodel.drafts import DRAFTS
from perfmodel.step import (
    DENSE_FORMATS,
    KV_BYTES,
    LAYER_MODEL,
    TOKENS_BESIDE,
    Predicted,
    Step,
    assumptions,
    formats_of,
    from_report,
)
from timing import allow, file, machine, names, numbers, reason, report_of
from token_bench import check, hindcast, measure, operators, picture, predict, results
from token_bench.model import Model, fork_experts, marlin_experts

from flashinfer.sm12x.models import MODELS
from flashinfer.sm12x.models import Model as Size
from flashinfer.testing.virtual_device import in_own_process
from flashinfer_sm12x.doctor.probe.target import find_target
from flashinfer_sm12x.doctor.probe.timing import sustained_read
from flashinfer_sm12x.files import written_whole

ATTENTION = ("xqa", "triton", "fa3", "torch")
DECODE = [(1, context) for context in (128, 1024, 8192, 32_768, 131_072)] + [(n, 1024) for n in (4, 16, 64)]
READ_BYTES = 1 << 30


def streaming_read() -> float | None:
    """GB/s of a plain streaming read, the floor's rate; None, and why, where it cannot be measured."""
    try:
        return sustained_read(find_target(), READ_BYTES)
    except Exception as error:  # the steps are measured all the same
        print(f"no floor: {reason(error)}", flush=True)
        return None


def attention_of(name: str, size: Size) -> Any:
    """An attention by its name in --attention."""
    if name == "triton":
        return operators.TritonAttention(size.heads, size.kv_heads, size.head)
    return {"xqa": operators.XqaAttention, "fa3": operators.Fa3Attention, "torch": operators.TorchAttention}[name]()


class Unavailable:
    """In place of an attention that is not there: says so when a step needs it."""

    def __init__(self, name: str, why: str) -> None:
        self.by, self._why = name, why

    def __call__(self, *_: Any) -> torch.Tensor:
        raise RuntimeError(f"{self.by} attention: {self._why}")


def equip(model: Model, arguments: argparse.Namespace, stack: str) -> None:
    """Give a model the small operators and attentions of a stack."""
    try:
        model.operators = operators.VllmOperators(arguments.vllm)
    except Exception as error:
        if stack == "vllm":
            raise
        print(f"fork: norms, rope, KV write and top-k by torch: {reason(error)}", flush=True)
    for slot, name in (("attention", arguments.attention), ("prefill_attention", arguments.prefill_attention)):
        try:
            setattr(model, slot, attention_of(name, model.size))
        except Exception as error:
            setattr(model, slot, Unavailable(name, reason(error)))


def build(stack: str, size: Size, arguments: argparse.Namespace) -> Model:
    """A model with a stack's experts, dense layers and operators."""
    make: Any
    if stack == "fork":
        make, formats = fork_experts(size, arguments.activations), tuple(arguments.dense)
    else:
        make, formats = marlin_experts(size, load_marlin(arguments.vllm)), ("bf16",)
    model = Model(size, make, formats, device="cuda")
    equip(model, arguments, stack)
    return model


def steps_of(
    arguments: argparse.Namespace, formats: Sequence[str], routers: Sequence[str], attentions: Sequence[str]
) -> Iterator[Step]:
    """The steps to measure on one stack. Prompts have an attention of their own, so they are not repeated for each."""
    dense_layers = [
        (weights, tokens)
        for weights in formats
        for tokens in TOKENS_BESIDE[weights]
        if weights == "bf16" or tokens in arguments.dense_tokens
    ]
    for (dense, dense_tokens), router, attention in itertools.product(dense_layers, routers, attentions):
        common: dict[str, Any] = {
            "formats": formats_of(dense),
            "dense_tokens": dense_tokens,
            "fused_router": router == "fork",
        }
        for kv, (sequences, context), new in itertools.product(arguments.kv, arguments.decode, arguments.windows):
            window = {"new": new, "verified": new > 1}
            yield Step(sequences, context, kv=kv, **window, **common, fused_attention=attention == "fork")
        for tokens in arguments.prefill if attention == attentions[0] else ():
            yield Step(1, tokens, tokens, arguments.kv[0], **common)


def stack_name(stack: str, step: Step) -> str:
    if stack == "vllm":
        return stack
    own = [name for name, used in (("router", step.fused_router), ("attention", step.fused_attention)) if used]
    rounded = "" if step.dense_tokens == "bf16" else f" (tokens {step.dense_tokens})"
    return f"fork, dense {step.formats['QKV']}{rounded}{', its ' if own else ''}{' and '.join(own)}"


def not_measured(name: str, stack: str, step: Step, why: str) -> results.Measured:
    return results.Measured(model=name, stack=stack_name(stack, step), step=step, note=why)


def run_on_gpu(arguments: argparse.Namespace) -> int:
    """Measure all that was asked for, and write it down step by step."""
    about = machine() | {"read_gb_per_second": streaming_read()}
    path = arguments.out / f"{arguments.name}.json"
    found: list[results.Measured] = []
    try:
        measure_all(arguments, path, about, found)
    except KeyboardInterrupt:
        known = any(step.replay is not None for step in found)
        left = (
            f"{path} has the steps measured so far, and --render {path} shows them" if known else "nothing was written"
        )
        raise KeyboardInterrupt(left) from None
    if not any(step.replay is not None for step in found):
        print(f"bench: nothing was measured, so the files of {path.with_suffix('')} are as they were", file=sys.stderr)
        return 1
    publish(about, found, arguments.out, arguments.name)
    return 0


def measure_all(
    arguments: argparse.Namespace, path: Path, about: dict[str, Any], found: list[results.Measured]
) -> None:
    """Add each step to ``found`` once it is measured, and write all of them to ``path``."""
    began = time.monotonic()
    for name, stack in itertools.product(arguments.models, arguments.stacks):
        size = MODELS[name]
        separate = (["bf16"], ["separate"], ["separate"])
        choices = (arguments.dense, arguments.router, arguments.decode_attention) if stack == "fork" else separate
        model, why = None, ""
        try:
            model = build(stack, size, arguments)
            print(f"{name}, {stack}: weights after {time.monotonic() - began:.0f} s", flush=True)
        except Exception as error:
            why = reason(error)
            print(f"{name}, {stack}: {why}", flush=True)
        for step in steps_of(arguments, *choices):
            if model is None:
                found.append(not_measured(name, stack, step, why))
                continue
            try:
                found.append(measure.measure_step(model, step, stack_name(stack, step), name, arguments.repeats))
            except Exception as error:
                found.append(not_measured(name, stack, step, reason(error)))
            results.save(path, about, found)
            gc.collect()
            torch.cuda.empty_cache()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    results.save(path, about, found)


def publish(about: dict[str, Any], steps: list[results.Measured], folder: Path, name: str) -> None:
    """Print the overview; write it with each step's table beside the JSON, and the picture."""
    rate = about["read_gb_per_second"]
    output = [", ".join(f"{key} {value}" for key, value in about.items()), results.overview(steps, rate)]
    print("\n\n".join(output))
    for step in steps:
        if step.rows:
            output.append(f"### {step.model}, {step.stack}, {step.what()}, KV {step.step.kv}")
            if step.replay is not None:
                fastest, slowest = step.replay.fastest, step.replay.slowest
                output.append(f"a replay: {step.replay.median:,.1f} us ({fastest:,.1f} to {slowest:,.1f})")
            output.append(results.by_part(step, rate, predict.of_measured(step) if "GB10" in about["gpu"] else None))
            if step.kernels:
                output.append(results.by_kernel(step))
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(folder / f"{name}.md") as scratch:
        scratch.write_text("\n\n".join(output) + "\n", encoding="utf-8")
    print(f"wrote {folder / name}.md")
    bars = [
        picture.Bar(
            f"{step.model}, {step.stack}\n{step.what()}, KV {step.step.kv}",
            {row.part: row.us for row in step.rows} | {"gaps": step.gaps},
            None if rate is None else step.bytes / rate / 1e3,
        )
        for step in steps
        if step.span
    ]
    write_picture(bars, f"{about['gpu']}, {about['date']}", folder / f"{name}.svg")


def write_picture(bars: list[picture.Bar], title: str, path: Path) -> None:
    """The picture, where there is something to draw and matplotlib is installed."""
    try:
        if bars:
            picture.draw(bars, title, path)
            print(f"wrote {path}")
    except ImportError as error:
        print(f"no picture: {error}")


def print_prediction(arguments: argparse.Namespace) -> int:
    """The predicted GB10's tables and picture."""
    name = arguments.models[0]
    given = from_report(arguments.report) if arguments.report is not None else None
    output = ["GB10 (SM121): prediction, not a measurement"]
    if arguments.draft is not None:
        output += [
            f"{name}, one Spark, one stream, context 1,024, {arguments.draft}",
            predict.drafts(name, arguments.draft, arguments.drafted, arguments.accepted),
        ]
        print("\n\n".join(output))
        return 0
    bars = []
    fused = {"fused_router": "fork" in arguments.router, "fused_attention": "fork" in arguments.decode_attention}
    # Counts for two Sparks are kept for gpt-oss-120b only.
    ranks = (1, 2) if name == LAYER_MODEL else (1,)
    for count in ranks:
        steps = predict.headline(count, name, **fused)
        where = "one Spark" if count == 1 else "two Sparks, one of them"
        output += [
            f"{name}, {where}, one stream, context 1,024, bf16 KV",
            predict.by_part(steps, list(predict.PRESET_FORMATS)),
        ]
        bars += [predicted_bar(step) for step in steps]
        if given is not None and count == 1:
            after_all = predict.headline(count, name, given, **fused)
            for preset, before, after in zip(predict.PRESET_FORMATS, steps, after_all, strict=True):
                output += [f"with the report, {preset}"]
                output += [predict.side_by_side(before, after)]
    for count in ranks:
        output += [
            f"one stream, tokens/s by context, Sparks: {count}",
            predict.by_context(name, count, **fused),
        ]
    output += ["several streams, tokens/s, one Spark, context 1,024", predict.streams_by_preset(name, **fused)]
    output += ["several streams, and prompts, one Spark", predict.overview(predict.batches(name, **fused))]
    if name == LAYER_MODEL:
        for row in hindcast.rows():
            one_stream = (row.gpu, row.model, row.sequences, row.new, row.dense) == ("GB10", name, 1, 1, "mxfp4")
            if one_stream and row.unit == "tokens/s":
                sparks = f"{row.gpus} Spark{'s' * (row.gpus > 1)}"
                output.append(f"published, {sparks}, {row.engine}, context {row.context:,}, tokens/s: {row.value:g}")
    output.append("\n".join(["Assumed:", *(f"- {line}" for line in assumptions())]))
    print("\n\n".join(output))
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{arguments.name}_predicted.md"
    with written_whole(path) as scratch:
        scratch.write_text("\n\n".join(output) + "\n", encoding="utf-8")
    print(f"\nwrote {path}")
    write_picture(bars, f"{name} on a GB10, predicted: one stream, context 1,024", path.with_suffix(".svg"))
    return 0


def print_hindcast(arguments: argparse.Namespace) -> int:
    """Print others' measurements beside the model's predictions of them, then its predictions of this fork."""
    output = {
        "Inputs of the model, which are no rows": hindcast.inputs(),
        "Streams: gpt-oss-120b, spark, one GB10, context 1,024, no engine; predicted, tokens/s": hindcast.streams(
            arguments.spread
        ),
        "A layer by the experts that it touches: the line through its times": hindcast.layer_line(),
        "SM120 cards: predicted us of a layer of experts, tokens/s in a server": hindcast.cards(),
    }
    for title, text in output.items():
        print(f"{title}\n\n{text}\n")
    path = arguments.out / "hindcast.svg"
    arguments.out.mkdir(parents=True, exist_ok=True)
    try:
        hindcast.draw(path)
        print(f"wrote {path}")
    except ImportError as error:
        print(f"no picture: {error}")
    print(f"\n{hindcast.table(hindcast.compared())}")
    return 0


def predicted_bar(step: Predicted) -> picture.Bar:
    sparks = "" if step.size.ranks == 1 else f", {step.size.ranks} Sparks"
    return picture.Bar(
        f"{step.step.formats['QKV']}{sparks}: {step.middle_rate:.0f} tokens/s",
        {row.part: row.middle for row in step.rows},
        step.floor,
        step.fast,
        step.slow,
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    def batches(text: str) -> list[tuple[int, int]]:
        return [(int(sequences), int(context)) for sequences, context in (item.split("x") for item in names(text))]

    def decimals(text: str) -> list[float]:
        return [float(item) for item in names(text)]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", type=names, default=["gpt-oss-120b"], help=f"of {', '.join(MODELS)}")
    parser.add_argument("--stacks", type=names, default=["fork", "vllm"], help="fork, vllm")
    parser.add_argument(
        "--dense", type=names, help="the fork's QKV, O and LM head; default: all that --dense-tokens go with"
    )
    parser.add_argument(
        "--dense-tokens",
        type=names,
        default=["bf16"],
        help="to what those round their tokens: bf16, mxfp8 (beside mxfp8 and mxfp4 weights), mxfp4 (beside mxfp4 "
        "ones)",
    )
    parser.add_argument("--decode", type=batches, default=DECODE, help="sequences x context: 1x1024,64x1024")
    parser.add_argument(
        "--windows",
        type=numbers,
        default=[1],
        help="tokens of each sequence that a decode step computes; more than one verify a draft",
    )
    parser.add_argument("--kv", type=names, default=["bf16"], help="bf16, fp8")
    parser.add_argument("--prefill", type=numbers, default=[], help="prompts of so many tokens, too")
    parser.add_argument(
        "--router",
        type=names,
        default=["fork"],
        help="of the fork's stack: fork (norms, router and top-k as in vLLM's decode steps), separate (norm, GEMM, "
        "top-k)",
    )
    parser.add_argument(
        "--decode-attention",
        type=names,
        default=["fork"],
        help="of the fork's stack: fork (its decode_attention), separate (rope, KV write, --attention)",
    )
    parser.add_argument("--attention", choices=ATTENTION, default="xqa")
    parser.add_argument("--prefill-attention", choices=ATTENTION, default="triton", help="of windows, too")
    parser.add_argument("--activations", choices=("a8", "a16"), default="a8", help="of the fork's experts")
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's package, where it is not installed")
    parser.add_argument("--check", action="store_true", help="only whether the stacks agree, on small models")
    parser.add_argument("--render", type=file, help="measure nothing: tables and picture of this JSON")
    parser.add_argument("--predict", action="store_true", help="measure nothing: the predicted GB10 tables")
    parser.add_argument(
        "--hindcast", action="store_true", help="measure nothing: what others published beside what the model predicts"
    )
    parser.add_argument(
        "--spread",
        type=decimals,
        default=[0.0, 1.5, 2.0],
        help="of --hindcast: spreads of the experts' popularity; 0 is uniform, 1.5 to 2 gpt-oss's",
    )
    parser.add_argument("--draft", choices=tuple(DRAFTS), help="of --predict: only passes that draft and verify")
    parser.add_argument("--drafted", type=numbers, default=[0, 1, 2, 3], help="of --draft: tokens that a pass drafts")
    parser.add_argument(
        "--accepted",
        type=decimals,
        default=[0.5, 0.61, 0.7, 0.8],
        help="of --draft: probability that a drafted token is right if those before it are",
    )
    parser.add_argument("--report", type=Path, help="a GB10's report of sm12x-doctor --probe, beside the prediction")
    parser.add_argument("--emulate", action="store_true", help="run the kernels of the prediction again (20 minutes)")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--name", default="token", help="of the files")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out", help="folder of the files")
    arguments = parser.parse_args(argv)
    made_by = ("fork", "separate")
    if arguments.dense is None:
        beside = TOKENS_BESIDE.items()
        arguments.dense = [
            name
            for name, tokens in beside
            if name == "bf16" or (name in DENSE_FORMATS and set(tokens) & set(arguments.dense_tokens))
        ]
    allow(parser, arguments, models=MODELS, stacks=("fork", "vllm"), dense=DENSE_FORMATS, dense_tokens=DENSE_FORMATS)
    allow(parser, arguments, kv=KV_BYTES, router=made_by, decode_attention=made_by)
    for option in ("models", "stacks", "dense_tokens", "decode", "windows", "kv", "router", "decode_attention"):
        if not getattr(arguments, option):
            parser.error(f"--{option.replace('_', '-')}: nothing is named")
    if arguments.repeats < 1:
        parser.error(f"--repeats is {arguments.repeats}; it must be at least 1")
    if least := [pair for pair in arguments.decode if min(pair) < 1]:
        parser.error(f"--decode: {'x'.join(map(str, least[0]))}; sequences and context must be at least 1")
    if arguments.prefill and min(arguments.prefill) < 1:
        parser.error(f"--prefill: {min(arguments.prefill)}; a prompt has at least one token")
    if min(arguments.drafted) < 0 or not all(0 <= each <= 1 for each in arguments.accepted):
        parser.error(
            f"--drafted {arguments.drafted}, --accepted {arguments.accepted}: 0 or more tokens, probabilities of 0 to 1"
        )
    if arguments.draft is not None and arguments.models[0] != LAYER_MODEL:
        parser.error(f"--draft: {arguments.draft} is a draft of {LAYER_MODEL}, not of {arguments.models[0]}")
    if min(arguments.windows) < 1:
        parser.error(f"--windows: {arguments.windows}; a step computes at least one token of a sequence")
    for weights in arguments.dense:
        beside = TOKENS_BESIDE[weights]
        if weights != "bf16" and not set(arguments.dense_tokens) & set(beside):
            parser.error(
                f"--dense-tokens: none of {arguments.dense_tokens} goes with {weights} weights: {list(beside)} do"
            )
    return arguments


def main(argv: list[str] | None = None) -> int:
    """The exit status: 2 where a file that is given is of no use, or none can be written."""
    arguments = parse(argv)
    os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")
    try:
        return run(arguments)
    except (OSError, ValueError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2


def run(arguments: argparse.Namespace) -> int:
    """Do what was asked for."""
    if arguments.render is not None:
        about, steps = results.load(arguments.render)
        with report_of(arguments.render):
            publish(about, steps, arguments.out, arguments.name)
        return 0
    if arguments.emulate:
        return int(in_own_process(emulate.renew))
    if arguments.hindcast:
        return print_hindcast(arguments)
    if arguments.check and not torch.cuda.is_available():
        print("bench: --check runs kernels, and there is no GPU: torch.cuda.is_available() is False", file=sys.stderr)
        return 2
    drafts = arguments.draft is not None
    if arguments.report is not None or arguments.predict or drafts or not torch.cuda.is_available():
        return print_prediction(arguments)
    if arguments.check:
        return check.check(arguments, lambda: load_marlin(arguments.vllm), equip)
    return run_on_gpu(arguments)


if __name__ == "__main__":
    timing.run(main)
