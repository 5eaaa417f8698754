from ..core import JitSpec
from .common import gen_sm12x_jit_spec
from .instances import GEMM_INSTANCES


def gen_sm12x_group_gemm_module() -> JitSpec:
    """The grouped GEMM of MXFP8 rows (e4m3 or e5m2) and MXFP4 matrices."""
    return gen_sm12x_jit_spec(
        "sm12x_group_gemm",
        ["sm12x_group_gemm_binding.cu", "sm12x_registry.cu"],
        "sm12x_group_gemm_instance.jinja",
        GEMM_INSTANCES,
    )
