# SPDX-License-Identifier: Apache-2.0
"""One table has all variables: what reads them, the doctor, vLLM's plugin and the page say the same."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import forked_python
import pytest
from layer_toys import REPO

from flashinfer_sm12x import variables

PAGE = (REPO / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

READ_ELSEWHERE = {
    "CUDA_HOME", "CUDA_PATH", "CXX", "MAX_JOBS", "FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_NVCC",
    "FLASHINFER_WORKSPACE_BASE",
    "PATH", "TMPDIR", "LD_PRELOAD", "VSM_ACCUMULATION_BITS", "FLASHINFER_SM12X_EMBED_PTX", "_FLASHINFER_SM12X_PROBE",
    "FLASHINFER_SM12X_MOE",
}  # fmt: skip
"""Names that code reads without the table: those of compilers and upstream, what it sets and puts back, and the switch,
whose 0 leaves upstream's package alone before anything of this fork is imported."""


def test_the_page_has_the_table() -> None:
    assert variables.as_markdown() in PAGE, f"docs/troubleshooting.md should have:\n{variables.as_markdown()}"


def names_read(file: Path) -> set[str]:
    """Names that ``os.environ`` is asked for, as far as they stand in the file."""
    text = file.read_text(encoding="utf-8")
    constants = dict(re.findall(r'^(\w+) = ("\w+")$', text, re.MULTILINE))
    asked = re.findall(r'(?:environ\.get\(|getenv\(|environ\[)("?\w+"?)(?:[,)]|\](?! = ))', text)
    asked += re.findall(r'("?\w+"?) (?:not )?in os\.environ\b', text)
    return {constants.get(name, name).strip('"') for name in asked if name.startswith('"') or name in constants}


def test_the_product_reads_its_variables_through_the_table() -> None:
    packages = (REPO / "flashinfer", REPO / "flashinfer_sm12x")
    doctor = set((REPO / "flashinfer_sm12x" / "doctor").glob("*.py"))  # which asks about variables of others
    files = [file for package in packages for file in package.rglob("*.py") if file not in doctor]
    asked = {name for file in files for name in names_read(file)}
    assert asked <= READ_ELSEWHERE
    assert {"FLASHINFER_WORKSPACE_BASE", "CXX"} <= asked, "this test sees what is read"
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    unread = [name for name in variables.TABLE if name.startswith("FLASHINFER_SM12X") and f'"{name}"' not in text]
    assert unread == []


def test_every_name_that_pages_have_is_in_the_table() -> None:
    pages = [REPO / "README.md", *(REPO / "docs").glob("*.md"), *filter(Path.is_file, (REPO / "docker").iterdir())]
    named = {
        name
        for page in pages
        for name in re.findall(r"(?<!-D)\bFLASHINFER_SM12X_\w+", page.read_text(encoding="utf-8"))
    }
    assert named - variables.TABLE.keys() == {"FLASHINFER_SM12X_CHEKC"}  # the doctor's example of a misspelled one


def test_upstreams_names_are_not_called_misspelled(site_packages: Path) -> None:
    theirs = set()
    for file in (site_packages / "flashinfer").rglob("*.py"):
        theirs |= set(re.findall(r"\bFLASHINFER_[A-Z0-9_]+", file.read_text(encoding="utf-8", errors="replace")))
    assert len(theirs) > 80
    assert list(variables.problems(dict.fromkeys(theirs - variables.TABLE.keys(), "x"))) == []
    assert (
        list(variables.problems({"PATH": "/bin", "CXXX": "x", "JOBS": "x", "MAX_JOB": "x", "SM12X;reboot": "x"})) == []
    )


def edits(word: str) -> set[str]:
    splits = [(word[:i], word[i:]) for i in range(len(word) + 1)]
    letters = "AB_"
    return {
        *(a + b[1:] for a, b in splits if b),
        *(a + c + b for a, b in splits for c in letters),
        *(a + c + b[1:] for a, b in splits if b for c in letters),
        *(a + b[1] + b[0] + b[2:] for a, b in splits if len(b) > 1),
    } - {word}


def test_one_edit_apart_is_what_one_edit_makes() -> None:
    words = ["".join(letters) for size in range(5) for letters in itertools.product("AB_", repeat=size)]
    for word in words:
        near = edits(word)
        assert {other for other in words if variables.one_edit_apart(word, other)} == near & set(words), word


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FLASHINFER_SM12X_CHEKC", "FLASHINFER_SM12X_CHECK"),
        ("FLASHINFR_SM12X_MOE", "FLASHINFER_SM12X_MOE"),
        ("flashinfer_sm12x_moe", "FLASHINFER_SM12X_MOE"),
        ("FLASHINFER_NVCC_LAUNCHR", "FLASHINFER_NVCC_LAUNCHER"),
        ("FLASHINFER_VIRTUAL_DEVICES", "FLASHINFER_VIRTUAL_DEVICE"),
        ("FLASHINFER_SM12X_DECODE", ""),
        ("SM12X_MOE", ""),
    ],
)
def test_a_misspelled_name_is_reported_with_the_one_that_was_meant(name: str, meant: str) -> None:
    assert [(found, right) for found, _, right in variables.problems({name: "1"})] == [(name, meant)]


