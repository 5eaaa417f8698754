# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` with ``spark`` as far as it comes without a GPU, by vLLM's own code: the command line, the plugin, and
vLLM's config, in which the plugin asks for a compiler. The stand-in of ``platform/`` answers as an SM121.

    python tests/vllm_plugin/start_up.py

Prints what it found; the exit status is 0 if the plugin is installed, vLLM takes FlashInfer, and vLLM and this fork
found the same compiler.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "platform"), str(HERE.parents[1] / "scripts")]
os.environ |= {"VIRTUAL_GPU_CAPABILITY": "12.1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
SPARK = '{"sm12x": "spark"}'


def main() -> int:
    import checkpoint
    import served
    from vllm.platforms import current_platform

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(type(current_platform), "device_type", "cuda"):
        checkpoint.write(Path(folder), 1)
        config = served.engine_config(folder, "--gpu-memory-utilization", "0.7", "--additional-config", SPARK)
    from vllm.utils import flashinfer as vllm_flashinfer

    import flashinfer_sm12x.vllm
    from flashinfer.jit import cpp_ext
    from flashinfer_sm12x.build.toolchain import compiler_banner

    ours, theirs = cpp_ext.find_toolkit().nvcc, vllm_flashinfer._flashinfer_nvcc_path()
    found = {
        "quantization": type(config.quant_config).__name__,
        "plugin": flashinfer_sm12x.vllm.outcome,
        "has_flashinfer": vllm_flashinfer.has_flashinfer(),
        "nvcc": f"{ours}, vLLM's {theirs}",
    }
    print("\n".join(f"{name}: {what}" for name, what in found.items()))
    agree = theirs is not None and compiler_banner(theirs) == compiler_banner(ours)  # one may be a link to the other
    return int(not (found["plugin"] == "installed" and found["has_flashinfer"] and agree))


if __name__ == "__main__":
    sys.exit(main())
