@functools.lru_cache(maxsize=16)
def _tuning_config(tune_max_num_tokens: int) -> TuningConfig:
    """L2 is cold: a layer's weights do not stay there from one token to the next."""
    return TuningConfig(
        dynamic_tensor_specs=(
            DynamicTensorSpec(
                (0,),
                (0,),
                get_hybrid_num_tokens_buckets(tune_max_num_tokens),
                make_hybrid_bucket_mapper(tune_max_num_tokens),
            ),
        ),
        use_cold_l2_cache=True,
        use_cuda_graph=True,
    )


def _forced(profile_ids: Sequence[int], problem: MoEProblem) -> tuple[int, int]:
    numbers = {row.number: row.index for row in _valid_rows(problem)}
    if len(profile_ids) != 2 or any(
        number != -1 and number not in numbers for number in profile_ids
    ):
        raise ValueError(
            f"profile_ids must be [fc1, fc2], each -1 or one of {sorted(numbers)}, "
            f"got {list(profile_ids)}"
        )
    wanted = [-1 if number == -1 else numbers[number] for number in profile_ids]
    return resolved_pair(wanted, _default_tactics(problem))


def _launch(problem: MoEProblem, call: MoECall, tactics: tuple[int, int]) -> bool:
    """Run a valid call that has an output and a workspace."""

    def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view(torch.uint8)

    fc1_scales, fc1_global, fc2_scales, fc2_global = call.weight_scales
    return get_sm12x_moe_module().sm12x_moe_run(
        call.output,
        call.input,
        None if call.input_sf is None else as_bytes(call.input_sf),
        call.token_selected_experts,
        call.token_final_scales,
        as_bytes(call.fc1_expert_weights),
        as_bytes(fc1_scales),
        fc1_global,
        call.fc1_expert_biases,
        as_bytes(call.fc2_expert_weights),
        as_bytes(fc2_scales),
        fc2_global,
        call.fc2_expert_biases,
        call.swiglu_alpha,
        call.swiglu_beta,
        call.swiglu_limit,
        call.workspace_buffer,
        int(problem.mode),
        call.swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        *tactics,
        call.enable_pdl,
    )


def _run(problem: MoEProblem, call: MoECall, tactics: tuple[int, int]) -> None:
    _launch(problem, call, tactics)


