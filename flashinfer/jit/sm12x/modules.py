# SPDX-License-Identifier: Apache-2.0
"""The modules of the SM12x family: their sources, architectures and flags.

===============================  =================================================================
``fused_moe_120``                the MXFP4 MoE layer: binding, launcher, one source per instance of ``MAIN_MODULE``
``fused_moe_120_nvfp4``          the same of NVFP4 weights
``fused_moe_120_<instance>``     another instance, registered with one of the modules above
``gemm_mxfp4_sm12x``             the public MXFP4 grouped GEMM
``dense_<format>_sm12x``         dense layers with weights in a block-scaled format, such as ``dense_mxfp4_sm12x``
``router_sm12x``                 a mixture of experts' router, with the norm before it
``decode_sm12x``                 decode attention, with rope and append
``probe_sm12x``                  kernels that measure a GPU (``flashinfer_sm12x.doctor.probe``)
===============================  =================================================================

If :func:`computes_in_fp16` holds for a kind, names end in ``_half_mxf8f6f4``, ``_half_mxf4`` or both: MXFP8 tokens
(``mxf8f6f4``) or packed MXFP4 ones (``mxf4``) are then multiplied by half-precision MMAs with float32 sums.

Each source holds one instance, generated from a template and the table in ``instances``, so that sources build in
parallel and an edit of the table rebuilds what it touches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jinja2
import torch

from flashinfer._layer import fork_root, wheel_root
from flashinfer.sm12x.models import MODELS
from flashinfer_sm12x import variables
from flashinfer_sm12x.build.diagnosis import WARN_OF_LOCAL_MEMORY, explained_os_errors
from flashinfer_sm12x.build.trust import read_file, require_trusted, require_trusted_tree, write_atomically

from ...sm12x.instances import DENSE_INSTANCES, FORMATS, GEMM_INSTANCES, MOE_MODULES, SM12X, Instance, is_alone
from .. import core
from .. import env as jit_env
from . import flags
from .spec import JitSpecSm12x

FUSED_MOE = "fused_moe_120"
FUSED_MOE_NVFP4 = "fused_moe_120_nvfp4"
GROUP_GEMM = "gemm_mxfp4_sm12x"
DENSE = "dense_{}_sm12x"
ROUTER = "router_sm12x"
DECODE = "decode_sm12x"
PROBE = "probe_sm12x"

_MOE_TEMPLATE = "fused_moe/cutlass_backend/sm12x_moe_instance.cu.jinja"
_LAUNCHER = "nv_internal/tensorrt_llm/kernels/cutlass_kernels/moe_gemm/launchers/moe_gemm_sm120_mixed_input_launcher.cu"
_REGISTRY = "sm12x_registry.cu"
_MOE_BINDING = "fused_moe/cutlass_backend/flashinfer_sm12x_fused_moe_binding.cu"
_GEMM_BINDING = "group_gemm_mxfp4_sm12x_binding.cu"
_DENSE_BINDING = "dense_mx_sm12x_binding.cu"

EMBED_PTX_VARIABLE = "FLASHINFER_SM12X_EMBED_PTX"
"""Set to 1, modules carry the PTX of their SM12x kernels too, uncompressed, under names that end in ``_ptx``."""

HALF_MMA_VARIABLE = "FLASHINFER_SM12X_HALF_MMA"
"""1: MXFP8 and MXFP4 tokens are multiplied in half precision; 0: by block-scaled MMAs; unset: by the
width that :func:`probed_sum_bits` has."""

PROBE_FILE = "sm12x_probe.json"
"""In the workspace folder: what a probe of this machine's GPU found,
``{"mma_sum_bits": {"mxf8f6f4": 20, ...}, ...}``."""

MMA_KINDS = ("mxf8f6f4", "mxf4")
"""Block-scaled MMAs for MXFP8 tokens, and for packed MXFP4 ones, which only dense GEMMs use."""

LONGEST_K = 32768
"""The longest K that :data:`NARROWEST_SUM` assumes: the switch is compiled in, before the K of a call is known."""

BF16_ROUNDOFF = 2.0**-9


def drift(bits: int, k: int = LONGEST_K) -> float:
    """The relative error of an MXFP8 or MXFP4 MMA's sum of ``k`` products of one sign.

    The adder truncates products to ``bits`` fraction bits below the running sum (arXiv 2512.07004). As the sum grows,
    more products have bits below that and each loses more: in total half the square of ``k 2^-bits``, by the model of
    the adder for random operands. Sums of both signs lose far less (docs/kernels.md, "Sums of tensor cores").
    """
    return (k * 2.0**-bits) ** 2 / 2


NARROWEST_SUM = next(bits for bits in range(64) if drift(bits) < BF16_ROUNDOFF)
"""The fewest fraction bits of sums with which a block-scaled MMA is used: at :data:`LONGEST_K` it loses less than
rounding a result to bfloat16 may."""


def probed_sum_bits(kind: str) -> int | None:
    """Fraction bits of the sums of this machine's MMA of ``kind``, as a probe recorded them; None if nothing was
    probed, or the GPU has no such MMA.

    Raises:
        ValueError: the probe's file holds something else; the message names it.
        UntrustedCacheError: another user can have written it.
    """
    path = Path(jit_env.FLASHINFER_WORKSPACE_DIR) / PROBE_FILE
    require_trusted(path)
    try:
        found = json.loads(read_file(path))["mma_sum_bits"].get(kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not what a probe writes ({error!r}); remove it, or probe again") from error
    if found is not None and (not isinstance(found, int) or not 1 <= found <= 64):
        raise ValueError(
            f"{path} has mma_sum_bits {found!r} of {kind}; it must be an integer from 1 to 64. Remove it, or probe "
            "again"
        )
    return found


def computes_in_fp16(kind: str = "mxf8f6f4") -> bool:
    """Whether half-precision MMAs replace a kind of block-scaled MMA.

    They do on a GPU whose MMA of that kind keeps fewer bits than :data:`NARROWEST_SUM`. An SM120 keeps enough: others
    measured 20 bits. In half precision each scale block is summed from zero, and their sums are added in float32.
    Fused MoE kernels multiply in bf16 anyway; the switch changes two-kernel tactics and the grouped GEMM, and has the
    planner of dense layers pass over GEMMs of that kind. It is read when a module is first used.

    Args:
        kind: One of :data:`MMA_KINDS`.

    Raises:
        ValueError: ``FLASHINFER_SM12X_HALF_MMA`` is neither 0 nor 1, or :func:`probed_sum_bits` raises it.
    """
    asked = variables.read(HALF_MMA_VARIABLE)
    if asked is not None:
        return bool(asked)
    bits = probed_sum_bits(kind)
    return bits is not None and bits < NARROWEST_SUM


def gen_fused_moe_module(weights: str = "mxfp4") -> JitSpecSm12x:
    """The spec of ``fused_moe_120``, or of ``fused_moe_120_nvfp4``: a model has experts in one format.

    Args:
        weights: The experts' format, one of ``MOE_WEIGHTS``.

    Raises:
        RuntimeError: no architecture of the family is to be compiled for; the message says what to set.
    """
    name = {"mxfp4": FUSED_MOE, "nvfp4": FUSED_MOE_NVFP4}[weights]
    rows = MOE_MODULES[weights]
    kinds = [kind for kind in MMA_KINDS if kind in {FORMATS[row.compute_dtype].mma for row in rows}]
    return _spec(name, [_MOE_BINDING, _LAUNCHER, _REGISTRY], _MOE_TEMPLATE, rows, mma_kinds=kinds)


def gen_fused_moe_instance_module(instance: Instance) -> JitSpecSm12x:
    """The spec of the small module that holds one instance which is in no module of :func:`gen_fused_moe_module`.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
        ValueError: the instance is in one of those.
    """
    if not is_alone(instance):
        raise ValueError(f"{instance.name} is part of {FUSED_MOE} and has no module of its own")
    binding = "fused_moe/cutlass_backend/flashinfer_sm12x_instance_binding.cpp"
    return _spec(f"{FUSED_MOE}_{instance.name}", [binding], _MOE_TEMPLATE, [instance], alone=True)


def gen_group_gemm_module() -> JitSpecSm12x:
    """The spec of ``gemm_mxfp4_sm12x``.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    template = "gemm/sm12x_group_gemm_instance.cu.jinja"
    return _spec(GROUP_GEMM, [_GEMM_BINDING, _REGISTRY], template, GEMM_INSTANCES)


