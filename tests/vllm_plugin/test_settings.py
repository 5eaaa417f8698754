# SPDX-License-Identifier: Apache-2.0
"""Settings that can be chosen, from where, and the message about a mistake; needs nothing of vLLM."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from whole_manifest import whole_manifest

from flashinfer_sm12x import variables
from flashinfer_sm12x.vllm import settings
from flashinfer_sm12x.vllm.settings import Choice, Settings


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(settings.VARIABLE, raising=False)


def test_the_defaults_are_the_forks_experts_and_vllms_dense_layers():
    chosen = settings.resolve({})
    assert chosen == Settings()
    assert chosen.choice("moe") == Choice("mxfp4", "auto")
    assert {str(chosen.choice(kind)) for kind in ("qkv", "o", "lm_head")} == {"bf16"}


def test_a_format_may_name_its_activations():
    chosen = settings.resolve({"sm12x": {"moe": "mxfp4-a16", "qkv": "mxfp8", "o": "mxfp8-a8", "lm_head": "mxfp4"}})
    assert [str(chosen.choice(kind)) for kind in ("moe", "qkv", "o", "lm_head")] == [
        "mxfp4-a16",
        "mxfp8-a16",
        "mxfp8-a8",
        "mxfp4-a16",
    ]


def test_the_variable_means_the_same_and_the_command_line_wins(monkeypatch):
    monkeypatch.setenv(settings.VARIABLE, "moe=mxfp4-a16, qkv=mxfp8")
    assert settings.resolve({}) == Settings(moe="mxfp4-a16", qkv="mxfp8")
    assert settings.resolve({"sm12x": {"qkv": "bf16"}}) == Settings(moe="mxfp4-a16", qkv="bf16")


MXFP4, MXINT8, MXFP8 = (dict.fromkeys(("qkv", "o", "lm_head"), weights) for weights in ("mxfp4", "mxint8", "mxfp8"))
SPARK = {"qkv": "mxfp6", "o": "mxfp6", "lm_head": "nvfp4_rescored"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("spark", SPARK),
        ("spark-int8", MXINT8),
        ("spark-fast", {**SPARK, "qkv": "nvfp4", "o": "nvfp4"}),
        ("spark-mxfp4", MXFP4),
        ("spark-mxfp8", MXFP8),
        ("spark, lm_head = bf16", {**SPARK, "lm_head": "bf16"}),
        ("lm_head=bf16,spark", {**SPARK, "lm_head": "bf16"}),
        ("moe=mxfp4-a16,spark-mxfp8", {**MXFP8, "moe": "mxfp4-a16"}),
    ],
)
def test_a_preset_is_choices_by_one_name(monkeypatch, text, expected):
    assert settings.resolve({"sm12x": text}) == Settings(**expected)
    monkeypatch.setenv(settings.VARIABLE, text)
    assert settings.resolve({}) == Settings(**expected)
    assert settings.resolve({"sm12x": {"o": "bf16"}}) == Settings(**{**expected, "o": "bf16"})
    assert settings.resolve({"sm12x": "spark"}) == Settings(**{**expected, **SPARK})


@pytest.mark.parametrize(
    ("variable", "given", "words"),
    [
        ("", "spark", ["'spark' is MXFP6 in QKV and O"]),
        ("spark,moe=mxfp4-a8", {}, ["'spark' is MXFP6 in QKV and O"]),
        ("spark", "spark-mxfp8, o=bf16", ["'spark' is MXFP6", "'spark-mxfp8' is MXFP8, as it was"]),
        ("spark", "spark", ["'spark' is MXFP6"]),
        ("spark-fast", {}, ["'spark-fast' is NVFP4 in QKV and O and nvfp4_rescored"]),
        ("1", "spark-int8", []),
        ("", {"qkv": "mxfp6"}, []),
        ("moe=mxfp4-a8", None, []),
    ],
)
def test_a_name_that_meant_another_choice_is_reported_with_what_it_means(monkeypatch, variable, given, words):
    monkeypatch.setenv(settings.VARIABLE, variable)
    messages = settings.changed_presets({"other": 1} if given is None else {"sm12x": given})
    assert len(messages) == len(words)
    for line, start in zip(messages, words, strict=True):
        assert line.startswith(start)


@pytest.mark.parametrize(
    ("variable", "given"),
    [
        ("", {"moe": "mxfp4-a16", "moe_input": "mxfp8"}),
        ("moe=mxfp4-a16", {"moe_input": "mxfp8"}),
        ("moe_input=mxfp8", "moe=mxfp4-a16"),
    ],
)
def test_choices_that_exclude_each_other_end_the_start(monkeypatch, variable, given):
    monkeypatch.setenv(settings.VARIABLE, variable)
    with pytest.raises(
        ValueError, match=r"^moe is 'mxfp4-a16' and moe_input 'mxfp8': .* choose moe 'mxfp4-a8', or moe_input"
    ):
        settings.resolve({"sm12x": given})
    assert settings.resolve({"sm12x": {"moe": "auto", "moe_input": "mxfp8"}}).moe_input == "mxfp8"


@pytest.mark.parametrize("name", [settings.VARIABLE, "FLASHINFER_SM12X_MOE"])
def test_0_switches_the_plugin_off_before_anything_of_it_is_imported(monkeypatch, caplog, name):
    """Also where the other variable has a bad value and the rest of the plugin is gone."""
    import flashinfer_sm12x.vllm as plugin

    monkeypatch.setattr(plugin, "_registered", False)
    for each in (settings.VARIABLE, "FLASHINFER_SM12X_MOE"):
        monkeypatch.setenv(each, "on")
    monkeypatch.setenv(name, "0")
    monkeypatch.setitem(sys.modules, "flashinfer_sm12x.vllm.settings", None)
    plugin.register()
    assert plugin.outcome == f"{name}=0 switches it off"
    assert caplog.messages == [f"flashinfer-sm12x: {name}=0 switches it off"]


def test_what_resolve_gives_can_be_written_back():
    """The hook does that, so that vLLM's compile cache hashes the settings wherever they came from."""
    import dataclasses

    chosen = settings.resolve({"sm12x": {"lm_head": "mxfp8"}})
    assert settings.resolve({"sm12x": dataclasses.asdict(chosen)}) == chosen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"head": "mxfp8"}, "'head' is no key of it; the keys are moe, qkv, o, lm_head"),
        ({"qkv": "fp8"}, "qkv is 'fp8'; it may be bf16, mxint8, mxint8-a16, mxfp8, mxfp8-a16"),
        ({"moe": "bf16"}, r"moe is 'bf16' \(the checkpoint's experts are MXFP4 and stay so\); it may be auto, mxfp4"),
        ({"qkv": "nvfp4-a8"}, "qkv is 'nvfp4-a8'; it may be bf16"),
        (["qkv"], r"is \['qkv'\]; it must be 'spark' or 'spark-int8' or .*, or an object with keys of moe"),
        ("sparc", r"'sparc' is no key=value and no preset; it may be spark, spark-int8, .*, pairs such as moe="),
        ("", r"'' is no key=value and no preset"),
        ("spark,", r"'' is no key=value and no preset"),
        ("spark,qkv=fp8", r"qkv is 'fp8'; it may be bf16"),
    ],
)
def test_a_mistake_on_the_command_line_is_named(given, words):
    with pytest.raises(ValueError, match=words):
        settings.resolve({"sm12x": given})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"SM12X": {"qkv": "mxfp8"}}, "'SM12X' is no key that a plugin reads; 'sm12x' is"),
        ({"sm12": {"qkv": "mxfp8"}}, "'sm12' is no key that"),
        ({"flashinfer-sm12x": {}, "sm12x": {}}, "'flashinfer-sm12x' is no key that"),
        ({"qkv": "mxfp8"}, "'qkv' stands at the top; it is a key of 'sm12x': {'sm12x': {'qkv': 'mxfp8'}}"),
        ({"moe": None}, "'moe' stands at the top"),
    ],
)
def test_what_is_meant_for_this_plugin_and_stands_elsewhere_ends_the_start(config, words):
    with pytest.raises(ValueError, match=f"^--additional-config: {words}"):
        settings.resolve(config)


