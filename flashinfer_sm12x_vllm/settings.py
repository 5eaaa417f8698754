# SPDX-License-Identifier: Apache-2.0
"""What can be chosen: ``--additional-config '{"sm12x": {...}}'``, or ``FLASHINFER_SM12X_VLLM`` where that is out of
reach.

The variable is ``0`` (the plugin does nothing), ``1``, or ``key=value`` pairs with commas between them:
``FLASHINFER_SM12X_VLLM=qkv=mxfp8,o=mxfp8,lm_head=mxfp8``. A key of the command line wins over the variable's.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

VARIABLE = "FLASHINFER_SM12X_VLLM"
KEY = "sm12x"

_DENSE = ("bf16", "mxfp8", "mxfp8-a16", "mxfp8-a8", "mxfp4", "mxfp4-a16", "mxfp4-a8")
ALLOWED: dict[str, tuple[str, ...]] = {
    "moe": ("mxfp4", "mxfp4-a8", "mxfp4-a16", "vllm"),
    "qkv": _DENSE,
    "o": _DENSE,
    "lm_head": _DENSE,
    "moe_input": ("bf16", "mxfp8"),
    "graphs": ("spark", "vllm"),
    "attention": ("flashinfer", "vllm"),
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A layer kind's weight format (``mxfp4``, ``mxfp8``, ``bf16``, ``vllm``) and its activations (``a8``, ``a16``)."""

    weights: str
    activations: str

    def __str__(self) -> str:
        return self.weights if self.weights in ("bf16", "vllm") else f"{self.weights}-{self.activations}"


@dataclasses.dataclass(frozen=True)
class Settings:
    """One value of :data:`ALLOWED` for each key."""

    moe: str = "mxfp4"
    qkv: str = "bf16"
    o: str = "bf16"
    lm_head: str = "bf16"
    moe_input: str = "bf16"
    graphs: str = "spark"
    attention: str = "flashinfer"

    def choice(self, kind: str) -> Choice:
        """The choice for ``moe``, ``qkv``, ``o`` or ``lm_head``.

        Without ``-a8`` or ``-a16`` the experts take MXFP8 activations (W4A8) and dense layers bf16 ones.
        """
        weights, _, activations = getattr(self, kind).partition("-")
        return Choice(weights, activations or ("a8" if kind == "moe" else "a16"))


def _check(given: Mapping[str, Any], origin: str) -> dict[str, str]:
    checked = {}
    for key, value in given.items():
        if key not in ALLOWED:
            raise ValueError(f"{origin}: {key!r} is no key of it; the keys are {', '.join(ALLOWED)}")
        if value not in ALLOWED[key]:
            hint = " (the checkpoint's experts are MXFP4 and stay so)" if key == "moe" else ""
            raise ValueError(f"{origin}: {key} is {value!r}{hint}; it may be {', '.join(ALLOWED[key])}")
        checked[key] = value
    return checked


def _from_variable() -> dict[str, str]:
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "0", "1"):
        return {}
    pairs = [pair.strip().partition("=") for pair in text.split(",")]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(
                f"{VARIABLE}: {key!r} is no key=value; it may be 0, 1 or pairs such as moe=mxfp4-a16,qkv=mxfp8, "
                f"with the keys {', '.join(ALLOWED)}"
            )
    return _check({key.strip(): value.strip() for key, _, value in pairs}, VARIABLE)


def switched_on() -> bool:
    """Whether ``FLASHINFER_SM12X_VLLM`` leaves the plugin on, which it does unless it is ``0``."""
    return os.environ.get(VARIABLE, "").strip() != "0"


def resolve(additional_config: Any) -> Settings:
    """The settings of a server whose ``additional_config`` is given; a dictionary, or an object that holds none of
    ours.

    Raises
    ------
    ValueError
        An unknown key or value, naming where it stands and what it may be.
    """
    given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
    origin = f"--additional-config, {KEY!r}"
    if not isinstance(given, Mapping):
        raise ValueError(f"{origin} is {given!r}; it must be an object with keys of {', '.join(ALLOWED)}")
    return Settings(**{**_from_variable(), **_check(given, origin)})


def current() -> Settings:
    """The settings of the model that vLLM is building in this process."""
    from vllm.config import get_current_vllm_config

    return resolve(get_current_vllm_config().additional_config)
