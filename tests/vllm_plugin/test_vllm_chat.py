# SPDX-License-Identifier: Apache-2.0
"""Chat, tools and llama-benchy as docs/serving.md has them, through vLLM's own server with an engine that follows a
script (``chat_server.py``)."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_checkpoint
import soak_server
import vllm_server

HERE = Path(__file__).parent
REPO = HERE.parents[1]
SERVING = (REPO / "docs/serving.md").read_text().replace("\\\n", " ")
CHAT = re.findall(r"curl \S+/v1/chat/completions --json '(.*?)'", SERVING, re.DOTALL)
BENCHY = re.findall(r"/llama-benchy (--.*)", SERVING)
PREFILL, DECODE = 2e-5, 2e-3


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    from vllm.utils.network_utils import get_open_port

    folder = tmp_path_factory.mktemp("chat")
    config = {**random_checkpoint.GPT_OSS_20B, "hidden_size": 160, "num_hidden_layers": 1}  # no weight is read
    (folder / "config.json").write_text(json.dumps(config))
    random_checkpoint.write_tokenizer(folder, config["vocab_size"])
    (line,) = re.findall(r"^vllm serve openai/gpt-oss-120b(.*--tool-call-parser.*)$", SERVING, re.MULTILINE)
    port = str(get_open_port())
    command = [sys.executable, str(HERE / "chat_server.py"), "serve", str(folder), "--port", port, *shlex.split(line)]
    path = os.pathsep.join(map(str, [REPO, HERE, HERE / "platform", REPO / "scripts"]))
    variables = {"PYTHONPATH": path, "PREFILL": str(PREFILL), "DECODE": str(DECODE)}
    address = f"http://127.0.0.1:{port}"
    log = folder / "server.log"
    try:
        with vllm_server.serving(command, address, log, 900, variables):
            yield address
    finally:
        print(log.read_text()[-3000:])


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]


def test_the_documents_chat_is_answered(url):
    found = ask(url, json.loads(CHAT[0]))
    message = found["message"]
    assert (message["content"], message["reasoning"], found["finish_reason"]) == ("Paris", "An easy one.", "stop")


def test_the_documents_tool_is_called_and_its_result_read(url):
    body = json.loads(CHAT[1])
    found = ask(url, body)
    assert found["finish_reason"] == "tool_calls"
    (call,) = found["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "get_temperature",
        {"city": "Paris"},
    )
    body["messages"] += [found["message"], {"role": "tool", "tool_call_id": call["id"], "content": "17 degrees"}]
    assert ask(url, body)["message"]["content"] == "17 degrees"


def test_llama_benchy_measures_this_server_as_documented(url, tmp_path):
    """The documented line with fewer runs, offline: words of one token each, in Harmony's vocabulary and in its own."""
    from openai_harmony import HarmonyEncodingName, load_harmony_encoding
    from tokenizers import Tokenizer, models, pre_tokenizers

    harmony = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    words = sorted({harmony.decode([token]).strip() for token in range(1000, 8000)})
    words = [word for word in words if word.isascii() and word.isalpha() and len(harmony.encode(f" {word}")) == 1]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    print("seed", 8)
    book = tmp_path / ".cache/llama-benchy"
    book.mkdir(parents=True)
    source = hashlib.md5(b"https://www.gutenberg.org/files/1661/1661-0.txt").hexdigest()
    (book / f"{source}.txt").write_text(" ".join(random.Random(8).choices(words, k=40000)))

    (line,) = BENCHY
    given = shlex.split(line.replace("http://127.0.0.1:8000", url))
    few = ["--served-model-name", "gpt-oss-120b", "--tokenizer", str(tmp_path / "tokenizer.json")]
    few += ["--pp", "2048", "--tg", "32", "--depth", "0", "4096", "--runs", "2", "--latency-mode", "none"]
    few += ["--save-result", str(tmp_path / "found.json"), "--format", "json"]
    done = subprocess.run(
        [sys.executable, "-m", "llama_benchy", *given, *few],
        env={**os.environ, "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    found = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert [(row["prompt_size"], row["context_size"]) for row in found] == [(2048, 0), (2048, 4096)]
    for row in found:  # a busy machine is slower than its sleep, never faster
        assert 0.05 / PREFILL < row["pp_throughput"]["mean"] < 1.1 / PREFILL
        assert 0.05 / DECODE < row["tg_throughput"]["mean"] < 1.1 / DECODE


def test_soak_server_chats_with_vllms_own_server(url, monkeypatch):
    words = ["--layers", "1", "--minutes", "0", "--rounds", "3", "--streams", "8", "--input", "20", "--output", "8"]
    monkeypatch.setattr(sys, "argv", ["soak_server.py", *words])
    given, rows = soak_server.arguments(), []
    assert asyncio.run(soak_server.soak(url, os.getpid(), given, rows)) == ""
    assert len(rows) == 3
    assert all(row["chats"] >= 2 for row in rows)
