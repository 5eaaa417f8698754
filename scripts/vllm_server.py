# SPDX-License-Identifier: Apache-2.0
"""A vLLM server as a child process, for the scripts beside this file: started, waited for, looked into, ended."""

from __future__ import annotations

import argparse
import contextlib
import functools
import http.client
import importlib.metadata
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]

# The Python that runs the script, so that `vllm` need not be on PATH and is the one beside it.
VLLM = (sys.executable, "-m", "vllm.entrypoints.cli.main")
VLLM_COMMAND = "pip install vllm==0.33.0"


sys.path.append(str(ROOT))  # last: an installed fork is the one that the server imports
from flashinfer_sm12x import host_memory, signals  # noqa: E402

sys.path.pop()  # the checkout's entry point must not pass for an installed plugin


def run(main: Callable[[], None], *errors: type[Exception]) -> NoReturn:
    """End the process after ``main``; an error of a server, or one of ``errors``, is a line, and Ctrl-C, SIGTERM and
    SIGHUP are one, after which nothing runs that was started."""
    left = "what it started is ended, and a new run begins anew"
    try:
        sys.exit(signals.until_interrupted(Path(sys.argv[0]).name, main, left))
    except (ServerEnded, *errors) as error:
        sys.exit(str(error))


def positive(text: str) -> int:
    """An argument that is a positive whole number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def positives(text: str) -> list[int]:
    """An argument that is positive whole numbers with commas between."""
    return [positive(part) for part in text.split(",")]


def parse(parser: argparse.ArgumentParser, out: str) -> argparse.Namespace:
    """A script's arguments, with those of each that serves; ``server`` are the words after ``--``, which go to it.

    ``out`` is what the folder ``--out`` is for.
    """
    parser.add_argument("--port", type=positive, default=8123)
    parser.add_argument("--start", type=positive, default=1800, help="seconds that a server may take to start")
    parser.add_argument("--out", type=Path, help=f"a folder for {out}; else a temporary one")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    return parser.parse_args(words[:at], argparse.Namespace(server=words[at + 1 :]))


def folder(given: Path | None, prefix: str) -> Path:
    """The folder that ``--out`` names, made if it is not there; else a temporary one."""
    out = given or Path(tempfile.mkdtemp(prefix=prefix))
    out.mkdir(parents=True, exist_ok=True)
    return out


def need(*packages: str) -> None:
    """End with a line that says what is missing.

    Raises
    ------
    SystemExit
        One of the packages is not installed for the Python that runs the script.
    """
    for package in packages:
        if importlib.util.find_spec(package) is None:
            brings = "" if package == "vllm" else ", and vLLM brings it"
            sys.exit(f"{package} is not installed for {sys.executable}{brings}: {VLLM_COMMAND}")


def need_fork() -> None:
    """End with a line where vLLM would serve without this fork.

    Raises
    ------
    SystemExit
        vLLM's plugin of this fork is not installed for the Python that runs the script.
    """
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if "flashinfer_sm12x" not in plugins.names:
        sys.exit(
            f"this fork is not installed for {sys.executable}, and vLLM would serve without it: pip install {ROOT}"
        )


@functools.cache
def gpu_bytes() -> int:
    """Memory of the first GPU, as torch tells it in a process of its own, which leaves nothing on the GPU.

    Raises
    ------
    SystemExit
        There is no GPU, or torch cannot be imported.
    """
    code = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory)"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if asked.returncode:
        sys.exit(f"torch cannot tell the GPU's memory: {(asked.stderr.strip() or 'no message').splitlines()[-1]}")
    if asked.stdout.strip() == "False":
        why = "`python -m flashinfer sm12x-doctor` says why there is none"
        sys.exit(f"no GPU: torch.cuda.is_available() is False, and vLLM's engine needs one; {why}")
    return int(asked.stdout)


def share(gpu: int) -> float:
    """vLLM's share of a GPU with ``gpu`` bytes: this fork's if the GPU shares the host's memory, else vLLM's own.

    If that cannot be told, the memory counts as shared: too small a share costs KV cache, but too large a one the host.
    """
    host = host_memory.read()
    return host_memory.SHARE if host is None or host_memory.is_shared(host, gpu) else host_memory.VLLM_SHARE


def serve(model: str, given: argparse.Namespace, *words: str) -> list[str]:
    """The command of a server that answers only this machine; options after ``--`` override the defaults."""
    defaults = {"--host": "127.0.0.1", "--gpu-memory-utilization": str(share(gpu_bytes()))}
    own = {word.partition("=")[0].replace("_", "-") for word in given.server}
    command = [*VLLM, "serve", model, "--port", str(given.port)]
    for option, value in defaults.items():
        command += [] if option in own else [option, value]
    return [*command, *words, *given.server]


class ServerEnded(RuntimeError):
    """The server is gone, or was not ready in time; the text says how it ended, why, and where its log is."""


def ended(server: subprocess.Popen[bytes]) -> str:
    """The way a process ended, in words; empty while it runs."""
    code = server.poll()
    if code is None:
        return ""
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def reason(log: Path) -> str:
    """The last error that a log names, after a colon. An engine's error is preferred to the server's that refers to
    it."""
    named = re.findall(r"\b[\w.]*(?:Error|Exception): .*", log.read_text(errors="replace"))
    named = [line for line in named if "root cause above" not in line]
    return f": {named[-1][:300]}" if named else ""


def healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5):
            return True
    except (OSError, ValueError, http.client.HTTPException):  # not there, no URL, no HTTP
        return False


@contextlib.contextmanager
def serving(
    command: Sequence[str], url: str, log: Path, seconds: int, variables: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``command`` until the block ends; it is entered once ``url`` answers.

    Raises
    ------
    ServerEnded
        Something else listens at ``url``, or the server ended while it started, or was not ready after ``seconds``.
    """
    address = urllib.parse.urlsplit(url)
    with socket.socket() as probe:
        if probe.connect_ex((address.hostname or "", address.port or 80)) == 0:
            raise ServerEnded(f"something else serves at {url}: end it, or give another --port")
    with log.open("ab") as output:
        server = subprocess.Popen(
            command,
            env={**os.environ, **(variables or {})},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a process group of its own: workers are ended with it
        )
    try:
        end = time.monotonic() + seconds
        while not healthy(url):
            if how := ended(server):
                raise ServerEnded(f"the server {how} while it started{reason(log)}; its log is {log}")
            if time.monotonic() > end:
                raise ServerEnded(f"the server was not ready after {seconds} s; its log is {log}")
            time.sleep(1)
        yield server
    finally:
        _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    """The server and every process of its group, first asked and after a minute killed."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def metrics(url: str) -> dict[str, float]:
    """The server's Prometheus gauges and counters by name, summed over labels."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def events(answer: Any) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an ``aiohttp`` answer that streams.

    Raises
    ------
    RuntimeError
        The server reports an error in place of a token.
    """
    async for line in answer.content:
        text = line.decode().strip().removeprefix("data:").strip()
        if text and text != "[DONE]":
            event = json.loads(text)
            if "error" in event:
                raise RuntimeError(f"the server says {event['error']}")
            yield event


def descendants(pid: int) -> list[int]:
    """``pid`` and the processes that it started, and theirs."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = [pid]
    for process in found:
        found.extend(children.get(process, []))
    return found


def host_mib(pid: int) -> float:
    """Memory of ``pid`` and its descendants that is theirs alone (anonymous, resident), in MiB.

    Pages of files are left out: they come and go with what is read.
    """
    total = 0
    for process in descendants(pid):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon:"))
    return total / 1024


def gpu_mib() -> float | None:
    """Memory in use on all GPUs, in MiB; None where the driver does not say (GB10's is the system's)."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
        return sum(map(float, output.split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
