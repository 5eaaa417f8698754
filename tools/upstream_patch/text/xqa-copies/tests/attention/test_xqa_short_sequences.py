import pytest
import torch

from flashinfer import xqa
from flashinfer.utils import get_compute_capability, get_device_sm_count

PAGE, HEAD_DIM, KV_HEADS, GROUP = 16, 64, 2, 8


# A warp that fetched a tile beyond the sequence must not let it land in the output.
@pytest.mark.parametrize("seq_len", [1, 64, 65, 77, 96, 128, 129, 300])
def test_xqa_short_sequences(seq_len):
    device = torch.device("cuda", 0)
    if get_compute_capability(device)[0] not in (9, 10, 12):
        pytest.skip("XQA is for SM90, SM100 and SM120 GPUs")
    torch.manual_seed(0)
    pages = (seq_len + PAGE - 1) // PAGE
    heads = KV_HEADS * GROUP

    def bf16(*shape):
        return torch.randn(*shape, device="cuda").to(torch.bfloat16)

    q = bf16(1, 1, heads, HEAD_DIM)
    k, v = (bf16(pages, PAGE, KV_HEADS, HEAD_DIM) for _ in range(2))
    output = torch.full_like(q, float("nan"))
    xqa(
        q,
        k,
        v,
        torch.arange(pages, dtype=torch.int32, device="cuda").view(1, pages),
        torch.tensor([[seq_len]], dtype=torch.uint32, device="cuda"),
        output,
        torch.zeros(64 << 20, dtype=torch.uint8, device="cuda"),
        torch.zeros(1024, dtype=torch.uint32, device="cuda"),
        KV_HEADS,
        PAGE,
        sm_count=get_device_sm_count(device),
    )
    keys, values = (cache.double().view(-1, KV_HEADS, HEAD_DIM)[:seq_len] for cache in (k, v))
    for head in range(heads):
        scores = keys[:, head // GROUP] @ q[0, 0, head].double() / HEAD_DIM**0.5
        weights = scores.softmax(0)
        expected = weights @ values[:, head // GROUP]
        # Weights and result are rounded to bfloat16.
        bound = 2.0**-7 * (weights @ values[:, head // GROUP].abs())
        bound += 2.0**-8 * expected.abs() + 1e-5
        worst = ((output[0, 0, head].double() - expected).abs() / bound).max().item()
        assert worst <= 1, f"head {head}: {worst:.2f} of the bound"
