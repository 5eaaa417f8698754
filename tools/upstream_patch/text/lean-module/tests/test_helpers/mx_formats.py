"""MXFP4 and MXFP8 (OCP Microscaling Formats v1.0) in float64, for references in tests."""

from __future__ import annotations

import pytest
import torch

from flashinfer.utils import get_compute_capability

# take flashinfer/testing/mxfp_formats.py: BLOCK NAN_SCALE SCALE_BIAS E2M1_MAX E4M3_MAX E2M1_VALUES power_of_two
# take flashinfer/testing/mxfp_formats.py: decode_scales _e2m1_table _look_up_nibbles
# take flashinfer/testing/mxfp_formats.py: decode_e2m1 _scale_ _per_element dequantize_mxfp4 dequantize_mxfp8
# take flashinfer/testing/mxfp_formats.py: scale_exponents round_to_e4m3 block_amax _scales_of
# take flashinfer/testing/mxfp_formats.py: quantize_mxfp8 _nan_scales _nearest_codes quantize_mxfp4 swizzle_scales


def skip_unless_sm12x():
    if get_compute_capability(torch.device("cuda"))[0] != 12:
        pytest.skip("these kernels are for SM120 and SM121")


def assert_close(out: torch.Tensor, expected: torch.Tensor, error: torch.Tensor):
    """Within ``error`` of ``expected`` and half a unit in the last place of the output."""
    unit = 2.0**-8 if out.dtype == torch.bfloat16 else 2.0**-11
    worst = ((out.double() - expected).abs() / (unit * expected.abs() + error)).max().item()
    assert worst <= 1, f"{worst:.2f} of the bound"
