# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools, but for editable installs.

What setuptools makes for ``pip install -e`` either appends the checkout to ``sys.path``, behind the wheel's
``flashinfer``, or serves a namespace package. Both leave ``import flashinfer`` without the fork. So an editable
install here is an ordinary one whose path hook points at the checkout (``setup.py``).
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from setuptools import build_meta
from setuptools.build_meta import (
    build_sdist as build_sdist,
)
from setuptools.build_meta import (
    build_wheel as build_wheel,
)
from setuptools.build_meta import (
    get_requires_for_build_sdist as get_requires_for_build_sdist,
)
from setuptools.build_meta import (
    get_requires_for_build_wheel as get_requires_for_build_wheel,
)
from setuptools.build_meta import (
    prepare_metadata_for_build_wheel as prepare_metadata_for_build_wheel,
)

get_requires_for_build_editable = build_meta.get_requires_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_wheel


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Build the wheel that ``pip install -e .`` installs (PEP 660)."""
    with mock.patch.dict(os.environ, {"FLASHINFER_SM12X_EDITABLE": "1"}):
        return build_wheel(wheel_directory, config_settings, metadata_directory)
