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


def _run(
    problem: MoEProblem,
    arguments: tuple[Any, ...],
    workspace: torch.Tensor,
    swizzled_input_sf: bool,
    tactics: tuple[int, int],
    enable_pdl: bool,
) -> None:
    get_sm12x_moe_module().sm12x_moe_run(
        *arguments,
        workspace,
        int(problem.mode),
        swizzled_input_sf,
        problem.first_expert,
        problem.num_experts_total,
        *tactics,
        enable_pdl,
    )


class Sm12xMoERunner(TunableRunner):
    """Times one layer with a given tactic for FC1 (``gemm_idx`` 1) or FC2 (2).

    FC2 starts to read its weights while FC1 still runs, so that only the time of the
    layer tells anything. Inputs are the activations and the two weights.
    """

    def __init__(
        self,
        problem: MoEProblem,
        arguments: tuple[Any, ...],
        swizzled_input_sf: bool,
        enable_pdl: bool,
        gemm_idx: int,
    ) -> None:
        self.problem = dataclasses.replace(problem, num_tokens=0)
        self.output_dtype = arguments[_OUTPUT].dtype
        self.swizzled_input_sf = swizzled_input_sf
        self.enable_pdl = enable_pdl
        self.gemm_idx = gemm_idx
        self._arguments_cache = arguments

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

    def _profile_arguments(self, activations: torch.Tensor) -> tuple[Any, ...]:
        problem, device = self.problem, activations.device
        num_tokens = activations.shape[0]
        arguments = list(self._arguments_cache)
        arguments[_INPUT] = activations
        arguments[_OUTPUT] = torch.empty(
            (num_tokens, problem.hidden), dtype=self.output_dtype, device=device
        )
        generator = torch.Generator().manual_seed(0)
        scores = torch.rand(
            (num_tokens, problem.num_experts_total), generator=generator
        )
        ids = scores.topk(problem.top_k, dim=1).indices
        arguments[_IDS] = ids.to(device=device, dtype=torch.int32)
        arguments[_SCALES] = torch.full(
            (num_tokens, problem.top_k), 1 / problem.top_k, device=device
        )
        if problem.mode is Mode.MXFP8_INPUT:
            blocks = problem.hidden // BLOCK_SIZE
            shape = (num_tokens, blocks)
            if self.swizzled_input_sf:
                shape = (round_up(num_tokens, 128), round_up(blocks, 4))
            arguments[_INPUT_SF] = torch.full(
                shape, 0x7F, dtype=torch.uint8, device=device
            )
        return tuple(arguments)

    def forward(
        self,
        inputs: list[torch.Tensor],
        tactic: Any = -1,
        do_preparation: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        arguments = self._profile_arguments(inputs[0])
        problem = dataclasses.replace(self.problem, num_tokens=inputs[0].shape[0])
        workspace = torch.empty(
            _workspace_bytes(problem), dtype=torch.uint8, device=inputs[0].device
        )
        own = -1 if tactic == -1 else index_of(tactic)
        wanted = (own, -1) if self.gemm_idx == 1 else (-1, own)
        tactics = resolved_pair(wanted, _default_tactics(problem))
        _run(
            problem,
            arguments,
            workspace,
            self.swizzled_input_sf,
            tactics,
            self.enable_pdl,
        )
        return arguments[_OUTPUT]


def _tuned(
    problem: MoEProblem,
    arguments: tuple[Any, ...],
    swizzled_input_sf: bool,
    enable_pdl: bool,
    tune_max_num_tokens: int,
) -> tuple[int, int]:
    tuner = AutoTuner.get()
    chosen = []
    for gemm_idx in (1, 2):
        runner = Sm12xMoERunner(
            problem, arguments, swizzled_input_sf, enable_pdl, gemm_idx
        )
        _, tactic = tuner.choose_one(
            f"flashinfer::sm12x_moe::fc{gemm_idx}",
            [runner],
            tuning_config(tune_max_num_tokens),
            [arguments[_INPUT], arguments[_FC1], arguments[_FC2]],
        )
        chosen.append(-1 if tactic == -1 else index_of(tactic))
    return resolved_pair(chosen, _default_tactics(problem))


def _mode(
    device: torch.device, input_dtype: torch.dtype, weight_dtype: torch.dtype, **flags
) -> Mode:
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


def _bytes(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if tensor is None else tensor.view(torch.uint8)


def sm12x_fused_moe(
    *,
    input: torch.Tensor,
    token_selected_experts: torch.Tensor,
    token_final_scales: Optional[torch.Tensor],
    fc1_expert_weights: torch.Tensor,
    fc2_expert_weights: torch.Tensor,
    output_dtype: torch.dtype,
    quant_scales: list[torch.Tensor],
    fc1_expert_biases: Optional[torch.Tensor],
    fc2_expert_biases: Optional[torch.Tensor],
    input_sf: Optional[torch.Tensor],
    swiglu_alpha: Optional[torch.Tensor],
    swiglu_beta: Optional[torch.Tensor],
    swiglu_limit: Optional[torch.Tensor],
    tp_size: int,
    tp_rank: int,
    ep_size: int,
    ep_rank: int,
    output: Optional[torch.Tensor],
    tune_max_num_tokens: int,
    enable_pdl: Optional[bool],
    swizzled_input_sf: bool,
    profile_ids: Optional[list[int]],
    workspace_buffer: Optional[torch.Tensor],
    **flags,
) -> torch.Tensor:
    """:func:`flashinfer.fused_moe.cutlass_fused_moe` with MXFP4 weights.

    Hidden and intermediate size are multiples of 32, weights are packed e2m1
    ``(E, 2 * inter, hidden / 2)`` (stacked ``[up; gate]``) and
    ``(E, hidden, inter / 2)``, block scales UE8M0 in the 128x4 layout of each expert.
    ``quant_scales`` are ``[fc1_sf, fc1_global, fc2_sf, fc2_global]`` for W4A8 and
    ``[fc1_sf, fc2_sf]`` for W4A16. Expert ids of other ranks and -1 contribute
    nothing. ``flags`` are the ``use_*`` flags and ``activation_type``.
    """
    mode = _mode(input.device, input.dtype, fc1_expert_weights.dtype, **flags)
    problem = validate_moe(
        mode,
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
        output=output,
        output_dtype=output_dtype,
        swizzled_input_sf=swizzled_input_sf,
        tp_size=tp_size,
        tp_rank=tp_rank,
        ep_size=ep_size,
        ep_rank=ep_rank,
    )
    if output is None:
        output = torch.empty(
            (problem.num_tokens, problem.hidden),
            dtype=output_dtype,
            device=input.device,
        )
    if problem.num_tokens == 0:
        return output

    needed = _workspace_bytes(problem)
    if workspace_buffer is None:
        workspace_buffer = torch.empty(needed, dtype=torch.uint8, device=input.device)
    else:
        check_workspace(
            workspace_buffer,
            needed,
            input.device,
            "cutlass_fused_moe_workspace_size() tells it",
        )
        require_alignment({"workspace_buffer": workspace_buffer}, WORKSPACE_ALIGNMENT)
    if mode is Mode.W4A16:
        (fc1_sf, fc2_sf), fc1_global, fc2_global = quant_scales, None, None
    else:
        fc1_sf, fc1_global, fc2_sf, fc2_global = quant_scales
    require_alignment(
        {
            "input": input,
            "output": output,
            "fc1_expert_weights": fc1_expert_weights,
            "fc1_expert_biases": fc1_expert_biases,
            "fc2_expert_weights": fc2_expert_weights,
            "fc2_expert_biases": fc2_expert_biases,
            "block scales of fc1": fc1_sf,
            "block scales of fc2": fc2_sf,
        }
    )
    require_alignment({"input_sf": input_sf}, 4)
    arguments = (
        output,
        input,
        _bytes(input_sf),
        token_selected_experts,
        token_final_scales,
        _bytes(fc1_expert_weights),
        _bytes(fc1_sf),
        fc1_global,
        fc1_expert_biases,
        _bytes(fc2_expert_weights),
        _bytes(fc2_sf),
        fc2_global,
        fc2_expert_biases,
        swiglu_alpha,
        swiglu_beta,
        swiglu_limit,
    )
    if enable_pdl is None:
        enable_pdl = device_support_pdl(input.device)
    if profile_ids is not None:
        tactics = _forced(profile_ids, problem)
    else:
        tactics = _tuned(
            problem, arguments, swizzled_input_sf, enable_pdl, tune_max_num_tokens
        )
    _run(problem, arguments, workspace_buffer, swizzled_input_sf, tactics, enable_pdl)
    return output


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
    mode = _mode(device, x_dtype, weight_dtype, **flags)
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
