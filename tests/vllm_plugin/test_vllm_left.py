# SPDX-License-Identifier: Apache-2.0
"""Failures of what the plugin asks the machine, or of the plugin itself: that part is left to vLLM with a line in the
log, and the start goes on. Refusals of a user's settings still end it."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import served
import torch
from test_vllm_models import TOKENS, attention_in_pytorch, logits, serve, table
from vllm.platforms import current_platform

from flashinfer_sm12x.vllm import (
    api_checks,
    attention,
    compiler,
    config,
    dense,
    fallback,
    lm_head,
    memory,
    model,
    moe,
    reach,
    replacements,
    settings,
)
from flashinfer_sm12x.vllm import table as table_module

__all__ = ["attention_in_pytorch"]
VirtualGpu = type(current_platform)  # platform/'s, which vLLM must have loaded


class NVMLError(Exception):
    """pynvml's derives from Exception alone."""


ERRORS = (OSError, RuntimeError, AttributeError, NVMLError)
DENSE = {"qkv": "mxfp8", "o": "mxfp4", "lm_head": "mxfp8"}


def failing(error: type[Exception]) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise error("injected")

    return fail


def fail_for_the_plugin(monkeypatch: Any, holder: Any, attribute: str, error: type[Exception]) -> None:
    """vLLM itself goes on getting answers of its platform."""
    real = getattr(holder, attribute)

    def asked(*given: Any, **named: Any) -> Any:
        if sys._getframe(1).f_globals["__name__"].startswith("flashinfer_sm12x.vllm"):
            raise error("injected")
        return real(*given, **named)

    monkeypatch.setattr(holder, attribute, asked)


def with_errors(cases: dict[str, Any]) -> list[Any]:
    """Each case with one of the errors, in turn: a start takes a second."""
    return [pytest.param(name, ERRORS[at % len(ERRORS)], id=name) for at, name in enumerate(cases)]


def left(log: list[str]) -> list[str]:
    """The subjects of the log's lines about failures; each is there once."""
    lines = [line for line in log if "left to vLLM" in line and "injected" in line]
    return [line.removeprefix("flashinfer-sm12x: ").partition(" left to vLLM: ")[0] for line in lines]


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host whose memory is its GPU's, so that every question about it is asked."""
    read = memory.host_memory.HostMemory(100 * memory.host_memory.GIB, 124 * memory.host_memory.GIB)
    monkeypatch.setattr(memory.host_memory, "read", lambda: read)


QKV = api_checks.MODULES["dense"][1]
HEAD = api_checks.MODULES["head"][1]
DECODE = api_checks.MODULES["decode"][1]
EXPERTS = api_checks.MODULES["experts"][1]
SHARE = (
    "the share of memory (on a host that shares it with its GPU pass --gpu-memory-utilization 0.7: "
    "docs/troubleshooting.md, "
    '"Hosts that hang") is'
)
# What fails: its holder and name; what is then left to vLLM. Each is asked in the start of a server's configuration.
OF_THE_CONFIG = {
    "presets": (settings, "changed_presets", ["messages about presets are"]),
    "device's capability": (VirtualGpu, "is_device_capability", [SHARE]),
    "device's memory": (VirtualGpu, "get_device_total_memory", [SHARE]),
    "host's memory": (memory.host_memory, "read", [SHARE]),
    "cache's configuration": (memory, "_bound_share", [SHARE]),
    "folder": (dense.dense_folder, "require", ["the check of the folder of quantized layers is"]),
    "prebuilt kernels": (dense, "_has_prebuilt", ["the check of the compiler is"]),
    "compiler": (compiler.toolchain, "discover", ["the check of the compiler is"]),
    "ninja": (compiler.toolchain, "find_ninja", ["the check of the compiler is"]),
    "architectures": (
        VirtualGpu,
        "get_device_capability",
        ["the check of the compiler's architectures is"],
    ),
    "graph sizes": (config, "_propose_graph_sizes", ["sizes of CUDA graphs are"]),
}


@pytest.mark.parametrize(("name", "error"), with_errors(OF_THE_CONFIG))
def test_a_configuration_is_made_without_what_fails(checkpoint_folder, monkeypatch, log, spark, name, error):
    holder, attribute, subjects = OF_THE_CONFIG[name]
    monkeypatch.setattr(VirtualGpu, "device_type", "cuda")  # else nothing looks for a compiler
    monkeypatch.setattr(dense, "_has_prebuilt", lambda: False)
    fail_for_the_plugin(monkeypatch, holder, attribute, error)
    made = serve(checkpoint_folder, {"qkv": "mxfp8"})
    assert made.additional_config["sm12x"]["qkv"] == "mxfp8"
    assert type(made.quant_config) is config.SM12xGptOssConfig
    assert [each for each in left(log) if each in subjects] == subjects
    assert len(left(log)) == len(set(left(log)))


