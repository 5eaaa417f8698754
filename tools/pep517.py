# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools, but for editable installs.

For ``pip install -e`` setuptools either appends the checkout to ``sys.path``, after the wheel's ``flashinfer``, or
serves a namespace package. Either way ``import flashinfer`` would not find the fork. So an editable install here is an
ordinary one whose path hook points at the checkout (``setup.py``).

Nothing is left in the checkout. If the checkout is on ``sys.path``, by an editable install or ``PYTHONPATH``, an
``egg-info`` in it would count as metadata: pip takes it for the installation, calls it "outside environment" and
removes nothing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from setuptools import build_meta

# setuptools' default place, where older versions of this file left one.
EGG_INFO = Path(__file__).resolve().parent.parent / "flashinfer_sm12x.egg-info"


@contextlib.contextmanager
def elsewhere() -> Iterator[None]:
    """Have setuptools keep its intermediate files in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-sm12x-build-") as scratch:
        config = Path(scratch) / "setup.cfg"
        config.write_text(f"[build]\nbuild_base = {scratch}\n[egg_info]\negg_base = {scratch}\n", encoding="utf-8")
        with mock.patch.dict(os.environ, {"DIST_EXTRA_CONFIG": str(config)}), without_egg_info():
            yield


@contextlib.contextmanager
def without_egg_info() -> Iterator[None]:
    shutil.rmtree(EGG_INFO, ignore_errors=True)
    try:
        yield
    finally:
        shutil.rmtree(EGG_INFO, ignore_errors=True)


# The hooks of PEP 517 and PEP 660: setuptools' own, each in one of the contexts above.
get_requires_for_build_wheel = elsewhere()(build_meta.get_requires_for_build_wheel)
prepare_metadata_for_build_wheel = elsewhere()(build_meta.prepare_metadata_for_build_wheel)
build_wheel = elsewhere()(build_meta.build_wheel)

get_requires_for_build_editable = get_requires_for_build_wheel
prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel
build_editable = mock.patch.dict(os.environ, {"FLASHINFER_SM12X_EDITABLE": "1"})(build_wheel)

get_requires_for_build_sdist = elsewhere()(build_meta.get_requires_for_build_sdist)
# setuptools needs the egg-info's file list in the checkout for an sdist.
build_sdist = without_egg_info()(build_meta.build_sdist)
