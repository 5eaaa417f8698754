# SPDX-License-Identifier: Apache-2.0
"""The plugin's API checks: each name is removed and changed in turn, and a gpt-oss is run where vLLM moved."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import json
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest
from test_vllm_processes import start

from flashinfer_sm12x.vllm import api_checks

PLUGIN = Path(api_checks.__file__).parent
EVERY = [(part, check) for part in api_checks.TABLE for check in api_checks.checks_of(part)]


def name_of(part: str, check: api_checks.ApiCheck) -> str:
    return f"{part} {check.module.rpartition('.')[2]}.{check.path}"


def test_nothing_moved():
    assert [message for _, check in EVERY if (message := api_checks.probe(check))] == []


def found(check: api_checks.ApiCheck) -> tuple[Any, str]:
    """The holder of the checked name, and its name in it: a module, or that class of the bases which has it."""
    holder: Any = importlib.import_module(check.module)
    *outer, name = check.path.split(".")
    for each in outer:
        holder = getattr(holder, each)
    if isinstance(holder, type) or not isinstance(holder, ModuleType):
        holder = holder if isinstance(holder, type) or name in vars(holder) else type(holder)
    if isinstance(holder, type):
        holder = next((base for base in holder.__mro__ if name in vars(base)), holder)
    return holder, name


# Every class has an __init__; those are among the next test's.
REMOVED = [(part, check) for part, check in EVERY if not check.path.endswith("__init__")]


@pytest.mark.parametrize(("part", "check"), REMOVED, ids=[name_of(*each) for each in REMOVED])
def test_a_name_that_is_gone_is_reported(monkeypatch, part, check):
    holder, name = found(check)
    if isinstance(holder, type) and issubclass(holder, enum.Enum) and name in holder.__members__:
        # A member cannot be deleted: the class has another in its place.
        others = {each: each for each in holder.__members__ if each != name}
        module = importlib.import_module(check.module)
        monkeypatch.setattr(module, check.path.partition(".")[0], type("Other", (), others))
    elif name in vars(holder):
        for base in [
            each for each in getattr(holder, "__mro__", [holder]) if name in vars(each) and each is not object
        ]:
            monkeypatch.delattr(base, name)
        if check.module == "vllm.envs":
            monkeypatch.delitem(holder.environment_variables, name, raising=False)
    elif check.module == "vllm.envs":
        monkeypatch.delitem(holder.environment_variables, name)
    if isinstance(holder, type):
        rename_in_class(monkeypatch, holder, name)
    assert api_checks.probe(check) == f"{check} is gone"


def rename_in_class(monkeypatch: Any, cls: type, name: str) -> None:
    """Simulate another name for a field, or for an attribute that methods assign to ``self``."""
    for base in cls.__mro__:
        annotations = vars(base).get("__annotations__", {})
        if name in annotations:
            monkeypatch.delitem(annotations, name)
    real = api_checks._assigned
    monkeypatch.setattr(api_checks, "_assigned", lambda base: real(base) - {name})


CALLED = [(part, check) for part, check in EVERY if check.call is not None or check.takes is not None]


@pytest.mark.parametrize(("part", "check"), CALLED, ids=[name_of(*each) for each in CALLED])
def test_a_function_that_takes_something_else_is_reported(monkeypatch, part, check):
    holder, name = found(check)
    written = inspect.getattr_static(holder, name)

    def moved(self: Any, something_else: Any, /, *, and_more: Any) -> None: ...

    def alone(something_else: Any, /, *, and_more: Any) -> None: ...

    of_instances = isinstance(written, FunctionType) and isinstance(holder, type)
    changed: Any = moved if of_instances else alone
    if isinstance(written, staticmethod):
        changed = staticmethod(alone)
    elif isinstance(written, classmethod):
        changed = classmethod(moved)
    monkeypatch.setattr(holder, name, changed)
    assert api_checks.probe(check).startswith(f"{check} takes (something_else, /, *, and_more)")


POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def moves(check: api_checks.ApiCheck, parameters: list[inspect.Parameter]) -> dict[str, list[inspect.Parameter]]:
    """What another vLLM might have in place of ``parameters``, all of which must be noticed."""
    kinds, found = inspect.Parameter, {}
    names = [each.name for each in parameters]
    if check.call is None:
        by_position = [each.name for each in parameters if each.kind in POSITIONAL]
    else:
        by_position = [each for each in check.call if "=" not in each and not each.startswith("*")]
    needed = [kinds("one_more", kinds.KEYWORD_ONLY)]
    found["one more is needed"] = sorted([*parameters, *needed], key=lambda each: each.kind)
    if len(by_position) > 1:
        first, second = (names.index(each) for each in by_position[:2])
        plain = [each.replace(default=each.empty) if each.kind in POSITIONAL else each for each in parameters]
        plain[first], plain[second] = plain[second], plain[first]
        found["two are swapped"] = plain
    for place, each in enumerate(parameters):
        rest = parameters[:place], parameters[place + 1 :]
        if each.name in by_position:
            found[f"{each.name} has another name"] = [*rest[0], each.replace(name=f"{each.name}_moved"), *rest[1]]
            moved = each.replace(kind=kinds.KEYWORD_ONLY)
            found[f"{each.name} is a keyword"] = sorted([*rest[0], *rest[1], moved], key=lambda each: each.kind)
        recorded = f"{each.name}={each.default!r}"
        if (check.takes is not None and each.default is not each.empty) or recorded in (check.call or ()):
            found[f"{each.name} has another default"] = [*rest[0], each.replace(default="another"), *rest[1]]
    return found


@pytest.mark.parametrize(("part", "check"), CALLED, ids=[name_of(*each) for each in CALLED])
def test_a_signature_of_another_order_kind_name_or_default_is_named(monkeypatch, part, check):
    """The signature of vLLM 0.33.0 fits; each that differs from it where the plugin depends on it does not."""
    holder, name = found(check)
    written = inspect.getattr_static(holder, name)
    function = written.__func__ if isinstance(written, (staticmethod, classmethod)) else written
    if function.__module__.startswith("flashinfer_sm12x.vllm"):  # vLLM's is what the plugin's closes over
        function = getattr(function, "__wrapped__", function)  # a cached function's closure is that of the inner one
        function = next(
            cell.cell_contents
            for cell in function.__closure__
            if str(getattr(cell.cell_contents, "__module__", "")).startswith("vllm")
        )
    first = list(inspect.signature(function).parameters.values())
    own = first[:1] if isinstance(holder, type) and not isinstance(written, staticmethod) else []

    def moved(*_: Any, **__: Any) -> None: ...

    def probed(parameters: list[inspect.Parameter]) -> str:
        moved.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
        kind = type(written) if isinstance(written, (staticmethod, classmethod)) else lambda same: same
        with monkeypatch.context() as patch:
            patch.setattr(holder, name, kind(moved))
            return api_checks.probe(check)

    parameters = first[len(own) :]
    assert probed(parameters) == ""
    for what, changed in moves(check, parameters).items():
        assert probed(changed).startswith(f"{check} takes ("), what


def test_sources_say_the_same_of_this_vllm():
    """``tools/api_checks.py`` imports nothing of it."""
    from layer_toys import load_tool

    tool = load_tool("api_checks")
    assert tool.Moved(tool.Sources(Path(importlib.import_module("vllm").__file__).parents[1])).report() == []


def imported(file: Path) -> set[str]:
    """``module.name`` of vLLM's that a file of the plugin imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "vllm":
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


