# SPDX-License-Identifier: Apache-2.0
"""``python -m tools.upstream_patch --onto DIR [--topic NAME ...]``: see ``docs/development.md``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .export import export
from .topics import TOPICS
from .tree import ExportError, git


def main() -> int:
    listed = "\n".join(
        f"  {topic.name:<24}{f'behind {topic.after}' if topic.after else ''}" for topic in TOPICS.values()
    )
    parser = argparse.ArgumentParser(
        prog="python -m tools.upstream_patch",
        description="Make a branch of each topic in a checkout of FlashInfer, ready for a pull request.",
        epilog=f"topics:\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--onto",
        type=Path,
        required=True,
        metavar="DIR",
        help="a git checkout of FlashInfer; a folder that does not exist becomes the pinned wheel's files",
    )
    parser.add_argument(
        "--topic", action="append", default=[], metavar="NAME", help="and those in front of it; default: all"
    )
    parser.add_argument("--base", default="HEAD", metavar="REVISION", help="onto which they go (default: HEAD)")
    given = parser.parse_args()
    try:
        done = export(given.onto, given.topic, base=given.base)
    except ExportError as error:
        print(error, file=sys.stderr)
        return 1
    for each in done:
        print(f"{each.branch}:{git(given.onto, 'diff', '--shortstat', f'{each.branch}^', each.branch).rstrip()}")
        if each.left_out:
            print(f"  without its edits of {', '.join(each.left_out)}: the tree has no such files (no wheel has)")
    print("formatted by the ruff and clang-format that are here: run pre-commit in the checkout")
    return 0


if __name__ == "__main__":
    sys.exit(main())
