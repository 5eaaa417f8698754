# SPDX-License-Identifier: Apache-2.0
"""``backend="sm12x"`` in the routines of upstream's ``benchmarks/flashinfer_benchmark.py``.

The wheel has no benchmarks: these edits are for a checkout (``tree.IN_WHEEL``).
"""

from __future__ import annotations

from .edits import Edit, Place

_GEMM = "benchmarks/routines/gemm.py"
_MOE = "benchmarks/routines/moe.py"
_UTILITIES = "benchmarks/routines/flashinfer_benchmark_utils.py"
_README = "benchmarks/README.md"

_MM_FP4 = Place(_GEMM, "testMmFp4", sha="639143488933")
_MM_MXFP8 = Place(_GEMM, "testMmMxfp8", sha="6a6d608b43a8")
_MM_MXFP8_BACKENDS = Place(_UTILITIES, first='    "mm_mxfp8": {', lines=12, sha="1daabfaf33c5")
_MM_BF16_FP4 = Place(_GEMM, "testMmBf16Fp4", sha="d48a5abdebe4")

DENSE_BENCHMARK = (
    Edit(Place(_GEMM, "parse_gemm_args", sha="4d68f4cc4d2e"), '"b12x",', '            "sm12x",'),
    Edit(_MM_FP4, '"b12x",', '        "sm12x",'),
    Edit(_MM_MXFP8, '"cudnn",', '        "sm12x",'),
    Edit(
        _MM_MXFP8,
        "assert backend in [",
        """\
        assert backend in [
            "cutlass",
            "trtllm",
            "cute-dsl",
            "cudnn",
            "sm12x",
            "auto",
        ], f"Unsupported backend: {backend}"
""",
        "replace",
        through=")",
    ),
    Edit(_MM_MXFP8_BACKENDS, '"12.0": [', '        "12.0": ["cutlass", "cudnn", "sm12x"],', "replace"),
    Edit(_MM_MXFP8_BACKENDS, '"12.1": [', '        "12.1": ["cutlass", "cudnn", "sm12x"],', "replace"),
    Edit(
        _MM_BF16_FP4,
        "g_b = (448 * 6) / w.float().abs().nan_to_num().max()",
        """\
    if backends == ["sm12x"]:
        # MXFP4 weights, which the other backends do not take.
        block_size = 32
        b_fp4, b_sf = flashinfer.mxfp4_quantize(w)
        alpha = None
    else:
        block_size = 16
        g_b = (448 * 6) / w.float().abs().nan_to_num().max()
        b_fp4, b_sf = flashinfer.nvfp4_quantize(
            w,
            g_b,
            sfLayout=flashinfer.SfLayout.layout_128x4,
            do_shuffle=False,
            backend="cute-dsl",
        )
        alpha = torch.tensor([1.0 / g_b.item()], device=device, dtype=torch.float32)
""",
        "replace",
        through="alpha = torch.tensor([1.0 / g_b.item()]",
    ),
    Edit(_MM_BF16_FP4, "block_size=16,", "                block_size=block_size,", "replace"),
    Edit(
        _MM_BF16_FP4,
        "b_fp4, b_sf, alpha, backend=backend",
        "                b_fp4, b_sf, alpha, backend=backend, block_size=block_size",
        "replace",
    ),
    Edit(
        _MM_BF16_FP4,
        "weight_fp32 = _dequantize_bf16_fp4_ref(",
        """\
        if block_size == 32:
            weight_fp32 = flashinfer.mxfp4_dequantize(b_fp4, b_sf).to(device)
        else:
            weight_fp32 = _dequantize_bf16_fp4_ref(b_fp4, b_sf, alpha, n, k, 16)
""",
        "replace",
    ),
    Edit(_MM_BF16_FP4, "+ (k // 16) * n", "        + (k // block_size) * n  # per-block SF of one byte", "replace"),
    Edit(
        Place(_README, first="| **mm_fp4** |", sha="5782603af3ee"),
        "| **mm_fp4** |",
        "| **mm_fp4** |  |  |  |  |  | cudnn, trtllm, cutlass | cudnn, trtllm, cutlass | cudnn, sm12x |",
        "replace",
    ),
)

_CUTLASS_MOE = Place(_MOE, "testCutlassFusedMoe", sha="98a99994a0d0")
_CUTLASS_MOE_BACKENDS = Place(_UTILITIES, first='    "cutlass_fused_moe": {', lines=12, sha="672fd753124a")
_MOE_ARGUMENTS = Place(_MOE, "parse_moe_args", sha="987c4c20bc6e")

