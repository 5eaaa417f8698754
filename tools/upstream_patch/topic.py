# SPDX-License-Identifier: Apache-2.0
"""What a topic is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .compose import New, Text, cxx_files
from .edits import Edit


@dataclass(frozen=True)
class Topic:
    """One pull request: a branch with one commit.

    Attributes:
        name: Of the branch, behind ``sm12x/``.
        after: The topic whose branch it starts from; empty: upstream's own.
        message: Path in ``text/`` of the commit's message.
        edits: Changes of upstream's files.
        new: Files that upstream has not, or an earlier topic had otherwise.
        cxx: From paths of C++ sources in the fork to paths in upstream's tree; their headers come along.
        tests: Of what is new, the files that pytest runs.
    """

    name: str
    message: Text
    after: str = ""
    edits: Sequence[Edit] = ()
    new: Sequence[New] = ()
    cxx: Mapping[str, str] = field(default_factory=dict)

    @property
    def tests(self) -> list[str]:
        """Test files among :attr:`new`."""
        return [each.path for each in self.new if each.path.rpartition("/")[2].startswith("test_")]

    def files(self, moved: Mapping[str, str]) -> dict[str, str]:
        """Texts of the files that it adds, before they are formatted; ``moved`` as in :func:`cxx_files`."""
        texts = cxx_files(self.cxx, moved) if self.cxx else {}
        return {**texts, **{each.path: each.text() for each in self.new}}
