# SPDX-License-Identifier: Apache-2.0
"""``sm12x-doctor --probe``: figures get the right line, and parts that hang or crash cost their own lines."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doctor_machine import DOCTOR, ORDERS, REPO, Machine, healthy
from doctor_machine import findings as all_findings
from layer_toys import write_tree
from perfmodel import gb10, moe

import flashinfer_sm12x.doctor as doctor
from flashinfer.sm12x.models import MOE_LAYERS
from flashinfer_sm12x.doctor import probing
from flashinfer_sm12x.doctor.probe import PARTS, TOKENS, layer, mma, parts, predicted, target
from flashinfer_sm12x.doctor.probe_checks import KINDS, PROBE_CHECKS


def findings(measured: dict[str, dict[str, Any]]) -> dict[str, doctor.Finding]:
    found = all_findings({f"probe-{part}": found for part, found in measured.items()})
    return {check: finding for check, finding in found.items() if check in PROBE_CHECKS}


def test_a_gpu_s_kernels_are_those_of_the_operators_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its module is loaded, and its device made the current one, by what does so for the operators."""
    calls: list[Any] = []
    module = SimpleNamespace(sm12x_probe_copy="copy")
    backend = SimpleNamespace(
        module=lambda generate: calls.append(generate) or module,
        call=lambda *given, writes: calls.append((given, writes)),
    )
    device = torch.device("cuda", 1)
    monkeypatch.setattr(target, "kernels", {device: backend}.__getitem__)
    target.Target(device, "NVIDIA GB10", (12, 1), 48).call("copy", 1, 2, writes=("out",))  # type: ignore[arg-type]
    assert calls == [target.gen_probe_module, (("copy", 1, 2), ("out",))]


def test_a_gb10_s_ranges_are_those_of_the_predictor() -> None:
    assert (gb10.SLOW.dram_gb_per_second, gb10.FAST.dram_gb_per_second) == predicted.DRAM_GB_PER_SECOND
    assert gb10.mma_rates() == predicted.MMA_FLOPS_PER_CLOCK
    size = MOE_LAYERS[layer.MODEL]
    ends = {tokens: moe.predicted_range(size, layer.MODE, tokens) for tokens in TOKENS}
    assert {tokens: tuple(round(end, 1) for end in both or ()) for tokens, both in ends.items()} == predicted.LAYER_US


def test_a_gb10_that_does_as_predicted() -> None:
    found = findings(healthy())
    assert list(found) == list(PROBE_CHECKS)
    assert {(finding.state, finding.command, finding.why) for finding in found.values()} == {("ok", "", "")}
    assert found["probe-dram"].found == (
        "233 GB/s are read by loads, 231 by bulk copies, as the layers read; predicted: 218 to 250 GB/s"
    )
    assert found["probe-mma-mxf8f6f4"].found.startswith("2,040 FLOP per clock and SM; predicted: 2,048; 230 TFLOP/s")
    assert found["probe-layer-2048"].found.endswith("are read in 7,275 us; predicted: 7,972 to 9,154 us")


