# SPDX-License-Identifier: Apache-2.0
"""Topics onto a tree: everything is checked first, then each becomes a branch with one commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import style
from .edits import apply, mismatch
from .figures import filled_in
from .topics import TOPICS, Topic
from .tree import IN_WHEEL, Files, TreeError, base_of, commit, git, lay_out_wheel, pinned_version, work_tree

BRANCH = "sm12x/"


class UpstreamMovedError(RuntimeError):
    """Upstream's text is not what edits were written for; each line of the message names one place."""


@dataclass(frozen=True)
class Exported:
    """What became of a topic.

    Attributes:
        new: Files that it adds.
        edited: Files that it changes.
        left_out: Files that it would change, were they there: benchmarks and documentation, which the wheel has not.
    """

    topic: Topic
    branch: str
    new: tuple[str, ...]
    edited: tuple[str, ...]
    left_out: tuple[str, ...]


def with_predecessors(names: Sequence[str], topics: Mapping[str, Topic]) -> list[Topic]:
    """The topics called ``names`` (all, if none is) and those that they come behind, in the order of the list.

    Raises:
        TreeError: there is no such topic; the message lists them.
    """
    wanted: set[str] = set()
    for name in names or topics:
        while name:
            if name not in topics:
                raise TreeError(f"there is no topic {name!r}; there are {', '.join(topics)}")
            wanted.add(name)
            name = topics[name].after
    return [topic for topic in topics.values() if topic.name in wanted]


def left_out(topic: Topic, files: Files) -> tuple[str, ...]:
    """Files that a topic edits in a checkout, and the wheel, of which this tree was made, does not have."""
    edited = {edit.place.file for edit in topic.edits if not edit.place.file.startswith(IN_WHEEL)}
    return tuple(sorted(path for path in edited if files.original(path) is None))


def changes(topic: Topic, files: Files, moved: Mapping[str, str]) -> list[str]:
    """Apply a topic to ``files``; what is the matter, one line for each place."""
    missing = left_out(topic, files)
    edits = [edit for edit in topic.edits if edit.place.file not in missing]
    wrong = [said for place in dict.fromkeys(edit.place for edit in edits) if (said := mismatch(place, files))]
    for edit in edits:
        if not wrong and (said := apply(edit, files)):
            wrong.append(said)
    for path, text in topic.files(moved).items():
        if files.original(path) is not None:
            wrong.append(f"{path}: upstream has a file of that name")
        text = style.with_header(path, text) if path.endswith((".py", *style.CXX_SUFFIXES, ".jinja")) else text
        files.changed[path] = style.wrapped(text) if path.endswith(".py") else text
    return wrong


def export(
    folder: Path, names: Sequence[str] = (), topics: Mapping[str, Topic] = TOPICS, base: str = "HEAD"
) -> list[Exported]:
    """Make a branch ``sm12x/<topic>`` of each topic in the repository ``folder``; its work tree stays as it is.

    Args:
        folder: A git checkout of upstream's. A folder that does not exist becomes the pinned wheel's files.
        names: Topics; their predecessors come too. All when empty.
        topics: Those that there are.
        base: The revision onto which they go.

    Raises:
        TreeError: no such topic, no checkout, or a branch that is there already.
        UpstreamMovedError: an edit does not fit. Nothing has been written.
        StyleError: a formatter is missing, or refuses a file. Nothing has been written.
    """
    chosen = with_predecessors(names, topics)
    if not folder.exists():
        lay_out_wheel(folder)
    revision = base_of(folder, base)
    branches = git(folder, "for-each-ref", "--format=%(refname:short)", f"refs/heads/{BRANCH}").split()
    there = [topic.name for topic in chosen if f"{BRANCH}{topic.name}" in branches]
    if there:
        listed = " ".join(f"{BRANCH}{name}" for name in there)
        raise TreeError(f"{folder} has these branches already; remove them first: git branch -D {listed}")

    moved = {source: place for topic in topics.values() for source, place in topic.cxx.items()}
    states = _checked(chosen, moved, folder, revision)
    upstream = Files(folder, revision)
    done: list[Exported] = []
    with work_tree(folder, revision) as tree:
        commits: dict[str, str] = {}
        for topic in chosen:
            git(tree, "reset", "--quiet", "--mixed", commits.get(topic.after, revision))
            done.append(_write(topic, tree, states[topic.name], upstream, moved))
            commits[topic.name] = git(tree, "rev-parse", "HEAD").strip()
        for topic in chosen:
            git(folder, "branch", f"{BRANCH}{topic.name}", commits[topic.name])
    return done


def _checked(
    chosen: Sequence[Topic], moved: Mapping[str, str], folder: Path, revision: str
) -> dict[str, dict[str, str]]:
    """Each topic's tree: the texts that it and its predecessors change. Everything that is wrong is said at once."""
    wrong: list[str] = []
    fit: list[str] = []
    states: dict[str, dict[str, str]] = {}
    for topic in chosen:
        files = Files(folder, revision)
        files.changed = dict(states.get(topic.after, {}))
        said = changes(topic, files, moved)
        wrong += [f"{topic.name}: {line}" for line in said]
        fit += [topic.name] if not said and topic.after in ("", *fit) else []
        states[topic.name] = files.changed
    if wrong:
        raise UpstreamMovedError(
            "\n".join(
                [
                    f"upstream{_version(folder, revision)} is not what these edits were written for "
                    f"({pinned_version()}); nothing was written.",
                    *dict.fromkeys(wrong),
                    *([f"These topics fit: {' '.join(f'--topic {name}' for name in fit)}"] if fit else []),
                ]
            )
        )
    return states


def _version(folder: Path, revision: str) -> str:
    """What a checkout calls its version; the wheel has no such file."""
    text = Files(folder, revision).original("version.txt")
    return f" {text.strip()}" if text else ""


def _write(topic: Topic, tree: Path, state: Mapping[str, str], upstream: Files, moved: Mapping[str, str]) -> Exported:
    # What a predecessor wrote and formatted stays, unless this topic has it otherwise.
    missing = left_out(topic, upstream)
    own = {*topic.files(moved), *(edit.place.file for edit in topic.edits)} - {*missing}
    new: list[str] = []
    edited: list[str] = []
    for path in sorted(own):
        (new if upstream.original(path) is None else edited).append(path)
        file = tree / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(state[path], encoding="utf-8")
    style.format_files(tree, new, edited)
    git(tree, "add", "--force", "--", *new, *edited)
    commit(tree, filled_in(topic.message))
    return Exported(topic, f"{BRANCH}{topic.name}", tuple(new), tuple(edited), missing)
