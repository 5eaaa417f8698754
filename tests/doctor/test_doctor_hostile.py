# SPDX-License-Identifier: Apache-2.0
"""Whatever the machine does or lacks, the doctor ends, with what it found."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_machine import DOCTOR, Machine, healthy
from layer_toys import write_fork, write_tree

import flashinfer_sm12x.doctor as doctor
from flashinfer_sm12x import variables

HOSTILE = {
    "sleeps": "import time; time.sleep(600)",
    "leaves a process behind": (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(40)'], start_new_session=True)\n"
        "time.sleep(600)"
    ),
    "segfaults": "import ctypes; ctypes.string_at(0)",
    "aborts": "import os; os.abort()",
    "exits": "import os; os._exit(0)",
    "raises": "raise SystemError('what is this')",
    "says a lot": "import os\nfor _ in range(3000): os.write(1, b'sm12x-fact {]' * 500 + b'\\xff\\n')\nos._exit(3)",
    "says no end of a line": "import os\nfor _ in range(300): os.write(1, b'x' * 65536)\nos._exit(3)",
}
LIMIT = "5"


@pytest.mark.parametrize("how", HOSTILE)
def test_a_vllm_that_does_not_import_ends_in_unknown(machine: Machine, how: str) -> None:
    machine.vllm(at_import=HOSTILE[how])
    found = machine.diagnose("--timeout", LIMIT)
    assert found["vllm-flashinfer"][0] == "unknown"
    assert found["vllm"][0] == found["vllm-plugin"][0] == found["build"][0] == "ok"
    assert found.seconds < 40, "it waited for what sleeps for ten minutes"


def test_programs_and_a_flashinfer_that_hang_end_in_unknown(machine: Machine) -> None:
    rows = {"toolkit/bin/nvcc": "build", "bin/nvidia-smi": "gpu"}
    for program in rows:
        machine.program(
            program, f"echo $$ >> {shlex.quote(str(machine.root))}/hang; trap '' TERM; while :; do /bin/sleep 600; done"
        )
    machine.torch("13.0", [])
    write_tree(machine.wheel, {"flashinfer/plain.py": "import time; time.sleep(600)"})
    found = machine.diagnose("--timeout", LIMIT)
    for check in (*rows.values(), "import"):
        assert found[check][0] == "unknown"
        assert "no answer within 5 s" in found[check][1]
    assert found["build"][2].endswith("sm12x-doctor --timeout 20")
    assert "-X importtime" in found["import"][2]
    for pid in (machine.root / "hang").read_text().split():
        state = Path(f"/proc/{pid}/stat")
        assert not state.exists() or state.read_text().split()[2] == "Z", "what the question started outlives it"
    assert found["variables"][0] == "ok"
    assert found.seconds < 40


def test_what_a_question_found_before_it_crashed_is_kept(machine: Machine) -> None:
    machine.vllm(has_nvidia_artifactory="__import__('os').abort()")
    found = machine.diagnose()
    assert found["vllm-plugin"][0] == "ok"
    assert found["vllm-flashinfer"][0] == "unknown"
    assert "SIGABRT" in found["vllm-flashinfer"][1]


def test_an_answer_may_be_longer_than_a_pipe_holds(machine: Machine) -> None:
    machine.program("bin/nvidia-smi", "printf '%0200000d' 0; exit 9")
    machine.torch("13.0", [])
    assert len(machine.diagnose()["gpu"][1]) > 200_000


# Each takes something away from the process itself, by a shell that then starts it.
DEPRIVED = {
    "no standard output": 'exec "$@" >&-',
    "no descriptors": 'exec "$@" <&- >&- 2>&-',
    "a full standard output": 'exec "$@" > /dev/full',
    "a reader who leaves": '{ "$@"; echo $? > status; } | :; exit $(cat status)',
    "a working directory that is gone": 'mkdir gone; cd gone; rm -r ../gone; exec "$@"',
    "few descriptors": 'ulimit -n 12; exec "$@"',
    "no processes": 'ulimit -u 1; exec "$@"',
    "no variables": 'exec env -i "$@"',
}


@pytest.mark.parametrize("how", DEPRIVED)
def test_it_ends_without_a_traceback_whatever_it_lacks(machine: Machine, how: str) -> None:
    machine.program("bin/rmdir", "")
    done = machine.run("/bin/sh", "-c", DEPRIVED[how], "sh", str(machine.python), str(DOCTOR))
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode == 1
    if how not in ("no standard output", "no descriptors", "a full standard output", "a reader who leaves"):
        assert re.search(r"\d+ ok, \d+ warn, \d+ fail, \d+ unknown$", done.stdout.strip()), done.stdout


def test_a_working_directory_that_is_gone_is_named_and_left(machine: Machine) -> None:
    """torch cannot be loaded from there; the command is a shell's own."""
    machine.variables["HOME"] = str(machine.root)
    doctor = shlex.join([str(machine.python), str(DOCTOR), "--json"])
    script = (
        f"mkdir gone; cd gone; rm -r ../gone; {doctor} > {shlex.quote(str(machine.root))}/before; cd; exec {doctor}"
    )
    done = machine.run("/bin/sh", "-c", script)
    rows = [
        {finding["check"]: finding for finding in json.loads(text)["findings"]}
        for text in ((machine.root / "before").read_text(), done.stdout)
    ]
    assert rows[0]["import"]["state"] == "fail"
    assert rows[0]["import"]["found"].startswith("the working directory is gone")
    assert rows[0]["import"]["command"] == "cd"
    assert rows[1]["import"]["state"] == "ok"