# What fails while the model is built and loaded; what is then left to vLLM, and the kernels of some kinds of layers.
BF16, NO_HEAD = "UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"
ALL_BF16 = {"qkv": BF16, "o": BF16, "lm_head": NO_HEAD}
OURS = dict.fromkeys(DENSE, "ForkKernel")
OF_THE_MODEL = {
    "capability": (VirtualGpu, "is_device_capability", ["the watch over the host's memory is"], OURS),
    "memory": (VirtualGpu, "get_device_total_memory", ["the watch over the host's memory is"], OURS),
    "memory during the load": (memory.host_memory, "read", ["the watch over the host's memory is"], OURS),
    "draft's tag": (lm_head, "_model_that_is_built", [HEAD], {**OURS, "lm_head": NO_HEAD}),
    "other model's line": (lm_head.reach, "tell_of_another_model", [HEAD], {**OURS, "lm_head": NO_HEAD}),
    "dense method": (dense, "method_of", [QKV, HEAD], ALL_BF16),
    "dense kernel": (dense, "make_kernel", [QKV], ALL_BF16),
    "dense loader": (dense, "initialize_online_processing", [QKV], ALL_BF16),
    "quantizing": (dense.DenseMethod, "_quantize", [QKV], ALL_BF16),
    "reason against decode steps": (model, "reason_against", [DECODE], OURS),
    "modules of decode steps": (model, "prepare", [DECODE], OURS),
    "decode steps": (model, "DecodeSteps", [DECODE], OURS),
    "workspace of decode steps": (model, "decode_workspace", [DECODE], OURS),
    "attention's row": (attention, "why", ["the attention's row of the table is"], OURS),
    "table": (table_module, "text", ["the table of layers is"], OURS),
}


@pytest.mark.parametrize(("name", "error"), with_errors(OF_THE_MODEL))
def test_a_model_is_built_loaded_and_answers_without_what_fails(
    checkpoint_folder, monkeypatch, log, spark, name, error
):
    holder, attribute, subjects, expected = OF_THE_MODEL[name]
    words = ("--attention-backend", "FLASHINFER") if "decode steps" in name else ()
    made = serve(checkpoint_folder, DENSE, *words)
    if "decode steps" in name:
        monkeypatch.setattr(model, "_reason_against_layer", lambda layer: "")  # this checkpoint's heads are others
    if name == "other model's line":
        made.model_config.hf_config.model_type = "other"
    with served.parallel_groups(made):
        fail_for_the_plugin(monkeypatch, holder, attribute, error)
        loaded = served.load_model(made)
        assert served.logits(made, loaded, TOKENS).isfinite().all()
    found = served.kernels(loaded)
    assert {kind: found[kind] for kind in expected} == expected
    assert left(log) == subjects
    if DECODE in subjects:
        assert loaded.decode_steps is None
        assert table(log)["decode"][:1] == ("vLLM's layers",)


@pytest.mark.parametrize("error", ERRORS[:1])
def test_experts_are_vllms_where_choosing_fails(checkpoint_folder, monkeypatch, log, error):
    monkeypatch.setattr(moe, "reason_against", failing(error))
    made = serve(checkpoint_folder, {})
    with served.parallel_groups(made):
        assert served.kernels(served.built(made))["moe"] == "MARLIN MarlinExperts"
    assert left(log) == [EXPERTS]


@pytest.mark.parametrize("error", ERRORS[1:2])
def test_messages_about_choices_do_not_end_a_start(checkpoint_folder, monkeypatch, log, error):
    """The decode steps are vLLM's by choice, so the fallback's own call is what fails."""
    monkeypatch.setattr(reach, "tell_of_gpt_oss", failing(error))
    assert logits(checkpoint_folder, {"decode": "vllm"}).isfinite().all()
    assert left(log) == ["messages about choices that do not apply are"]


def test_a_model_without_attention_is_no_reason_to_end_a_start(monkeypatch, log):
    """``next()`` raises StopIteration, which ``with`` statements treat in a way of their own."""
    monkeypatch.setattr(reach, "chosen", lambda keys: {})
    with fallback.leaving("this is"):
        reach.tell_of_gpt_oss(
            SimpleNamespace(model_config=SimpleNamespace(quantization="fp8")), SimpleNamespace(layers=[])
        )
    assert log == ["flashinfer-sm12x: this is left to vLLM: StopIteration: "]


def test_a_head_is_vllms_where_nothing_tells_a_drafts(checkpoint_folder, monkeypatch, log):
    """vLLM without ``vllm.compilation.backends.model_tag``: a line, and no format, whatever was chosen."""
    made = serve(checkpoint_folder, DENSE)
    monkeypatch.setitem(sys.modules, "vllm.compilation.backends", SimpleNamespace())
    with served.parallel_groups(made):
        found = served.kernels(served.built(made))
    assert found == {**found, **OURS, "lm_head": NO_HEAD}
    (line,) = [line for line in log if "left to vLLM" in line]
    assert line.startswith("flashinfer-sm12x: the LM head is left to vLLM: vllm.compilation.backends.model_tag is gone")


