# SPDX-License-Identifier: Apache-2.0
"""Loads a gpt-oss and has it answer with a vLLM in which names have changed; run in a process of its own. If the
experts are vLLM's, which have no kernel for CPU tensors, the model is only built.

    python moved_vllm.py FOLDER '["old_name", ...]' [WORDS OF VLLM'S COMMAND LINE]

Every word ``old_name`` in vLLM's sources is read as ``old_name_moved``, so vLLM itself stays consistent.
``old_name:text`` puts a text in its place. The last line printed is the state of the plugin's parts, as JSON.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any


class Renamer(importlib.abc.MetaPathFinder):
    """Finds vLLM's modules whose source has one of the names, and has them compiled from another text."""

    def __init__(self, names: list[str]) -> None:
        self.names = {name.partition(":")[0]: name.partition(":")[2] or f"{name}_moved" for name in names}
        self.pattern = re.compile("|".join(rf"\b{re.escape(name)}\b" for name in self.names))
        self.read: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] != "vllm":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return spec
        text = Path(spec.origin).read_text(encoding="utf-8")
        if not self.pattern.search(text):
            return spec
        self.read.append(name)
        loader = _Loader(name, spec.origin)
        loader.text = self.pattern.sub(lambda match: self.names[match[0]], text)
        return importlib.util.spec_from_file_location(
            name, spec.origin, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )


class _Loader(importlib.machinery.SourceFileLoader):
    text: str

    def get_code(self, fullname: str) -> Any:
        return compile(self.text, self.path, "exec", dont_inherit=True)


if __name__ == "__main__":
    folder, names, *words = sys.argv[1:]
    renamer = Renamer(json.loads(names))
    sys.meta_path.insert(0, renamer)
    logged: list[str] = []
    logging.getLogger("vllm.flashinfer_sm12x").addFilter(lambda record: logged.append(record.getMessage()) or True)

    import reference_attention
    import served
    import torch

    sys.path.append(str(Path(__file__).parents[1]))  # what test_vllm_models imports
    from test_vllm_models import ON_THE_CPU, TOKENS
    from vllm.model_executor.layers.attention import Attention

    import flashinfer_sm12x.vllm
    from flashinfer_sm12x.vllm import api_checks

    Attention.forward = reference_attention.forward
    config = served.engine_config(folder, *ON_THE_CPU, *words)
    with served.parallel_groups(config):
        ours = not api_checks.why_not("experts") and not api_checks.why_not("config")
        model = served.load_model(config) if ours else served.built(config)
        logits = served.logits(config, model, TOKENS) if ours else torch.zeros(1, 1)
        found = {
            "outcome": flashinfer_sm12x.vllm.outcome,
            "log": logged,
            "read": renamer.read,
            "kernels": served.kernels(model),
            "class": type(model).__name__,
            "head": type(model.lm_head).__name__,
            "answer": [int(token) for token in logits.argmax(-1)],
            "finite": bool(logits.isfinite().all()),
        }
    print("RESULT", json.dumps(found))
