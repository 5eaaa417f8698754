# SPDX-License-Identifier: Apache-2.0
"""Command lines that cannot work end with one line, and ``--help`` needs nothing of vLLM."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

REPO = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.name for path in (REPO / "scripts").glob("*.py") if path.name != "vllm_server.py")
sys.path.append(str(REPO / "scripts"))

WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(("aiohttp", "safetensors", "tokenizers", "transformers", "vllm")))  # none can be found
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""Runs a script as if nothing of vLLM's were installed."""


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPO), **variables}
    if words[0] == "-S":
        return subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment)
    return forked_python.run(words, env=environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_nothing_of_vllm(script: str) -> None:
    done = run("-c", WITHOUT, str(REPO / "scripts" / script), "--help")
    assert done.stdout.startswith("usage: "), done.stderr
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("soak_server.py model", "aiohttp is not installed for "),
        ("watch_server.py model", "aiohttp is not installed for "),
        ("compare_vllm.py model", "vllm is not installed for "),
        ("compare_answers.py model", "vllm is not installed for "),
        ("compare_answers.py --urls http://127.0.0.1:9,http://127.0.0.1:9", "http://127.0.0.1:9 does not answer: "),
        ("random_checkpoint.py {tmp}/new", "safetensors is not installed for "),
    ],
)
def test_what_is_missing_is_said_in_a_line(line: str, said: str, tmp_path: Path) -> None:
    script, *words = line.format(tmp=tmp_path).split()
    done = run("-c", WITHOUT, str(REPO / "scripts" / script), *words)
    (only,) = done.stderr.splitlines()
    assert only.startswith(said)
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("line", "said"),
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
def test_arguments_are_refused_before_anything_starts(line: str, said: str) -> None:
    script, *words = line.split()
    done = run(str(REPO / "scripts" / script), *words)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"{script}: error: {said}")


def test_a_checkpoint_is_not_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import random_checkpoint
    import vllm_server

    monkeypatch.setattr(vllm_server, "need", lambda package: None)
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
def test_a_bad_list_of_architectures_is_said_in_a_line(command: str) -> None:
    done = run("-m", "flashinfer", command, FLASHINFER_CUDA_ARCH_LIST="12.1x")
    assert done.stderr.splitlines()[-1].startswith("python -m flashinfer: FLASHINFER_CUDA_ARCH_LIST: '12.1x' is not")
    assert "Traceback" not in done.stderr
    assert done.returncode == 1
    imported = run("-c", "import flashinfer", FLASHINFER_CUDA_ARCH_LIST="12.1x")
    assert "ValueError: FLASHINFER_CUDA_ARCH_LIST: '12.1x' is not" in imported.stderr


def test_the_doctor_comes_before_all_that_may_be_broken(tmp_path: Path) -> None:
    """As ``python -m flashinfer sm12x-doctor``, with no wheel to import and variables that end an import."""
    (tmp_path / "flashinfer").symlink_to(REPO / "flashinfer")
    done = run("-S", "-m", "flashinfer", "sm12x-doctor", PYTHONPATH=str(tmp_path), FLASHINFER_CUDA_ARCH_LIST="x")
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[0].startswith("fail     import")
    assert " ok, " in done.stdout.splitlines()[-1]
    shown = run("-m", "flashinfer", "sm12x-doctor", "--help")
    assert shown.stdout.startswith("usage: sm12x-doctor"), shown.stderr
