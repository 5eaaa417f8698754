# SPDX-License-Identifier: Apache-2.0
"""Turns this fork, a layer over upstream's wheel, into branches for pull requests: ordinary edits of upstream's files.

=================  =================================================================================================
``topics``         the list: what each pull request holds, and behind which other it comes
``topic``          what a topic is
``bugs`` ...       the topics themselves: ``bugs``, ``kernels``, ``gemm``, ``moe``; ``benchmarks`` and ``traces`` of the last two
``edits``          changes of upstream's files, each with the hash of what it was written for
``compose``        new files: the fork's at upstream's paths, in part where only a part belongs there
``text``           what is written for upstream alone: operators in its manner, tests, messages
``figures``        measured figures, from this fork's pages into messages
``style``          upstream's licence header, line lengths, formatters
``tree``           git, and the pinned wheel as a source tree of upstream's
``export``         all of it, one branch after the other
=================  =================================================================================================

``docs/development.md`` tells how the branches become pull requests.
"""