NOT_PROBED = {"vllm.platforms.current_platform"}  # asked before anything, and where that fails all is left to vLLM


def test_all_that_the_plugin_imports_of_vllm_is_in_the_table():
    """Objects are compared, not names, because a name may be imported from a module that reexports it."""
    known = set()
    for _, check in EVERY:
        module = importlib.import_module(check.module)
        known |= {id(module), id(getattr(module, check.path.partition(".")[0]))}
    missing = []
    for file in sorted(PLUGIN.glob("*.py")):
        for name in sorted(imported(file) - NOT_PROBED):
            holder, _, attribute = name.rpartition(".")
            what = getattr(importlib.import_module(holder), attribute, None)
            if id(what) not in known:
                missing.append(f"{file.name}: {name}")
    assert missing == []


def run(folder: Path, names: list[str], *words: str) -> dict[str, Any]:
    process = start("moved_vllm.py", str(folder), json.dumps(names), *words, VIRTUAL_GPU_CAPABILITY="12.1")
    output = process.communicate()[0]
    assert process.returncode == 0, output
    result = json.loads(output.rpartition("RESULT")[2])
    assert result["read"], "nothing of vLLM's was renamed"
    assert result["finite"]
    return result


CHOSEN = '{"sm12x": {"moe": "mxfp4-a16", "qkv": "mxfp4", "lm_head": "mxfp8"}}'
OURS = {"moe": "FLASHINFER_CUTLASS_MXFP4_BF16 SM12xExperts", "qkv": "ForkKernel", "lm_head": "ForkKernel"}
THEIRS = {"qkv": "UnquantizedLinearMethod", "lm_head": "UnquantizedEmbeddingMethod"}
DECODE = {**OURS, "class": "GptOssForCausalLM"}


@pytest.mark.parametrize(
    ("names", "message", "expected"),
    [
        (
            ["FlashInferDecodeKernel"],
            "decode steps are left to vLLM: vllm.v1.attention.backends.flashinfer.Flash",
            DECODE,
        ),
        (["_ensure_moe_quant_config_init"], "decode steps are left to vLLM: ", DECODE),
        (["initialize_online_processing"], "QKV, O and the LM head are left to vLLM: ", {"moe": OURS["moe"], **THEIRS}),
        (["op_registry_oot"], "the LM head is left to vLLM: ", {**OURS, "lm_head": THEIRS["lm_head"]}),
        (["_flashinfer_nvcc_path"], "the choice of the attention is left to vLLM: ", OURS),
        (["_user_moe_activation_override"], "the experts are left to vLLM: ", {"qkv": OURS["qkv"]}),
        (["register_quantization_config"], "all of gpt-oss is left to vLLM: ", THEIRS),
    ],
    ids=["decode steps", "decode steps, a private call", "dense layers", "head", "attention", "experts", "all"],
)
def test_a_gpt_oss_loads_and_answers_where_vllm_moved(checkpoint_folder, names, message, expected):
    result = run(checkpoint_folder, names, "--additional-config", CHOSEN)
    lines = [line for line in result["log"] if "left to vLLM" in line]
    assert lines[0].startswith(f"flashinfer-sm12x: {message}"), lines
    assert f"{names[0]}" in lines[0]
    assert lines[0].endswith(" is gone. This fork is made for vLLM 0.33.0")
    found = {**result["kernels"], "class": result["class"]}
    assert {name: found[name] for name in expected} == expected
    parts = {line.split(" left to")[0] for line in lines}
    assert len(parts) == len(lines), "each part says it once"
