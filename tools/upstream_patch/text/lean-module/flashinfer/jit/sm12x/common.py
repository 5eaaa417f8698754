from typing import Any, List, Sequence

import jinja2

from .. import env as jit_env
from ..core import JitSpec, current_compilation_context, gen_jit_spec
from ..utils import write_if_different

SOURCE_DIR = "sm12x"


def gen_sm12x_jit_spec(name: str, sources: Sequence[str], template: str, instances: Sequence[Any]) -> JitSpec:
    """The spec of a module: ``sources`` and one rendered source per instance.

    ``sources`` and ``template`` are names of files in ``csrc/sm12x``.
    """
    source_dir = jit_env.FLASHINFER_CSRC_DIR / SOURCE_DIR
    gen_directory = jit_env.FLASHINFER_GEN_SRC_DIR / name
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True, lstrip_blocks=True
    )
    with open(source_dir / template) as f:
        kernel_inst_templ = environment.from_string(f.read())

    source_paths: List[Any] = [source_dir / source for source in sources]
    for instance in instances:
        dest_path = gen_directory / f"{instance.name}.cu"
        source_paths.append(dest_path)
        source = kernel_inst_templ.render(instance=instance)
        write_if_different(dest_path, source)

    return gen_jit_spec(
        name,
        source_paths,
        extra_cuda_cflags=current_compilation_context.get_nvcc_flags_list(supported_major_versions=[12]),
        # The quantizers' results are part of the operators' contract.
        use_fast_math=False,
    )
