# SPDX-License-Identifier: Apache-2.0
"""Logits of a whole small gpt-oss from ``vllm serve``'s command line, by vLLM's own code, on CPU tensors.

The reference is transformers' model of the dequantized weights in float32. Its distance from the same model in bf16
arithmetic sets the scale of allowed differences: vLLM keeps activations in bf16, too, and rounds in other places.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import checkpoint
import experts_reference
import pytest
import reference_attention
import served
import torch
from documents import serve_commands
from whole_manifest import whole_manifest

from flashinfer_sm12x.host_memory import SHARE

REPO = Path(__file__).parents[2]
# Eager, with the PyTorch versions of vLLM's small operators.
ON_THE_CPU = ("--compilation-config", '{"mode": 0, "custom_ops": ["none"], "cudagraph_mode": "NONE"}')
DENSE_MXFP4 = {"qkv": "mxfp4", "o": "mxfp4", "lm_head": "mxfp4"}
RUNTIME = "#define CUDART_VERSION 13000"
TOKENS = (torch.arange(29) * 2654435761 + 12345) % checkpoint.CONFIG["vocab_size"]


@pytest.fixture(autouse=True)
def attention_in_pytorch(monkeypatch):
    from vllm.model_executor.layers.attention import Attention

    monkeypatch.setattr(Attention, "forward", reference_attention.forward)


def serve(folder: Any, chosen: dict[str, str], *words: str) -> Any:
    return served.engine_config(str(folder), *ON_THE_CPU, "--additional-config", json.dumps({"sm12x": chosen}), *words)


def logits(folder: Any, chosen: dict[str, str], *words: str) -> torch.Tensor:
    config = serve(folder, chosen, *words)
    with served.parallel_groups(config):
        return served.logits(config, served.load_model(config), TOKENS)


def quantized(folder: Any, kinds: dict[str, str], name: str, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as the format that ``kinds`` gives its kind of layer leaves it; Q, K and V are quantized as one."""
    from flashinfer.quantization.block_scaled import dequantize_weight, quantize_weight

    suffixes = {"q_proj.weight": "qkv", "k_proj.weight": "qkv", "v_proj.weight": "qkv", "o_proj.weight": "o"}
    kind = "lm_head" if name == "lm_head.weight" else suffixes.get(".".join(name.split(".")[-2:]))
    if kind not in kinds:
        return tensor
    form: Any = kinds[kind]
    rows = {name: tensor}
    if kind == "qkv":
        layer = name.rsplit(".", 2)[0]
        saved = checkpoint.load(folder)
        rows = {f"{layer}.{part}_proj.weight": saved[f"{layer}.{part}_proj.weight"] for part in "qkv"}
    whole = torch.cat(list(rows.values()))
    whole = dequantize_weight(quantize_weight(whole, form), form, whole.shape[1]).to(tensor.dtype)
    return dict(zip(rows, whole.split([len(part) for part in rows.values()]), strict=True))[name]