PLANTED: dict[str, tuple[str, dict[str, Any], str, str, str, str]] = {
    # name -> part, what it tells otherwise, check, state, part of what is found, part of the fix
    "slow memory": ("dram", {"gigabytes_per_second": 180.0}, "probe-dram", "warn", "180 GB/s", "close what else uses"),
    "slow copies": ("dram", {"copies_gigabytes_per_second": 150.0}, "probe-dram", "warn", "150 by bulk",
        "close what else uses"),
    "wrong copies": ("dram", {"copies_wrong": True}, "probe-dram", "fail", "is not the sum of what was written",
        "report"),
    "wrong memory": ("dram", {"wrong": True}, "probe-dram", "fail", "is not the sum of what was written", "report"),
    "slow MMAs": ("mma", {"mxf4": {"wrong": 0, "flops_per_clock": 2048.0, "tflops": 115.0, "gigahertz": 2.4,
                                   "predicted": [4096, 4096]}},
                  "probe-mma-mxf4", "warn", "2,048 FLOP per clock and SM; predicted: 4,096", "nvidia-smi -q"),
    "wrong MMAs": ("mma", {"f16": {"wrong": 7}}, "probe-mma-f16", "fail", "7 results", "report"),
    "narrow packed sums": ("sums", {"mxf4": 13}, "probe-sums", "warn", "so half precision takes the place of mxf4",
        "sm12x-build"),
    "narrow sums": ("sums", {"mxf8f6f4": 13}, "probe-sums", "warn", "takes the place of mxf8f6f4", "sm12x-build"),
    "narrow bf16": ("sums", {"bf16": 13}, "probe-sums", "warn", "13 bits (bf16)", "there is no other MMA"),
    "launches out of order": ("launch", {"dependent out of order": 3}, "probe-launch", "fail", "3 of the dependent",
                              "report"),
    "slow launches": ("launch", {"plain": {"host_us": 9.0, "stream_us": 30.0, "graph_us": 25.0}}, "probe-launch",
                      "warn", "plain: 30.0 us, 25.0 us in a CUDA graph", "profilers"),
    "no overlap": ("launch", {"overlap_graph": {"began_before_end_us": -1.5}}, "probe-overlap", "warn",
                   "in a CUDA graph only behind it", "layers are slower by a launch"),
    "no overlap of shared memory": ("launch", {"overlap_shared": {"began_before_end_us": -1.5}}, "probe-overlap", "ok",
                                    "with all shared memory only behind it", ""),
    "all overlap": ("launch", {"overlap_plain": {"began_before_end_us": 3.0}}, "probe-overlap", "fail",
                    "so does one that is not dependent", "report"),
    "reordered in spite of fences": ("order", {"copies with fence": {"compared": 9, "wrong": 2}}, "probe-order", "fail",
                                     "2 of 1,000,009 words", "do not use this GPU"),
    "reordered": ("order", {"stores without fence": {"compared": 9, "wrong": 2}}, "probe-order", "ok",
                  "this GPU does reorder, as is known of GB10", ""),
    "nothing handed over": ("order", {name: {"compared": 0, "wrong": 0} for name in ORDERS}, "probe-order", "fail",
                            "no word was handed over", "report"),
    "a wrong tactic": ("tactics", {"wrong": ["MoE 8 experts: off", "another"]}, "probe-tactics", "fail",
                       "MoE 8 experts: off; and 1 more", "export FLASHINFER_SM12X_MOE=0"),
    "a slow layer": ("layer", {"64 tokens": {"layer_us": 8000.0, "read_us": 6238.0, "predicted": [5867, 6742]}},
                     "probe-layer-64", "warn", "8,000 us; its weights are read in 6,238 us; predicted: 5,867 to 6,742",
                     "see probe-dram"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_figure_gets_its_line(name: str) -> None:
    part, facts, check, state, found, fix = PLANTED[name]
    measured = healthy()
    measured[part] |= facts
    lines = findings(measured)
    assert lines[check].state == state
    assert found in lines[check].found
    assert fix in f"{lines[check].command} | {lines[check].why}"
    assert bool(lines[check].command or lines[check].why) == (state != "ok")
    assert {line.state for other, line in lines.items() if other != check} == {"ok"}


def test_reordering_on_another_gpu_asks_for_fences() -> None:
    measured = healthy()
    measured["device"] |= {"name": "NVIDIA GeForce RTX 5090", "capability": [12, 0], "gb10": False}
    measured["order"]["copies without fence"] = {"compared": 9, "wrong": 1}
    line = findings(measured)["probe-order"]
    assert (line.state, line.command == "export FLASHINFER_CUDA_ARCH_LIST=12.0f") == ("warn", True)


def test_hopper_has_no_block_scales_and_no_prediction() -> None:
    measured = healthy()
    measured["device"] |= {"name": "NVIDIA H200", "capability": [9, 0], "gb10": False, "sm12x": False}
    measured["sums"] = {"bf16": 25, "f16": 25, "needed": 20}
    del measured["mma"]["mxf8f6f4"], measured["mma"]["mxf4"], measured["dram"]["predicted"]
    for facts in [*measured["mma"].values(), *measured["layer"].values()]:
        facts["predicted"] = None
    lines = findings(measured)
    assert list(lines) == [check for check in PROBE_CHECKS if not check.startswith("probe-mma-mx")]
    assert {line.state for line in lines.values()} == {"ok"}
    assert not any("predicted" in line.found for line in lines.values())


@pytest.mark.parametrize("part", [part for part in PARTS if not part.startswith("build") and part != "device"])
def test_a_part_without_an_answer_costs_its_own_lines(part: str) -> None:
    measured = healthy()
    measured[part] = {"failed": "it was killed by SIGSEGV"}
    unknown = {check for check, line in findings(measured).items() if line.state == "unknown"}
    names = {"launch": {"probe-launch", "probe-overlap"}}.get(part)
    assert unknown == (names or {check for check in PROBE_CHECKS if check.startswith(f"probe-{part}")})


def test_the_doctor_asks_for_the_parts_and_kinds_there_are() -> None:
    there = {name for name in vars(parts) if name.startswith("probe_")}
    assert {f"probe_{part.replace('-', '_')}" for part in PARTS} == there
    assert tuple(mma.KINDS) == KINDS


# --- as a command -----------------------------------------------------------------------------------------------------

FAKE_PARTS = """
import os, time
FACTS = {facts!r}
def run(part, tell):
    if part == "dram":
        time.sleep(600)
    tell(**dict(list(FACTS[part].items())[:1]))
    if part == "mma":
        os.abort()
    tell(**FACTS[part])
"""


@pytest.fixture
def machine(machine: Machine) -> Machine:
    probe = "flashinfer_sm12x/doctor/probe"
    empty = (
        "flashinfer/__init__.py",
        "flashinfer/_layer.py",
        "flashinfer_sm12x/doctor/__init__.py",
        f"{probe}/__init__.py",
    )
    parts = {f"{probe}/parts.py": FAKE_PARTS.format(facts=healthy())}
    write_tree(machine.root / "fork", {**dict.fromkeys(empty, ""), **parts})
    machine.path = [machine.root / "fork", machine.site]
    return machine


def test_parts_that_hang_or_crash_and_the_file(machine: Machine) -> None:
    result = machine.doctor("--json", "--timeout", "4", "--probe", "--report", "sent.json")
    data = json.loads(result.stdout)
    states = {finding["check"]: finding for finding in data["findings"] if finding["check"] in PROBE_CHECKS}
    assert list(states) == list(PROBE_CHECKS)
    unknown = {check: finding["found"] for check, finding in states.items() if finding["state"] == "unknown"}
    assert set(unknown) == {"probe-dram", "probe-mma-f16", "probe-mma-mxf8f6f4", "probe-mma-mxf4"}
    assert "no answer within 8 s" in unknown["probe-dram"]
    assert "SIGABRT" in unknown["probe-mma-f16"]
    assert {f"probe-{part}" for part in PARTS} <= set(data["facts"])
    path = machine.root / "sent.json"
    assert str(path) in result.stderr
    sent = json.loads(path.read_text())
    assert list(sent) == ["format", "fork", "upstream", "driver", "toolkit", "measured", "findings"]
    assert sent["driver"] == "580.95.05"
    assert sent["measured"] == {part: data["facts"][f"probe-{part}"] for part in PARTS}
    assert sent["findings"] == list(states.values())
    assert str(machine.root) not in path.read_text()
    assert str(REPO) not in path.read_text()


def test_nothing_to_measure_is_one_line(machine: Machine) -> None:
    """The real parts, and a torch that sees no GPU, which they cannot even import."""
    machine.path = [REPO, machine.wheel, machine.root / "site"]
    machine.torch(None, [])
    sent = machine.root / "sent.json"
    for text in (None, "a good one\n"):
        if text is not None:
            sent.write_text(text)
        result = machine.doctor("--probe", "--report", str(sent))
        lines = [line for line in result.stdout.splitlines() if "probe-" in line]
        assert [line.split()[:2] for line in lines if not line.startswith(" ")] == [["unknown", "probe-device"]]
        assert f"probe: nothing was measured, so {sent} is not written\n" in result.stderr
        assert result.returncode == 1
        assert (sent.read_text() if sent.exists() else None) == text
    assert [file.name for file in machine.root.glob("*sent*")] == [sent.name]


@pytest.mark.parametrize(
    ("report", "reason"),
    [("none/sent.json", "No such file or directory"), ("file/sent.json", "Not a directory"), ("", "it is a folder")],
)
def test_a_report_that_cannot_be_written_ends_before_anything_is_asked(
    report: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "ask", lambda *_: pytest.fail("it asks"))
    (tmp_path / "file").touch()
    assert doctor.main(["--probe", "--report", str(tmp_path / report)]) == 2
    message = capsys.readouterr().err
    assert (
        message
        == f"sm12x-doctor: --report {tmp_path / report}: {reason}; name a file in a folder that you can write to\n"
    )


@pytest.mark.parametrize("part", ["device", "build", "build-layers"])
def test_a_report_needs_a_part_that_measured(part: str) -> None:
    """Neither the device nor a build is one."""
    failed = {f"probe-{each}": {"failed": "it was killed", "wall_seconds": 1.0} for each in PARTS}
    assert not probing.has_measured(failed)
    assert not probing.has_measured(failed | {f"probe-{part}": healthy()[part]})
    for each in set(PARTS) - {"device", "build", "build-layers"}:
        assert probing.has_measured(failed | {f"probe-{each}": {"failed": "x", "one": 1}}), each


@pytest.mark.parametrize("how", ["full disk", "facts that no JSON has"])
def test_a_report_that_fails_while_it_is_written_leaves_the_old_one(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = tmp_path / "sent.json"
    report.write_text("a good one")
    facts: dict[str, Any] = {"gpus": {}, "build": {}, "probe-device": {"name": "GB10"}}

    def full(path: Path, *_: Any, **__: Any) -> int:
        with path.open("w") as file:
            file.write("{")
        raise OSError(28, "No space left on device")

    if how == "full disk":
        monkeypatch.setattr(Path, "write_text", full)
    else:
        facts["probe-device"]["name"] = object()
    with pytest.raises((OSError, TypeError)):
        probing.write_report(report, facts, [])
    assert report.read_bytes() == b"a good one"
    assert list(tmp_path.iterdir()) == [report]


def test_a_report_goes_where_a_link_leads_and_into_a_device(tmp_path: Path) -> None:
    facts: dict[str, Any] = {"gpus": {}, "build": {}, "probe-device": {"name": "GB10"}}
    (tmp_path / "there").mkdir()
    link = tmp_path / "sent.json"
    link.symlink_to(tmp_path / "there" / "real.json")
    probing.write_report(link, facts, [])
    assert link.is_symlink()
    assert json.loads(link.read_text())["measured"] == {"device": {"name": "GB10"}}
    probing.write_report(Path("/dev/null"), facts, [])
    assert Path("/dev/null").is_char_device()


# --- signals ----------------------------------------------------------------------------------------------------------

HANGS = """
import os, subprocess, sys, time
# A compiler in a session of its own, whose parent is gone.
code = "import os, time; open(sys.argv[1], 'a').write(f'{os.getpid()} '); time.sleep(600)"
code = code.replace("sys", "__import__('sys')")
start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {code!r}, {PIDS!r}], start_new_session=True)"
subprocess.run([sys.executable, "-c", start], start_new_session=True)
open(PIDS, "a").write(f"{os.getpid()} ")
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("probe", [False, True])
def test_a_signal_ends_all_that_was_started_and_reports_what_a_new_run_does(
    machine: Machine, plain_signals: None, number: signal.Signals, probe: bool
) -> None:
    pids = machine.root / "pids"
    hangs = f"PIDS = {str(pids)!r}\n{HANGS}"
    if probe:
        file = machine.root / "fork" / "flashinfer_sm12x" / "doctor" / "probe" / "parts.py"
        file.write_text("def run(part, tell):\n" + "".join(f"    {line}\n" for line in hangs.splitlines()))
    else:
        write_tree(machine.site, {"torch/__init__.py": hangs})
    (machine.root / "sent.json").write_text("a good one")
    command = [str(machine.python), str(DOCTOR), *(["--probe", "--report", "sent.json"] if probe else [])]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell has its background jobs ignore SIGINT, nohup SIGHUP.
    pipes["preexec_fn"] = lambda: signal.signal(number, signal.SIG_DFL)
    with subprocess.Popen(command, env=machine.environment(), cwd=machine.root, **pipes) as asked:
        until = time.monotonic() + 120
        while not (pids.exists() and len(pids.read_text().split()) == 2):
            assert time.monotonic() < until
            time.sleep(0.05)
        asked.send_signal(number)
        out, message = asked.communicate(timeout=60)
    assert (asked.returncode, out) == (128 + number, "")
    (line,) = [line for line in message.splitlines() if not line.startswith("probe: ")]
    assert line.startswith(f"sm12x-doctor: interrupted by {number.name}: all that was started is ended")
    assert "a new run asks everything again" in line
    assert line.endswith("sent.json is as it was") == probe
    assert (machine.root / "sent.json").read_text() == "a good one"
    for pid in map(int, pids.read_text().split()):
        until = time.monotonic() + 10
        while _runs(pid) and time.monotonic() < until:
            time.sleep(0.05)
        assert not _runs(pid), pid
    assert not [*(machine.root / "cache").rglob("doctor-*")], "what a build that was killed left"


def _runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
