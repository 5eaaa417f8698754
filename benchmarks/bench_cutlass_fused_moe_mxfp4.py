# SPDX-License-Identifier: Apache-2.0
"""Time an MXFP4 MoE layer from expert ids to output, beside the plain streaming read of the bytes that it must read.

    make bench
    make bench BENCH_ARGS="--models gpt-oss-20b --tokens 1,8,64 --modes 0 --tactics all"
    make bench BENCH_ARGS=--upstream                # on SM12x: upstream's module too
    make bench BENCH_ARGS="--render bench.json"     # table and plot of an earlier run, no GPU needed

Every number is the median of replays of a CUDA graph, each after a write of 256 MB so that L2 holds nothing of the
layer.  ``FLASHINFER_SM12X_MOE=1`` is set for this process, so that a Hopper runs this family too.  Results are compared
with the float64 reference before anything is timed; a disagreement ends the run with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("FLASHINFER_SM12X_MOE", "1")

import tabulate
import torch
import tqdm

import flashinfer
from flashinfer.fused_moe import sm12x_dispatch
from flashinfer.fused_moe.sm12x_plan import allowed_tactics
from flashinfer.fused_moe.sm12x_validation import Mode
from flashinfer.jit.sm12x.instances import INSTANCES
from flashinfer.testing import (
    TENSOR_CORE,
    MoECase,
    MoEInputs,
    check_within_bound,
    make_moe_inputs,
    moe_reference,
)

MODELS = {"gpt-oss-120b": (2880, 2880, 128, 4), "gpt-oss-20b": (2880, 2880, 32, 4)}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
MODE_NAMES = {0: "W4A8 mxfp8", 1: "W4A8 bf16", 2: "W4A16"}
FLUSH_BYTES = 256 << 20
PIECE_BYTES = 32 << 10
CHECKED_TOKENS = 64  # the float64 reference takes seconds up to here


@dataclasses.dataclass
class Sample:
    """Microseconds of one graph, over its replays."""

    median: float
    fastest: float
    slowest: float


@dataclasses.dataclass
class Row:
    """One line of the table."""

    model: str
    tokens: int
    mode: str
    experts: int
    megabytes: float
    read: Sample
    ours: Sample
    tactics: tuple[int, int] | None
    upstream: Sample | None = None
    forced: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def ratio(self) -> float:
        return self.ours.median / self.read.median


def time_graph(run: Callable[[], Any], repeats: int) -> Sample:
    """Replays of ``run`` captured in a CUDA graph, L2 cold."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for i in range(repeats):
        flush.fill_(i % 256)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return Sample(statistics.median(times), min(times), max(times))


