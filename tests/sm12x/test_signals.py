# SPDX-License-Identifier: Apache-2.0
"""Every long command ends with a line after SIGTERM and SIGHUP, as after Ctrl-C, and what it started ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forked_python
import pytest

from flashinfer.testing import virtual_device
from flashinfer_sm12x.signals import ended_by_signals, until_interrupted

REPO = Path(__file__).resolve().parents[2]
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
PROGRAMS = sorted(
    str(path.relative_to(REPO))
    for pattern in ("scripts/*.py", "benchmarks/bench_*.py", "examples/*.py")
    for path in REPO.glob(pattern)
    if path.name != "vllm_server.py"
)


@pytest.mark.parametrize("number", [*SIGNALS, signal.SIGINT])
def test_a_signal_ends_a_block_once(number: signal.Signals, plain_signals: None) -> None:
    """A second one does not interrupt the cleaning up."""
    before = [signal.getsignal(each) for each in SIGNALS]
    cleaned = []
    with ended_by_signals() as ending:
        try:
            os.kill(os.getpid(), number)
            time.sleep(60)
        except KeyboardInterrupt:
            for again in SIGNALS if number in SIGNALS else ():
                try:
                    os.kill(os.getpid(), again)
                    time.sleep(0.01)
                except KeyboardInterrupt:  # which pytest would take for its own
                    pytest.fail(f"{again.name} interrupts the cleaning up")
                cleaned.append(again)
    assert (ending.signal, ending.status) == (number, 128 + number)
    assert cleaned == list(SIGNALS if number in SIGNALS else ())
    assert ending.line("x", "all is whole") == f"x: interrupted by {number.name}: all is whole"
    assert [signal.getsignal(each) for each in SIGNALS] == before


def test_what_the_caller_ignores_or_handles_stays_so() -> None:
    """nohup has SIGHUP ignored; a server has a handler of its own."""
    seen: list[int] = []
    before = (
        signal.signal(signal.SIGHUP, signal.SIG_IGN),
        signal.signal(signal.SIGTERM, lambda *got: seen.append(got[0])),
    )
    try:
        with ended_by_signals():
            for number in SIGNALS:
                os.kill(os.getpid(), number)
                time.sleep(0.01)
    except KeyboardInterrupt:  # which pytest would take for its own
        pytest.fail("a signal was taken from its owner")
    finally:
        for number, handler in zip((signal.SIGHUP, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert seen == [signal.SIGTERM]


def test_a_thread_that_is_not_the_first_runs_its_body() -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(until_interrupted("x", lambda: 3, "")))
    thread.start()
    thread.join()
    assert found == [3]


def test_the_exception_may_say_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt("half of it")

    assert until_interrupted("x", interrupted, "nothing") == 130
    assert until_interrupted("x", lambda: None, "nothing") == 0
    assert capsys.readouterr().err == "\nx: interrupted by SIGINT: half of it\n"


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_ends_in_a_line(program: str) -> None:
    """While it reads its command line, which each of them does in what it runs."""
    number = SIGNALS[len(program) % 2]
    code = f"""
import argparse, os, runpy, signal, sys, time
signal.signal({int(number)}, signal.SIG_DFL)
def ended(*_, **__):
    os.kill(os.getpid(), {int(number)})
    time.sleep(60)
argparse.ArgumentParser.parse_args = ended
sys.argv = [{str(REPO / program)!r}]
sys.path.insert(0, {str((REPO / program).parent)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = forked_python.run(["-c", code], env={**os.environ, "PYTHONPATH": str(REPO)})
    (line,) = done.stderr.split("\n")[1:-1]
    assert f": interrupted by {number.name}: " in line, done.stderr
    assert (done.returncode, done.stdout) == (128 + number, "")


SERVER = """
import http.server, os, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""
SERVES = """
import contextlib, pathlib, socket, sys, time
sys.path.insert(0, sys.argv[1])
import vllm_server
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
def main():
    command = [sys.executable, "-c", sys.argv[2], str(port)]
    with vllm_server.serving(command, f"http://127.0.0.1:{port}", pathlib.Path(sys.argv[3]), 60) as server:
        print(server.pid, flush=True)
        time.sleep(60)
vllm_server.run(main)
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_server_that_a_script_started_ends_with_it(
    number: signal.Signals, tmp_path: Path, plain_signals: None
) -> None:
    words = [sys.executable, "-c", SERVES, str(REPO / "scripts"), SERVER, str(tmp_path / "log")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None
        pid = int(script.stdout.readline())
        os.kill(pid, 0)
        script.send_signal(number)
        _, said = script.communicate(timeout=60)
    assert script.returncode == 128 + number
    assert said == f"\n-c: interrupted by {number.name}: what it started is ended, and a new run begins anew\n"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def _hang(pids: str) -> None:
    Path(pids).write_text(str(os.getpid()))
    time.sleep(60)


def test_what_runs_on_the_virtual_device_in_a_process_of_its_own_ends_with_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_signals: None
) -> None:
    """As with a torch that has CUDA, where a process is needed."""
    pids = tmp_path / "pids"
    monkeypatch.setattr(virtual_device, "_vsm", lambda: None)
    monkeypatch.setattr(
        virtual_device.importlib,
        "import_module",
        lambda _: type("", (), {"preload": staticmethod(lambda: "libm.so.6")}),
    )

    def end() -> None:
        while not (pids.exists() and pids.read_text()):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    thread.start()
    with ended_by_signals() as ending, pytest.raises(KeyboardInterrupt):
        virtual_device.in_own_process(_hang, str(pids))
    thread.join()
    assert ending.signal == signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)
