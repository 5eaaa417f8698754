# SPDX-License-Identifier: Apache-2.0
"""Every fix that the doctor can give goes through what will read it.

Each text of its checks tells when it is put together. States, as facts that questions would tell, must together have
every text said, so a fix that no state gives is found; and all that they give is read.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from doctor_machine import healthy
from layer_toys import REPO, UPSTREAM, write_tree
from readers import read_by_its_reader, words_are_read
from test_doctor_checks import GIVEN, MOE, SPARK, gpus, module, seen
from test_doctor_probe import PLANTED as PROBED

import flashinfer_sm12x.doctor as doctor
from flashinfer_sm12x import versions
from flashinfer_sm12x.build import diagnosis, toolchain
from flashinfer_sm12x.doctor import checks, fixes, probe_checks, questions
from flashinfer_sm12x.doctor.asking import CLI, FOLDER, PACKAGE, Answers
from flashinfer_sm12x.doctor.probe import TOKENS

MODULES = (fixes, checks, probe_checks, doctor)
"""Modules that give fixes, in the order of their imports."""


@dataclass(frozen=True)
class State:
    """The state of a machine, as far as the doctor asks.

    Attributes:
        facts: Facts by question; a question that is not in it told nothing.
        environ: The variables that are set.
        patches: ``name -> value`` to replace in ``os`` or in a module of the doctor, for facts that no question tells.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    patches: Mapping[str, Any] = field(default_factory=dict)


def no_folder() -> str:
    raise FileNotFoundError


class _Telling(ast.NodeTransformer):
    """Wraps each text of a function in a call that tells its place and its own text; of the doctor's other functions,
    that print, none."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.texts: dict[str, str] = {}

    def _wrapped(self, node: ast.Constant | ast.JoinedStr, text: str) -> ast.expr:
        place = f"{self.file}:{node.lineno}:{node.col_offset}"
        self.texts[place] = text
        call = ast.Call(ast.Name("__said__", ast.Load()), [ast.Constant(place), node], [])
        return ast.copy_location(call, node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        text = ast.unparse(node)
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)
        return self._wrapped(node, text)

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return self._wrapped(node, repr(node.value)) if isinstance(node.value, str) else node

    def visit_Module(self, node: ast.Module) -> ast.Module:
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and (self.file != "__init__.py" or each.name == "diagnose"):
                self.visit(each)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        described = ast.get_docstring(node) is not None
        node.body = [*node.body[:described], *map(self.visit, node.body[described:])]
        return node


class Telling:
    """Copies of the doctor's modules whose texts tell when they are put together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: dict[str, str] = {}
        self.reported: set[str] = set()
        self.modules: dict[str, types.ModuleType] = {}
        for original in MODULES:
            assert original.__file__ is not None
            answers = _Telling(Path(original.__file__).name)
            source = Path(original.__file__).read_text(encoding="utf-8")
            tree = ast.fix_missing_locations(answers.visit(ast.parse(source)))
            copy = types.ModuleType(original.__name__)
            copy.__dict__.update(
                __file__=original.__file__, __package__=doctor.__name__, __path__=doctor.__path__, __said__=self._tell
            )
            monkeypatch.setitem(sys.modules, original.__name__, copy)
            exec(compile(tree, original.__file__, "exec"), copy.__dict__)
            self.modules[Path(original.__file__).stem] = copy
            self.texts |= answers.texts

    def _tell(self, place: str, text: str) -> str:
        self.reported.add(place)
        return text

    def unsaid(self) -> list[str]:
        return [f"{place} {text}" for place, text in self.texts.items() if place not in self.reported]


