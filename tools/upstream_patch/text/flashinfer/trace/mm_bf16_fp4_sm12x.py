def _mm_bf16_fp4_sm12x_reference(a, b, b_descale, alpha=None, block_size=32):
    """Reference for the MXFP4 weights of the sm12x backend, as mxfp4_quantize returns them.

    b: [N, K//2] uint8, two FP4 codes per byte.
    b_descale: uint8 E8M0 per-block scales in the 128x4 layout, N and K padded.
    """
    n, k_half = b.shape
    k = k_half * 2
    sf_bytes = _unswizzle_sf_128x4(b_descale.reshape(-1), n, k // block_size)
    sf = _e8m0_to_float(sf_bytes).repeat_interleave(block_size, dim=1)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], device=b.device)
    lut = torch.cat([magnitudes, -magnitudes])
    codes = torch.stack([b & 0xF, b >> 4], dim=-1).to(torch.int64).reshape(n, k)
    return _bf16_fp4_matmul(a, (lut[codes] * sf).T, alpha)


cast(Any, _mm_bf16_fp4_sm12x_reference)._trace_reference_dependencies = (
    _bf16_fp4_matmul,
    _e8m0_to_float,
    _unswizzle_batched_sf_128x4,
    _unswizzle_sf_128x4,
)


def _mm_bf16_fp4_sm12x_init(
    *,
    M: int,
    N: int = 2880,
    K: int = 2880,
    block_size: int = 32,
    K_div_2: int = 0,  # derived
    N_padded: int = 0,  # derived
    K_sf_padded: int = 0,  # derived
    device: str = "cuda",
    seed: int = 0,
):
    """Build inputs for ``flashinfer.mm_bf16_fp4`` (sm12x backend)."""
    del K_div_2, N_padded, K_sf_padded
    from flashinfer import mxfp4_quantize  # noqa: PLC0415

    if not torch.cuda.is_available() or torch.device(device).type != "cuda":
        raise NotImplementedError("mm_bf16_fp4 init requires a CUDA device")
    major, minor = torch.cuda.get_device_capability(torch.device(device))
    if major != 12:
        raise NotImplementedError(f"the sm12x backend is not for SM{major}{minor}")

    torch.manual_seed(seed)
    a = torch.randn(M, K, dtype=torch.bfloat16, device=device)
    w = torch.randn(N, K, dtype=torch.bfloat16, device=device)
    b, b_descale = mxfp4_quantize(w)
    return {
        "a": a,
        "b": b,
        "b_descale": b_descale,
        "alpha": None,
        "backend": "sm12x",
        "block_size": int(block_size),
    }


mm_bf16_fp4_sm12x_trace = TraceTemplate(
    op_type="gemm_bf16_fp4",
    name_prefix="mm_bf16_fp4_sm12x",
    description=(
        "bf16 x MXFP4 GEMM C = (A @ dequant(B).T) * alpha on SM120/121. A is bf16; B is "
        "fp4 (e2m1fn_x2 packed as uint8) with E8M0 per-block scales in the 128x4 layout."
    ),
    axes={
        "M": Var(description="Tokens."),
        "N": Const(description="Weight rows."),
        "K": Const(description="Elements of a token and of a weight row."),
        "block_size": Const(description="Elements of K that share a scale, 32."),
    },
    inputs={
        "A": Tensor(["M", "K"], param="a", description="Tokens in bfloat16."),
        "B": Tensor(
            ["N", "K_div_2"],
            param="b",
            description="Weight rows, two e2m1 values a byte.",
        ),
        "b_descale": Tensor(
            ["N_padded", "K_sf_padded"],
            description="Per-block scales, E8M0 as uint8, 128x4-swizzled, N and K padded.",
        ),
        "alpha": Tensor(
            ["1"],
            optional=True,
            description="Optional global scale, float32, shape (1,).",
        ),
        "block_size": Scalar("int32", description="FP4 block size (always 32)."),
    },
    outputs={
        "C": Tensor(["M", "N"], dtype_from="a"),
    },
    tags=["status:verified", "quantization:fp4"],
    reference=_mm_bf16_fp4_sm12x_reference,
    check=_fp4_gemm_check,
    init=_mm_bf16_fp4_sm12x_init,
)
