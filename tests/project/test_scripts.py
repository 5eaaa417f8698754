# SPDX-License-Identifier: Apache-2.0
"""Command lines that cannot work end with one line, ``--help`` needs nothing of vLLM, and servers harm no host."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import forked_python
import pytest

from flashinfer_sm12x import host_memory

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("*.py") if path.name != "vllm_server.py")
sys.path.append(str(REPO / "scripts"))

BROUGHT = ("aiohttp", "flashinfer", "safetensors", "tokenizers", "torch", "transformers", "vllm")
"""Packages that scripts need and an environment of vLLM's has."""

WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # none can be found
sys.argv = sys.argv[2:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as if the packages of the first argument were not installed."""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), **variables}
    if words[0] == "-S":
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    return forked_python.run(words, env=environment)


@pytest.fixture
def vllm(tmp_path: Path) -> str:
    """``PYTHONPATH`` of an environment of vLLM's without a GPU, as far as scripts look before they start a server."""
    torch = "class cuda:\n    is_available = lambda: False"
    for name, text in {"aiohttp": "", "torch": torch, "vllm": ""}.items():
        (tmp_path / "brought" / name).mkdir(parents=True)
        (tmp_path / "brought" / name / "__init__.py").write_text(text)
    return f"{REPO}{os.pathsep}{tmp_path / 'brought'}"


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_nothing_of_vllm(script: str) -> None:
    done = run("-c", WITHOUT, ",".join(BROUGHT), str(REPO / "scripts" / script), "--help")
    assert done.stdout.startswith("usage: "), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("line", "gone", "message"),
    [
        ("soak_server.py model", "vllm", "vllm is not installed for {python}: pip install "),
        ("soak_server.py model", "aiohttp", "aiohttp is not installed for {python}, and vLLM brings it: pip install "),
        ("watch_server.py model", "vllm", "vllm is not installed for "),
        ("watch_server.py model", "aiohttp", "aiohttp is not installed for "),
        ("compare_vllm.py model", "vllm", "vllm is not installed for "),
        ("compare_vllm.py model --url http://127.0.0.1:1", "vllm", "vllm is not installed for "),
        ("profile_decode.py model", "torch", "torch is not installed for "),
        ("profile_decode.py model", "vllm", "vllm is not installed for "),
        ("verify_gpu.py", "torch", "torch is not installed for "),
        ("verify_gpu.py --virtual", "flashinfer", "flashinfer is not installed for "),
        ("random_checkpoint.py {tmp}/new", "torch", "torch is not installed for "),
        ("random_checkpoint.py {tmp}/new", "safetensors", "safetensors is not installed for "),
        ("compare_answers.py model", "vllm", "vllm is not installed for "),
    ],
)
def test_what_is_missing_is_reported_in_a_line(line: str, gone: str, message: str, tmp_path: Path, vllm: str) -> None:
    script, *words = line.format(tmp=tmp_path).split()
    done = run("-c", WITHOUT, gone, str(REPO / "scripts" / script), *words, PYTHONPATH=vllm)
    (only,) = done.stderr.splitlines()
    assert only.startswith(message.format(python=sys.executable))
    assert done.returncode == 1


@pytest.mark.parametrize(
    "line",
    [
        "compare_answers.py model",
        "compare_vllm.py model",
        "profile_decode.py model",
        "soak_server.py model",
        "soak_server.py --layers 1",
        "verify_gpu.py --quick",
        "watch_server.py model",
    ],
)
def test_that_there_is_no_gpu_is_reported_in_a_line(line: str, tmp_path: Path, vllm: str) -> None:
    """And before anything is written or started."""
    script, *words = line.split()
    brought = sorted((tmp_path / "brought").iterdir())
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(tmp_path / "brought")}
    done = run(str(REPO / "scripts" / script), *words, PYTHONPATH=vllm, **hidden)
    (only,) = done.stderr.splitlines()
    assert only.startswith("no GPU: torch.cuda.is_available() is False")
    assert done.returncode == 1
    assert (done.stdout, sorted((tmp_path / "brought").iterdir())) == ("", brought)


