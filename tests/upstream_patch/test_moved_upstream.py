# SPDX-License-Identifier: Apache-2.0
"""Onto an upstream that has changed: each place that does not fit is named, and nothing is written."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from flashinfer_sm12x.versions import UPSTREAM_VERSION
from tools.upstream_patch import edits, export, style, tree
from tools.upstream_patch.compose import cxx_files, fork_text, with_definitions
from tools.upstream_patch.topics import TEXT, TOPICS
from tools.upstream_patch.tree import ExportError

GEMM = "flashinfer/gemm/gemm_base.py"
BF16 = "flashinfer/gemm/gemm_bf16_fp4.py"
XQA = "csrc/xqa/mha.cu"


@pytest.fixture(scope="module")
def upstream_tree(upstream_tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy without the branches that other files' tests make, whichever run first."""
    folder = tmp_path_factory.mktemp("moved") / "flashinfer"
    tree.git(upstream_tree, "clone", "--quiet", "--branch", "main", "--single-branch", str(upstream_tree), str(folder))
    return folder


@pytest.fixture(scope="module")
def newer(upstream_tree: Path) -> str:
    """A commit of a later upstream: a function is gone, an argument renamed, a line of C++ changed."""
    original = tree.Files(upstream_tree, "main")
    gemm, bf16, xqa = (original.original(path) or "" for path in (GEMM, BF16, XQA))
    name = "group_gemm_mxfp8_mxfp4_nt_groupwise"
    first, end = edits.definition_lines(gemm, name) or (0, 0)
    lines = gemm.splitlines(keepends=True)
    argument = r"\bb_descale(: torch.Tensor,\n    alpha: Optional\[torch.Tensor\] = None,\n    \*,\n    backend)"
    changed = {
        GEMM: "".join([*lines[:first], f"from .grouped import {name}\n", *lines[end:]]),
        BF16: re.sub(argument, r"b_scale\1", bf16),
        XQA: xqa.replace("UniformRescaleMask::filled(~0U)", "UniformRescaleMask::filled(0xFFFFFFFFU)"),
        "version.txt": "9.8.7\n",
    }
    with tree.work_tree(upstream_tree, "main") as work:
        for path, text in changed.items():
            assert text != original.original(path)
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_text(text)
        tree.git(work, "add", "--", *changed)
        tree.commit(work, "A later upstream")
        return tree.git(work, "rev-parse", "HEAD").strip()


def test_each_place_is_named_and_nothing_is_written(upstream_tree, newer):
    before = tree.git(upstream_tree, "for-each-ref", "refs/heads")
    with pytest.raises(ExportError) as error:
        export.export(upstream_tree, base=newer)
    first, *messages, fit = str(error.value).splitlines()
    assert (
        first == f"upstream 9.8.7 is not what these edits were written for ({UPSTREAM_VERSION}); nothing was written."
    )
    assert f"group-gemm: {GEMM}: group_gemm_mxfp8_mxfp4_nt_groupwise is not there any more" in messages
    for function in ("mm_bf16_fp4", "prepare_bf16_fp4_weights"):
        assert any(
            line.startswith(f"dense: {BF16}: {function} has changed (its text hashes to ") for line in messages
        ), messages
    assert any(line.startswith(f"xqa-copies: {XQA}: auto const fullRescaleMask") for line in messages)
    # Topics that nothing has happened to are not named, or as those that fit: lean-module, but what is after it not.
    names = ("architectures", "cublas-headers", "group-gemm-scales", "lean-module")
    assert fit == f"These topics fit: {' '.join(f'--topic {name}' for name in names)}"
    assert {line.partition(":")[0] for line in messages} == {"group-gemm", "dense", "xqa-copies"}
    assert tree.git(upstream_tree, "for-each-ref", "refs/heads") == before
    assert tree.git(upstream_tree, "status", "--porcelain") == ""
    assert len(tree.git(upstream_tree, "worktree", "list").splitlines()) == 1


