# SPDX-License-Identifier: Apache-2.0
"""vLLM 0.33.0 finds in the fork all that it looks for in FlashInfer.

``LOOKUPS`` are the names that vLLM 0.33.0 reads from each module, by ``vllm/utils/flashinfer.py`` (which decides what
FlashInfer can do by ``hasattr``) and by its other ``from flashinfer... import ...``. The layer must have every name
that the plain wheel has; vLLM does without a name that the plain wheel lacks on this machine in both cases.
"""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

from layer_toys import OURS, REPO, Run

LOOKUPS: dict[str, list[str]] = json.loads((Path(__file__).parent / "vllm_0_33_0_lookups.json").read_text())

# Names of them that vLLM's MoE path needs.
MOE_PATH = {
    "flashinfer": """fp4_quantize nvfp4_block_scale_interleave mxfp8_quantize mxfp4_quantize block_scale_interleave
        autotune_v2""".split(),
    "flashinfer.fused_moe": ["cutlass_fused_moe", "trtllm_fp4_block_scale_moe"],
    "flashinfer.fp4_quantization": ["block_scale_interleave"],
    "flashinfer.autotuner": ["autotune", "AutoTuner"],
    "flashinfer.fused_moe.core": ["ActivationType", "get_w2_permute_indices_with_cache"],
}

LOOK = """
import importlib, importlib.util, json, os, sys
# "plain": without the fork, wherever it is installed.
if sys.argv[2] == "plain":
    sys.path[:] = [p for p in sys.path if not os.path.exists(os.path.join(p, "flashinfer", "_layer.py"))]
found = {}
for module, names in json.loads(sys.argv[1]).items():
    try:
        spec = importlib.util.find_spec(module)
        loaded = importlib.import_module(module)
    except ImportError as error:
        found[module] = f"{type(error).__name__}: {error}"
    else:
        def there(name):
            if hasattr(loaded, name):
                return True
            try:
                return importlib.util.find_spec(f"{module}.{name}") is not None
            except ImportError:
                return False
        found[module] = [name for name in names if spec is not None and there(name)]
print("RESULT", json.dumps(found))
"""


def look(run_python: Run, wanted: dict[str, list[str]], kind: str, path: list[Path]) -> dict[str, list[str]]:
    output = run_python("-c", LOOK, json.dumps(wanted), kind, path=path).stdout
    return json.loads(output.rpartition("RESULT")[2])


def test_every_lookup_gives_what_the_wheel_gives_and_the_moe_path_all(run_python: Run) -> None:
    plain = look(run_python, LOOKUPS, "plain", [])
    layer = look(run_python, LOOKUPS, "layer", [REPO])
    assert layer == plain
    assert sum(isinstance(names, list) and len(names) for names in plain.values()) > 100
    for module, names in MOE_PATH.items():
        assert set(names) <= set(layer[module])


def test_find_spec_does_not_import(run_python: Run) -> None:
    """vLLM asks before it imports, to leave CUDA alone."""
    code = (
        "import importlib.util, sys; spec = importlib.util.find_spec('flashinfer'); "
        "print(spec.origin, 'torch' in sys.modules, 'flashinfer' in sys.modules)"
    )
    assert run_python("-c", code, path=[REPO], fresh=True).stdout.strip() == f"{OURS / '__init__.py'} False False"


def test_the_version_of_the_wheel_is_what_metadata_and_module_say(run_python: Run) -> None:
    code = (
        "import flashinfer, importlib.metadata as m; "
        "print(m.version('flashinfer-python'), flashinfer.__version__, flashinfer.__file__)"
    )
    output = run_python("-c", code, path=[REPO]).stdout.split()
    assert output == [importlib.metadata.version("flashinfer-python")] * 2 + [str(OURS / "__init__.py")]


def test_a_directory_without_init_is_not_mistaken_for_flashinfer(run_python: Run, tmp_path: Path) -> None:
    """A stray ``flashinfer/`` without ``__init__.py`` anywhere on the path makes no empty namespace package."""
    (tmp_path / "flashinfer" / "data").mkdir(parents=True)
    code = "import flashinfer; print(flashinfer.__file__, hasattr(flashinfer.fused_moe, 'cutlass_fused_moe'))"
    assert run_python("-c", code, path=[tmp_path, REPO]).stdout.strip() == f"{OURS / '__init__.py'} True"


def test_import_needs_no_toolkit(run_python: Run, tmp_path: Path) -> None:
    """Not even to look for one: neither ``nvcc`` on PATH nor ``CUDA_HOME``."""
    env = {"CUDA_HOME": "", "CUDA_PATH": "", "PATH": str(tmp_path)}
    run_python("-c", "import flashinfer.fused_moe, flashinfer.gemm", path=[REPO], env=env)
