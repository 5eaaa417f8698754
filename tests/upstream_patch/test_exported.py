# SPDX-License-Identifier: Apache-2.0
"""Branches that ``tools/upstream_patch`` makes of the pinned wheel; they need nothing of this fork.

The whole modules, and all tests of the exported tree, are ``check_exported.py``'s (``make test-upstream-patch``).
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tools.upstream_patch import style
from tools.upstream_patch.topics import TOPICS
from tools.upstream_patch.tree import git

# Words of this fork that upstream's reader would not know.
FORK_WORDS = re.compile(
    r"flashinfer\._layer|\bextend\(|flashinfer_sm12x|sm12x_(?:doctor|probes|gpu_probe|dispatch|cpu)|emulator"
    r"|virtual_(?:device|operators)|\b[Uu]pstream|fork\b|docs/\w+\.md|FLASHINFER_SM12X_MOE"
    r"|\balone\b.*%}|alone=|register_instance_address|sm12x_register_instance|\bhanded? over\b|\bplanner|\bsimulated"
)

# Without the summary: pytest shortens it except where the environment says CI, and repeats a failure's text there.
PLAIN = ("-q", "-rN", "-W", "ignore", "-p", "no:cacheprovider", "--import-mode=importlib")


def added(folder: Path, branch: str) -> list[tuple[str, str]]:
    """Lines that a branch adds to upstream's, and the file of each."""
    path, lines = "", []
    for line in git(folder, "diff", "--unified=0", "main", branch).splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ b/")
        elif line.startswith("+"):
            lines.append((path, line[1:]))
    return lines


def test_each_topic_is_a_branch_with_one_commit_behind_its_predecessor(exported):
    folder, done = exported
    assert [each.topic.name for each in done] == list(TOPICS)
    for each in done:
        before = f"sm12x/{each.topic.after}" if each.topic.after else "main"
        assert git(folder, "rev-list", "--count", f"{before}..{each.branch}").strip() == "1"
        assert git(folder, "rev-parse", f"{each.branch}^") == git(folder, "rev-parse", before)
        changed = set(git(folder, "diff", "--name-only", before, each.branch).split())
        assert {edit.place.file for edit in each.topic.edits} | set(each.topic.tests) <= changed | set(each.left_out)
        assert not changed & set(each.left_out)
    assert git(folder, "status", "--porcelain") == ""
    assert git(folder, "symbolic-ref", "--short", "HEAD").strip() == "main"


def test_messages_are_fit_for_a_pull_request(exported):
    folder, done = exported
    for each in done:
        title, blank, *body = git(folder, "log", "-1", "--format=%B", each.branch).rstrip().splitlines()
        assert re.match(r"(?:feat|fix)\((?:jit|gemm|moe|xqa)\): ", title), title
        assert len(title) <= 80
        assert blank == ""
        assert max(map(len, body)) <= 88, max(body, key=len)
        assert not FORK_WORDS.search("\n".join(body)), each.branch
        assert not re.search(r"\d us\b", "\n".join(body)) or re.search(r"\(20\d\d-\d\d-\d\d", "\n".join(body)), (
            "undated times"
        )
        tests = next(line for line in body if line.startswith(("Tests: pytest ", "Reproducer: tests/")))
        for path in re.findall(r"tests/\S+\.py", tests):
            assert path in each.topic.tests


def test_nothing_of_the_fork_is_left(exported):
    folder, done = exported
    for each in done:
        lines = added(folder, each.branch)
        assert lines
        assert [(path, line) for path, line in lines if FORK_WORDS.search(line)] == []


def test_nothing_new_is_unused(exported):
    """Definitions of new Python modules, and functions of bindings, in the last of the branches, which has them all."""
    folder, done = exported
    branch = done[-1].branch
    new = {path for each in done if each.topic.after or each.topic.name == "lean-module" for path in each.new}
    texts = {path: git(folder, "show", f"{branch}:{path}") for path in new}
    names = {name for text in texts.values() for name in re.findall(r"_TYPED_FUNC\((\w+),", text)}
    assert len(names) == 6
    for path, text in texts.items():
        if path.startswith("flashinfer/"):
            defined = (node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.FunctionDef, ast.ClassDef)))
            names |= {node.name for node in defined}
    lines = git(folder, "grep", "-h", "-e", "", branch, "--", "*.py", "*.cu")  # all of them; Python finds words faster
    count = Counter(re.findall(r"\w+", lines))
    assert sorted(name for name in names if count[name] < 2) == []


