# SPDX-License-Identifier: Apache-2.0
"""The plugin's choices: ``--additional-config '{"sm12x": "spark"}'`` or ``'{"sm12x": {"qkv": "mxint8"}}'``, or
``FLASHINFER_SM12X_VLLM`` if the command line is out of reach; ``{"sm12x": {"dense": "FOLDER"}}`` names a folder of
layers that ``sm12x-quantize`` made.

The variable is ``0`` (the plugin does nothing), ``1``, or the command line's choices as text: a preset, ``key=value``
pairs, or both with commas between them: ``FLASHINFER_SM12X_VLLM=spark,lm_head=bf16``. The command line's choices
override the variable's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .. import variables
from ..quantize import manifest

VARIABLE: str = variables.PLUGIN
KEY = "sm12x"
CHECKPOINTS = "gpt_oss_mxfp4"  # what vLLM calls the quantization of gpt-oss' own


@functools.cache
def located(name: str, *patterns: str) -> Path:
    """``manifest.located``; each layer asks, and the hub is asked once a process."""
    found: Path = manifest.located(name, patterns) if patterns else manifest.located(name)
    return found


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layer kind's weight format, ``bf16`` or ``vllm``, and its activations: ``a8``, ``a16``, of experts also
    ``auto``."""

    weights: str
    activations: str

    def __str__(self) -> str:
        alone = self.weights in ("bf16", "vllm", variables.RESCORED)
        return self.weights if alone else f"{self.weights}-{self.activations}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One value of ``variables.CHOICES`` for each key, and the folder of quantized layers, if any."""

    moe: str = "auto"
    qkv: str = "bf16"
    o: str = "bf16"
    lm_head: str = "bf16"
    moe_input: str = "bf16"
    graphs: str = "spark"
    attention: str = "flashinfer"
    decode: str = "fused"
    dense: str = ""

    def choice(self, kind: str) -> Choice:
        """The choice for ``moe``, ``qkv``, ``o`` or ``lm_head``.

        A choice without ``-a8`` or ``-a16`` means MXFP8 activations (W4A8) for experts and bf16 ones for dense layers.
        ``auto`` experts take either, by a step's number of tokens.
        """
        if (kind, self.moe) == ("moe", "auto"):
            return Choice("mxfp4", "auto")
        weights, _, activations = getattr(self, kind).partition("-")
        return Choice(weights, activations or ("a8" if kind == "moe" else "a16"))

    def folder(self, kind: str) -> str:
        """The folder that holds layers of a kind, on this machine; or empty."""
        if not self.dense:
            return ""
        folder = located(self.dense)
        return str(folder) if kind in manifest.finished(folder).formats else ""


def _require_our_key(additional_config: Mapping[Any, Any]) -> None:
    """Refuse settings of ours that stand elsewhere than under :data:`KEY`; other plugins' keys pass."""
    for key, value in additional_config.items():
        name = "".join(filter(str.isalnum, str(key).lower()))
        if key in variables.KEYS and not isinstance(value, Mapping):
            raise variables.VariableError(
                f"--additional-config: {key!r} stands at the top; it is a key of {KEY!r}: {{{KEY!r}: {{{key!r}: "
                f"{value!r}}}}}"
            )
        if key != KEY and (KEY in name or variables.one_edit_apart(KEY, name)):
            raise variables.VariableError(f"--additional-config: {key!r} is no key that a plugin reads; {KEY!r} is")


def resolve(additional_config: Any) -> Settings:
    """The settings of a server whose ``additional_config`` is given; a dictionary, or an object that holds none of
    ours.

    Raises
    ------
    ValueError
        An unknown key or value, naming where it stands and what it may be.
    """
    given = {}
    origin = f"--additional-config, {KEY!r}"
    if isinstance(additional_config, Mapping):
        _require_our_key(additional_config)
        given = additional_config.get(KEY, {})
    if isinstance(given, str):
        chosen = variables.parse_choices(given, origin)
    elif isinstance(given, Mapping):
        chosen = variables.check_choices(given, origin)
    else:
        raise variables.VariableError(
            f"{origin} is {given!r}; it must be {' or '.join(map(repr, variables.PRESETS))}, or an object with keys of "
            f"{', '.join(variables.KEYS)}"
        )
    of_variable = variables.read(VARIABLE) or {}
    together = {**variables.with_preset(of_variable), **variables.with_preset(chosen)}
    variables.check_together(together)
    if together.get(variables.FOLDER):
        together |= _formats_of_folder(together, {*of_variable, *chosen})
    return Settings(**together)


def _formats_of_folder(together: Mapping[str, str], named: set[str]) -> dict[str, str]:
    """The formats of the folder's layers; presets give way to them, ``named`` keys must agree with them.

    Raises
    ------
    ValueError
        They do not; or the folder cannot be used.
    """
    name = together[variables.FOLDER]
    folder = manifest.finished(located(name, manifest.MANIFEST))  # its weights when layers ask for them
    found = {}
    for kind, weights in folder.formats.items():
        chosen = together.get(kind, "bf16") if kind in named else weights
        if chosen.partition("-")[0] != weights:
            raise variables.VariableError(
                f"{kind} is {chosen!r}, and {together[variables.FOLDER]!r}, the folder under {variables.FOLDER!r}, "
                f"has it in {weights}: leave {kind} out, or choose a folder that was quantized with "
                f"--{kind.replace('_', '-')} bf16"
            )
        found[kind] = chosen
    return found


def changed_presets(additional_config: Any) -> list[str]:
    """The messages about presets of :data:`CHANGED_PRESETS` that the command line or the variable names."""
    given = additional_config.get(KEY) if isinstance(additional_config, Mapping) else None
    given = given.get(variables.PRESET) if isinstance(given, Mapping) else given
    named = [os.environ.get(VARIABLE, ""), given if isinstance(given, str) else ""]
    presets = dict.fromkeys(preset for text in named for preset in variables.presets_in(text))
    return [variables.CHANGED_PRESETS[preset] for preset in presets if preset in variables.CHANGED_PRESETS]


def current() -> Settings:
    """The settings of the model that vLLM is building in this process."""
    from vllm.config import get_current_vllm_config

    return resolve(get_current_vllm_config().additional_config)