def check(
    got: torch.Tensor, folder: Any, activations: str, kinds: dict[str, str] | None = None, change: Any = None
) -> None:
    """``change``, of ``checkpoint.reference_model``, in place of weights that are rounded to ``kinds``."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    change = change or functools.partial(quantized, folder, kinds or {})
    forward = experts_reference.forward if activations == "a8" else GptOssExperts.forward
    with mock.patch.object(GptOssExperts, "forward", forward), torch.inference_mode():
        model = checkpoint.reference_model(folder, change)
        exact = model(TOKENS[None]).logits[0].float()
        inexact = [model.to(torch.bfloat16)(TOKENS[None]).logits[0].float()]
        for seed in range(3):
            # Rounding may send a token to another expert, or may not: parameters that are off by as much show both.
            generator = torch.Generator().manual_seed(seed)
            model = checkpoint.reference_model(folder, change)
            for parameter in model.parameters():
                parameter.mul_(1 + 2.0**-8 * (torch.rand(parameter.shape, generator=generator) - 0.5))
            inexact.append(model(TOKENS[None]).logits[0].float())
    scale, error = max(float((each - exact).norm()) for each in inexact), float((got - exact).norm())
    print(f"error {error:.3f}, of bf16 arithmetic and seeds 0 to 2 {scale:.3f}, logits {float(exact.norm()):.1f}")
    # Else the reference decides nothing. Rounding to MXFP8 makes jumps of it: 10 % with this seed.
    assert scale < 0.2 * float(exact.norm())
    assert error < 1.5 * scale


@pytest.mark.parametrize(
    ("chosen", "activations"),
    [
        ({}, "a16"),
        ({"moe_input": "mxfp8"}, "a8"),
        ({"moe": "mxfp4"}, "a8"),
        ({"moe": "mxfp4-a8"}, "a8"),
        ({"moe": "mxfp4-a16"}, "a16"),
    ],
    ids=["auto", "W4A8 quantized by vLLM", "mxfp4", "W4A8", "W4A16"],
)
def test_a_model_of_the_forks_experts_agrees_with_transformers(checkpoint_folder, chosen, activations):
    check(logits(checkpoint_folder, chosen), checkpoint_folder, activations)


@pytest.fixture
def few_w4a16_tokens(monkeypatch):
    """The planner of a GPU on which W4A16 is as fast as W4A8 for very few tokens: 29 are in W4A8."""
    from flashinfer.sm12x.device_class import GB10

    monkeypatch.setitem(vars(GB10), "w4a16_rows", 1.7)


@pytest.mark.usefixtures("few_w4a16_tokens")
def test_experts_are_in_the_mode_of_a_steps_tokens(checkpoint_folder, log):
    check(logits(checkpoint_folder, {}), checkpoint_folder, "a8")
    assert table(log)["moe"][1] == "mxfp4-a16 up to 2 tokens a step, mxfp4-a8 beyond"


@pytest.mark.parametrize(
    "kinds",
    [
        {"qkv": "mxfp8"},
        {"o": "mxfp4"},
        {"lm_head": "mxfp8"},
        {"qkv": "mxfp4", "o": "mxfp8", "lm_head": "mxfp4"},
        {"qkv": "mxfp6", "o": "mxfp6", "lm_head": "mxint8"},
        {"qkv": "mxint8", "o": "nvfp4", "lm_head": "mxfp6"},
        {"qkv": "nvfp4", "o": "mxint8", "lm_head": "nvfp4"},
    ],
    ids=lambda kinds: ", ".join(f"{kind} {weights}" for kind, weights in kinds.items()),
)
def test_each_dense_choice_agrees_with_transformers_on_quantized_weights(checkpoint_folder, kinds, log):
    got = logits(checkpoint_folder, {"moe": "mxfp4-a16", **kinds})
    check(got, checkpoint_folder, "a16", kinds)
    rows = table(log)
    for kind, weights in kinds.items():
        assert rows[kind][:3] == ("flashinfer-sm12x", f"{weights}-a16", "chosen")


def test_an_explicit_linear_backend_wins(checkpoint_folder, log):
    kinds = {"qkv": "mxfp8", "lm_head": "mxfp8"}
    got = logits(checkpoint_folder, {"moe": "mxfp4-a16", **kinds}, "--linear-backend", "emulation")
    check(got, checkpoint_folder, "a16", kinds)
    assert table(log)["qkv"][0] == "vLLM's EmulationMxfp8LinearKernel"


def table(log: list[str]) -> dict[str, tuple[str, ...]]:
    """The table in the log: cells by the kind of layer."""
    (text,) = [message for message in log if "serves gpt-oss" in message]
    rows = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in text.splitlines()[3:]]
    return {row[0]: row[1:] for row in rows}


def test_the_table_names_each_kind_of_layer_once(checkpoint_folder, log):
    from flashinfer_sm12x.vllm import moe

    logits(checkpoint_folder, {})
    rows = table(log)
    assert list(rows) == ["moe", "qkv", "o", "lm_head", "attention", "decode"]
    most = moe.most_exact_tokens(SimpleNamespace(device="cpu", experts_per_token=4, num_experts=8))
    description = f"mxfp4-a16 up to {most:,} tokens a step, mxfp4-a8 beyond"
    assert rows["moe"][:3] == ("flashinfer-sm12x", description, "default")
    assert rows["qkv"][:3] == ("vLLM's (cuBLAS)", "bf16", "default")
    assert '"sm12x": "spark"' in rows["qkv"][3]


def chosen_kernels(folder: Any, chosen: dict[str, str], *words: str) -> dict[str, str]:
    config = serve(folder, chosen, *words)
    with served.parallel_groups(config):
        return served.kernels(served.built(config))


FORMATS = {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8-a8"}
MARLINS = {"qkv": "MarlinMxfp8LinearKernel", "o": "MarlinMxFp4LinearKernel", "lm_head": "MarlinMxfp8LinearKernel"}
VLLMS = {"moe": "MARLIN MarlinExperts"}
LEFT = "flashinfer-sm12x: the experts are left to vLLM: "
ADAPTERS = "LoRA adapters may change them; with --lora-target-modules q_proj k_proj v_proj o_proj they do not"


@pytest.mark.parametrize(
    ("chosen", "words", "expected", "message"),
    [
        (FORMATS, (), dict.fromkeys(FORMATS, "ForkKernel"), ""),
        (FORMATS, ("--linear-backend", "marlin"), MARLINS, ""),
        (
            {"qkv": "mxfp4"},
            ("--quantization-config", '{"linear": "mxfp8"}', "--linear-backend", "emulation"),
            dict.fromkeys(("qkv", "o"), "EmulationMxfp8LinearKernel"),
            "",
        ),
        ({}, ("--moe-backend", "marlin"), VLLMS, f"{LEFT}--moe-backend marlin"),
        # vLLM alone refuses it here: it looks for the bf16 variant, which it keeps to Hopper.
        ({}, ("--moe-backend", "flashinfer_cutlass"), {"moe": "FLASHINFER_CUTLASS_MXFP4_BF16 SM12xAutoExperts"}, ""),
        ({"moe": "vllm"}, (), VLLMS, f"{LEFT}chosen"),
        ({}, ("--enable-lora",), VLLMS, LEFT + ADAPTERS),
        ({}, ("--enable-lora", "--lora-target-modules", "o_proj", "gate_up_proj"), VLLMS, LEFT + ADAPTERS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_kernels_are_those_that_were_chosen_and_named(checkpoint_folder, log, chosen, words, expected, message):
    found = chosen_kernels(checkpoint_folder, chosen, *words)
    assert found == found | expected
    assert not message or message in log


LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj")


def adapter(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """A and B of a random LoRA adapter of attention, by the checkpoint's names of its layers."""
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    sizes = checkpoint.CONFIG
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"] * sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes = {"q_proj": (heads, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, heads)}
    return {
        f"model.layers.{layer}.self_attn.{name}": (
            (torch.randn(8, k, generator=generator) * k**-0.5).bfloat16(),
            (torch.randn(n, 8, generator=generator) * 0.3).bfloat16(),
        )
        for layer in range(sizes["num_hidden_layers"])
        for name, (n, k) in shapes.items()
    }


