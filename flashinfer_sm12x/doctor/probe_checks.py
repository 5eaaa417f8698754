# SPDX-License-Identifier: Apache-2.0
"""The checks of a probe's measurements: :data:`PROBE_CHECKS`, of the same form as those of ``checks``.

On a GB10 the facts hold a prediction (``probe.predicted``) beside each measurement; for other GPUs there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from .asking import CLI, Answers
from .checks import BLOCK_SCALED, Outcome, sums_text
from .probe import TOKENS

SLACK = 0.95
"""A figure below this share of a predicted range's slow end is slower than predicted."""

KINDS = ("bf16", "f16", *BLOCK_SCALED)
SLOW_LAUNCH_US = 10.0
"""A node of a CUDA graph takes about 1.3 us."""

KERNELS_WRONG = f"{CLI} sm12x-doctor --probe", "do not use this GPU for it; report this, with the file"
SLOWER = "nvidia-smi -q -d PERFORMANCE,POWER", "close what else uses the GPU or its memory, probe again"


def _beside(text: str, value: float, predicted: Sequence[float] | None, unit: str = "", more: str = "") -> Outcome:
    """The row of a figure that is better if larger, with its predicted range."""
    if not predicted:
        return "ok", text + more
    low, high = predicted
    text += f"; predicted: {low:,.0f}" + (f" to {high:,.0f}" if low != high else "") + unit + more
    return ("warn", text, *SLOWER) if value < SLACK * low else ("ok", text)


def device(a: Answers) -> Outcome:
    """The device that is measured."""
    if failed := a.get("probe-device", "failed"):
        where = "see 'gpu' and 'torch'; compute capability 12.x, or 9.0 with FLASHINFER_SM12X_MOE=1"
        return "unknown", f"nothing to measure: {failed}", "", where
    name, capability, sms = (a("probe-device", fact) for fact in ("name", "capability", "sm_count"))
    text = f"{name} (compute capability {'.'.join(map(str, capability))}), {sms} SMs"
    return "ok", text + (": results are checked, nothing is timed" if a("probe-device", "virtual") else "")


def dram(a: Answers) -> Outcome:
    """Sustained read, by plain loads and as the layers read: by bulk copies."""
    if a("probe-dram", "wrong") or a("probe-dram", "copies_wrong"):
        return "fail", "the sum of what was read is not the sum of what was written", *KERNELS_WRONG
    if a("probe-device", "virtual"):
        return "ok", "what was read is what was written"
    rate = a("probe-dram", "gigabytes_per_second")
    copies = a("probe-dram", "copies_gigabytes_per_second")
    text = f"{rate:,.0f} GB/s are read by loads, {copies:,.0f} by bulk copies, as the layers read"
    return _beside(text, min(rate, copies), a.get("probe-dram", "predicted"), " GB/s")


def mma(a: Answers, kind: str) -> Outcome:
    """Results and rate of one kind of MMA."""
    if kind in BLOCK_SCALED and not a("probe-device", "sm12x"):
        return None
    found = a("probe-mma", kind)
    if found["wrong"]:
        return "fail", f"{found['wrong']:,} results of a product of small integers are wrong", *KERNELS_WRONG
    if a("probe-device", "virtual"):
        return "ok", "results are exact"
    rate, more = found["flops_per_clock"], f"; {found['tflops']:,.0f} TFLOP/s at {found['gigahertz']:.2f} GHz"
    return _beside(f"{rate:,.0f} FLOP per clock and SM", rate, found.get("predicted"), more=more)


def sums(a: Answers) -> Outcome:
    """The width in which MMAs add up."""
    needed = a("probe-sums", "needed")
    bits = {kind: a("probe-sums", kind) for kind in KINDS if a.get("probe-sums", kind) is not None}
    text = sums_text(bits, needed)
    narrow = {kind for kind, width in bits.items() if width < needed}
    if not narrow:
        return "ok", text
    if a("probe-device", "virtual"):
        return "warn", text, "", "nothing: the virtual device was made so"
    if narrow.isdisjoint(BLOCK_SCALED):
        return "warn", text, "", "there is no other MMA to multiply with; report this, with the file"
    return "warn", text, f"{CLI} sm12x-build", "FLASHINFER_SM12X_HALF_MMA=0 keeps the block-scaled MMAs"