def test_answers_of_a_server_that_is_not_up_are_reported_in_a_line(vllm: str) -> None:
    words = ("--urls", "http://127.0.0.1:9,http://127.0.0.1:9")
    done = run(str(REPO / "scripts" / "compare_answers.py"), *words, PYTHONPATH=vllm)
    (only,) = done.stderr.splitlines()
    assert only.startswith("http://127.0.0.1:9 does not answer: ")
    assert done.returncode == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:8000", "8000"])
def test_a_server_that_does_not_answer_is_reported_in_a_line(url: str, vllm: str) -> None:
    done = run(str(REPO / "scripts" / "compare_vllm.py"), "model", "--url", url, PYTHONPATH=vllm)
    (only,) = done.stderr.splitlines()
    assert only.startswith(f"no server is ready at {url}: ")
    assert done.returncode == 1


@pytest.mark.parametrize(
    "line",
    [
        "compare_answers.py model --tokens 9",
        "compare_vllm.py model --ways {way}",
        "profile_decode.py model --set moe=mxfp4-a16",
    ],
)
def test_another_flashinfer_is_not_measured_as_this_fork(
    line: str, tmp_path: Path, vllm: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM takes options of a plugin that it has not, so that the table would say what is not so."""
    import vllm_server

    monkeypatch.setattr(vllm_server, "gpu_bytes", lambda: 1 << 36)
    monkeypatch.setattr(vllm_server, "need", lambda *_: None)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(REPO / "scripts")])
    script, *words = line.format(way="fork").split(" ", 3)
    module = importlib.import_module(script.removesuffix(".py"))
    words = [words[0], words[1], "fork, W4A8" if words[2] == "fork" else words[2]]
    monkeypatch.setattr(sys, "argv", [script, *words])
    with pytest.raises(SystemExit, match=f"this fork is not installed for .*: pip install {REPO}"):
        module.main()


@pytest.mark.parametrize(
    ("gpu", "own", "share"),
    [
        (128 << 30, [], host_memory.SHARE),  # the host's memory, as on a Spark
        (16 << 30, [], host_memory.VLLM_SHARE),  # a card's own
        (128 << 30, ["--gpu-memory-utilization", "0.5"], None),
        (128 << 30, ["--gpu_memory_utilization=0.5"], None),
    ],
)
def test_servers_leave_the_host_its_memory_and_answer_this_machine_alone(
    gpu: int, own: list[str], share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm_server

    host = host_memory.HostMemory(100 << 30, 128 << 30)
    monkeypatch.setattr(vllm_server, "gpu_bytes", lambda: gpu)
    monkeypatch.setattr(vllm_server.host_memory, "read", lambda: host)
    given = argparse.Namespace(port=1, server=[*own, "--max-num-seqs", "2"])
    words = vllm_server.serve("model", given, "--additional-config", "{}")[len(vllm_server.VLLM) :]
    expected = [] if share is None else ["--gpu-memory-utilization", str(share)]
    assert words == [
        *("serve", "model", "--port", "1", "--host", "127.0.0.1", *expected, "--additional-config", "{}"),
        *(*own, "--max-num-seqs", "2"),
    ]
    monkeypatch.setattr(vllm_server.host_memory, "read", lambda: None)  # no /proc: who knows
    assert vllm_server.share(gpu) == host_memory.SHARE
    given = argparse.Namespace(port=1, server=["--host=0.0.0.0"])
    assert "127.0.0.1" not in vllm_server.serve("model", given)


def test_scripts_start_servers_by_that_command_alone() -> None:
    for script in SCRIPTS:
        text = (REPO / "scripts" / script).read_text()
        assert '"serve", ' not in text.replace('"bench", "serve"', ""), script
        assert text.count("vllm_server.serving(") == text.count("vllm_server.serve("), script


def test_why_a_server_ended_while_it_started_is_reported(tmp_path: Path) -> None:
    import vllm_server

    message = """
        print("INFO: so far so good")
        print("(EngineCore pid=7) ERROR 11-26 21:00:00 [core.py:1] torch.OutOfMemoryError: CUDA out of memory.")
        print("(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above. Failed: {}")
        raise SystemExit(1)
    """
    command = [sys.executable, "-c", textwrap.dedent(message)]
    log = tmp_path / "log"
    with (
        pytest.raises(vllm_server.ServerEnded) as ended,
        vllm_server.serving(command, "http://127.0.0.1:9", log, 60),
    ):
        pytest.fail("it was entered")
    how = "the server ended with status 1 while it started: torch.OutOfMemoryError: CUDA out of memory.; its log is"
    assert str(ended.value) == f"{how} {log}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("random_checkpoint.py folder --layers -1", "argument --layers: '-1' is not a positive whole number"),
        ("random_checkpoint.py folder --experts 3", "--experts: 3 are fewer than the 4 of a token"),
        ("random_checkpoint.py folder --vocabulary 5", "--vocabulary: 5 has no room for the tokenizer's 9 own"),
        ("soak_server.py model --streams x", "argument --streams: 'x' is not a positive whole number"),
        ("soak_server.py model --layers 2", "give a model, or --layers N"),
        ("watch_server.py model --streams 0", "argument --streams: '0' is not a positive whole number"),
        ("watch_server.py model --vocabulary 2", "--vocabulary: prompts are of ids from 2 on"),
        ("compare_answers.py model --urls x", "give a model, whose servers are started, or --urls"),
        ("compare_answers.py", "give a model, whose servers are started, or --urls"),
        ("compare_answers.py --urls http://x", "two servers are compared, or more: the first is the reference"),
        ("compare_answers.py model --ways spark", "two servers are compared, or more: the first is the reference"),
        (
            "compare_answers.py model --ways spark;sparks",
            "--ways: FLASHINFER_SM12X_VLLM: 'sparks' is no key=value and no",
        ),
        ("compare_answers.py model --decode 1", "--decode: the first token is the prompt's, so that two are the least"),
        ("compare_answers.py model --streams 1,0", "argument --streams: '0' is not a positive whole number"),
        ("compare_vllm.py model --streams x", "argument --streams: 'x' is not a positive whole number"),
        ("compare_vllm.py model --streams 1,,2", "argument --streams: '' is not a positive whole number"),
        ("profile_decode.py --layers 0", "argument --layers: '0' is not a positive whole number"),
    ],
)
def test_arguments_are_refused_before_anything_starts(line: str, message: str) -> None:
    script, *words = line.split()
    done = run(str(REPO / "scripts" / script), *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"{script}: error: {message}")


LATIN_1 = b'{"text": "caf\xe9"}\n'


@pytest.mark.parametrize(
    ("line", "status", "message"),
    [
        ("scripts/compare_answers.py model --text", 2, "{file} is not UTF-8: byte 13 is 0xe9"),
        ("scripts/watch_server.py model --replay", 1, "{file} holds no requests, one in a line: 'utf-8' codec .* 13"),
        ("benchmarks/bench_accuracy.py --device cpu --text", 2, "{file} is not UTF-8: byte 13 is 0xe9"),
        ("benchmarks/bench_token.py --render", 2, "{file} is not JSON: byte 13 is not UTF-8"),
        ("benchmarks/bench_token.py --predict --report", 2, "{file} is not JSON: byte 13 is not UTF-8"),
        ("benchmarks/bench_dense_mx.py --render", 2, "{file} is not JSON: byte 13 is not UTF-8"),
        ("benchmarks/bench_cutlass_fused_moe_mxfp4.py --render", 2, "{file} is not JSON: byte 13 is not UTF-8"),
    ],
)
def test_a_file_that_is_not_utf_8_is_named_with_its_byte(line: str, status: int, message: str, tmp_path: Path) -> None:
    """Before a server is started or a model loaded, and in a locale in which it would be a text, too."""
    file = tmp_path / "a file.txt"
    file.write_bytes(LATIN_1)
    script, *words = line.split()
    done = run(str(REPO / script), *words, str(file), LC_ALL="C")
    assert done.returncode == status
    assert re.search(message.format(file=re.escape(str(file))), done.stderr.splitlines()[-1]), done.stderr
    assert "Traceback" not in done.stderr


def test_a_text_that_is_not_there_or_a_folder_is_named(tmp_path: Path) -> None:
    for file, why in ((tmp_path / "none", "No such file or directory"), (tmp_path, "Is a directory")):
        done = run(str(REPO / "scripts" / "compare_answers.py"), "model", "--text", str(file))
        assert done.returncode == 2
        assert done.stderr.endswith(f"error: --text: {file} cannot be read: {why}\n")


def test_a_checkpoint_that_was_not_finished_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a signal, and where the disk is full."""
    import random_checkpoint
    import vllm_server

    monkeypatch.setattr(vllm_server, "need", lambda *packages: None)
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", str(tmp_path / "new")])
    for error in (KeyboardInterrupt, OSError):

        def fail(folder: Path, *_: object, error: type[BaseException] = error) -> None:
            (folder / "model-embedding.safetensors").write_bytes(b"half")
            raise error

        monkeypatch.setattr(random_checkpoint, "write", fail)
        with pytest.raises(error):
            random_checkpoint.main()
        assert list((tmp_path / "new").iterdir()) == []


def test_a_checkpoint_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import random_checkpoint
    import vllm_server

    monkeypatch.setattr(vllm_server, "need", lambda *packages: None)
    monkeypatch.setattr(random_checkpoint, "write", lambda *_: pytest.fail("it was written"))
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="holds files: name a new folder, or empty it"):
        random_checkpoint.main()
    monkeypatch.setattr(sys, "argv", ["random_checkpoint.py", "/dev/null"])
    with pytest.raises(SystemExit, match="/dev/null cannot be written: "):
        random_checkpoint.main()