def test_modules_of_pythons_names_on_the_path_do_not_stop_it(machine: Machine) -> None:
    names = ("json", "argparse", "textwrap", "subprocess", "dataclasses", "signal", "shlex", "pathlib", "probe")
    write_tree(machine.root / "shadows", {f"{name}.py": "raise SystemExit('shadow')" for name in names})
    machine.path.insert(0, machine.root / "shadows")
    result = machine.doctor()
    assert result.stdout.splitlines()[-1].endswith("unknown"), result.stderr
    assert "shadow" not in result.stderr


def test_a_copy_of_which_a_part_is_cut_off_says_so_in_a_line(machine: Machine) -> None:
    copy = machine.root / "copy" / DOCTOR.name
    shutil.copytree(DOCTOR, copy)
    result = machine.doctor(how=(str(copy),))
    assert result.returncode == 1
    assert result.stderr.startswith("sm12x-doctor: this copy of the fork is not whole: ")
    assert len(result.stderr.splitlines()) == 1
    machine.path = [write_fork(machine.root / "bare", {})]
    result = machine.doctor(how=("-m", "flashinfer", "sm12x-doctor"))
    assert result.returncode == 1
    assert result.stderr.startswith("python -m flashinfer: this copy of the fork is not whole: ")
    assert len(result.stderr.splitlines()) == 1


# --- in this process: facts, variables and command lines --------------------------------------------------------------

ODD: list[Any] = [None, "", "x\n\udc80\x1b[ä", -1, 1e308, [], ["x"], {"x": 1}, "12.1", "no answer within 1 s"]
BUILT = {"workspace": "/cache", "architectures": ["12.1a"], "probed_sum_bits": {"mxf4": 20}, "narrowest_sum": 20}
MODULES = BUILT | {"module fused_moe_120": {"prebuilt": False, "stale": "x", "passed_over": "", "by_default": True}}
Ended = Callable[..., str]


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Ended:
    """Runs the doctor with given facts and variables; its table. The JSON and the exit status must agree."""

    def run(facts: dict[str, dict[str, Any]], environ: dict[str, str]) -> str:
        monkeypatch.setattr(doctor, "ask", lambda *_: {question: dict(answers) for question, answers in facts.items()})
        monkeypatch.setattr(doctor, "os", SimpleNamespace(environ=environ))
        status = doctor.main(["--json"])
        rows = json.loads(capsys.readouterr().out)["findings"]
        assert status == int(any(row["state"] in ("fail", "unknown") for row in rows))
        return doctor.as_text([doctor.Finding(**row) for row in rows])

    return run


def test_whatever_questions_tell_and_variables_hold_the_table_is_printed(machine: Machine, ended: Ended) -> None:
    facts = machine.diagnose().data["facts"] | {"modules": MODULES}
    facts |= {f"probe-{part}": answers for part, answers in healthy().items()}
    counts = re.compile(r"\d+ ok, \d+ warn, \d+ fail, \d+ unknown$")
    for question, answers in facts.items():
        for fact in (*answers, "failed", "error"):
            less = {question: {name: value for name, value in answers.items() if name != fact}}
            assert "the check itself failed" not in ended(facts | less, {}), (question, fact)
            for odd in ODD:
                assert counts.search(ended(facts | {question: {**answers, fact: odd}}, {})), (question, fact, odd)
    for name in (*variables.TABLE, "PYTHONPATH", "VLLM_PLUGINS", "CUDA_VISIBLE_DEVICES"):
        for odd in ("", "0", "1", "/x:/y", *filter(None, map(str, ODD))):
            assert counts.search(ended(facts, {name: odd})), (name, odd)


def test_signs_that_an_output_lacks_are_escaped() -> None:
    output = io.TextIOWrapper(io.BytesIO(), "ascii")
    assert doctor.say("ä", output)
    assert output.buffer.getvalue() == b"\\xe4\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize("words", ["--timeout x", "--timeout", "--bogus", "x"])
def test_a_wrong_command_line_is_2(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor.main(words.split())
    assert ended.value.code == 2
    # Python 3.11.2's argparse, Debian 12's, writes to whatever standard error is.
    monkeypatch.setattr(doctor.argparse.ArgumentParser, "_print_message", lambda *_: doctor.sys.nowhere)
    assert doctor.main(words.split()) == 2