@pytest.mark.parametrize("kinds", [{}, {"qkv": "mxint8", "o": "mxint8"}], ids=["bf16", "quantized"])
def test_an_adapter_of_attention_leaves_the_experts_to_the_fork(checkpoint_folder, monkeypatch, kinds):
    """vLLM's own LoRA layers around its attention; logits are those of weights with the adapter added in."""
    from vllm.lora import model_manager
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    monkeypatch.setattr(model_manager, "get_punica_wrapper", PunicaWrapperCPU)
    given = adapter(4)
    config = serve(checkpoint_folder, kinds, *LORA)
    with served.parallel_groups(config):
        model = served.load_model(config)
        chosen = {**dict.fromkeys(kinds, "ForkKernel"), "moe": "FLASHINFER_CUTLASS_MXFP4_BF16 SM12xAutoExperts"}
        assert served.kernels(model) == served.kernels(model) | chosen
        sizes = 1, len(TOKENS), checkpoint.CONFIG["vocab_size"]
        manager = model_manager.LoRAModelManager(model, *sizes, config.lora_config, torch.device("cpu"), config)
        named = {name.replace("self_attn", "attn"): pair for name, pair in given.items()}
        manager.add_adapter(
            LoRAModel(1, 8, {name: LoRALayerWeights(name, 8, 8, *pair) for name, pair in named.items()})
        )
        manager.activate_adapter(1)
        found = []
        for number in (0, 1):  # without an adapter, and with it
            manager.set_adapter_mapping(LoRAMapping((number,) * len(TOKENS), (number,), is_prefill=True))
            found.append(served.logits(config, model, TOKENS))

    def added(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensor = quantized(checkpoint_folder, kinds, name, tensor)
        a, b = given.get(name.removesuffix(".weight"), (None, None))
        return tensor if a is None or not name.endswith(".weight") else tensor.float() + b.float() @ a.float()

    check(found[0], checkpoint_folder, "a16", kinds)
    check(found[1], checkpoint_folder, "a16", change=added)
    with pytest.raises(AssertionError):
        check(found[0], checkpoint_folder, "a16", change=added)


def test_speculative_decoding_verifies_by_these_kernels_and_drafts_by_vllms(checkpoint_folder, tmp_path, monkeypatch):
    """EAGLE3: a window's rows have the logits that they have without a draft, which stays as it was trained."""
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.model_loader import get_model

    checkpoint.write_draft(tmp_path / "draft", 5, 64)
    plain = logits(checkpoint_folder, DENSE_MXFP4)
    draft = {"method": "eagle3", "model": str(tmp_path / "draft"), "num_speculative_tokens": 1}
    config = serve(checkpoint_folder, DENSE_MXFP4, "--speculative-config", json.dumps(draft))
    with served.parallel_groups(config):
        model = served.load_model(config)
        model.set_aux_hidden_state_layers((0, 1, 2))
        # Load it as vLLM's proposers do. The module of their set_model_tag needs CUDA's operators, as does Llama's
        # activation.
        monkeypatch.setitem(sys.modules, "vllm.compilation.backends", SimpleNamespace(model_tag="eagle_head"))
        monkeypatch.setattr(torch.ops._C, "silu_and_mul", None, raising=False)
        drafter = get_model(vllm_config=config, model_config=config.speculative_config.draft_model_config)
        drafter.model.embed_tokens = model.model.embedding  # the proposers share what the draft's checkpoint lacks
        for module in drafter.modules():  # vLLM's rope and norms, in PyTorch
            if isinstance(module, CustomOp):
                module._forward_method = module.forward_native
        with torch.inference_mode(), set_forward_context(None, config, num_tokens=len(TOKENS)):
            hidden, states = model(TOKENS, positions := torch.arange(len(TOKENS)))
            window = model.compute_logits(hidden).float()
            given = drafter.combine_hidden_states(torch.cat(states, -1))
            drafted = drafter.compute_logits(drafter(TOKENS, positions, given)[0])
    assert torch.equal(window, plain)
    assert served.kernels(model) == {**served.kernels(model), "qkv": "ForkKernel", "o": "ForkKernel"}
    assert drafter.lm_head.weight.dtype == torch.bfloat16
    assert drafted[:, :64].isfinite().all()
    assert drafted.shape == (len(TOKENS), checkpoint.CONFIG["vocab_size"])


def test_a_module_that_cannot_be_built_leaves_the_experts_to_vllm(checkpoint_folder, log, monkeypatch):
    from flashinfer_sm12x.vllm import moe

    monkeypatch.setattr(moe, "build", lambda *sizes: "fused_moe_120 could not be built: nvcc was killed")
    assert chosen_kernels(checkpoint_folder, {})["moe"] == "MARLIN MarlinExperts"
    assert any("could not be built: nvcc was killed" in message for message in log)


@pytest.mark.parametrize("capability", ["12.1", "9.0"])
def test_the_module_is_built_once_and_before_weights_are_loaded(checkpoint_folder, monkeypatch, capability):
    """On Hopper also the other modules that its planner may choose, so that no request waits for a build."""
    from flashinfer.fused_moe import sm12x_launch
    from flashinfer.sm12x.device_class import class_of
    from flashinfer.sm12x.instances import HOPPER, INSTANCES, is_alone
    from flashinfer_sm12x.vllm import moe

    monkeypatch.setenv("VIRTUAL_GPU_CAPABILITY", capability)
    monkeypatch.setenv("FLASHINFER_SM12X_MOE", "1")
    order: list[str] = []

    class Backend:
        device_class = class_of(tuple(map(int, capability.split("."))))
        memo: ClassVar[dict] = {}

        def module(self, _generate, *tactic):
            name = INSTANCES[tactic[0]].name if tactic else "build"
            if name not in order:
                order.append(name)
            return SimpleNamespace(sm12x_register_instance=lambda *_: None, sm12x_instance_address=lambda: 0)

    backend = Backend()
    monkeypatch.setattr(sm12x_launch, "kernels", lambda device: backend)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    build = moe.build.__wrapped__
    monkeypatch.setattr(moe, "build", functools.cache(lambda device_type, *sizes: build("cuda", *sizes)))
    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

        load = DefaultModelLoader.load_weights
        monkeypatch.setattr(
            DefaultModelLoader, "load_weights", lambda *a, **k: (order.append("load"), load(*a, **k))[1]
        )
        served.load_model(config)
    # Streams for a longer K than this checkpoint's are left out.
    of_its_own = [row.name for row in HOPPER if is_alone(row) and row.block_k <= 256 and capability == "9.0"]
    assert order == ["build", *of_its_own, "load"]


def test_rows_of_padding_change_nothing_and_may_be_all(checkpoint_folder):
    config = serve(checkpoint_folder, {})
    padding = torch.zeros(len(TOKENS), dtype=torch.bool)
    with served.parallel_groups(config):
        model = served.load_model(config)
        whole = served.logits(config, model, TOKENS)
        padding[20:] = True
        assert torch.equal(served.logits(config, model, TOKENS, padding)[:20], whole[:20])
        assert served.logits(config, model, TOKENS, torch.ones_like(padding)).isfinite().all()


def test_weights_are_quantized_with_one_bf16_copy_at_a_time(checkpoint_folder, monkeypatch):
    """When a layer is quantized, the bf16 weights of those before it are gone and those after it not yet there."""
    from flashinfer_sm12x.vllm import dense

    alive: list[int] = []
    layers: list[Any] = []
    create, process = dense.DenseMethod.create_weights, dense.DenseMethod.process_weights_after_loading

    def remember(method: Any, layer: Any, *arguments: Any, **keywords: Any) -> None:
        layers.append(layer)
        create(method, layer, *arguments, **keywords)

    def count(method: Any, layer: Any) -> None:
        alive.append(sum(x.weight.dtype == torch.bfloat16 and not x.weight.is_meta for x in layers))
        process(method, layer)

    monkeypatch.setattr(dense.DenseMethod, "create_weights", remember)
    monkeypatch.setattr(dense.DenseMethod, "process_weights_after_loading", count)
    config = serve(checkpoint_folder, {"qkv": "mxfp8", "o": "mxfp8", "lm_head": "mxfp8"})
    with served.parallel_groups(config):
        assert served.load_model(config).lm_head.weight.dtype == torch.float8_e4m3fn
    assert len(alive) >= 2 * checkpoint.CONFIG["num_hidden_layers"] + 1
    assert max(alive) == 1


def documented_lines() -> list[tuple[dict[str, str], list[str]]]:
    """Variables and words behind the model's name; the second Spark's line waits for the first's."""
    return [
        (variables, [word for word in words[1:] if word != "--headless"])
        for _, variables, words in serve_commands()
        if words[0] == "openai/gpt-oss-120b"
    ]


# An older recipe's word, which docs/troubleshooting.md says changes nothing.
LINES = [*documented_lines(), ({}, ["--quantization", "mxfp4"])]


@pytest.mark.parametrize(("variables", "words"), LINES, ids=lambda given: shlex.join(given)[:60] or "-")
def test_the_documents_lines_start_a_server_as_far_as_the_engine(
    checkpoint_folder, tmp_path, monkeypatch, variables, words
):
    from flashinfer_sm12x.vllm import dense_folder
    from flashinfer_sm12x.vllm.settings import manifest

    if any("DRAFT" in word for word in words):
        checkpoint.write_draft(tmp_path / "draft", 6, 64)
        words = [word.replace("DRAFT", str(tmp_path / "draft")) for word in words]
    if any('"dense"' in word for word in words):  # a folder of another model's layers, whose names are not looked at
        (tmp_path / "f").mkdir()
        folder = whole_manifest(manifest, dict.fromkeys(manifest.KINDS, "mxfp6"))
        folder.write(tmp_path / "f" / manifest.MANIFEST)
        monkeypatch.setattr(dense_folder, "require", lambda *_: None)
        words = [word.replace("~/gpt-oss-120b-mxfp6", str(tmp_path / "f")) for word in words]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VIRTUAL_GPU_COUNT", "2")
    with mock.patch("vllm.utils.network_utils.get_ip", return_value="127.0.0.1"):
        config = served.engine_config(str(checkpoint_folder), *words)
    assert type(config.quant_config).__name__ == "SM12xGptOssConfig"
    chosen = config.additional_config["sm12x"]
    assert chosen["moe"] == "auto"
    if "--quantization" not in words:
        assert config.cache_config.gpu_memory_utilization == SHARE
    if "mxfp8" in f"{variables} {words}":
        assert (chosen["qkv"], chosen["o"], chosen["lm_head"]) == ("mxfp8",) * 3


def test_the_last_of_an_option_counts(checkpoint_folder):
    """So the words of ``docker run`` and those behind a script's ``--`` win over defaults, whatever they call an
    option."""
    words = ("--gpu-memory-utilization", "0.7", "--max-num-seqs", "32", "--device-memory-utilization", "0.5")
    config = served.engine_config(str(checkpoint_folder), *words, "--max_num_seqs=16")
    assert config.cache_config.gpu_memory_utilization == 0.5
    assert config.scheduler_config.max_num_seqs == 16


def test_there_are_lines_to_test():
    assert len(documented_lines()) >= 8
    assert sum("--max-num-batched-tokens" in words for _, words in documented_lines()) == 1


def test_a_mistake_ends_the_start_with_what_is_allowed(checkpoint_folder):
    with pytest.raises(ValueError, match="qkv is 'int4'; it may be bf16, mxint8, "):
        serve(checkpoint_folder, {"qkv": "int4"})


@pytest.mark.parametrize("place", ["CUDA_HOME", "CUDA_PATH", "PATH", "/usr/local/cuda"])
def test_vllm_and_this_fork_end_at_the_same_compiler(tmp_path, monkeypatch, place):
    """Also where two are there, and where pip's is another."""
    from vllm.utils import flashinfer as vllm_flashinfer

    from flashinfer_sm12x.build import toolchain

    for name in ("named", "also", "pip/nvidia/cu13"):
        for file, text in (
            ("bin/nvcc", "#!/bin/sh\necho release 13.0"),
            ("cuda_runtime.h", ""),
            ("cuda_runtime_api.h", RUNTIME),
        ):
            path = tmp_path / name / ("include" if file.endswith(".h") else "") / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            path.chmod(0o755)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    home, default = str(tmp_path / "named"), str(tmp_path / "also")
    monkeypatch.setenv("PATH", f"{home}/bin:/bin" if place == "PATH" else "/bin")
    monkeypatch.setattr(vllm_flashinfer, "_DEFAULT_CUDA_HOME", home if place.startswith("/") else default)
    if place.startswith("CUDA"):
        monkeypatch.setenv(place, home)
    default_root = Path(vllm_flashinfer._DEFAULT_CUDA_HOME)
    found = toolchain.discover(wheels=[tmp_path / "pip" / "nvidia"], default_root=default_root)
    assert str(found.nvcc) == vllm_flashinfer._flashinfer_nvcc_path() == f"{home}/bin/nvcc"


def test_dense_layers_that_nothing_can_compile_end_the_start_before_weights_are_loaded(
    checkpoint_folder, tmp_path, monkeypatch
):
    from virtual_gpu_platform import VirtualGpu

    from flashinfer.jit.sm12x import prebuilt

    def start(*words: str) -> None:
        """On the CPU nothing is compiled: only the config, by a platform that says cuda."""
        with monkeypatch.context() as patch:
            patch.setattr(VirtualGpu, "device_type", "cuda")
            serve(checkpoint_folder, {"qkv": "mxfp8", "lm_head": "mxfp4"}, *words)

    start()
    monkeypatch.setenv("CUDA_HOME", "/none")
    fix = r"""qkv, lm_head are to .*: CUDA_HOME=/none holds no bin/nvcc.*pip install"""
    fix += r""".*{"qkv": "bf16", "lm_head": "bf16"}"""
    with pytest.raises(ValueError, match=fix):
        start()
    with pytest.raises(ValueError, match="flashinfer-sm12x: lm_head are to be quantized"):
        start("--quantization-config", '{"linear": "mxfp8"}')
    start("--linear-backend", "emulation")
    serve(checkpoint_folder, {})
    start("--nnodes", "2", "--tensor-parallel-size", "2")  # the other node may have a compiler
    folder = tmp_path / prebuilt.PACKAGE
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=fix):
        start()  # nothing is in it
    (folder / "manifest.json").touch()
    start()