def test_somebody_elses_server_is_not_measured(tmp_path: Path) -> None:
    import vllm_server

    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"http://127.0.0.1:{other.getsockname()[1]}"
        with (
            pytest.raises(vllm_server.ServerEnded, match=f"something else serves at {url}: .* another --port"),
            vllm_server.serving(["/nonexistent"], url, tmp_path / "log", 5),
        ):
            pytest.fail("it was entered")
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("command", ["sm12x-build", "sm12x-instances", "show-config"])
def test_a_bad_list_of_architectures_is_reported_in_a_line(command: str) -> None:
    done = run("-m", "flashinfer", command, FLASHINFER_CUDA_ARCH_LIST="12.1x")
    assert done.stderr.splitlines()[-1].startswith("python -m flashinfer: FLASHINFER_CUDA_ARCH_LIST: '12.1x' is not")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    imported = run("-c", "import flashinfer", FLASHINFER_CUDA_ARCH_LIST="12.1x")
    assert "ValueError: FLASHINFER_CUDA_ARCH_LIST: '12.1x' is not" in imported.stderr


def test_the_doctor_comes_before_all_that_may_be_broken(tmp_path: Path) -> None:
    """``python -m flashinfer sm12x-doctor`` works even without the wheel, and with variables that make an import
    fail."""
    (tmp_path / "flashinfer").symlink_to(REPO / "flashinfer")
    done = run("-S", "-m", "flashinfer", "sm12x-doctor", PYTHONPATH=str(tmp_path), FLASHINFER_CUDA_ARCH_LIST="x")
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[0].startswith("fail     import")
    assert " ok, " in done.stdout.splitlines()[-1]
    shown = run("-m", "flashinfer", "sm12x-doctor", "--help")
    assert shown.stdout.startswith("usage: sm12x-doctor"), shown.stderr