@pytest.mark.parametrize("error", ERRORS[-1:])
def test_a_module_of_dense_layers_that_cannot_be_built_leaves_them_in_bf16(checkpoint_folder, monkeypatch, log, error):
    """As a GPU would have it: each format's module once, before weights are loaded."""
    from flashinfer.sm12x import backend
    from flashinfer.sm12x.device_class import GB10

    asked: list[str] = []

    def fail(_generate: Any, weights: str) -> Any:
        asked.append(weights)
        raise error("injected")

    monkeypatch.setattr(backend, "kernels", lambda device: SimpleNamespace(device_class=GB10, module=fail))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    build = dense.build.__wrapped__
    monkeypatch.setattr(dense, "build", functools.cache(lambda device_type, weights: build("cuda", weights)))
    made = serve(checkpoint_folder, DENSE)
    with served.parallel_groups(made):
        found = served.kernels(served.built(made))
    assert found == {**found, **ALL_BF16}
    assert left(log) == [QKV]
    assert asked == ["mxfp8", "mxfp4"]
    assert f"flashinfer-sm12x: {QKV} left to vLLM: the kernels of mxfp8 could not be built: injected" in log


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("name", ["why_not_compiled", "settings"])
def test_vllms_own_question_is_asked_where_ours_fails(monkeypatch, log, name, error):
    from vllm.utils import flashinfer as vllm_flashinfer

    monkeypatch.setattr(replacements, "_before", {})
    monkeypatch.setattr(vllm_flashinfer, "has_nvidia_artifactory", lambda: True)
    if name == "settings":
        monkeypatch.setattr(settings, "resolve", failing(error))
    else:
        monkeypatch.setattr(attention, "why_not_compiled", failing(error))
    attention.install()
    assert vllm_flashinfer.has_nvidia_artifactory() is True
    assert left(log) == [api_checks.MODULES["attention"][1]]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("part", ["experts", "nvfp4", "head", "attention"])
def test_a_part_that_cannot_be_installed_leaves_the_others_installed(monkeypatch, log, part, error):
    import flashinfer_sm12x.vllm as plugin

    installed = []
    for each in ("experts", "nvfp4", "head", "attention"):
        module = api_checks.module(each)
        monkeypatch.setattr(
            module, "install", failing(error) if each == part else lambda each=each: installed.append(each)
        )
    monkeypatch.setattr(config, "install", lambda: None)
    monkeypatch.setattr(plugin, "_registered", False)
    plugin.register()
    assert sorted([*installed, part]) == ["attention", "experts", "head", "nvfp4"]
    assert left(log) == [api_checks.MODULES[part][1]]
    assert plugin.outcome == f"installed, but left to vLLM, as the log says: {part}"


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("probe", ["served", "upstream_alone"])
def test_a_gpu_or_a_wheel_that_cannot_be_asked_leaves_all_to_vllm(monkeypatch, log, probe, error):
    import flashinfer_sm12x.vllm as plugin
    from flashinfer_sm12x.vllm import devices

    if probe == "served":
        monkeypatch.setattr(devices, "served", failing(error))
    else:
        monkeypatch.setattr(plugin.versions, "upstream_alone", failing(error))
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "outcome", "")
    plugin.register()
    assert plugin.outcome == f"{error.__name__}: injected"
    (line,) = log
    assert "vLLM goes on without it" in line


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("probe", ["probe", "import_module"])
def test_a_part_whose_api_cannot_be_checked_is_vllms(monkeypatch, log, probe, error):
    """A name of vLLM's that computes its value may fail in any way; so may a module of this package, when imported."""
    api_checks._moved.cache_clear()
    monkeypatch.setattr(api_checks if probe == "probe" else api_checks.importlib, probe, failing(error))
    try:
        assert api_checks.module("attention") is None
    finally:
        monkeypatch.undo()
        api_checks._moved.cache_clear()
    (line,) = [line for line in log if "left to vLLM" in line]
    assert line.startswith("flashinfer-sm12x: the choice of the attention is left to vLLM: ")
    assert "injected" in line


@pytest.mark.parametrize("error", ERRORS)
def test_the_model_class_is_vllms_where_choosing_it_fails(monkeypatch, log, error):
    from vllm.model_executor.models.gpt_oss import GptOssForCausalLM

    from flashinfer_sm12x.vllm import model_class

    assert model_class._chosen() is model.SM12xGptOssForCausalLM
    monkeypatch.setattr(api_checks, "module", failing(error))
    assert model_class._chosen() is GptOssForCausalLM
    assert left(log) == [DECODE]