class StreamingRead:
    """The floor: reads the weights and scales of the experts that a batch touches."""

    def __init__(self) -> None:
        from flashinfer.jit.core import gen_jit_spec

        source = Path(__file__).with_name("streaming_read.cu")
        self._run = gen_jit_spec("bench_streaming_read", [source]).build_and_load().streaming_read
        self._sink = torch.zeros(4, dtype=torch.int32, device="cuda")

    def time(self, inputs: MoEInputs, repeats: int) -> tuple[Sample, int, int]:
        """The time, the number of experts touched and their bytes."""
        experts = inputs.token_selected_experts.unique().tolist()
        addresses, vectors = [], []
        for tensor in (inputs.fc1_weights, inputs.fc1_scales, inputs.fc2_weights, inputs.fc2_scales):
            for expert in experts:
                piece = tensor[expert]
                size = piece.numel() * piece.element_size()
                for offset in range(0, size, PIECE_BYTES):
                    addresses.append(piece.data_ptr() + offset)
                    vectors.append(min(PIECE_BYTES, size - offset) // 16)
        pieces = torch.tensor(addresses, dtype=torch.int64, device="cuda")
        counts = torch.tensor(vectors, dtype=torch.int32, device="cuda")
        sample = time_graph(lambda: self._run(pieces, counts, self._sink), repeats)
        return sample, len(experts), 16 * sum(vectors)


def layer(inputs: MoEInputs, profile_ids: list[int] | None = None) -> Callable[[], torch.Tensor]:
    """A call of ``cutlass_fused_moe`` that allocates nothing."""
    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    size = flashinfer.fused_moe.cutlass_fused_moe_workspace_size(
        tokens,
        hidden,
        2 * half,
        experts,
        top_k,
        x_dtype=inputs.input.dtype,
        weight_dtype=inputs.fc1_weights.dtype,
        output_dtype=inputs.output_dtype,
        use_w4_group_scaling=inputs.w4a16,
        use_mxfp8_act_scaling=not inputs.w4a16,
        device=inputs.input.device,
    )
    workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
    output = torch.full((tokens, hidden), torch.nan, dtype=inputs.output_dtype, device="cuda")
    arguments = inputs.arguments()

    def run() -> torch.Tensor:
        return flashinfer.cutlass_fused_moe(
            **arguments, output=output, workspace_buffer=workspace, profile_ids=profile_ids
        )

    return run


def upstream_sample(inputs: MoEInputs, repeats: int) -> Sample:
    """The same call through upstream's module, which SM12x falls back to under ``FLASHINFER_SM12X_MOE=0``."""
    before = os.environ["FLASHINFER_SM12X_MOE"]
    os.environ["FLASHINFER_SM12X_MOE"] = "0"
    try:
        return time_graph(layer(inputs), repeats)
    finally:
        os.environ["FLASHINFER_SM12X_MOE"] = before


def planned_tactics(inputs: MoEInputs, mode: int) -> tuple[int, int]:
    """What the planner gives the call."""
    from flashinfer.fused_moe.sm12x_planner import plan_moe

    tokens, top_k = inputs.token_selected_experts.shape
    experts, hidden, half = inputs.fc2_weights.shape
    index = torch.cuda.current_device()
    blocks = sm12x_dispatch.sm_count(index)
    return plan_moe(tokens, top_k, experts, hidden, 2 * half, mode, blocks, sm12x_dispatch.has_block_scaled_mma(index))


def routed(inputs: MoEInputs, num_tokens: int, num_experts: int, seed: int) -> MoEInputs:
    """The first ``num_tokens`` rows of ``inputs`` with routing of their own."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(num_tokens, num_experts, device="cuda", generator=generator)
    top_k = inputs.token_selected_experts.shape[1]
    return dataclasses.replace(
        inputs,
        input=inputs.input[:num_tokens].contiguous(),
        input_sf=inputs.input_sf,
        token_selected_experts=scores.topk(top_k).indices.int(),
        token_final_scales=torch.rand(num_tokens, top_k, device="cuda", generator=generator),
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """All rows; raises ``BoundViolation`` where a result disagrees with the reference."""
    read = StreamingRead()
    for model in arguments.models:
        hidden, inter, experts, top_k = MODELS[model]
        for mode in arguments.modes:
            largest = max(arguments.tokens)
            # Linear scales: a prefix of the rows is then a valid input of its own.
            case = MoECase(largest, hidden, inter, experts, top_k, mode, swizzled_input_sf=False)
            full = make_moe_inputs(case, arguments.seed, "cuda")
            for tokens in tqdm.tqdm(arguments.tokens, desc=f"{model} {MODE_NAMES[mode]}", disable=None):
                inputs = routed(full, tokens, experts, arguments.seed + tokens)
                if inputs.input_sf is not None:
                    inputs = dataclasses.replace(inputs, input_sf=full.input_sf[:tokens].contiguous())
                yield measure_one(arguments, read, model, mode, tokens, inputs)


def measure_one(
    arguments: argparse.Namespace, read: StreamingRead, model: str, mode: int, tokens: int, inputs: MoEInputs
) -> Row:
    """One row, checked first."""
    if tokens <= CHECKED_TOKENS:
        reference, bound = moe_reference(inputs, TENSOR_CORE)
        check_within_bound(layer(inputs)(), reference, bound, f"{model}, {tokens} tokens, {MODE_NAMES[mode]}")
    floor, touched, size = read.time(inputs, arguments.repeats)
    row = Row(
        model,
        tokens,
        MODE_NAMES[mode],
        touched,
        size / 1e6,
        floor,
        time_graph(layer(inputs), arguments.repeats),
        planned_tactics(inputs, mode),
    )
    for tactic in forced_tactics(arguments.tactics, mode):
        row.forced[INSTANCES[tactic].name] = time_graph(layer(inputs, [tactic, tactic]), arguments.repeats).median
    if arguments.upstream:
        row.upstream = upstream_sample(inputs, arguments.repeats)
    return row


def forced_tactics(wanted: str, mode: int) -> list[int]:
    """Tactics of ``--tactics`` that fit ``mode``."""
    fitting = [tactic for tactic in allowed_tactics(Mode(mode)) if INSTANCES[tactic].default]
    if wanted == "all":
        return fitting
    return [tactic for tactic in map(int, filter(None, wanted.split(","))) if tactic in fitting]


def as_table(rows: list[Row]) -> str:
    """For people."""
    headers = ["model", "mode", "tokens", "experts", "MB", "read us", "layer us", "min-max", "x read", "TB/s", "tactic"]
    forced = list(dict.fromkeys(name for row in rows for name in row.forced))
    with_upstream = any(row.upstream for row in rows)
    body = []
    for row in rows:
        line = [
            row.model,
            row.mode,
            row.tokens,
            row.experts,
            f"{row.megabytes:.0f}",
            f"{row.read.median:.1f}",
            f"{row.ours.median:.1f}",
            f"{row.ours.fastest:.1f}-{row.ours.slowest:.1f}",
            f"{row.ratio:.2f}",
            f"{row.megabytes / row.ours.median:.2f}",
            "-" if row.tactics is None else "/".join(map(str, row.tactics)),
        ]
        if with_upstream:
            line.append(f"{row.upstream.median:.1f}" if row.upstream else "-")
        body.append(line + [f"{row.forced[name]:.1f}" if name in row.forced else "-" for name in forced])
    headers += (["upstream us"] if with_upstream else []) + forced
    return tabulate.tabulate(body, headers, tablefmt="github", disable_numparse=True)


def plot(rows: list[Row], path: Path, title: str) -> None:
    """Layer time over tokens with the floor drawn in, one panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(row.model for row in rows))
    figure, panels = plt.subplots(1, len(models), figsize=(7 * len(models), 5), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        of_model = [row for row in rows if row.model == model]
        for mode in dict.fromkeys(row.mode for row in of_model):
            line = [row for row in of_model if row.mode == mode]
            tokens = [row.tokens for row in line]
            panel.plot(tokens, [row.ours.median for row in line], marker="o", label=mode)
            panel.fill_between(
                tokens, [row.ours.fastest for row in line], [row.ours.slowest for row in line], alpha=0.15
            )
        floor = [row for row in of_model if row.mode == of_model[0].mode]
        panel.plot(
            [row.tokens for row in floor], [row.read.median for row in floor], "k--", label="streaming read (floor)"
        )
        panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=model)
        panel.set_xscale("log", base=2)
        panel.grid(True, which="both", alpha=0.3)
        panel.legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> dict[str, str]:
    """What the numbers were taken on."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "flashinfer": f"{flashinfer.__version__} + {flashinfer.__fork_version__}",
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--tokens", type=numbers, default=list(TOKENS))
    parser.add_argument("--modes", type=numbers, default=list(MODE_NAMES), help="0, 1: W4A8; 2: W4A16")
    parser.add_argument("--tactics", default="", help="time these instances too (numbers, or all)")
    parser.add_argument("--upstream", action="store_true", help="upstream's module too (SM12x; 40 minutes to build)")
    parser.add_argument("--render", type=Path, help="measure nothing: table and plot of this JSON")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "out", help="folder of the JSON and the plot"
    )
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"--models: {sorted(unknown)} are not among {sorted(MODELS)}")
    if unknown_modes := set(arguments.modes) - set(MODE_NAMES):
        parser.error(f"--modes: {sorted(unknown_modes)} are not among {sorted(MODE_NAMES)}")
    return arguments


def load(path: Path) -> tuple[dict[str, str], list[Row]]:
    """An earlier run's JSON."""
    report = json.loads(path.read_text())
    rows = []
    for fields in report["rows"]:
        fields.pop("ratio")
        for name in ("read", "ours", "upstream"):
            fields[name] = Sample(**fields[name]) if fields[name] else None
        rows.append(Row(**fields))
    return report["machine"], rows


