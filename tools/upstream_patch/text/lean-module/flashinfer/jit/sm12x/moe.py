from ..core import JitSpec
from .common import gen_sm12x_jit_spec
from .instances import INSTANCES


def gen_sm12x_moe_module() -> JitSpec:
    """MXFP4 MoE layers: MXFP8 (W4A8) or bfloat16 (W4A16) activations, SwiGLU."""
    return gen_sm12x_jit_spec(
        "sm12x_moe",
        ["sm12x_moe_binding.cu", "sm12x_launcher.cu", "sm12x_registry.cu"],
        "sm12x_moe_instance.jinja",
        INSTANCES,
    )
