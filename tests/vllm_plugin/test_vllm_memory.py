# SPDX-License-Identifier: Apache-2.0
"""A host whose memory is its GPU's: vLLM's share of it, and a load that ends before the host does."""

from __future__ import annotations

import json
from typing import Any

import pytest
import served
from test_vllm_models import attention_in_pytorch, logits, serve
from vllm.config import CacheConfig

from flashinfer_sm12x import host_memory as numbers
from flashinfer_sm12x.vllm import memory

__all__ = ["attention_in_pytorch"]

GIB = numbers.GIB
SPARK = 124 * GIB  # MemTotal is less than the stand-in for its GPU has, which is 128


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A host of a Spark's size; what of it is free, the last sample for ever."""
    free = [100 * GIB]

    def read() -> Any:
        return memory.host_memory.HostMemory(free.pop(0) if len(free) > 1 else free[0], SPARK)

    monkeypatch.setattr(memory.host_memory, "read", read)
    monkeypatch.setenv("VIRTUAL_GPU_CAPABILITY", "12.1")
    return free


def share(folder: Any, *words: str) -> float:
    return float(served.engine_config(str(folder), *words).cache_config.gpu_memory_utilization)


def reported(log: list[str]) -> list[str]:
    return [message for message in log if "--gpu-memory-utilization" in message]


def test_vllms_default_is_lowered_and_the_log_reports_it(checkpoint_folder, spark, log):
    assert CacheConfig.gpu_memory_utilization == numbers.VLLM_SHARE
    assert share(checkpoint_folder) == numbers.SHARE
    (line,) = reported(log)
    assert f"--gpu-memory-utilization is {numbers.SHARE} in place of vLLM's default of {numbers.VLLM_SHARE}" in line
    assert f"name another number than {numbers.VLLM_SHARE}" in line


@pytest.mark.parametrize("option", ["--gpu-memory-utilization", "--device-memory-utilization"])
def test_a_users_own_share_stays_and_is_warned_of_above_the_forks(checkpoint_folder, spark, log, option):
    assert share(checkpoint_folder, option, "0.85") == 0.85
    (line,) = reported(log)
    assert f"--gpu-memory-utilization 0.85 is more than {numbers.SHARE}" in line


@pytest.mark.parametrize("given", [numbers.SHARE, 0.3])
def test_a_share_that_is_small_enough_gets_no_line(checkpoint_folder, spark, log, given):
    assert share(checkpoint_folder, "--gpu-memory-utilization", str(given)) == given
    assert reported(log) == []


def test_a_cache_of_named_bytes_is_no_share(checkpoint_folder, spark, log):
    assert share(checkpoint_folder, "--kv-cache-memory-bytes", "8G") == numbers.VLLM_SHARE
    assert reported(log) == []


@pytest.mark.parametrize(
    ("capability", "total"),
    [("12.0", SPARK), ("12.1", 62 * GIB), ("12.1", None)],
    ids=["a card", "a guest", "no /proc"],
)
def test_memory_that_is_not_known_to_be_the_hosts_stays_vllms(
    checkpoint_folder, spark, log, monkeypatch, capability, total
):
    """A card of the host's size, a guest with a part of the host's memory, a kernel that does not tell."""
    monkeypatch.setenv("VIRTUAL_GPU_CAPABILITY", capability)
    host = None if total is None else memory.host_memory.HostMemory(GIB, total)
    monkeypatch.setattr(memory.host_memory, "read", lambda: host)
    assert share(checkpoint_folder) == numbers.VLLM_SHARE
    assert reported(log) == []
    assert list(memory.watched([("name", None)])) == [("name", None)]


def test_a_gpu_that_does_not_tell_its_memory_stops_nothing(checkpoint_folder, spark, log, monkeypatch):
    monkeypatch.setattr(memory, "shared", lambda: 1 / 0)
    assert share(checkpoint_folder) == numbers.VLLM_SHARE
    (line,) = reported(log)
    assert "division by zero" in line
    assert f"--gpu-memory-utilization {numbers.SHARE}" in line


def test_other_models_keep_vllms_share(tmp_path, spark, log):
    """The plugin's hook is gpt-oss's; of others it has the experts alone, and their memory is not known here."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 64}
    config |= {"intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    assert share(tmp_path, "--skip-tokenizer-init") == numbers.VLLM_SHARE


def test_a_load_ends_before_the_host_does(checkpoint_folder, spark):
    """vLLM's own loader stops at the first sample below the floor, whatever the share."""
    spark[:] = [100 * GIB, 90 * GIB, numbers.HEADROOM, numbers.HEADROOM - 1]
    config = serve(checkpoint_folder, {}, "--gpu-memory-utilization", "0.5")
    with (
        served.parallel_groups(config),
        pytest.raises(
            RuntimeError, match=r"stopped before \S+: 8\.0 of 124 GiB of the host's memory are free, and below 8"
        ),
    ):
        served.load_model(config)
    assert spark == [numbers.HEADROOM - 1]


def test_a_load_with_memory_to_spare_is_the_same_load(checkpoint_folder, spark, monkeypatch):
    seen = logits(checkpoint_folder, {})
    monkeypatch.setattr(memory.host_memory, "read", lambda: None)
    assert seen.equal(logits(checkpoint_folder, {}))
