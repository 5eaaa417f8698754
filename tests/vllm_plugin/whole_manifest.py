# SPDX-License-Identifier: Apache-2.0
"""Manifests of folders of quantized layers, as far as settings read them: no tensor is there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DIGEST = "0" * 64


def whole_manifest(manifest: Any, formats: Mapping[str, str]) -> Any:
    """A manifest with one module of each kind. ``manifest`` is the module, which settings load by its path."""
    modules = {
        f"layers.0.{manifest.NAMES[kind][0]}": manifest.Module(kind, 64, 64, "layers.safetensors", DIGEST)
        for kind in formats
    }
    files = {"layers.safetensors": DIGEST} if modules else {}
    return manifest.Manifest(dict(formats), {}, modules, files)