def test_tables_in_comments_keep_their_columns(exported):
    """A C++ formatter that breaks a line of a table continues it left of its column."""
    folder, done = exported
    for path in {path for each in done for path in each.new if path.endswith(style.CXX_SUFFIXES)}:
        lines = git(folder, "show", f"{done[-1].branch}:{path}").splitlines()
        depth = [len(match[1]) if (match := re.match(r"\s*//( +)\S", line)) else 0 for line in lines]
        for place, (before, broken, behind) in enumerate(zip(depth, depth[1:], depth[2:], strict=False)):
            row = re.search(r"\S  +\S", lines[place + 1])
            assert row or not 1 < before <= broken < behind, (path, lines[place : place + 3])


def test_new_files_have_upstreams_header_and_line_length(exported):
    folder, done = exported
    for each in done:
        for path in each.new:
            text = git(folder, "show", f"{each.branch}:{path}")
            if path.endswith(".py"):
                first, second = text.splitlines()[:2]
                assert first == "# SPDX-FileCopyrightText: Copyright (c) 2026 by FlashInfer team.", path
                assert second == "# SPDX-License-Identifier: Apache-2.0", path
            else:
                assert text.startswith("/*\n * Copyright (c) 2026 by FlashInfer team.\n *\n * Licensed under the "), (
                    path
                )
                assert text.index("limitations under the License.") < text.index("*/") < 800, path
            assert text.count("icensed under the Apache License") + text.count("SPDX-License-Identifier") == 1, path
        for path, line in added(folder, each.branch):
            if path.endswith(".py") and len(line) > style.PYTHON_COLUMNS:
                assert '"' in line, (path, line)  # a formatter does not break strings
            if path.endswith(style.CXX_SUFFIXES) and '"' not in line and "//" not in line:
                assert len(line) <= 100, (path, line)


def test_edited_files_stay_formatted(exported):
    """An edit leaves nothing to format that was not there to format before."""
    folder, done = exported

    def unformatted(branch: str, path: str) -> int:
        command = [style.tool("ruff"), "format", "--diff", "--no-cache", "--isolated", "-"]
        text = git(folder, "show", f"{branch}:{path}")
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False).stdout.count("\n@@ ")

    for path in {path for each in done for path in each.edited if path.endswith(".py")}:
        branches = [each.branch for each in done if path in each.edited]
        assert {unformatted(branch, path) for branch in branches} == {unformatted("main", path)}, path


def test_the_topics_go_together_and_import_without_the_fork(merged, without_fork):
    """All branches merged; every module that they add or edit, ``flashinfer.aot`` with its list of modules included."""
    changed = git(merged, "diff", "--name-only", "main", "HEAD", "--", "flashinfer").split()
    modules = [path.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in changed]
    assert "flashinfer.aot" in modules
    code = f"""if True:
        import importlib, sys
        from pathlib import Path
        for name in {modules!r}:
            importlib.import_module(name)
        import flashinfer
        assert Path(flashinfer.__file__).parent == Path({str(merged)!r}, "flashinfer")
        others = [name for name, module in sys.modules.items()
                  if name.startswith("flashinfer") and module.__file__
                  and not module.__file__.startswith({str(merged)!r})]
        assert others == [], others
        from flashinfer.aot import gen_all_modules, get_default_config
        import inspect
        text = inspect.getsource(gen_all_modules)
        for name in ("moe", "group_gemm", "dense"):
            assert f"gen_sm12x_{{name}}_module()" in text
    """
    without_fork(merged, "-c", code)