def test_other_plugins_keys_pass():
    theirs = {"ascend": {"qkv": "x"}, "attention": {"backend": "theirs"}, "o": {}, 7: "x", "SM": 1, "smx": "mxfp8"}
    assert settings.resolve({**theirs, "sm12x": {"qkv": "mxfp8"}}) == Settings(qkv="mxfp8")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "yes",
            "FLASHINFER_SM12X_VLLM: 'yes' is no key=value and no preset; it may be 0, 1, spark, spark-int8, .*, pairs",
        ),
        ("o=int4", "FLASHINFER_SM12X_VLLM: o is 'int4'; it may be bf16"),
    ],
)
def test_a_mistake_in_the_variable_is_named(monkeypatch, value, words):
    monkeypatch.setenv(settings.VARIABLE, value)
    with pytest.raises(ValueError, match=words):
        settings.resolve({})


@pytest.mark.parametrize("name", [settings.VARIABLE, "FLASHINFER_SM12X_MOE"])
def test_a_bad_value_ends_the_start_and_all_else_that_fails_does_not(monkeypatch, name):
    """vLLM's own modules are absent here: asking for the GPU fails, behind the variable that switches the plugin."""
    import flashinfer_sm12x.vllm as plugin

    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=None))
    plugin.register()
    assert plugin.outcome.startswith(("AttributeError", "ModuleNotFoundError"))
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setenv(name, "on")
    with pytest.raises(ValueError, match=f"^{name}"):
        plugin.register()
    assert name in plugin.outcome


