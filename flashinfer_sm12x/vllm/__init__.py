# SPDX-License-Identifier: Apache-2.0
"""The SM12x fork's plugin for vLLM: gpt-oss on this fork's kernels, with no change to vLLM's files.

vLLM calls :func:`register` in every process through the entry point group ``vllm.general_plugins``. It returns before
it imports any of vLLM's model code if there is no GPU of the SM12x family (:mod:`.devices`), if it is switched off, or
if ``import flashinfer`` is not this fork (``flashinfer_sm12x.versions``).

================ =====================================================================================
``fallback``     what a failure leaves to vLLM, and the refusals that end a start
``settings``     the user's choices, their sources, and the errors
``api_checks``   vLLM's names that the plugin uses, and the part that is switched off if one has moved
``replacements`` the table of what the plugin replaces in vLLM, and its installation
``devices``      whether this machine's GPU is one that the fork serves
``config``       gpt-oss's quantization config and its hook into vLLM's config: where the choices are made
``moe``          the MoE layer: weights into the fork's layout, the experts classes, the build
``nvfp4``        NVFP4 experts of any model
``dense``        QKV, O and the LM head in block-scaled formats
``layer_object`` the cache of the fork's layer objects
``lm_head``      the LM head's class, of every model
``rescored``     LM heads of any model that rescore; ``coarse_weight`` is what they read most of
``model``        the model's class: decode steps by an executor over vLLM's layers; ``model_class`` is what vLLM imports
``attention``    FlashInfer's attention with sinks on a machine without a network
``compiler``     whether this machine can compile for its GPU
``memory``       vLLM's share of memory that GPU and host share, and a watch over the weights' load
``reach``        warnings about choices that do not apply
``table``        the table in the log
================ =====================================================================================
"""

from __future__ import annotations

import logging
import os

from .. import variables, versions

_registered = False

outcome = "it was not registered"
"""The outcome of :func:`register`; the doctor tells it."""


def register() -> None:
    """The entry point, called once or more in every process of vLLM. If the plugin cannot be installed, vLLM goes on.

    Raises
    ------
    ValueError
        A variable of this fork has a value that it cannot have; vLLM then ends with the message.
    """
    global _registered, outcome
    if _registered:
        return
    _registered = True
    log = logging.getLogger("vllm.flashinfer_sm12x")
    try:
        for name in ("FLASHINFER_SM12X_VLLM", "FLASHINFER_SM12X_MOE"):
            if os.environ.get(name, "").strip() == "0":
                outcome = f"{name}=0 switches it off"
                log.warning("flashinfer-sm12x: %s", outcome)  # vLLM may not have set its log's level yet
                return
        from . import devices, settings

        if aside := versions.upstream_alone():
            outcome = f"it steps aside: {aside}"
            log.warning("flashinfer-sm12x: the plugin steps aside and all is vLLM's: %s", aside)
            return
        variables.read(settings.VARIABLE)  # a bad value ends the start here
        if not devices.served():
            outcome = "no GPU here is served"
            return
        from . import api_checks, fallback

        if reason := api_checks.why_not("config"):
            outcome = f"vLLM's code moved: {reason}"
            return
        from . import config

        config.install()
        left = []
        for part in ("experts", "nvfp4", "dense", "head", "attention"):
            left.append(part)
            with fallback.leaving(api_checks.MODULES[part][1]):
                module = api_checks.module(part)
                if module is not None:
                    if part != "dense":  # which the quantization config makes
                        module.install()
                    left.remove(part)
        outcome = "installed"
        if left:
            outcome += f", but left to vLLM, as the log says: {', '.join(left)}"
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
        if isinstance(error, variables.VariableError):
            raise
        # A server without this fork is better than none.
        log.warning(
            "flashinfer-sm12x: the plugin could not be installed and vLLM goes on without it: %s: %s",
            type(error).__name__,
            error,
        )
