# SPDX-License-Identifier: Apache-2.0
"""Upstream's MoE operator with the kernels as a backend."""

from __future__ import annotations

from collections.abc import Mapping

from .benchmarks import MOE_BENCHMARK
from .compose import New, Take, Text
from .edits import Edit, Place
from .gemm import _PLANNER, HEURISTICS
from .kernels import instances, text
from .topic import Topic

_CORE = "flashinfer/fused_moe/core.py"
_MOE = Place(_CORE, "cutlass_fused_moe", sha="dff32024e682")
_MOE_WORKSPACE = Place(_CORE, "cutlass_fused_moe_workspace_size", sha="7cc682f03ce2")
_CONTRACT = "flashinfer/sm12x/checks.py"
_VALIDATION = "flashinfer/fused_moe/sm12x_validation.py"


def _heuristics(layer: str) -> New:
    return New(
        HEURISTICS.path,
        (*HEURISTICS.parts, Text(f"flashinfer/jit/sm12x/{layer}.py")),
        renames={
            "from .instances import GEMM_INSTANCES, Instance": (
                "from .instances import GEMM_INSTANCES, INSTANCES, Format, Instance"
            )
        },
    )


_CHECKS = New(
    "flashinfer/fused_moe/sm12x_moe_checks.py",
    (
        Text("flashinfer/fused_moe/sm12x_moe_checks_header.py"),
        Take(
            _CONTRACT,
            (
                *(
                    "INT32_MAX",
                    "BLOCK_SIZE",
                    "K_ALIGNMENT",
                    "POINTER_ALIGNMENT",
                    "SCALE_WORD",
                    "ELEMENT",
                    "OUTPUT_DTYPES",
                ),
                *(
                    "UE8M0_DTYPES",
                    "round_up",
                    "has_no_shape",
                    "describe",
                    "require_int",
                    "require_switches",
                    "require_k_alignment",
                    "require_output_dtype",
                ),
                *("require_tensor_type", "require_rank", "require_memory", "require_tensor", "_end"),
                *("require_apart", "_meet", "elements_overlap"),
            ),
        ),
        Take(
            _VALIDATION,
            (
                *("WEIGHT_DTYPES", "LINEAR_SCALE_DTYPES", "SWIGLU", "Mode", "INPUT_DTYPES"),
                *("_QUANT_SCALES", "MoECall", "MoEProblem", "select_mode", "swizzled_scale_shapes"),
                *("require_swizzled_scales", "require_parallel_sizes", "require_pairs", "_weight_sizes"),
                *("_check_quant_scales", "_check_input_sf", "validate"),
            ),
        ),
    ),
)


def _operator(renames: Mapping[str, str] | None = None) -> New:
    """The operator; ``renames`` are what a later topic has otherwise."""
    folder = "flashinfer/fused_moe/"
    parts = (
        Text(f"{folder}sm12x_moe_header.py"),
        Take(_PLANNER, ("computes_layer", "go_together", "resolved_pair")),
        Text(f"{folder}sm12x_moe.py"),
    )
    return New(f"{folder}sm12x_moe.py", parts, renames)


