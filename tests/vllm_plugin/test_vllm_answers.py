# SPDX-License-Identifier: Apache-2.0
"""``scripts/compare_answers.py`` against vLLM's own server with models that vLLM loaded (``forced_server.py``)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoint
import compare_answers
import pytest
import reference_attention
import served
import torch
import vllm_server
from random_checkpoint import HARMONY_TOKENS
from test_vllm_models import ON_THE_CPU

HERE = Path(__file__).parent
REPO = HERE.parents[1]
VOCABULARY = checkpoint.CONFIG["vocab_size"]
PROMPT, DECODE = 5, 12
REFERENCE, OTHER = "moe=mxfp4-a16", "spark"
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, [REPO, HERE, HERE / "platform", REPO / "scripts"])),
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # by default where there is Triton, which a CPU has not
}
SERVER = ("--", *ON_THE_CPU, "--max-model-len", "256")


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    program = (
        "import runpy, sys, vllm_server; "
        f"vllm_server.VLLM = (sys.executable, {str(HERE / 'forced_server.py')!r}); "
        "vllm_server.gpu_bytes = lambda: 1 << 36; "  # its servers run on the CPU
        f"sys.argv[0] = 'compare_answers.py'; "
        f"runpy.run_path({str(REPO / 'scripts/compare_answers.py')!r}, run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, **ENVIRONMENT, **variables},
        capture_output=True,
        text=True,
        timeout=1800,
    )


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A file of the tokenizer's words, and its windows."""
    print("seed", 9)
    generator = torch.Generator().manual_seed(9)
    words = VOCABULARY - len(HARMONY_TOKENS)  # others have no number
    ids = torch.randint(20, words, (3 * (PROMPT + DECODE) + 4,), generator=generator).tolist()
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"t{token}" for token in ids))
    size = PROMPT + DECODE
    return path, [ids[at : at + size] for at in range(0, 3 * size, size)]


def port() -> str:
    from vllm.utils.network_utils import get_open_port

    return str(get_open_port())


def log_probabilities(
    folder: Path, way: str, windows: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """The log probabilities of every compared token, by vLLM's model in this process: ``[tokens, vocabulary]``."""
    from vllm.model_executor.layers.attention import Attention

    monkeypatch.setattr(Attention, "forward", reference_attention.forward)
    monkeypatch.setenv("FLASHINFER_SM12X_VLLM", way)
    config = served.engine_config(str(folder), *ON_THE_CPU)
    with served.parallel_groups(config):
        model = served.load_model(config)
        rows = [served.logits(config, model, torch.tensor(window))[PROMPT:-1] for window in windows]
    return torch.cat(rows).double().log_softmax(-1)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    print(done.stdout, done.stderr[-2000:])
    assert done.returncode == 0
    return [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][2:]


def test_two_servers_one_after_the_other_and_the_models_own_divergence(checkpoint_folder, text, tmp_path, monkeypatch):
    """``--top`` covers the whole vocabulary, so the printed KL is the true one; decode and prefill agree here."""
    path, windows = text
    words = [str(checkpoint_folder), "--ways", f"{REFERENCE};{OTHER}", "--text", str(path), "--streams", "1,2"]
    words += ["--prompt", str(PROMPT), "--decode", str(DECODE), "--top", str(VOCABULARY), "--out", str(tmp_path)]
    done = run(*words, "--port", port(), *SERVER)
    rows = rows_of(done)
    assert done.stdout.startswith(f"{checkpoint_folder}: 33 tokens in 3 windows, against {REFERENCE}\n")
    paths = ["decode, streams: 1", "decode, streams: 2", "prefill"]
    assert [row[:2] for row in rows] == [
        [f"{REFERENCE}, itself", "decode, streams: 1 / 2"],
        *([OTHER, each] for each in paths),
    ]
    assert rows[0][2:5] == ["0 [0, 0]", "0", "100.0%"]
    p, q = (log_probabilities(checkpoint_folder, way, windows, monkeypatch) for way in (REFERENCE, OTHER))
    kl = (p.exp() * (p - q)).sum(-1)
    answered = torch.tensor([token for window in windows for token in window[PROMPT + 1 :]])
    perplexities = [float(each.gather(1, answered[:, None]).mean().neg().exp()) for each in (p, q)]
    assert kl.mean() > 1e-3
    for row in rows[1:]:
        value, low, high = (float(each) for each in row[2].replace("[", "").replace("]", "").replace(",", "").split())
        assert value == pytest.approx(float(kl.mean()), rel=0.06)  # two digits are printed
        assert low <= value <= high
        assert float(row[3]) == pytest.approx(float(kl.max()), rel=0.06)  # of 33 tokens
        assert row[4] == f"{float((p.argmax(-1) == q.argmax(-1)).double().mean()):.1%}"
        for printed, true in zip(row[5].split(" -> "), perplexities, strict=True):
            assert float(printed) == pytest.approx(true, rel=1e-3)
        assert row[6] == "0.00%"


@pytest.fixture
def server(checkpoint_folder: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """One that is up; its fault and its words are the test's."""
    fault, words = request.param
    at = port()
    command = [sys.executable, str(HERE / "forced_server.py"), "serve", str(checkpoint_folder), "--port", at, *words]
    url = f"http://127.0.0.1:{at}"
    with vllm_server.serving([*command, *SERVER[1:]], url, tmp_path / "log", 900, {**ENVIRONMENT, "FAULT": fault}):
        yield url


GOOD = [*compare_answers.FORCING, "--max-logprobs", "30"]


@pytest.mark.parametrize(
    ("server", "answered"),
    [
        (("", []), "403: "),
        (("", ["--enable-scale-out", "--max-logprobs", "30"]), "trace replay is not enabled"),
        (("tokens", GOOD), "wrote other tokens than it was given"),
    ],
    indirect=["server"],
)
def test_a_server_that_cannot_be_compared_ends_with_what_to_start_with(server, answered, text):
    words = ["--urls", f"{server},{server}", "--text", str(text[0]), "--streams", "1", "--top", "30"]
    done = run(*words, "--prompt", str(PROMPT), "--decode", str(DECODE))
    print(done.stdout, done.stderr)
    assert done.returncode == 1
    assert answered in done.stderr
    asks = "it must be vLLM 0.33.0's, started with --enable-trace-replay --enable-scale-out --max-logprobs 30"
    assert answered.startswith("wrote") or done.stderr.splitlines()[-1] == asks
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("server", [("", GOOD)], indirect=True)
def test_a_running_server_is_as_far_from_itself_as_nothing(server, text):
    words = ["--urls", f"{server}/,{server}", "--text", str(text[0]), "--streams", "16", "--top", "30"]
    rows = rows_of(run(*words, "--prompt", str(PROMPT), "--decode", str(DECODE), "--tokens", "22"))
    assert [row[:3] for row in rows] == [[server, path, "0 [0, 0]"] for path in ("decode, streams: 16", "prefill")]
    done = run(*words, "--prompt", str(PROMPT), "--decode", str(DECODE), "--top", "31")
    assert "which is greater than max allowed: 30" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("--enable-scale-out --max-logprobs 31")
    done = run(*words, "--prompt", "400")
    assert done.stderr.splitlines()[1:] == [
        "the text has no 528 tokens in a row: shorten --prompt or --decode, or give more --text"
    ]
