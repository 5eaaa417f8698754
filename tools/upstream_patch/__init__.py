# SPDX-License-Identifier: Apache-2.0
"""Turns this fork, a layer over upstream's wheel, into branches for pull requests: ordinary edits of upstream's files.

===========  =======================================================================================================
``text``     a folder for each topic: its message, its edits, and new files, which take definitions from the fork
``topics``   what each pull request holds of the fork's C++, and behind which other it comes
``edits``    changes of upstream's files, each with the hash of what it was written for, and of definitions taken
``compose``  definitions of the fork's, its C++ sources with their headers at upstream's paths
``style``    upstream's licence header, line lengths, formatters
``tree``     git, and the pinned wheel as a source tree of upstream's
``export``   all of it, one branch after the other
===========  =======================================================================================================

``docs/development.md`` tells how the branches become pull requests.
"""