FORK: dict[str, Any] = {"found": {"file": str(PACKAGE / "__init__.py"), "folders": []}}
IMPORTED = {"version": UPSTREAM, "fork": "0.1.0"}
GB10S = SPARK["gpus"]
OLD: dict[str, Any] = {"gpus": {"gpus": [{**GB10S[0], "driver": "570.86.10"}]}, "build": {"version": "13.0"}}
MANAGED: dict[str, Any] = {"pip": True, "managed": True, "ensurepip": True}
NO_CUDA: dict[str, Any] = {"torch": {"torch": "2", "cuda": None}, "gpus": SPARK}
NO_COMPILER: dict[str, Any] = {"build": {"error": f"no CUDA compiler found. Install one with: {toolchain.PIP_COMMAND}"}}
NO_HOST_COMPILER: dict[str, Any] = {"build": {"error": "missing or broken. Debian, Ubuntu: apt-get install g++"}}
VLLM: dict[str, Any] = {
    "found": True,
    "nvcc": "/t/bin/nvcc",
    "ninja": "/b/ninja",
    **dict.fromkeys(questions.VLLM_QUESTIONS, True),
}
WITHOUT = VLLM | {"has_flashinfer": False, "has_flashinfer_cutlass_fused_moe": False, "has_flashinfer_cubin": False}
OWN = {"version": "0.34.0", "kind": "an editable installation", "source": "/home/u/vllm"}
OWN_TORCH = {"version": "2.15.0.dev20261101", "kind": "a nightly or development build", "source": ""}
OTHER_VLLM: dict[str, Any] = {"path": {"vllm": "0.34.0"}}
LOADED: dict[str, Any] = {"vllm": "0.33.0", "plugins": ["flashinfer_sm12x"]}
ASIDE = "flashinfer-python 0.6.4 in /site is none that flashinfer-sm12x 0.1.0 was tested with"


def imported(failed: str, blame: str = "") -> State:
    """``import flashinfer`` ends so, and without a variable it does not."""
    blamed = {"blame": blame} if blame else {}
    return State({"path": FORK, "import": {"failed": failed, **blamed}}, {blame: "2"} if blame else {})


def plugin(outcome: str, environ: Mapping[str, str] | None = None, aside: str = "", **more: Any) -> State:
    """vLLM's plugin ends so."""
    facts: dict[str, Any] = {
        "path": LOADED | {"aside": aside},
        "vllm": VLLM | {"outcome": outcome, "settings": {"moe": "auto"}},
    }
    return State(facts | more, environ or {})


def probed(part: str = "device", **facts: Any) -> State:
    """A probe's figures, of which some are these."""
    measured = healthy()
    measured[part] |= facts
    return State({f"probe-{name}": found for name, found in measured.items()})