class Sm12xMoERunner(TunableRunner):
    """Times one layer with a given tactic for FC1 (``gemm_idx`` 1) or FC2 (2).

    FC2 starts to read its weights while FC1 still runs, so that only the time of the
    layer tells anything. Inputs are the activations and the two weights.
    """

    def __init__(self, problem: MoEProblem, call: MoECall, gemm_idx: int) -> None:
        self.problem = problem._replace(num_tokens=0)
        self.output_dtype = call.output_dtype
        self.swizzled_input_sf = call.swizzled_input_sf
        self.enable_pdl = call.enable_pdl
        self.gemm_idx = gemm_idx
        self._call_cache = call

    def get_cache_key_extras(self, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        return (
            int(self.problem.mode),
            str(inputs[0].dtype),
            str(self.output_dtype),
            self.problem.top_k,
            self.problem.num_experts_total,
            self.swizzled_input_sf,
            self.enable_pdl,
        )

    def get_valid_tactics(self, inputs: list[torch.Tensor], profile: Any) -> list[str]:
        return [row.name for row in _valid_rows(self.problem)]

    def _profile(self, activations: torch.Tensor) -> tuple[MoEProblem, MoECall]:
        num_tokens, device = activations.shape[0], activations.device
        problem = self.problem._replace(num_tokens=num_tokens)
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(
            (num_tokens, problem.num_experts_total), generator=generator
        )
        ids = scores.topk(problem.top_k, dim=1).indices
        input_sf = None
        if problem.mode is Mode.MXFP8_INPUT:
            shape = (num_tokens, problem.hidden // BLOCK_SIZE)
            if self.swizzled_input_sf:
                shape = (round_up(num_tokens, 128), round_up(shape[1], 4))
            input_sf = torch.full(shape, 0x7F, dtype=torch.uint8, device=device)
        return problem, self._call_cache._replace(
            output=torch.empty(
                (num_tokens, problem.hidden), dtype=self.output_dtype, device=device
            ),
            workspace_buffer=torch.empty(
                _workspace_bytes(problem), dtype=torch.uint8, device=device
            ),
            input=activations,
            input_sf=input_sf,
            token_selected_experts=ids.to(device=device, dtype=torch.int32),
            token_final_scales=torch.full(
                (num_tokens, problem.top_k), 1 / problem.top_k, device=device
            ),
        )

    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = -1,
        do_preparation: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        problem, call = self._profile(inputs[0])
        own = -1 if tactic == -1 else index_of(tactic)
        wanted = (own, -1) if self.gemm_idx == 1 else (-1, own)
        _run(problem, call, resolved_pair(wanted, _default_tactics(problem)))
        return call.output


def _tuned(problem: MoEProblem, call: MoECall) -> tuple[int, int]:
    tuner = AutoTuner.get()
    inputs = [
        call.input,
        call.fc1_expert_weights.view(torch.uint8),
        call.fc2_expert_weights.view(torch.uint8),
    ]
    chosen = []
    for gemm_idx in (1, 2):
        _, tactic = tuner.choose_one(
            f"flashinfer::sm12x_moe::fc{gemm_idx}",
            [Sm12xMoERunner(problem, call, gemm_idx)],
            _tuning_config(call.tune_max_num_tokens),
            inputs,
        )
        chosen.append(-1 if tactic == -1 else index_of(tactic))
    return resolved_pair(chosen, _default_tactics(problem))


def sm12x_mode(
    device: torch.device, input_dtype: torch.dtype, weight_dtype: torch.dtype, **flags
) -> Mode:
    """The mode of a call; ``flags`` are the ``use_*`` flags and ``activation_type``."""
    major, minor = get_compute_capability(device)
    if major != 12:
        raise BackendSupportedError(
            f"backend='sm12x' is for SM120 and SM121, not SM{major}{minor}"
        )
    mode = select_mode(input_dtype, weight_dtype, **flags)
    if mode is None:
        raise ValueError(
            "backend='sm12x' takes MXFP4 weights (uint8 or int64), SwiGLU, and "
            "use_mxfp8_act_scaling (W4A8) or use_w4_group_scaling (W4A16)"
        )
    return mode


def sm12x_fused_moe(call: MoECall) -> torch.Tensor:
    """:func:`flashinfer.fused_moe.cutlass_fused_moe` with MXFP4 weights.

    Hidden and intermediate size are multiples of 32, weights are packed e2m1
    ``(E, 2 * inter, hidden / 2)`` (stacked ``[up; gate]``) and
    ``(E, hidden, inter / 2)``, block scales UE8M0 in the 128x4 layout of each expert.
    ``quant_scales`` are ``[fc1_sf, fc1_global, fc2_sf, fc2_global]`` for W4A8 and
    ``[fc1_sf, fc2_sf]`` for W4A16. Expert ids of other ranks and -1 contribute
    nothing.
    """
    problem, device = validate(call), call.input.device
    if call.output is None:
        output = torch.empty(
            (problem.num_tokens, problem.hidden),
            dtype=call.output_dtype,
            device=device,
        )
        call = call._replace(output=output)
    if problem.num_tokens == 0:
        return call.output

    needed = _workspace_bytes(problem)
    if call.workspace_buffer is None:
        workspace = torch.empty(needed, dtype=torch.uint8, device=device)
        call = call._replace(workspace_buffer=workspace)
    elif call.workspace_buffer.numel() < needed:
        raise ValueError(
            f"workspace_buffer holds {call.workspace_buffer.numel()} bytes; this call "
            f"needs {needed} (cutlass_fused_moe_workspace_size() tells it)"
        )
    if call.enable_pdl is None:
        call = call._replace(enable_pdl=device_support_pdl(device))
    if call.profile_ids is not None:
        tactics = _forced(call.profile_ids, problem)
    else:
        tactics = _tuned(problem, call)
    _run(problem, call, tactics)
    return call.output


def sm12x_fused_moe_workspace_size(
    *,
    max_num_tokens: int,
    hidden_size: int,
    intermediate_size: int,
    num_experts_total: int,
    top_k: int,
    x_dtype: torch.dtype,
    weight_dtype: torch.dtype,
    ep_size: int,
    ep_rank: int,
    device: torch.device,
    **flags,
) -> int:
    """Bytes of ``workspace_buffer`` for up to ``max_num_tokens`` tokens, of sizes that
    :func:`flashinfer.fused_moe.cutlass_fused_moe_workspace_size` has checked.
    """
    mode = sm12x_mode(device, x_dtype, weight_dtype, **flags)
    require_k_alignment("hidden_size", hidden_size)
    require_k_alignment("intermediate_size", intermediate_size)
    require_pairs("max_num_tokens", max_num_tokens, top_k)
    experts = num_experts_total // ep_size
    return _workspace_bytes(
        MoEProblem(
            mode,
            max_num_tokens,
            hidden_size,
            intermediate_size,
            experts,
            top_k,
            ep_rank * experts,
            num_experts_total,
        )
    )