# --- A folder of sm12x-quantize ---------------------------------------------------------------------------------------


def folder_of(path: Path, **formats: str) -> str:
    """A folder as far as settings read it: its manifest."""
    path.mkdir()
    whole_manifest(settings.manifest, formats).write(path / settings.manifest.MANIFEST)
    return str(path)


@pytest.mark.parametrize("preset", ["spark", "spark-mxfp8", ""])
def test_a_folders_layers_are_as_the_folder_has_them_and_the_rest_as_a_preset(tmp_path, monkeypatch, preset):
    folder = folder_of(tmp_path / "f", qkv="nvfp4", o="mxfp6")
    head = {"lm_head": variables.PRESETS[preset]["lm_head"]} if preset else {}
    expected = Settings(qkv="nvfp4", o="mxfp6", dense=folder, **head)
    together = {"dense": folder, **({"preset": preset} if preset else {})}
    text = ",".join(filter(None, [preset, f"dense={folder}"]))
    assert settings.resolve({"sm12x": together}) == expected
    assert settings.resolve({"sm12x": text}) == expected
    assert [expected.folder(kind) for kind in ("qkv", "o", "lm_head", "moe")] == [folder, folder, "", ""]
    monkeypatch.setenv(settings.VARIABLE, text)
    assert settings.resolve({}) == expected
    assert settings.resolve({"sm12x": {"lm_head": "bf16"}}) == Settings(qkv="nvfp4", o="mxfp6", dense=folder)
    # The command line's preset gives way to the variable's folder, too; an empty name takes the folder away.
    assert settings.resolve({"sm12x": "spark-int8"}) == Settings(qkv="nvfp4", o="mxfp6", lm_head="mxint8", dense=folder)
    assert settings.resolve({"sm12x": {"dense": "", "preset": "spark"}}) == Settings(**SPARK)


def test_another_folder_on_the_command_line_wins(tmp_path, monkeypatch):
    of_variable, given = folder_of(tmp_path / "v", qkv="mxfp4"), folder_of(tmp_path / "c", o="mxfp8")
    monkeypatch.setenv(settings.VARIABLE, f"dense={of_variable}")
    assert settings.resolve({"sm12x": {"dense": given}}) == Settings(o="mxfp8", dense=given)


def test_tokens_beside_a_folders_format_may_be_chosen(tmp_path):
    folder = folder_of(tmp_path / "f", qkv="mxfp6", o="mxint8", lm_head="mxfp8")
    chosen = settings.resolve({"sm12x": {"dense": folder, "qkv": "mxfp6-a8", "o": "mxint8-a16", "lm_head": "mxfp8"}})
    assert [str(chosen.choice(kind)) for kind in ("qkv", "o", "lm_head")] == ["mxfp6-a8", "mxint8-a16", "mxfp8-a16"]