STATES = [
    *(State(facts, *environ) for _, facts, _, _, _, _, *environ in GIVEN),
    *(probed(part, **facts) for part, facts, *_ in PROBED.values()),
    # import
    State(patches={"os.getcwd": no_folder}),
    State({"path": {"found": None}}),
    *(State({"path": {"found": None, "wheel": False}, "installer": found}) for found in ({}, MANAGED)),
    State({"path": {"found": {"file": None, "folders": ["/x/flashinfer"]}}}),
    State({"path": {"found": {"file": "/site/flashinfer/__init__.py"}}}),
    State({"path": FORK | {"aside": "FLASHINFER_SM12X_MOE=0"}}, {"FLASHINFER_SM12X_MOE": "0"}),
    State({"path": FORK | {"aside": ASIDE}}),
    State({"path": FORK | {"aside": ASIDE}, "installer": MANAGED}),
    State({"path": FORK, "import": IMPORTED}),
    State({"path": FORK, "import": IMPORTED}, patches={"checks.PACKAGE": Path("/elsewhere")}),
    imported("no answer within 60 s"),
    imported("it was killed by SIGSEGV"),
    imported("TypeError: unsupported operand", blame="PYTHONOPTIMIZE"),
    imported(f"ImportError: Install it with:  {versions.fix('--force-reinstall --no-deps ')}"),
    imported("RuntimeError: Install it with:  cd"),
    imported("flashinfer-cubin version (0.6.4) does not match flashinfer version (0.7.2)"),
    imported("VariableError: FLASHINFER_LOGLEVEL is 'much'; it may be a whole number"),
    imported("ModuleNotFoundError: No module named 'tvm_ffi'"),
    imported("SyntaxError: '(' was never closed"),
    # variables
    State(environ={"FLASHINFER_SM12X_CHEKC": "1"}),
    State(environ={"FLASHINFER_SM12X_CHEKC": "1", "FLASHINFER_SM12X_CHECK": "1", "FLASHINFER_SM12X_MOE": "on"}),
    # build
    State({"build": {"error": None, "version": "13.0", "nvcc": "/n", "origin": "PATH", "passed_over": ["/o: old"]}}),
    State({"build": {"error": "x", "blame": "CUDA_HOME"}}, {"CUDA_HOME": "/none"}),
    State({"build": {"error": "No space left", "elsewhere": "/var/tmp/a folder"}}),
    State({"build": {"error": "exit status 1", "silent": "/b/g++"}}),
    State({"build": {"error": "an unknown one"}}),
    State({"build": {"error": f"CUDA_HOME=/t holds none. {toolchain.PIP_COMMAND}"}}),
    State(NO_COMPILER | {"installer": {"pip": False, "uv": "/a b/uv"}}),
    State(NO_COMPILER | {"installer": MANAGED}),
    *(
        State(NO_HOST_COMPILER | {"system": {"programs": ["apt-get", *sudo]}}, patches={"os.geteuid": lambda: 7})
        for sudo in (["sudo"], [])
    ),
    State(NO_HOST_COMPILER, patches={"os.geteuid": lambda: 0}),
    State(NO_COMPILER | {"path": LOADED}),
    # gpu, driver, kernel-log
    State({"gpus": {"failed": "no answer within 60 s"}}),
    State({"gpus": {"error": "it couldn't communicate with the driver"}}),
    State({"gpus": gpus("9.0")}, {"FLASHINFER_SM12X_MOE": "1"}),
    *(State({"gpus": {"error": "no driver"}, "system": {"guest": guest}}) for guest in fixes.GUESTS),
    State({"torch": seen("12.1")}),
    State({"gpus": SPARK, "memory": {"available": 0, "total": 1}, "system": {"programs": []}}),
    State({"folder": {"free_bytes": 1, "folder": "/c"}, "import": {"failed": "no answer within 60 s"}, "path": FORK}),
    State({"folder": {"failed": "no answer within 60 s"}, "path": {"found": None}}),
    State(OLD),
    State(OLD | {"system": {"programs": []}}),
    *(
        State({"torch": seen("12.1"), "system": {"programs": [], "guest": guest}})
        for guest in (None, "WSL2", "container")
    ),
    State({"gpus": SPARK, "log": {"lines": []}}),
    State({"gpus": SPARK}, patches={"os.geteuid": lambda: 0}),
    State({"gpus": SPARK, "log": {"failed": "no answer within 60 s"}}, patches={"os.geteuid": lambda: 0}),
    State({"gpus": SPARK}, patches={"os.geteuid": lambda: 7}),
    State({"gpus": SPARK, "log": {"lines": ["NVRM: Xid 79"], "count": 1}}),
    State({"gpus": SPARK, "log": {"lines": ["NVRM: Out of memory [NV_ERR_NO_MEMORY]"], "count": 1}}),
    # builds of the user's
    *(
        State(OTHER_VLLM | {"installer": {"builds": builds}})
        for builds in ({"vllm": OWN}, {"vllm": OWN, "torch": OWN_TORCH})
    ),
    State(NO_CUDA | {"installer": {"builds": {"torch": OWN_TORCH}}}),
    State(NO_COMPILER | {"installer": {"builds": {"flashinfer-sm12x": OWN}}}),
    State(NO_COMPILER | {"installer": {"builds": {"flashinfer-sm12x": OWN | {"source": str(REPO)}}}}),
    State({"torch": seen("9.0"), "gpus": gpus("8.9")}),
    # torch
    *(State(NO_CUDA | {"installer": found}) for found in ({}, MANAGED, {"pip": False, "uv": "/u/uv"})),
    State({"torch": {"torch": "2", "cuda": None}}),
    State({"torch": {"torch": "2", "cuda": "13.0", "gpus": []}, "gpus": SPARK}),
    State({"torch": {"torch": "2", "cuda": "13.0", "gpus": []}, "gpus": SPARK}, {"CUDA_VISIBLE_DEVICES": ""}),
    State({"torch": seen("12.0", "12.1"), "gpus": gpus("12.1", "12.1")}, {"FLASHINFER_CUDA_ARCH_LIST": "12.1a"}),
    # architectures, modules, probe
    State({"modules": {"architectures": []}}),
    State({"modules": {"architectures": ["12.0a"]}, "gpus": gpus("9.0")}, {"FLASHINFER_SM12X_MOE": "1"}),
    State({"modules": {"error": "no CUDA compiler found"}}),
    State({"modules": {"failed": "ImportError: x"}}),
    State({"modules": {"failed": "no answer within 60 s"}}),
    State({"modules": {"probe_error": "it is not what a probe writes", "workspace": "/c d"}}),
    State({"modules": {MOE: module("changed", passed_over="x.cuh is another")}, "installer": MANAGED}),
    # vllm, vllm-plugin, vllm-flashinfer
    State({"vllm": {"found": False}, "path": {"vllm": None}}),
    State({"vllm": {"found": True}, "path": {"vllm": None}}),
    State({"vllm": {"unread": ["VLLM_ATTENTION_BACKEND"]}, "path": {"vllm": "0.33.0"}}),
    State({"vllm": {"settings_error": "FLASHINFER_SM12X_VLLM: 'off' is no key=value"}}),
    State({"vllm": {"settings_error": "--additional-config: qkv is 'int4'; it may be bf16"}}),
    State({"vllm": VLLM, "path": {"plugins": []}}),
    plugin("installed"),
    plugin("installed but for decode steps"),
    plugin("installed but for decode steps", installer=MANAGED),
    plugin("", {"VLLM_PLUGINS": "other"}),
    plugin("it was not registered", {"FLASHINFER_SM12X_VLLM": "0", "FLASHINFER_SM12X_MOE": "0"}),
    plugin("it steps aside", aside=ASIDE),
    plugin("no GPU here is served"),
    plugin("no GPU here is served", gpus=SPARK),
    plugin("ImportError: x"),
    State({"vllm": WITHOUT | {"has_flashinfer_cutlass_fused_moe": True, "has_nvidia_artifactory": False}}),
    State({"vllm": WITHOUT}),
    State({"vllm": WITHOUT | {"nvcc": None}}),
    State({"vllm": WITHOUT | {"nvcc": None, "ninja": None}, "build": {"nvcc": "/a toolkit/bin/nvcc"}}),
    *(
        State({"vllm": WITHOUT | {"ninja": None}, "installer": found}, patches={"fixes.INTERPRETER": python})
        for found in ({}, MANAGED)
        for python in ("/none/python", sys.executable)
    ),
    # probe-*
    State({"probe-device": {"failed": "RuntimeError: no GPU here is served"}}),
    probed(virtual=True),
    State(probed("sums", mxf4=13).facts | {"probe-device": {**healthy()["device"], "virtual": True}}),
    State(
        probed("order", **{"copies without fence": {"compared": 9, "wrong": 1}}).facts
        | {"probe-device": {**healthy()["device"], "gb10": False}}
    ),
    *(probed("tactics", wrong=["MoE 8 experts: off"][:count]) for count in (0, 1)),
    probed("layer", **{f"{tokens} tokens": {"layer_us": 9.0, "read_us": 8.0} for tokens in TOKENS}),
    probed("dram", predicted=None),
]
"""Machines that lack one thing each; together they have every fix given."""


