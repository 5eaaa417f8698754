# SPDX-License-Identifier: Apache-2.0
"""Exports topics to a tree: checks everything first, then makes each topic a branch with one commit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flashinfer_sm12x.versions import UPSTREAM_VERSION

from . import style
from .edits import apply, mismatch
from .topics import TOPICS, Topic
from .tree import ExportError, Files, base_of, commit, git, lay_out_wheel, work_tree

BRANCH = "sm12x/"
# Folders of upstream's repository whose files are also in the wheel.
IN_WHEEL = ("flashinfer/", "csrc/", "include/")


@dataclass(frozen=True)
class Exported:
    """The export of a topic.

    Attributes:
        new: Files that it adds.
        edited: Files of upstream's that it changes.
        left_out: Files that it would change but that are not there: benchmarks and documentation are not in the wheel.
        state: The texts that this topic and its predecessors change, before they are formatted.
    """

    topic: Topic
    new: list[str]
    edited: list[str]
    left_out: list[str]
    state: dict[str, str]

    @property
    def branch(self) -> str:
        return f"{BRANCH}{self.topic.name}"


def with_predecessors(names: Sequence[str]) -> list[Topic]:
    """The topics called ``names`` (all, if none is named) and their predecessors, in the order of the list.

    Raises:
        ExportError: there is no such topic; the message lists them.
    """
    wanted: set[str] = set()
    for name in names or TOPICS:
        while name:
            if name not in TOPICS:
                raise ExportError(f"there is no topic {name!r}; there are {', '.join(TOPICS)}")
            wanted.add(name)
            name = TOPICS[name].after
    return [topic for topic in TOPICS.values() if topic.name in wanted]


def _changes(topic: Topic, files: Files) -> tuple[Exported, list[str]]:
    """Apply a topic to ``files``; what is the matter, one line for each place."""
    edits = topic.edits
    new, wrong = topic.files(), []
    outside = {edit.place.file for edit in edits if not edit.place.file.startswith(IN_WHEEL)}
    left_out = sorted(path for path in outside - new.keys() if files.text(path) is None)
    edits = [edit for edit in edits if edit.place.file not in left_out]
    for path, text in new.items():
        if files.original(path) is not None:
            wrong.append(f"{path}: upstream has a file of that name")
        files.changed[path] = style.with_header(path, text)
    wrong += [message for place in dict.fromkeys(edit.place for edit in edits) if (message := mismatch(place, files))]
    for edit in edits:
        if not wrong and (message := apply(edit, files)):
            wrong.append(message)
    for path in [path for path in new if path.endswith(".py")]:
        files.changed[path] = style.wrapped(files.changed[path])
    own = sorted({*new, *(edit.place.file for edit in edits)})
    edited = [path for path in own if files.original(path) is not None]
    return Exported(topic, [path for path in own if path not in edited], edited, left_out, files.changed), wrong


def export(folder: Path, names: Sequence[str] = (), base: str = "HEAD") -> list[Exported]:
    """Make a branch ``sm12x/<topic>`` of each topic in the repository ``folder``; its work tree stays as it is.

    Args:
        folder: A git checkout of upstream's. A folder that does not exist becomes the pinned wheel's files.
        names: Topics; their predecessors come too. All when empty.
        base: The revision onto which they go.

    Raises:
        ExportError: no such topic, no checkout, a branch that is there already, an edit that does not fit, or a
            formatter that is missing or refuses a file. Nothing has been written.
    """
    chosen = with_predecessors(names)
    if not folder.exists():
        lay_out_wheel(folder)
    revision = base_of(folder, base)
    branches = git(folder, "for-each-ref", "--format=%(refname:short)", f"refs/heads/{BRANCH}").split()
    if there := [f"{BRANCH}{topic.name}" for topic in chosen if f"{BRANCH}{topic.name}" in branches]:
        listed = " ".join(there)
        raise ExportError(f"{folder} has these branches already; remove them first: git branch -D {listed}")

    done = _checked(chosen, folder, revision)
    commits: dict[str, str] = {"": revision}
    with work_tree(folder, revision) as tree:
        for each in done:
            git(tree, "reset", "--quiet", "--mixed", commits[each.topic.after])
            _write(each, tree)
            commits[each.topic.name] = git(tree, "rev-parse", "HEAD").strip()
        for each in done:
            git(folder, "branch", each.branch, commits[each.topic.name])
    return done


def _checked(chosen: Sequence[Topic], folder: Path, revision: str) -> list[Exported]:
    """The export of each topic; one error reports all mismatches at once."""
    wrong: list[str] = []
    fit = [""]
    done: dict[str, Exported] = {}
    for topic in chosen:
        before = done[topic.after].state if topic.after else {}
        done[topic.name], message = _changes(topic, Files(folder, revision, before))
        wrong += [f"{topic.name}: {line}" for line in message]
        fit += [topic.name] if not message and topic.after in fit else []
    if wrong:
        version = (Files(folder, revision).original("version.txt") or "").strip()  # the wheel has no such file
        raise ExportError(
            "\n".join(
                [
                    f"upstream{f' {version}' if version else ''} is not what these edits were written for "
                    f"({UPSTREAM_VERSION}); nothing was written.",
                    *dict.fromkeys(wrong),
                    *([f"These topics fit: {' '.join(f'--topic {name}' for name in fit[1:])}"] if fit[1:] else []),
                ]
            )
        )
    return list(done.values())


def _write(each: Exported, tree: Path) -> None:
    # Files that a predecessor wrote and formatted stay as they are, unless this topic changes them.
    own = [*each.new, *each.edited]
    for path in own:
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(each.state[path], encoding="utf-8")
    style.format_files(tree, each.new, each.edited)
    git(tree, "add", "--force", "--", *own)
    commit(tree, each.topic.message)