def test_a_file_that_only_a_checkout_has_is_edited_there_and_left_out_elsewhere(upstream_tree):
    """The wheel has no docs; a checkout has, and there its text is checked as every other's."""
    page, edited = "docs/installation.rst", "spaces or semicolons separate its entries"
    line = "   Build ``flashinfer-jit-cache`` (customize ``FLASHINFER_CUDA_ARCH_LIST`` for your target GPUs):\n"
    commits = {}
    for name, text in (("same", line), ("other", line.replace("target", "own"))):
        with tree.work_tree(upstream_tree, "main") as work:
            (work / "docs").mkdir()
            (work / page).write_text(f"Installation\n\n{text}\n")
            tree.git(work, "add", "--", page)
            tree.commit(work, "Documentation")
            commits[name] = tree.git(work, "rev-parse", "HEAD").strip()

    def exported(base: str) -> tuple[list[str], str]:
        (done,) = export.export(upstream_tree, ["architectures"], base=base)
        difference = tree.git(upstream_tree, "diff", base, done.branch)
        tree.git(upstream_tree, "branch", "--quiet", "-D", done.branch)
        return done.left_out, difference

    left_out, difference = exported("main")
    assert left_out == [page]
    assert edited not in difference
    left_out, difference = exported(commits["same"])
    assert left_out == []
    assert edited in difference
    with pytest.raises(ExportError, match=rf"architectures: {page}: Build .* has changed"):
        export.export(upstream_tree, ["architectures"], base=commits["other"])


def test_topics_that_still_fit_are_exported_and_not_overwritten(upstream_tree, newer):
    (done,) = export.export(upstream_tree, ["architectures"], base=newer)
    try:
        assert tree.git(upstream_tree, "rev-parse", f"{done.branch}^").strip() == newer
        with pytest.raises(ExportError, match=r"has these branches already.*git branch -D sm12x/architectures$"):
            export.export(upstream_tree, ["architectures"])
    finally:
        tree.git(upstream_tree, "branch", "--quiet", "-D", done.branch)


def test_unknown_topics_and_folders_are_named(upstream_tree, tmp_path):
    with pytest.raises(ExportError, match=r"there is no topic 'gemm'; there are architectures, cublas-headers"):
        export.export(upstream_tree, ["gemm"])
    with pytest.raises(ExportError, match="is not a git checkout of FlashInfer"):
        export.export(tmp_path, ["architectures"])


def test_a_topic_brings_those_in_front_of_it():
    names = [topic.name for topic in export.with_predecessors(["dense", "architectures"])]
    assert names == ["architectures", "lean-module", "group-gemm", "dense"]
    for topic in TOPICS.values():
        assert topic.after == "" or list(TOPICS).index(topic.after) < list(TOPICS).index(topic.name)


# --- edits ------------------------------------------------------------------------------------------------------------


SOURCE = '''\
import os


@decorated
def f(a):
    """Text."""
    if a:
        return 1
    return 2


def g(a):
    return f(a)
'''


class FakeFiles:
    """A tree of one file."""

    def __init__(self, source: str = SOURCE, now: str | None = None) -> None:
        self.source, self.changed = source, {} if now is None else {"m.py": now}

    def original(self, path: str) -> str | None:
        return self.source if path == "m.py" else None

    def text(self, path: str) -> str | None:
        return self.changed.get(path, self.original(path))


def place(**named: object) -> edits.Place:
    return edits.Place("m.py", **named)  # type: ignore[arg-type]


def test_hashes_do_not_see_indentation_and_blanks_at_line_ends():
    assert edits.text_hash("a\n  b") == edits.text_hash("    a   \n      b\n\n")
    assert edits.text_hash("a\n  b") != edits.text_hash("a\n b")


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (edits.Edit(place(definition="f"), "return 2", "    # two"), "        return 1\n    return 2\n    # two\n"),
        (edits.Edit(place(definition="f"), "return 2", "    # two", "before"), "return 1\n    # two\n    return 2\n"),
        (
            edits.Edit(place(definition="f"), "if a:", "    pass", "replace", through="return 1"),
            '"""\n    pass\n    ret',
        ),
        (edits.Edit(place(definition="f"), "@decorated", "@twice", "before"), "\n\n@twice\n@decorated\ndef f(a):\n"),
        (edits.Edit(place(), "import os", "import re"), "import os\nimport re\n\n\n@decorated"),
        (
            edits.Edit(place(first="def g(a):", lines=2), "return f(a)", "    return 3", "replace"),
            "def g(a):\n    return 3\n",
        ),
    ],
)
def test_edits_go_where_their_anchor_is(edit, expected):
    files = FakeFiles()
    assert edits.apply(edit, files) == ""  # type: ignore[arg-type]
    assert expected in files.changed["m.py"]


