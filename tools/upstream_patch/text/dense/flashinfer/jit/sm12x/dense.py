from ..core import JitSpec
from .common import gen_sm12x_jit_spec
from .instances import DENSE_INSTANCES


def gen_sm12x_dense_module() -> JitSpec:
    """Dense GEMMs with MXFP4 or MXFP8 weights."""
    return gen_sm12x_jit_spec(
        "sm12x_dense", ["sm12x_dense_binding.cu", "sm12x_registry.cu"], "sm12x_dense_instance.jinja", DENSE_INSTANCES
    )
