import os
import shutil
import subprocess
from pathlib import Path

import pytest

from flashinfer.jit import env as jit_env
from flashinfer.jit.cpp_ext import get_cuda_path

HEADERS = {
    "tensorrt_llm/common/cudaUtils.h": "csrc/nv_internal/include",
    "flashinfer/trtllm/common/cudaUtils.h": "include",
}


@pytest.mark.parametrize("header", HEADERS)
def test_header_compiles_without_cublas(tmp_path: Path, header: str):
    """Toolkits from PyPI (nvidia-cuda-nvcc) come without cublas_v2.h."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    toolkit = Path(get_cuda_path()) / "include"
    if compiler is None or not (toolkit / "cuda_runtime.h").is_file():
        pytest.skip("needs a C++ compiler and the CUDA headers")
    without_cublas = tmp_path / "include"
    without_cublas.mkdir()
    for file in toolkit.iterdir():
        if not file.name.startswith("cublas"):
            (without_cublas / file.name).symlink_to(file)
    source = tmp_path / "source.cpp"
    source.write_text(f'#include "{header}"\n')
    csrc = jit_env.FLASHINFER_CSRC_DIR
    includes = [
        jit_env.FLASHINFER_INCLUDE_DIR,
        csrc,
        csrc / "nv_internal",
        csrc / "nv_internal" / "include",
        jit_env.SPDLOG_INCLUDE_DIR,
        *jit_env.CUTLASS_INCLUDE_DIRS,
        *jit_env.CCCL_INCLUDE_DIRS,
    ]
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", f"-I{without_cublas}"]
    command += [f"-I{folder}" for folder in includes]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