def findings_of(state: State, telling: Telling) -> list[doctor.Finding]:
    """The findings of one state, each with a fix that ``telling`` can trace."""
    environ = {"PATH": os.environ["PATH"], **state.environ}
    facts: dict[str, Any] = {question: {} for question in questions.QUESTIONS}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in state.patches.items():
            owner, _, attribute = name.partition(".")
            patched.setattr(telling.modules.get(owner, os), attribute, value)
        findings: list[doctor.Finding] = telling.modules["__init__"].diagnose(
            Answers(facts | state.facts, state.environ)
        )
    for finding in findings:
        assert bool(finding.command or finding.why) == (finding.state != "ok"), finding
        if finding.command:
            read_by_its_reader(finding.command, environ)
        words_are_read(finding.why, environ)
    return findings


def test_every_fix_is_given_by_a_state_and_read_by_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    telling = Telling(monkeypatch)
    for state in STATES:
        try:
            findings_of(state, telling)
        except BaseException as error:
            raise AssertionError(f"{state}: {error}") from error
    unsaid = telling.unsaid()
    assert not unsaid, "no state has the doctor say these:\n" + "\n".join(unsaid)


def fixes_of(state: State, **facts: Mapping[str, Any]) -> list[doctor.Finding]:
    """The findings of one state, with other facts of some questions."""
    answers: dict[str, Any] = {question: {} for question in questions.QUESTIONS} | dict(state.facts)
    answers |= {question: answers[question] | found for question, found in facts.items()}
    with pytest.MonkeyPatch.context() as patched:
        for name, value in state.patches.items():
            owner, _, attribute = name.partition(".")
            patched.setattr({"checks": checks, "fixes": fixes}.get(owner, os), attribute, value)
        return doctor.diagnose(Answers(answers, state.environ))