def test_graph_sizes_are_proposed_and_a_users_win(checkpoint_folder):
    def sizes(*words: str) -> list[int]:
        return served.engine_config(str(checkpoint_folder), *words).compilation_config.cudagraph_capture_sizes

    assert sizes("--max-num-seqs", "18") == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18]
    assert sizes("--cudagraph-capture-sizes", "1", "2") == [1, 2]
    vllms = sizes("--additional-config", '{"sm12x": {"graphs": "vllm"}}')
    assert vllms[:4] == [1, 2, 4, 8]
    assert vllms[-1] > 256


def test_upstreams_seam_for_mxfp4_linear_layers_answers():
    """``--quantization-config '{"linear": "mxfp4"}'``: vLLM's own class, whose call upstream refuses on SM12x."""
    import types

    from vllm.model_executor.kernels.linear import FlashInferMxFp4LinearKernel, MxFp4LinearLayerConfig
    from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Dynamic

    from flashinfer.quantization import mx_cpu

    print("seed", 9)
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(96, 160, generator=generator).to(torch.bfloat16)
    x, bias = torch.randn(3, 160, generator=generator).to(torch.bfloat16), torch.randn(96).to(torch.bfloat16)
    packed, scales = mx_cpu.quantize_mxfp4_linear(weight)
    parameters = {"weight": packed, "weight_scale": scales}
    layer: Any = types.SimpleNamespace(
        output_size_per_partition=96,
        **{name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in parameters.items()},
    )
    with mock.patch.object(FlashInferMxFp4LinearKernel, "is_supported", return_value=(True, None)):
        kernel = FlashInferMxFp4LinearKernel(MxFp4LinearLayerConfig(activation_quant_key=kMxfp4Dynamic))
    kernel.process_weights_after_loading(layer)
    # Operators that vLLM registers for CUDA, as the functions that they are.
    from vllm.utils import flashinfer as calls

    names = ("flashinfer_mm_fp4", "flashinfer_mxfp4_quantize")
    with mock.patch.multiple(calls, **{name: getattr(calls, name)._init_fn for name in names}):
        got = kernel.apply_weights(layer, x, bias)
    given = mx_cpu.dequantize_mxfp4_linear(*mx_cpu.quantize_mxfp4_linear(x))
    product = (given @ mx_cpu.dequantize_mxfp4_linear(packed, scales).t()).to(torch.bfloat16)
    torch.testing.assert_close(got, product + bias, rtol=2 * torch.finfo(torch.bfloat16).eps, atol=1e-5)


