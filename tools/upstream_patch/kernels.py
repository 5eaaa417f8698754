# SPDX-License-Identifier: Apache-2.0
"""The lean module: the kernel family, its launcher, its tables and its generator."""

from __future__ import annotations

from .compose import Literally, New, Part, Take, Text
from .edits import Edit, Place
from .topic import Topic

_MOE_GEMM = "csrc/nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm"
_LAUNCHERS = f"{_MOE_GEMM}/launchers/moe_gemm_sm120_mixed_input_launcher"
_BACKEND = "csrc/fused_moe/cutlass_backend"
LAUNCHER = {
    f"{_LAUNCHERS}.cu": "csrc/sm12x/sm12x_launcher.cu",
    f"{_LAUNCHERS}.h": "csrc/sm12x/sm12x_launcher.h",
    f"{_LAUNCHERS}.inl": "csrc/sm12x/sm12x_launcher.inl",
    f"{_MOE_GEMM}/sm12x_arch_config.h": "csrc/sm12x/sm12x_arch_config.h",
    "csrc/sm12x_registry.cu": "csrc/sm12x/sm12x_registry.cu",
    "csrc/sm12x_binding_utils.h": "csrc/sm12x/sm12x_binding_utils.h",
}

FORK_INSTANCES = "flashinfer/jit/sm12x/instances.py"
INSTANCES = "flashinfer/jit/sm12x/instances.py"
_ROW = ("Format", "Layer", "_MULTIPLIES", "Instance")
_SIZES = ("MAX_EXPERTS", "STREAM_ENTRIES")
_PAIRS = ("_BF16", "_MXFP8_M8", "PAIRS")
_LOOK_UP = ("_NAMES", "tactic", "index_of")
# For plans and reports, of which upstream has none.
_REPORTED = ("Instance.schedule", "Instance.threads")


def instances(streamed: bool = False, gemm: bool = False, dense: bool = False) -> New:
    """The tables, with what topics up to one need."""
    names = (*_SIZES, *_ROW, *_PAIRS, *(["_STREAM_M8"] if streamed else []))
    rows = "(*PAIRS, *_STREAM_M8)" if streamed else "PAIRS"
    parts: list[Part] = [
        Text("flashinfer/jit/sm12x/instances_header.py"),
        Take(FORK_INSTANCES, names, without=_REPORTED),
        Literally(f"INSTANCES: tuple[Instance, ...] = {rows}\n"),
        *([Take(FORK_INSTANCES, ("GEMM_INSTANCES",))] if gemm else []),
        Take(FORK_INSTANCES, ("_dense", "DENSE_INSTANCES", "_PLACES"))
        if dense
        else Literally("_PLACES = {row.name: place for place, row in enumerate(INSTANCES)}\n"),
        Take(FORK_INSTANCES, _LOOK_UP),
    ]
    return New(INSTANCES, parts)


def text(path: str) -> New:
    """A file of ``text/`` at the same path of upstream's tree."""
    return New(path, (Text(path),))


def in_aot(generator: str, module: str) -> tuple[Edit, Edit]:
    """The edits that have ``aot.py`` build a module for SM12x."""
    return (
        Edit(
            Place("flashinfer/aot.py"),
            "from .jit.monomoe import gen_monomoe_module",
            f"from .jit.sm12x.{module} import {generator}",
        ),
        Edit(
            Place("flashinfer/aot.py", "gen_all_modules"),
            "jit_specs.append(gen_gemm_sm120_module())",
            f"            jit_specs.append({generator}())",
        ),
    )


TEST_HELPERS = New(
    "tests/test_helpers/mx_formats.py",
    (
        Literally('"""MXFP4 and MXFP8 (OCP Microscaling Formats v1.0) in float64, for references in tests."""\n'),
        Literally("from __future__ import annotations\n\nimport torch\n"),
        Take(
            "flashinfer/testing/mxfp_formats.py",
            (
                *("BLOCK", "NAN_SCALE", "SCALE_BIAS", "E2M1_MAX", "E4M3_MAX", "E2M1_VALUES", "power_of_two"),
                *("decode_scales", "decode_e2m1", "_per_element", "dequantize_mxfp4", "dequantize_mxfp8"),
                *(
                    "scale_exponents",
                    "round_to_e4m3",
                    "block_amax",
                    "quantize_mxfp8",
                    "quantize_mxfp4",
                    "swizzle_scales",
                ),
            ),
        ),
    ),
)

LEAN_MODULE = Topic(
    name="lean-module",
    message=Text("messages/lean-module.txt"),
    edits=in_aot("gen_sm12x_moe_module", "moe"),
    cxx={
        **LAUNCHER,
        f"{_BACKEND}/flashinfer_sm12x_fused_moe_binding.cu": "csrc/sm12x/sm12x_moe_binding.cu",
        f"{_BACKEND}/sm12x_moe_instance.cu.jinja": "csrc/sm12x/sm12x_moe_instance.jinja",
    },
    new=(
        text("flashinfer/jit/sm12x/__init__.py"),
        text("flashinfer/jit/sm12x/common.py"),
        text("flashinfer/jit/sm12x/moe.py"),
        instances(),
        TEST_HELPERS,
        text("tests/test_helpers/sm12x_moe.py"),
        text("tests/moe/test_sm12x_moe_module.py"),
    ),
)