def test_a_call_of_the_moe_backend_reaches_its_checks(merged, without_fork):
    """Upstream's function hands over its own arguments; a call of the fork has more."""
    code = """if True:
        import torch
        from flashinfer.fused_moe import cutlass_fused_moe, sm12x_moe
        sm12x_moe._mode = lambda *given: sm12x_moe.Mode.W4A16  # which asks for a GPU
        x, weights = torch.zeros(1, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 16, dtype=torch.uint8)
        ids, shares = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 2)
        try:
            cutlass_fused_moe(x, ids, shares, weights[:1], weights, torch.bfloat16, [], backend="sm12x")
        except ValueError as error:
            print(error)
    """
    output = without_fork(merged, "-c", code).stdout
    assert output.startswith("fc1_expert_weights is torch.uint8 (1, 64, 16) on cpu; it must be "), output


def test_tests_of_the_plain_topics_pass(merged, without_fork):
    done = without_fork(merged, "-m", "pytest", *PLAIN, *TOPICS["architectures"].tests, *TOPICS["cublas-headers"].tests)
    assert re.search(r"\b14 passed", done.stdout)


def test_tests_of_the_plain_topics_fail_without_their_edits(exported, merged, without_fork):
    """They are reproducers: what they show is upstream's."""
    topics = "architectures", "cublas-headers"
    edited = [path for each in exported[1] if each.topic.name in topics for path in each.edited]
    files = [path for name in topics for path in TOPICS[name].tests]
    git(merged, "checkout", "--quiet", "main", "--", *edited)
    try:
        answer = without_fork(merged, "-m", "pytest", *PLAIN, *files, check=False)
    finally:
        git(merged, "checkout", "--quiet", "HEAD", "--", *edited)
    assert re.search(r"\b10 failed, 4 passed", answer.stdout)
    assert answer.stdout.count("fatal error: cublasLt.h: No such file or directory") == 2


INSTANCE = "mxfp8_m8_k256"


@pytest.fixture(scope="module")
def group_gemm(merged, on_the_virtual_gpu) -> subprocess.CompletedProcess:
    """Upstream's JIT builds the exported module, with one instance; its tests run as far as that goes."""
    return on_the_virtual_gpu(
        merged, *TOPICS["group-gemm"].tests, "-k", "(sizes1 or errors or fit or capabilities) and not of_models",
        VIRTUAL_GPU_INSTANCES=INSTANCE,
    )  # fmt: skip


def test_the_grouped_gemm_passes_its_tests_on_the_virtual_gpu(group_gemm):
    assert re.search(r"\b26 passed", group_gemm.stdout)
    launches = re.search(r"(\d+) launches on the virtual SM121, of 3 kernels", group_gemm.stdout)
    assert launches is not None  # the prologue, and the GEMM of e4m3 and e5m2
    assert int(launches[1]) == 16


def machine_code(binary: Path, cuobjdump: Path) -> dict[str, str]:
    """SASS of each kernel in a library, an object or a cubin."""
    # cuobjdump looks for nvdisasm on PATH; in the wheels it lies beside it.
    path = {**os.environ, "PATH": f"{cuobjdump.parent}{os.pathsep}{os.environ['PATH']}"}
    dump = [str(cuobjdump), "-sass", str(binary)]
    text = subprocess.run(dump, check=True, capture_output=True, text=True, env=path).stdout
    parts = re.split(r"^\s*Function : (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_its_machine_code_is_the_forks(group_gemm, jit_cache, tmp_path, monkeypatch):
    """The module that upstream's JIT made, with its flags, beside the one that the fork's own command makes of the
    fork's sources."""
    from flashinfer.jit.core import current_compilation_context
    from flashinfer.jit.sm12x.modules import gen_group_gemm_module
    from flashinfer_sm12x.build import inspect_sass

    cuobjdump = inspect_sass.find_tool()
    (built,) = jit_cache.rglob(f"*{INSTANCE}.cuda.o")
    theirs = machine_code(built, cuobjdump)
    monkeypatch.setattr(current_compilation_context, "TARGET_CUDA_ARCHS", {(12, "1a")})
    entries = gen_group_gemm_module().get_compile_commands()
    (command,) = [shlex.split(entry["command"]) for entry in entries if f"/{INSTANCE}.cu" in entry["command"]]
    command[command.index("-o") + 1] = str(tmp_path / "ours.o")
    subprocess.run(command, check=True, capture_output=True)
    assert len(theirs) == 2
    assert theirs == machine_code(tmp_path / "ours.o", cuobjdump)
