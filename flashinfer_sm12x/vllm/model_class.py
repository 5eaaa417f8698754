# SPDX-License-Identifier: Apache-2.0
"""The model class of gpt-oss that vLLM imports: :mod:`.model`'s, or vLLM's own if a name that :mod:`.model` uses has
moved."""

from __future__ import annotations

from typing import Any

from . import api_checks, fallback, replacements, table


def _chosen() -> Any:
    with fallback.leaving(api_checks.MODULES["decode"][1]):
        model = api_checks.module("decode")
        if model is not None:
            return model.SM12xGptOssForCausalLM
        table.note("decode", "vLLM's layers", "", api_checks.why_not("decode"))
    (entry,) = replacements.of("decode")
    return entry.original().load_model_cls()


SM12xGptOssForCausalLM = _chosen()