@pytest.mark.parametrize(("compiler", "server"), [(True, False), (False, True), (False, False)])
def test_attention_with_sinks_needs_a_compiler_or_cubins(monkeypatch, compiler, server):
    """XQA and FA2 are compiled on SM12x; without a compiler vLLM's own question is asked."""
    from vllm.utils import flashinfer as vllm_flashinfer

    from flashinfer_sm12x.vllm import attention, replacements

    monkeypatch.setattr(replacements, "_before", {})
    monkeypatch.setattr(vllm_flashinfer, "has_nvidia_artifactory", lambda: server)
    monkeypatch.setattr(attention, "why_not_compiled", lambda: "" if compiler else "no compiler")
    attention.install()
    installed = vllm_flashinfer.has_nvidia_artifactory
    attention.install()
    assert vllm_flashinfer.has_nvidia_artifactory is installed
    supports = vllm_flashinfer.supports_trtllm_attention.__wrapped__
    assert supports(is_prefill=False) is (compiler or server)
    assert supports(is_prefill=True) is False


def test_attentions_row_names_its_kernels(monkeypatch):
    from flashinfer_sm12x.vllm import attention

    for capability, prefill in (("12.1", "FA2"), ("9.0", "FA3")):
        monkeypatch.setenv("VIRTUAL_GPU_CAPABILITY", capability)
        assert attention.why("FLASHINFER").startswith(f"XQA decode, {prefill} prefill")
    assert attention.why("TRITON_ATTN").startswith(("no compiler", "vLLM's choice"))