MOE = Topic(
    name="moe",
    after="dense",
    message=Text("messages/moe.txt"),
    edits=(
        Edit(
            _MOE,
            'if backend != "cutlass":',
            """\
    if backend == "sm12x":
        from .sm12x_moe import MoECall, sm12x_fused_moe, sm12x_mode

        if min_latency_mode:
            raise NotImplementedError("min latency mode not yet implemented.")
        if cluster_size != 1:
            raise ValueError(f"cluster_size must be 1, got {cluster_size}")
        for parameter in (clamped_relu2_limit, situ_beta, situ_linear_beta):
            if parameter is not None:
                raise ValueError("backend='sm12x' takes SwiGLU's parameters only")
        mode = sm12x_mode(
            input.device,
            input.dtype,
            fc1_expert_weights.dtype,
            use_mxfp8_act_scaling=use_mxfp8_act_scaling,
            use_w4_group_scaling=use_w4_group_scaling,
            use_packed_weights=use_packed_weights,
            use_wfp4afp8_humming=use_wfp4afp8_humming,
            use_deepseek_fp8_block_scale=use_deepseek_fp8_block_scale,
            activation_type=int(activation_type),
        )
        return sm12x_fused_moe(
            MoECall(
                output=output,
                workspace_buffer=workspace_buffer,
                input=input,
                input_sf=input_sf,
                token_selected_experts=token_selected_experts,
                token_final_scales=token_final_scales,
                fc1_expert_weights=fc1_expert_weights,
                fc1_expert_biases=fc1_expert_biases,
                fc2_expert_weights=fc2_expert_weights,
                fc2_expert_biases=fc2_expert_biases,
                quant_scales=quant_scales,
                swiglu_alpha=swiglu_alpha,
                swiglu_beta=swiglu_beta,
                swiglu_limit=swiglu_limit,
                output_dtype=output_dtype,
                moe_mode=int(mode),
                swizzled_input_sf=swizzled_input_sf,
                tp_size=tp_size,
                tp_rank=tp_rank,
                ep_size=ep_size,
                ep_rank=ep_rank,
                enable_alltoall=enable_alltoall,
                tune_max_num_tokens=tune_max_num_tokens,
                enable_pdl=enable_pdl,
                profile_ids=profile_ids,
            )
        )
""",
            "before",
        ),
        Edit(
            _MOE,
            "See the Cake SiTU guide for its TRTLLM shuffled NVFP4 weight layout.",
            """\
        ``"sm12x"`` (SM120/SM121) takes MXFP4 weights with MXFP8 or bfloat16
        activations and SwiGLU: biases, ``swiglu_alpha``, ``swiglu_beta`` and
        ``swiglu_limit``, expert parallelism, hidden and intermediate sizes that are
        multiples of 32. Its results are the same on every run.
""",
        ),
        Edit(
            _MOE_WORKSPACE,
            "only. It requires BF16/uint8, TP8, SiTU and the documented fixed geometry.",
            '        ``"sm12x"`` returns the size for MXFP4 weights on SM120/SM121.',
        ),
        Edit(
            _MOE_WORKSPACE,
            'if backend != "cutlass":',
            '    if backend not in ("cutlass", "sm12x"):',
            "replace",
        ),
        Edit(
            _MOE_WORKSPACE,
            "major, minor = get_compute_capability(device)",
            """\
        if backend == "sm12x":
            from .sm12x_moe import sm12x_fused_moe_workspace_size

            if min_latency_mode:
                raise NotImplementedError("min latency mode not yet implemented.")
            return sm12x_fused_moe_workspace_size(
                max_num_tokens=max_num_tokens,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                num_experts_total=num_experts_total,
                top_k=top_k,
                x_dtype=x_dtype,
                weight_dtype=weight_dtype,
                ep_size=ep_size,
                ep_rank=ep_rank,
                device=device,
                use_mxfp8_act_scaling=use_mxfp8_act_scaling,
                use_w4_group_scaling=use_w4_group_scaling,
                use_packed_weights=use_packed_weights,
                use_wfp4afp8_humming=use_wfp4afp8_humming,
                use_deepseek_fp8_block_scale=use_deepseek_fp8_block_scale,
                activation_type=int(activation_type),
            )
""",
            "before",
        ),
        *MOE_BENCHMARK,
    ),
    new=(
        _heuristics("heuristics_moe"),
        _CHECKS,
        _operator(),
        text("tests/moe/test_sm12x_fused_moe.py"),
        text("benchmarks/bench_sm12x_fused_moe.py"),
    ),
)

STREAMED_LAYER = Topic(
    name="streamed-layer",
    after="moe",
    message=Text("messages/streamed-layer.txt"),
    new=(
        instances(streamed=True, gemm=True, dense=True),
        _heuristics("heuristics_streamed"),
        _operator(
            {
                """Two GEMM kernels a layer: FC1 with bias and SwiGLU in its epilogue, FC2 with bias,
routing weights and the sum over a token's experts, whose order is fixed. The kernels
route by themselves; nothing waits on the host.
""": """With few rows for an expert a layer is one launch that streams the weights of both
GEMMs; else it is two GEMM kernels: FC1 with bias and SwiGLU in its epilogue, FC2 with
bias, routing weights and the sum over a token's experts, whose order is fixed. The
kernels route by themselves; nothing waits on the host.
""",
                """def _default_tactics(problem: MoEProblem) -> tuple[int, int]:
    row = choose_moe(
        problem.mode.activation,
        problem.num_tokens * problem.top_k,
        problem.num_local_experts,
    )
""": """def _default_tactics(problem: MoEProblem, all_sms: bool = True) -> tuple[int, int]:
    row = choose_moe(
        problem.mode.activation,
        problem.num_tokens * problem.top_k,
        problem.num_local_experts,
        problem.hidden,
        problem.inter,
        all_sms,
    )
""",
                """def _valid_rows(problem: MoEProblem) -> list[Any]:
    return [row for row in INSTANCES if row.activation == problem.mode.activation]
""": """def _valid_rows(problem: MoEProblem, num_tokens: int) -> list[Any]:
    sizes = num_tokens * problem.top_k, problem.hidden, problem.inter
    return [
        row
        for row in INSTANCES
        if row.activation == problem.mode.activation and row.takes(*sizes)
    ]
""",
                """numbers = {row.number: row.index for row in _valid_rows(problem)}
""": """rows = _valid_rows(problem, problem.num_tokens)
    numbers = {row.number: row.index for row in rows}
""",
                """    _launch(problem, call, tactics)
""": """    if not _launch(problem, call, tactics):
        # The stream has fewer SMs than the device (a green context, or MPS), and
        # blocks of a streamed layer wait for each other.
        _launch(problem, call, _default_tactics(problem, all_sms=False))
""",
                """        return [row.name for row in _valid_rows(self.problem)]
""": """        return [
            row.name
            for row in _valid_rows(self.problem, inputs[0].shape[0])
            if self.gemm_idx == 1 or not row.streamed
        ]
""",
            },
        ),
        text("tests/moe/test_sm12x_streamed_moe.py"),
    ),
)