def publish(about: dict[str, str], rows: list[Row], folder: Path) -> None:
    """Prints the table, writes the JSON and, where matplotlib is installed, the plot."""
    print(", ".join(f"{key} {value}" for key, value in about.items()))
    print(as_table(rows))
    folder.mkdir(parents=True, exist_ok=True)
    report = {"machine": about, "rows": [dataclasses.asdict(row) | {"ratio": row.ratio} for row in rows]}
    (folder / "bench.json").write_text(json.dumps(report, indent=1))
    print(f"wrote {folder / 'bench.json'}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    plot(rows, folder / "bench.png", f"MXFP4 MoE layer, {about['gpu']}, {about['date']}")
    print(f"wrote {folder / 'bench.png'}")


def main(argv: list[str] | None = None) -> int:
    arguments = parse(argv)
    if arguments.render is not None:
        publish(*load(arguments.render), arguments.out)
        return 0
    if not torch.cuda.is_available():
        print("bench: this needs a CUDA GPU of compute capability 9.0 or 12.x; torch sees none", file=sys.stderr)
        return 2
    if arguments.upstream and not sm12x_dispatch.has_block_scaled_mma(torch.cuda.current_device()):
        print("bench: --upstream needs an SM12x GPU; elsewhere upstream takes other weight layouts", file=sys.stderr)
        return 2
    try:
        rows = list(measure(arguments))
    except flashinfer.testing.BoundViolation as error:
        print(f"bench: a result disagrees with the reference: {error}", file=sys.stderr)
        return 1
    publish(machine(), rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