def test_a_forward_pass_under_both_autotuners(checkpoint_folder):
    """vLLM's warm-up enters them in this way."""
    import flashinfer

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        model = served.load_model(config)
        plain = served.logits(config, model, TOKENS)
        with flashinfer.autotuner.autotune(tuning_buckets=(1, 2, 4, 32), round_up=True):
            assert torch.equal(served.logits(config, model, TOKENS), plain)
        with flashinfer.autotune_v2(mode="tune"):
            assert torch.equal(served.logits(config, model, TOKENS), plain)


def experts_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The tensors that the layers' experts hold and read, by name: weights' scales and biases, the activation's
    constants."""
    found = {}
    for index, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts.routed_experts.quant_method.moe_kernel.fused_experts
        config = experts.quant_config
        holders = {"w1": config.w1_scale, "w2": config.w2_scale, "bias1": config.w1_bias, "bias2": config.w2_bias}
        holders |= {name: value for name, value in vars(experts).items() if isinstance(value, torch.Tensor)}
        found |= {f"{index} {name}": tensor for name, tensor in holders.items()}
    return found


@pytest.mark.parametrize("kinds", [{}, {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"}], ids=["bf16", "quantized"])
def test_weights_loaded_anew_after_sleep_are_the_same_at_the_same_addresses(checkpoint_folder, kinds):
    """Sleep mode, level 2: vLLM gives away all memory of the load, keeps buffers, and loads weights into the old
    addresses, which CUDA graphs hold."""
    from vllm.model_executor.model_loader.reload.inplace import reload_weights

    config = serve(checkpoint_folder, kinds)  # --enable-sleep-mode needs the GPU's allocator
    with served.parallel_groups(config):
        model = served.load_model(config)
        before = served.logits(config, model, TOKENS)

        def addresses() -> dict[str, int]:
            held = {**dict(model.named_parameters()), **experts_tensors(model)}
            return {name: tensor.data_ptr() for name, tensor in held.items()}

        first, kept = addresses(), {name: buffer.clone() for name, buffer in model.named_buffers()}
        with torch.inference_mode():
            for tensor in (*model.parameters(), *model.buffers(), *experts_tensors(model).values()):
                tensor.data.fill_(77)
            for name, buffer in model.named_buffers():
                buffer.copy_(kept[name])
        reload_weights(config, model, None, None, is_checkpoint_format=True)
        assert addresses() == first
        assert torch.equal(served.logits(config, model, TOKENS), before)


def test_a_head_tied_to_the_embedding_stays_bf16(tmp_path, log, monkeypatch):
    """vLLM's gpt-oss does not tie; here it does, as vLLM's other models do it."""
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    checkpoint.write(tmp_path, 2, tie_word_embeddings=True)
    construct = GptOssForCausalLM.__init__

    def tying(model: Any, *, vllm_config: Any, prefix: str = "") -> None:
        construct(model, vllm_config=vllm_config, prefix=prefix)
        model.lm_head = model.lm_head.tie_weights(model.model.embedding)

    monkeypatch.setattr(GptOssForCausalLM, "__init__", tying)
    check(logits(tmp_path, {"moe": "mxfp4-a16", "lm_head": "mxfp8"}), tmp_path, "a16")
    # No fourth cell: nothing would be faster.
    assert table(log)["lm_head"] == ("vLLM's (cuBLAS)", "bf16, with the embedding", "tied to the embedding")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_eplb": True}, "expert load balancing (EPLB)"),
        ({"ep_size": 3, "use_ep": True}, "8 experts do not divide into 3 ranks"),
        ({"dp_size": 2, "use_ep": True, "all2all_backend": "deepep_low_latency"}, "kernel does not support "),
    ],
    ids=["EPLB", "three ranks", "batched all-to-all"],
)
def test_experts_that_the_fork_does_not_serve_are_left_to_vllm(checkpoint_folder, changes, reason):

    from flashinfer_sm12x.vllm import moe
    from flashinfer_sm12x.vllm.settings import Settings

    config = serve(checkpoint_folder, {})
    with served.parallel_groups(config):
        given = next(m.moe_config for m in served.built(config).modules() if hasattr(m, "moe_config"))
        assert moe.reason_against(given, Settings()) == ""
        parallel = dataclasses.replace(given.moe_parallel_config, **changes)
        found = moe.reason_against(dataclasses.replace(given, moe_parallel_config=parallel), Settings())
    assert found.startswith(reason)


def test_experts_of_a_rank_must_be_consecutive():
    from flashinfer_sm12x.vllm import moe

    linear = torch.tensor([-1, -1, -1, -1, 0, 1, 2, 3])
    moe.require_contiguous_experts(None, 0, 8)
    moe.require_contiguous_experts(linear, 1, 4)
    with pytest.raises(ValueError, match="--expert-placement-strategy linear"):
        moe.require_contiguous_experts(torch.tensor([0, -1, 1, -1, 2, -1, 3, -1]), 0, 4)


def test_the_plugin_is_registered_again_and_again_and_never_raises(log, monkeypatch):
    import flashinfer_sm12x.vllm as plugin
    from flashinfer_sm12x.vllm import config

    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise RuntimeError("vLLM has moved this")

    plugin.register()  # vLLM did already
    monkeypatch.setattr(config, "install", fail)
    plugin.register()
    assert not calls
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    plugin.register()
    assert len(calls) == 1
    assert log == [
        "flashinfer-sm12x: the plugin could not be installed and vLLM goes on without it: RuntimeError: vLLM has "
        "moved this"
    ]