BAD = {
    "FLASHINFER_SM12X_MOE": "on",
    "FLASHINFER_SM12X_VLLM": "off",
    "FLASHINFER_SM12X_CHECK": "true",
    "FLASHINFER_SM12X_HALF_MMA": " 1",
    "FLASHINFER_SM12X_EMBED_PTX": "yes",
    "FLASHINFER_ALLOW_SHARED_CACHE": "yes",
    "FLASHINFER_JIT_VERBOSE": "on",
    "FLASHINFER_JIT_DEBUG": "2",
    "FLASHINFER_JIT_LINEINFO": "x",
    "FLASHINFER_JIT_PREBUILD_MAX_JOBS": "0",
    "FLASHINFER_VIRTUAL_DEVICE": "gb10",
    "FLASHINFER_LOGLEVEL": "info",
    "FLASHINFER_LOGGING_LEVEL": "loud",
    "FLASHINFER_EXTRA_CFLAGS": "-D'x",
    "FLASHINFER_EXTRA_CUDAFLAGS": '-D"x',
    "FLASHINFER_EXTRA_LDFLAGS": "-Wl,'x",
}


def first_use(name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    """A call that reads a variable in the product."""
    import torch

    from flashinfer.jit import core
    from flashinfer.jit.sm12x import modules
    from flashinfer.sm12x import backend, devices
    from flashinfer_sm12x.build import trust
    from flashinfer_sm12x.vllm import settings

    uses: dict[str, Callable[[], object]] = {
        "FLASHINFER_SM12X_MOE": lambda: devices.serves_cuda(0),
        "FLASHINFER_SM12X_VLLM": lambda: settings.resolve({}),
        "FLASHINFER_SM12X_CHECK": lambda: backend.checks_values(torch.device("cuda", 0)),
        "FLASHINFER_SM12X_HALF_MMA": modules.computes_in_fp16,
        "FLASHINFER_ALLOW_SHARED_CACHE": lambda: trust.require_trusted(Path("/")),
        "FLASHINFER_JIT_PREBUILD_MAX_JOBS": lambda: core.build_jit_specs([]),
        "FLASHINFER_VIRTUAL_DEVICE": lambda: backend.kernels(torch.device("cpu")),
        "FLASHINFER_LOGLEVEL": variables.check_imported,
        "FLASHINFER_LOGGING_LEVEL": variables.check_imported,
        "FLASHINFER_JIT_VERBOSE": lambda: modules.gen_router_module().build(),
        **{
            f"FLASHINFER_EXTRA_{kind}FLAGS": lambda: modules.gen_router_module().build_hash  # needs no compiler
            for kind in ("C", "CUDA", "LD")
        },
    }
    monkeypatch.setattr(devices, "_capability", lambda _index: (12, 1))
    return uses.get(name, modules.gen_router_module)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_reported_alike_by_its_first_use_and_the_doctor(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "12.1a")
    ((found, message, _),) = variables.problems({name: BAD[name]})
    assert found == name
    assert message.startswith((f"{name} is {BAD[name]!r}; it may be ", f"{name}: {BAD[name]!r} is no key=value"))
    use = first_use(name, monkeypatch)
    monkeypatch.setenv(name, BAD[name])
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        use()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("FLASHINFER_SM12X_MOE", "", None),
        ("FLASHINFER_SM12X_MOE", "0", False),
        ("FLASHINFER_SM12X_CHECK", "", False),
        ("FLASHINFER_SM12X_CHECK", "1", True),
        ("FLASHINFER_DISABLE_JIT", "0", True),  # as upstream reads it
        ("FLASHINFER_EXTRA_CUDAFLAGS", """-DA='b c' "-DD" """, ("-DA=b c", "-DD")),
        ("FLASHINFER_EXTRA_LDFLAGS", "", ()),
        ("MAX_JOBS", "", None),
        ("MAX_JOBS", "12", 12),
        ("FLASHINFER_SM12X_VLLM", "", {}),
        ("FLASHINFER_SM12X_VLLM", " 0 ", None),
        ("FLASHINFER_SM12X_VLLM", "o=mxfp4, qkv = bf16", {"qkv": "bf16", "o": "mxfp4"}),
    ],
)
def test_values(name: str, text: str, value: object) -> None:
    assert variables.read(name, {name: text}) == value
    assert text or variables.read(name, {}) == value


def test_what_was_meant_for_a_while_is_reported() -> None:
    warnings = dict(
        variables.forgotten({"FLASHINFER_SM12X_MOE": "0", "FLASHINFER_JIT_DEBUG": "0", "FLASHINFER_SM12X_CHECK": "on"})
    )
    assert warnings == {
        "FLASHINFER_SM12X_MOE": "FLASHINFER_SM12X_MOE=0: upstream's kernels run in place of this fork's"
    }


@pytest.mark.parametrize("name", ["FLASHINFER_LOGLEVEL", "FLASHINFER_LOGGING_LEVEL"])
def test_what_upstream_reads_while_it_is_imported_is_reported_by_the_import(name: str) -> None:
    """Upstream's own words for a bad value, and for an empty one, are Python's."""
    command = ["-c", "import flashinfer"]
    bad = forked_python.run(command, cwd=REPO, env={**os.environ, name: "much"})
    assert bad.stderr.splitlines()[-1].startswith("flashinfer_sm12x.variables.VariableError: ")
    assert f"{name} is 'much'; it may be " in bad.stderr
    empty = forked_python.run(command, cwd=REPO, env={**os.environ, name: ""})
    assert f"VariableError: {name} is empty; it may be " in empty.stderr