@pytest.mark.parametrize(
    ("variable", "given", "messages"),
    [
        ("", {"qkv": "mxfp4"}, "qkv is 'mxfp4', and "),
        ("", {"qkv": "bf16", "preset": "spark"}, "qkv is 'bf16', and "),
        ("qkv=mxfp8-a8", {}, "qkv is 'mxfp8-a8', and "),
        ("", {"lm_head": "mxint8"}, "lm_head is 'mxint8', and "),
    ],
)
def test_a_choice_that_contradicts_the_folder_ends_the_start(tmp_path, monkeypatch, variable, given, messages):
    monkeypatch.setenv(settings.VARIABLE, variable)
    folder = folder_of(tmp_path / "f", qkv="mxfp6", lm_head="mxfp4")
    kind, option, weights = ("qkv", "qkv", "mxfp6") if messages.startswith("qkv") else ("lm_head", "lm-head", "mxfp4")
    with pytest.raises(variables.VariableError) as error:
        settings.resolve({"sm12x": {"dense": folder, **given}})
    assert str(error.value) == (
        f"{messages}{folder!r}, the folder under 'dense', has it in {weights}: leave {kind} out, or choose a folder "
        f"that was quantized with --{option} bf16"
    )


def test_a_folder_among_what_resolve_gives_can_be_written_back(tmp_path, monkeypatch):
    """A worker gets that, with the variable still set; a hook of another start gets it with what was changed."""
    import dataclasses

    folder = folder_of(tmp_path / "f", qkv="mxfp6", o="mxfp6")
    monkeypatch.setenv(settings.VARIABLE, f"spark,dense={folder},o=mxfp6-a8")
    chosen = settings.resolve({})
    assert chosen == Settings(qkv="mxfp6", o="mxfp6-a8", lm_head="nvfp4_rescored", dense=folder)
    written = dataclasses.asdict(chosen)
    assert settings.resolve({"sm12x": written}) == chosen
    monkeypatch.delenv(settings.VARIABLE)
    assert settings.resolve({"sm12x": written}) == chosen


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dense": 7}, r"'sm12x': dense is 7; it may be a folder of sm12x-quantize's, or a name on the hub"),
        ({"dense": None}, r"'sm12x': dense is None; it may be a folder"),
        ({"preset": "sparc"}, r"'sm12x': preset is 'sparc'; it may be spark, spark-int8"),
        ({"dense": "/nowhere"}, r"^/nowhere is no folder, and no name of one on the hub, which are OWNER/NAME$"),
        ("spark,dense=/nowhere", r"^/nowhere is no folder, and no name of one on the hub, which are OWNER/NAME$"),
    ],
)
def test_what_is_no_folder_and_no_preset_is_named(given, words):
    pytest.importorskip("huggingface_hub")
    with pytest.raises(ValueError, match=words) as error:
        settings.resolve({"sm12x": given})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("key", "value"), [("dense", "/somewhere"), ("preset", "spark")])
def test_a_folder_that_stands_at_the_top_is_reported_with_where_it_belongs(key, value):
    with pytest.raises(ValueError, match=f"^--additional-config: '{key}' stands at the top; it is a key of 'sm12x'"):
        settings.resolve({key: value})


def test_a_preset_under_its_key_is_reported_with_what_it_means():
    assert len(settings.changed_presets({"sm12x": {"preset": "spark", "qkv": "mxfp6"}})) == 1
    assert settings.changed_presets({"sm12x": {"preset": "spark-int8"}}) == []


def test_the_hub_is_asked_once(tmp_path, monkeypatch):
    """Every layer of a model asks for its settings; and a name that is not there yet is asked for again."""
    folder = Path(folder_of(tmp_path / "f", qkv="mxfp6"))
    calls: list[str] = []

    def locate(name: str, patterns: Any = ("all",)) -> Any:
        calls.append(" ".join([name, *patterns]))
        if len(calls) == 1:
            raise settings.manifest.FolderError("not yet")
        return folder

    monkeypatch.setattr(settings.manifest, "located", locate)
    settings.located.cache_clear()
    with pytest.raises(ValueError, match="not yet"):
        settings.resolve({"sm12x": {"dense": "someone/dense"}})
    chosen = settings.resolve({"sm12x": {"dense": "someone/dense"}})
    assert (
        chosen
        == settings.resolve({"sm12x": {"dense": "someone/dense"}})
        == Settings(qkv="mxfp6", dense="someone/dense")
    )
    assert chosen.folder("qkv") == str(folder)
    assert chosen.folder("o") == ""
    assert calls == [f"someone/dense {settings.manifest.MANIFEST}"] * 2 + ["someone/dense all"], (
        "weights when a layer wants them"
    )
    settings.located.cache_clear()


def test_an_additional_config_of_another_kind_is_left_alone():
    assert settings.resolve(object()) == Settings()
    assert settings.resolve(None) == Settings()