def launch(a: Answers) -> Outcome:
    """The cost of launches."""
    kinds = ("plain", "dependent", "cooperative")
    wrong = {kind: a("probe-launch", f"{kind} out of order") for kind in kinds}
    if any(wrong.values()):
        text = ", ".join(f"{count} of the {kind} ones" for kind, count in wrong.items() if count)
        return "fail", f"launches did not see what the one in front of them wrote: {text}", *KERNELS_WRONG
    if a("probe-device", "virtual"):
        return "ok", "plain, dependent and cooperative launches see what the one in front of them wrote"
    costs = {kind: a("probe-launch", kind) for kind in kinds}
    text = "; ".join(
        f"{kind}: {cost['stream_us']:.1f} us, {cost['graph_us']:.1f} us in a CUDA graph" for kind, cost in costs.items()
    )
    if costs["plain"]["graph_us"] > SLOW_LAUNCH_US:
        return "warn", text, "nvidia-smi -q -d CLOCK", "stop profilers and debuggers, probe again"
    return "ok", text


def overlap(a: Answers) -> Outcome:
    """Whether a dependent launch begins before the launch ahead of it ends."""
    if a("probe-device", "virtual"):
        return None
    names = {"overlap": "from a stream", "overlap_shared": "with all shared memory", "overlap_graph": "in a CUDA graph"}
    leads = {name: a("probe-launch", name)["began_before_end_us"] for name in names}
    begins = {name: f"{lead:.1f} us before its end" if lead > 0 else "only behind it" for name, lead in leads.items()}
    text = f"behind a launch of {a('probe-launch', 'overlap')['first_us']:.0f} us a dependent one begins: "
    text += ", ".join(f"{names[name]} {when}" for name, when in begins.items())
    if a("probe-launch", "overlap_plain")["began_before_end_us"] > 0:
        return "fail", f"{text}; so does one that is not dependent", *KERNELS_WRONG
    # No overlap with all of shared memory is no fault: an SM may divide its memory between L1 and blocks anew only
    # while it runs no block.
    if leads["overlap"] > 0 and leads["overlap_graph"] > 0:
        return "ok", text
    return "warn", text, "", "layers are slower by a launch and right; report this, with the file"


def order(a: Answers) -> Outcome:
    """Arrivals at mbarriers."""
    counts = {
        fenced: [a("probe-order", f"{how} {fenced} fence") for how in ("stores", "copies")]
        for fenced in ("with", "without")
    }
    wrong = {fenced: sum(count["wrong"] for count in found) for fenced, found in counts.items()}
    compared = sum(count["compared"] for count in counts["with"])
    if compared == 0:
        return "fail", "no word was handed over", *KERNELS_WRONG
    if wrong["with"]:
        text = f"{wrong['with']:,} of {compared:,} words were those of another stage, in spite of fences"
        return "fail", text, *KERNELS_WRONG
    text = f"{compared:,} words handed over with fences, none wrong; without: {wrong['without']:,} wrong"
    if not wrong["without"]:
        return "ok", text
    if a("probe-device", "gb10"):
        return "ok", f"{text}: this GPU does reorder, as is known of GB10, and the kernels have fences"
    text += ": this GPU does reorder, which was known of GB10 only"
    return "warn", text, "export FLASHINFER_CUDA_ARCH_LIST=12.0f", "for kernels with fences; report this, with the file"


def tactics(a: Answers) -> Outcome:
    """Every default tactic against its reference."""
    wrong = a("probe-tactics", "wrong")
    if wrong:
        more = f"; and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return "fail", f"{wrong[0]}{more}", "export FLASHINFER_SM12X_MOE=0", KERNELS_WRONG[1]
    count, used = a("probe-tactics", "count"), a("probe-tactics", "used")
    worst = ", ".join(f"{name} {share:.0%}" for name, share in used.items())
    return "ok", f"{count} results are within their bounds; the largest error, as a share of it: {worst}"


def layer(a: Answers, tokens: int) -> Outcome:
    """gpt-oss-120b's layer."""
    if a("probe-device", "virtual"):
        return None
    line: Mapping[str, Any] = a("probe-layer", f"{tokens} tokens")
    time, read, predicted = line["layer_us"], line["read_us"], line.get("predicted")
    text = f"gpt-oss-120b's layer, {tokens:,} tokens: {time:,.0f} us; its weights are read in {read:,.0f} us"
    if not predicted:
        return "ok", text
    low, high = predicted
    text += f"; predicted: {low:,.0f} to {high:,.0f} us"
    if time > high / SLACK:
        why = f"see probe-dram and the MMAs' rates first; {SLOWER[1]}; else report this, with the file"
        return "warn", text, SLOWER[0], why
    return "ok", text


PROBE_CHECKS: Mapping[str, Callable[[Answers], Outcome]] = {
    "probe-device": device,
    "probe-dram": dram,
    **{f"probe-mma-{kind}": partial(mma, kind=kind) for kind in KINDS},
    "probe-sums": sums,
    "probe-launch": launch,
    "probe-overlap": overlap,
    "probe-order": order,
    "probe-tactics": tactics,
    **{f"probe-layer-{tokens}": partial(layer, tokens=tokens) for tokens in TOKENS},
}
"""The probe's checks, in the order of the table that is printed."""