@pytest.mark.parametrize(
    ("chosen", "words", "message"),
    [
        ({"qkv": "int4"}, (), "qkv is 'int4'"),
        ({"dense": "/none"}, (), "/none is no folder"),
        ({"qkv": "mxint8"}, ("--linear-backend", "marlin"), "vLLM has no kernel that multiplies mxint8"),
        ({"lm_head": "mxint8"}, ("--linear-backend", "marlin"), "vLLM has no kernel that multiplies mxint8"),
    ],
)
def test_what_a_user_asked_for_and_cannot_have_still_ends_the_start(checkpoint_folder, log, chosen, words, message):
    def start() -> None:
        made = serve(checkpoint_folder, chosen, *words)
        with served.parallel_groups(made):
            served.built(made)

    with pytest.raises(ValueError, match=message):
        start()
    assert left(log) == []


@pytest.mark.parametrize(
    ("k", "dtype", "message"), [(33, torch.bfloat16, "K = 33"), (64, torch.float16, "torch.float16")]
)
def test_a_layer_that_cannot_be_quantized_as_asked_still_ends_the_start(monkeypatch, k, dtype, message):
    method = dense.DenseMethod("qkv", settings.Choice("mxfp8", "a16"))
    monkeypatch.setattr(dense, "linear", SimpleNamespace(_get_linear_backend=lambda quantization: "auto"))
    with pytest.raises(ValueError, match=message):
        method.create_weights(torch.nn.Module(), k, [64], k, 64, dtype, weight_loader=lambda *_: None)


@pytest.mark.parametrize("error", ERRORS)
def test_a_folder_that_cannot_be_used_still_ends_the_start(monkeypatch, log, error):
    """Whatever it fails with, in the layer's method or in its weights: bf16 is not what its user named."""
    choice = settings.Choice("mxfp8", "a16")
    monkeypatch.setattr(dense.dense_folder, "Layer", failing(error))
    with pytest.raises(ValueError, match=rf"^/folder cannot be used for lm_head: {error.__name__}: injected$"):
        dense.method_of("lm_head", choice, "/folder", "lm_head")
    method = dense.DenseMethod("lm_head", choice)
    method.quantized = SimpleNamespace(weight=failing(error))
    with pytest.raises(error, match="injected"):
        method.process_weights_after_loading(SimpleNamespace())
    assert left(log) == []


def test_a_host_without_memory_still_ends_the_load(checkpoint_folder, monkeypatch, log):
    low = memory.host_memory.HostMemory(memory.host_memory.HEADROOM - 1, 124 * memory.host_memory.GIB)
    monkeypatch.setattr(memory, "shared", lambda: True)
    monkeypatch.setattr(memory.host_memory, "read", lambda: low)
    with pytest.raises(RuntimeError, match="the load was stopped before x"):
        list(memory.watched([("x", None)]))


def test_what_the_weights_themselves_raise_is_not_kept_back(monkeypatch):
    def broken() -> Any:
        yield "x", None
        raise OSError("the checkpoint ends here")

    monkeypatch.setattr(memory, "shared", lambda: False)
    with pytest.raises(OSError, match="the checkpoint ends here"):
        list(memory.watched(broken()))


def test_every_question_to_the_platform_is_among_those_that_fail_here():
    """The tests above know what the plugin asks vLLM's platform for."""
    import ast

    asked: set[str] = set()
    for file in Path(fallback.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "current_platform":
                asked.add(node.attr)
    of_the_tests = {attribute for _, attribute, *_ in [*OF_THE_CONFIG.values(), *OF_THE_MODEL.values()]}
    # Asked where the test makes the asking function itself fail: devices.served(), attention.why().
    assert asked - of_the_tests == {"is_cuda", "is_device_capability_family"}


@pytest.mark.parametrize("module", ["moe", "nvfp4"])
def test_experts_of_other_models_are_vllms_where_their_selection_fails(
    module: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The selections that :func:`ours_first` replaces are called by vLLM's methods, which catch nothing."""
    ours = importlib.import_module(f"flashinfer_sm12x.vllm.{module}")
    monkeypatch.setattr(fallback, "_logged", set())

    def fails(*_: object, **__: object) -> str:
        raise OSError("no such library")

    monkeypatch.setattr(ours, "reason_against", fails)
    monkeypatch.setattr(ours.moe if module == "nvfp4" else ours, "with_adapters_that_matter", lambda moe: moe)
    monkeypatch.setattr(settings, "current", lambda: None)
    arguments = ("config",) if module == "moe" else ("config", "weights", "activations")
    with caplog.at_level("WARNING", logger="vllm.flashinfer_sm12x"):
        assert ours.ours_first(lambda *given, **named: (given, named))(*arguments) is not None
    assert "left to vLLM: OSError: no such library" in caplog.text