MOE_BENCHMARK = (
    Edit(
        Place(_MOE),
        "from flashinfer import fp4_quantize, mxfp8_quantize",
        "from flashinfer import fp4_quantize, mxfp4_quantize, mxfp8_quantize",
        "replace",
    ),
    Edit(
        _MOE_ARGUMENTS,
        'choices=["base", "fp8", "nvfp4"],',
        """\
        choices=["base", "fp8", "nvfp4", "mxfp4"],
        help=(
            "Variant for cutlass_fused_moe benchmark: base (no quant), fp8 (per-tensor), "
            "nvfp4 (fp4 blockscale), mxfp4 (MXFP4 weights; MXFP8 activations with "
            "--quantized_input, else bfloat16)"
        ),
    )
    parser.add_argument(
        "--cutlass_backend",
        type=str,
        required=False,
        default="cutlass",
        choices=["cutlass", "sm12x"],
        help="Backend of cutlass_fused_moe; sm12x takes the mxfp4 variant only.",
""",
        "replace",
        through="help=",
    ),
    Edit(
        _MOE_ARGUMENTS,
        'help="Quantize input activations (only used for nvfp4).",',
        '        help="Quantize input activations (only used for nvfp4 and mxfp4).",',
        "replace",
    ),
    Edit(
        _CUTLASS_MOE,
        "- nvfp4: FP4 block-scale weights, optional quantized input",
        "      - mxfp4: MXFP4 weights, optional MXFP8 input; also with backend sm12x",
    ),
    Edit(_CUTLASS_MOE, 'backends = ["cutlass"]', "    backends = [args.cutlass_backend]", "replace"),
    Edit(
        _CUTLASS_MOE,
        'variant = getattr(args, "cutlass_variant", "base")',
        """\
    if args.cutlass_backend == "sm12x" and variant != "mxfp4":
        raise ValueError(f"--cutlass_backend sm12x does not take variant {variant}")
""",
    ),
    Edit(
        _CUTLASS_MOE,
        'elif variant == "nvfp4":',
        """\
    elif variant == "mxfp4":
        w1_q, w1_sf = map(
            torch.stack, zip(*map(mxfp4_quantize, w31_local), strict=True)
        )
        w2_q, w2_sf = map(
            torch.stack,
            zip(*(mxfp4_quantize(w.contiguous()) for w in w2_local), strict=True),
        )
        w1_sf, w2_sf = w1_sf.view(torch.int32), w2_sf.view(torch.int32)
        if args.quantized_input:
            ones = torch.ones(w31_local.shape[0], device=device)
            hidden_states, input_sf = mxfp8_quantize(x, True, 32)
            quant_scales = [w1_sf, ones, w2_sf, ones]
        else:
            hidden_states, input_sf = x, None
            quant_scales = [w1_sf, w2_sf]

        def run_cutlass(
            hidden_states, selected_experts, routing_weights, w1_q, w2_q, out
        ):
            return cutlass_fused_moe(
                hidden_states,
                selected_experts.to(torch.int),
                routing_weights,
                w1_q.view(torch.long),
                w2_q.view(torch.long),
                input_dtype,
                tp_size=tp_size,
                tp_rank=tp_rank,
                ep_size=ep_size,
                ep_rank=ep_rank,
                quant_scales=quant_scales,
                input_sf=input_sf,
                use_mxfp8_act_scaling=args.quantized_input,
                use_w4_group_scaling=not args.quantized_input,
                output=out,
                enable_pdl=args.enable_pdl,
                backend=args.cutlass_backend,
                **_activation_kwarg(cutlass_fused_moe, activation_type),
            )

        input_args_for_bench = (
            hidden_states,
            selected_experts,
            routing_weights,
            w1_q,
            w2_q,
            out,
        )

""",
        "before",
    ),
    Edit(_CUTLASS_MOE, 'backend = "cutlass"', "    backend = args.cutlass_backend", "replace"),
    Edit(_CUTLASS_MOE, 'backend = "cutlass_autotune"', '        backend = f"{backend}_autotune"', "replace"),
    Edit(_CUTLASS_MOE_BACKENDS, '"12.0": [', '        "12.0": ["cutlass", "sm12x"],', "replace"),
    Edit(_CUTLASS_MOE_BACKENDS, '"12.1": [', '        "12.1": ["cutlass", "sm12x"],', "replace"),
    Edit(
        Place(_README, first="    - `cutlass_fused_moe` - CUTLASS fused MoE", sha="8c33ed3ef00e"),
        "- `cutlass_fused_moe`",
        "    - `cutlass_fused_moe` - CUTLASS fused MoE (base/fp8/nvfp4/mxfp4 variants with optional TP/EP; "
        "`--cutlass_backend sm12x` for mxfp4 on SM120/SM121)",
        "replace",
    ),
    Edit(
        Place(_README, first="| **cutlass_fused_moe** |", sha="2e8ef67a25e7"),
        "| **cutlass_fused_moe** |",
        "| **cutlass_fused_moe** |  |  |  |  |  | cutlass | cutlass | sm12x |",
        "replace",
    ),
)