def gen_dense_module(weights: str) -> JitSpecSm12x:
    """The spec of ``dense_<weights>_sm12x``: a model has dense weights in one or two formats.

    Args:
        weights: The format of the weights, one that rows of ``DENSE_INSTANCES`` have.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    rows = [row for row in DENSE_INSTANCES if row.weights == weights]
    operands = {FORMATS[row.compute_dtype].mma for row in rows}
    template = "gemm/sm12x_dense_instance.cu.jinja"
    kinds = [kind for kind in MMA_KINDS if kind in operands]
    return _spec(DENSE.format(weights), [_DENSE_BINDING, _REGISTRY], template, rows, mma_kinds=kinds)


def gen_router_module() -> JitSpecSm12x:
    """The spec of ``router_sm12x``.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    return _spec(ROUTER, ["fused_moe/sm12x_router_binding.cu"])


def gen_decode_module() -> JitSpecSm12x:
    """The spec of ``decode_sm12x``.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    return _spec(DECODE, ["sm12x_decode_attention_binding.cu"])


def gen_operator_modules() -> list[JitSpecSm12x]:
    """The specs of all that this fork's operators load, but for the instances that are modules of their own.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    return [generate() for name, generate in MODULES.items() if name != PROBE]


def gen_shipped_modules() -> list[JitSpecSm12x]:
    """The specs of all that an SM12x may ask for, which prebuilt wheels and upstream's AOT builds hold.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    single = [gen_fused_moe_instance_module(row) for row in SM12X if is_alone(row)]
    return [*gen_operator_modules(), *single]


def gen_probe_module() -> JitSpecSm12x:
    """The spec of ``probe_sm12x``, whose kernels have fences before arrivals, or none, by their own choice.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`.
    """
    return _spec(PROBE, ["sm12x_probe_binding.cu"], defines=["-DFLASHINFER_SM12X_FENCE_ARRIVALS=0"])


MODULES: dict[str, Callable[[], JitSpecSm12x]] = {
    FUSED_MOE: gen_fused_moe_module,
    FUSED_MOE_NVFP4: partial(gen_fused_moe_module, "nvfp4"),
    GROUP_GEMM: gen_group_gemm_module,
    **{
        DENSE.format(weights): partial(gen_dense_module, weights)
        for weights in dict.fromkeys(row.weights for row in DENSE_INSTANCES)
    },
    ROUTER: gen_router_module,
    DECODE: gen_decode_module,
    PROBE: gen_probe_module,
}
"""Beginning of a spec's name -> the function that gives the module's spec. The names of single instances' specs begin
with :data:`FUSED_MOE`."""


def gen_vllm_modules(kv_cache: torch.dtype) -> list[Any]:
    """The specs of upstream's modules that gpt-oss in vLLM loads when it starts: attention with sinks, and the sampler.

    Each is as vLLM's FLASHINFER backend asks for it, by default: pages of 16, and the window and the whole context
    apart. The prefill's two have the same names for either cache, so the one that was asked for last is there.

    Args:
        kv_cache: torch.bfloat16, or torch.float8_e4m3fn for ``--kv-cache-dtype fp8``.

    Raises:
        RuntimeError: as :func:`gen_fused_moe_module`; or an FP8 cache on 9.0, for which upstream's sources do not
            compile.
    """
    from ..attention.modules import gen_customize_batch_prefill_module
    from ..attention.variants import attention_sink_decl
    from ..sampling import gen_sampling_module
    from ..utils import filename_safe_dtype_map
    from ..xqa import gen_xqa_module

    sizes, half = MODELS["gpt-oss-120b"], torch.bfloat16
    hopper = all(major == 9 for major, _ in target_architectures())
    if hopper and kv_cache != half:
        # FA3 reads FP8 caches with FP8 queries only, and its kernel with sinks has no transposed V for those.
        raise RuntimeError(
            "on 9.0 upstream's prefill with sinks does not compile for an FP8 KV cache, so vLLM's FLASHINFER backend "
            "cannot serve one; use sm12x-build --vllm bf16 there"
        )
    prefill = "fa3" if hopper else "fa2"
    specs = [gen_sampling_module()]
    for window in (False, True):
        ratio = sizes.heads // sizes.kv_heads
        specs.append(gen_xqa_module(half, kv_cache, 16, sizes.head, ratio, window, half))
        name = f"batch_prefill_attention_sink_{filename_safe_dtype_map[half]}_swa_{window}_{prefill}"
        specs.append(
            gen_customize_batch_prefill_module(
                prefill,
                name,
                dtype_q=half,
                dtype_kv=kv_cache,
                dtype_o=half,
                idtype=torch.int32,
                head_dim_qk=sizes.head,
                head_dim_vo=sizes.head,
                additional_tensor_names=["sink"],
                additional_tensor_dtypes=["float"],
                additional_scalar_names=["sm_scale"],
                additional_scalar_dtypes=["double"],
                variant_name="AttentionSink",
                variant_decl=attention_sink_decl[prefill],
                use_sliding_window=window,
                paged_kv_stride_mode="runtime" if hopper else "independent",
                module_surface="full",
            )
        )
    return specs


def target_architectures() -> tuple[tuple[int, str], ...]:
    """The architectures to compile for, as far as the family has kernels for them: 12.x and 9.0.

    Older ones have neither bulk copies nor programmatic dependent launch.

    Raises:
        RuntimeError: there is none of them, or none at all is known; the message says what to set.
    """
    context = core.current_compilation_context
    if not context.TARGET_CUDA_ARCHS:
        context = core.refresh_current_compilation_context()
    known = sorted(context.TARGET_CUDA_ARCHS)
    ours = tuple((major, minor) for major, minor in known if major == 12 or (major, minor) == (9, "0a"))
    if ours:
        return ours
    if not known:
        raise RuntimeError(
            "it is not known which GPU to compile for: no GPU is visible and FLASHINFER_CUDA_ARCH_LIST is not set. "
            "Set FLASHINFER_CUDA_ARCH_LIST=12.1a (DGX Spark) or 12.0a (RTX 50, RTX PRO Blackwell)"
        )
    names = ", ".join(f"{major}.{minor}" for major, minor in known)
    raise RuntimeError(
        f"the SM12x kernels are for compute capability 12.0, 12.1 and 9.0, but modules are compiled for {names}. "
        "Set FLASHINFER_CUDA_ARCH_LIST, e.g. 12.1a (DGX Spark) or 12.0a (RTX 50, RTX PRO Blackwell)"
    )


def _csrc() -> Path:
    return fork_root() / "csrc"


def _include_dirs() -> list[Path]:
    """This tree's headers, before any of the wheel's."""
    cutlass = fork_root() / "3rdparty" / "cutlass" / "include"
    ours = [fork_root() / "include", _csrc(), _csrc() / "nv_internal"]
    upstream = [
        wheel_root() / "data" / "csrc" / "nv_internal",
        wheel_root() / "data" / "csrc" / "nv_internal" / "include",
    ]
    return [*ours, *([cutlass] if cutlass.is_dir() else []), *upstream]


def _spec(
    name: str,
    sources: Sequence[str | Path],
    template: str = "",
    instances: Iterable[Instance] = (),
    alone: bool = False,
    defines: Sequence[str] = (),
    mma_kinds: Iterable[str] = MMA_KINDS[:1],
) -> JitSpecSm12x:
    """``sources``, which lie in ``csrc``, and one of the template for each instance."""
    architectures = target_architectures()
    embed_ptx = variables.read(EMBED_PTX_VARIABLE)
    in_half = [kind for kind in mma_kinds if template and computes_in_fp16(kind)]
    name += "".join(f"_half_{kind}" for kind in in_half) + "_ptx" * embed_ptx
    cuda_flags = [
        *flags.cuda_flags(architectures, embed_ptx),
        *defines,
        *(f"-DFLASHINFER_SM12X_HALF_{kind.upper()}=1" for kind in in_half),
    ]
    # Kernels that must not spill: not a debugger's, which keep variables in memory, nor the half-precision GEMMs, which
    # Hopper has too.
    if not flags.debug() and not in_half and all(major == 12 for major, _ in architectures):
        cuda_flags.append(WARN_OF_LOCAL_MEMORY)
    spec = JitSpecSm12x(
        name=name,
        sources=[
            *(_csrc() / source for source in sources),
            *(_render(name, template, instances, alone) if template else []),
        ],
        extra_cflags=flags.cxx_flags(),
        extra_cuda_cflags=cuda_flags,
        extra_ldflags=None,
        extra_include_dirs=_include_dirs(),
        architectures=architectures,
    )
    core.jit_spec_registry.register(spec)
    return spec


def _render(name: str, template: str, instances: Iterable[Instance], alone: bool = False) -> list[Path]:
    """Write one source per instance into the cache's folder of generated sources; ``alone``: it is all of a module.

    Raises:
        JitBuildError: one cannot be written.
        UntrustedCacheError: another user can write there.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_csrc()),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,
    )
    compiled = environment.get_template(template)
    folder = jit_env.FLASHINFER_GEN_SRC_DIR / name
    paths = []
    with explained_os_errors(name, folder):
        require_trusted_tree(folder)
        for instance in instances:
            path = folder / f"{instance.name}.cu"
            write_atomically(path, compiled.render(instance=instance, alone=alone))
            paths.append(path)
    return paths