def test_no_command_runs_a_program_that_is_not_there() -> None:
    """All that commands run is looked for, and without one of them its commands are words."""
    run: set[str] = set()
    for state in STATES:
        for finding in fixes_of(state, system={"programs": list(questions.PROGRAMS)}):
            programs = {name for name in fixes.programs_of(finding.command) if "/" not in name}
            assert programs <= {*fixes.SHELL, *questions.PROGRAMS}, finding
            run |= programs
        for lacking in questions.PROGRAMS:
            for finding in fixes_of(state, system={"programs": sorted({*questions.PROGRAMS} - {lacking})}):
                assert lacking not in fixes.programs_of(finding.command), finding
                assert finding.state == "ok" or finding.command or finding.why, finding
    assert run >= {*questions.PROGRAMS} - {"sudo", "dmesg", "mkdir"} | {*fixes.SHELL}


def test_no_command_replaces_a_build_of_the_users() -> None:
    """It is named in words, with the command that would."""
    named, packages = 0, "|".join(questions.REPLACED)
    for state in STATES:
        with_command = {finding.check: finding for finding in fixes_of(state)}
        found = state.facts.get("installer", {}) | {"builds": dict.fromkeys(questions.REPLACED, OWN)}
        for finding in fixes_of(state, installer=found):
            installs = re.findall(r"pip (?:un)?install ([^&]*)", finding.command)
            assert not re.search(rf"(?<![\w-])({packages})(?![\w-])|\[cuda\]", " ".join(installs)), finding
            before = with_command[finding.check]
            if before.command and not finding.command:
                named += 1
                assert " 0.34.0 is a build of your own (an editable installation, /home/u/vllm)" in finding.why, finding
    assert named >= 10


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("install vllm==0.33.0", ["vllm", "torch", "flashinfer-python"]),
        ("install --no-deps vllm==0.33.0", ["vllm"]),
        ("uninstall --yes torch", ["torch"]),
        ('install --force-reinstall --no-deps "flashinfer-python==0.7.2.post1"', ["flashinfer-python"]),
        ("install ninja", []),
        ("install -e '/home/u/sm12x[cuda]'", ["flashinfer-python"]),
        ("install '/elsewhere[cuda]'", ["flashinfer-sm12x", "flashinfer-python"]),
        ("install torchao", []),
        ("uninstall --yes flashinfer-sm12x-kernels", []),
    ],
)
def test_what_pip_would_replace(words: str, named: list[str]) -> None:
    builds = dict.fromkeys(("vllm", "torch", "flashinfer-python"), OWN)
    builds["flashinfer-sm12x"] = OWN | {"source": "/home/u/sm12x"}
    found = fixes.replaced(Answers({"installer": {"builds": builds}}, {}), words)
    assert [text.split()[0] for text in found] == named


@pytest.mark.parametrize(
    "facts",
    [
        {"path": FORK, "import": {"failed": "RuntimeError: x"}},
        {"path": FORK | {"aside": ASIDE}},
        {"path": {"found": None}},
        {"path": {"found": {"file": "/site/flashinfer/__init__.py"}}},
    ],
)
def test_without_the_fork_its_commands_are_words_and_the_doctors_is_its_folder(facts: dict[str, Any]) -> None:
    facts = {**facts, "folder": {"free_bytes": 1, "folder": "/c"}, "memory": {"failed": "no answer within 60 s"}}
    found = {row.check: row for row in fixes_of(State(facts | {"gpus": SPARK}))}
    assert found["disk"].command == ""
    assert found["disk"].why.startswith("once 'import' is ok: ")
    assert found["disk"].why.count("sm12x-cache list") == 1
    own = found["headroom"].command.rpartition(" --timeout")[0]
    first = facts["path"].get("found") == FORK["found"]
    assert own == (f"{CLI} sm12x-doctor" if first else shlex.join([sys.executable, str(FOLDER)]))