def test_an_anchor_must_stand_there_once():
    files = FakeFiles()
    for anchor, messages in (("return 5", "is not there any more"), ("return", "stands there 2 times")):
        answer = edits.apply(edits.Edit(place(definition="f"), anchor, "x"), files)  # type: ignore[arg-type]
        assert answer == f"m.py: f: the line '{anchor}' {messages}"
    assert files.changed == {}


def test_a_place_is_checked_in_upstreams_text_not_in_what_topics_made_of_it():
    sha = edits.text_hash(textwrap.dedent(SOURCE).split("\n\n\n")[1])
    edited = FakeFiles(now=SOURCE.replace("return 1", "return 7"))
    assert edits.mismatch(place(definition="f", sha=sha), edited) == ""  # type: ignore[arg-type]
    moved = FakeFiles(SOURCE.replace("return 1", "return 7"))
    assert "m.py: f has changed" in edits.mismatch(place(definition="f", sha=sha), moved)  # type: ignore[arg-type]
    assert edits.mismatch(place(definition="h"), moved) == "m.py: h is not there any more"  # type: ignore[arg-type]
    broken = FakeFiles("def f(:\n")
    assert "the file is no Python" in edits.mismatch(place(definition="f"), broken)  # type: ignore[arg-type]


# --- new files --------------------------------------------------------------------------------------------------------


def test_definitions_are_taken_with_their_comments_and_documentation():
    source = "flashinfer/sm12x/instances.py"
    taken = with_definitions(f"x = 1\n# take {source}: GEMM_INSTANCES TWO_KERNEL\ny = 2\n")
    assert taken.startswith("x = 1\n# Two GEMM kernels a layer.\nTWO_KERNEL: tuple[Instance, ...] = (\n")
    assert taken.endswith('"""The rows for which the grouped GEMM is compiled."""\ny = 2\n')
    first = with_definitions("# take flashinfer/testing/error_bounds.py: __doc__ STEP\n")
    assert first.startswith('"""Bounds on the distance of a float32') and "\n\nSTEP = 8\n" in first
    with pytest.raises(ExportError, match=r"instances\.py defines no NOTHING"):
        with_definitions(f"# take {source}: TWO_KERNEL NOTHING\n")


def test_parts_of_bindings_that_nobody_calls_upstream_are_left_out():
    path = "csrc/fused_moe/cutlass_backend/flashinfer_sm12x_fused_moe_binding.cu"
    files = cxx_files({path: "csrc/binding.cu"}, {})
    assert "sm12x_register_instance" in fork_text("csrc/sm12x_register_instance_binding.h")
    assert not any("register_instance_binding" in name or "register_instance_binding" in files[name] for name in files)
    dense = "csrc/dense_mx_sm12x_binding.cu"
    files = cxx_files({dense: "csrc/dense.cu"}, {})
    assert not set(files) & {"csrc/dense_mx_sm12x_rows_binding.inl", "include/flashinfer/sm12x/rows/top_k.cuh"}
    assert files["csrc/dense.cu"].rstrip().endswith("flashinfer::sm12x::dense_gemm_workspace_size);")


def test_prose_is_wrapped_and_tables_stay():
    long = "word " * 30
    wrapped = style.wrapped(
        f'# {long}\n# {long}\nx = 1  # {long}\n\n\ndef f():\n    """{long}\n\n    {long}\n\n    a    {long}\n    """\n'
    )
    lines = wrapped.splitlines()
    assert [line for line in lines if len(line) > 88] == [f"x = 1  # {long}".rstrip() + " ", f"    a    {long}"]
    assert " ".join(wrapped.split()).count("word") == 30 * 6
    compile(wrapped, "wrapped", "exec")


def test_every_text_is_some_topics():
    assert {path.name for path in TEXT.iterdir()} == set(TOPICS)