@pytest.mark.parametrize(
    ("version", "files", "kind"),
    [
        ("0.33.0", {}, None),
        ("0.33.0", {"RECORD": "", "INSTALLER": "pip", "direct_url.json": "{"}, None),
        ("0.33.0rc1", {"RECORD": ""}, None),
        *((f"2.14.0+{label}", {}, None) for label in ("cpu", "cu130", "xpu", "rocm6.4")),
        ("2.15.0.dev20261101+cu130", {}, "a nightly or development build"),
        ("0.33.1rc1.dev7", {}, "a nightly or development build"),
        ("0.9.0a0+50eac811a6.nv26.10", {}, "a build with a local version"),
        ("2.14.0+cu130.mine", {}, "a build with a local version"),
        ("2.14.0", {"SOURCES.txt": ""}, "a source tree"),
        ("2.14.0", {"SOURCES.txt": "", "RECORD": ""}, None),
        ("2.14.0", {"direct_url.json": '{"url": "file:///a%20b", "dir_info": {}}'}, "built from source"),
        ("2.14.0", {"direct_url.json": '{"url": "file:///a%20b", "dir_info": {"editable": true}}'},
            "an editable installation"),
        ("2.14.0", {"direct_url.json": '{"url": "file:///a%20b", "archive_info": {}}'}, "a wheel that no index gave"),
        ("2.14.0", {"direct_url.json": '{"url": "file:///a%20b", "vcs_info": {}}'}, "built from source"),
        ("2.14.0", {"direct_url.json": "[]"}, None),
    ],
)  # fmt: skip
def test_a_build_of_the_users_is_distinguished_from_what_an_index_gave(
    version: str, files: Mapping[str, str], kind: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = f"sm12x_toy-{version}.{'egg-info' if 'SOURCES.txt' in files else 'dist-info'}"
    name = "PKG-INFO" if "SOURCES.txt" in files else "METADATA"
    metadata = {name: f"Metadata-Version: 2.1\nName: sm12x-toy\nVersion: {version}\n", **files}
    write_tree(tmp_path, {f"{info}/{file}": text for file, text in metadata.items()})
    monkeypatch.syspath_prepend(tmp_path)
    found = questions.own_build("sm12x-toy")
    assert (found or {}).get("kind") == kind
    assert found is None or (found["version"] == version and found["source"] in ("", "/a b", str(tmp_path)))
    assert questions.own_build("sm12x-no-such-package") is None


def test_a_package_on_the_path_without_metadata_is_a_source_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tree(tmp_path, {"sm12x_toy/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    found = questions.own_build("sm12x-toy")
    assert found == {"version": "without a version", "kind": "a source tree", "source": str(tmp_path / "sm12x_toy")}


def test_the_toolkits_fix_is_readmes() -> None:
    """The same two lines, and one list of packages."""
    readme = (REPO / "README.md").read_text(encoding="utf-8")
    assert re.search(r'^pip install "\$HOME/flashinfer-sm12x\[cuda\]"$', readme, re.MULTILINE)
    assert f"""export CUDA_HOME="$(python -c '{fixes.FIND_TOOLKIT}')"\n""" in readme
    folder = shlex.quote(f"{REPO}[cuda]")
    assert toolchain.PIP_COMMAND in (f"pip install {folder}", f"pip install -e {folder}")
    pinned = (REPO / "requirements-cuda.txt").read_text(encoding="utf-8")
    assert all(f"\n{name}=={toolchain.OWN_RELEASE}." in pinned for name in toolchain.COMPILER_WHEELS)


def texts_that_install(module: types.ModuleType) -> Iterator[str]:
    """The errors of a module that name an installation, with ``X`` where a value would stand."""
    source = Path(str(module.__file__)).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node] if isinstance(node, ast.Constant) else []
        text = ""
        for part in parts:
            if isinstance(part, ast.Constant):
                text += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                known = ast.unparse(part.value) in ("PIP_COMMAND", "toolchain.PIP_COMMAND", "command")
                text += toolchain.PIP_COMMAND if known else "X"
        if re.search(r"(pip|apt-get) install \S", text):
            yield text


@pytest.mark.parametrize("module", [toolchain, diagnosis], ids=lambda module: module.__name__.rpartition(".")[2])
def test_what_a_builds_errors_name_is_read_by_pip_and_apt_get(module: types.ModuleType) -> None:
    """Whatever stands around it in the sentence."""
    texts = list(texts_that_install(module))
    assert len(texts) >= 5, "this test sees them"
    for text in texts:
        fix = fixes.named_in(Answers({}, {}), text)
        assert fix is not None, text
        assert fix[0] or fix[1].startswith("as root: "), fix
        read_by_its_reader(fix[0] or fix[1].removeprefix("as root: "), {})
