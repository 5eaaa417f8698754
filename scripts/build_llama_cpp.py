#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Build the three libraries of ggml that the benchmarks' --llama-cpp wants, out of llama-cpp-python's sdist.

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36
    pip install --target cublas --no-deps "nvidia-cublas==13.1.*"   # where the toolkit has no cuBLAS
    scripts/build_llama_cpp.py llama_cpp_python-0.3.36.tar.gz build --arch 90 --cublas cublas/nvidia/cu13

Needs nvcc, cmake, make and g++. Into ``build/lib`` go libggml-base, libggml-cpu and libggml-cuda, stripped. So that it
takes minutes, CUDA kernels that the benchmarks cannot reach are left out of the sources: all operators but products with
MXFP4 and Q8_0 weights and what gpt-oss's MoE layer puts around them. What remains is compiled as it came, but for the
cases of other formats in mmq.cu and mmvq.cu.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

KEPT = ("MXFP4", "Q8_0")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "CMAKE_SHARED_LINKER_FLAGS": "-Wl,-z,defs",  # a function that is left out and has no stub is told at the link
    "BUILD_SHARED_LIBS": "ON",
    "GGML_CUDA": "ON",
    "GGML_CUDA_GRAPHS": "ON",  # off where ggml is built outside llama.cpp
    "GGML_CUDA_FA": "OFF",
    "GGML_CUDA_NCCL": "OFF",
    "GGML_CUDA_NO_VMM": "ON",  # its pool then needs no libcuda at link; replays of graphs allocate nothing
    "GGML_NATIVE": "OFF",
    "GGML_OPENMP": "OFF",
    "GGML_CCACHE": "OFF",
    "GGML_BUILD_TESTS": "OFF",
    "GGML_BUILD_EXAMPLES": "OFF",
}
# Files of ggml-cuda that a product with quantized weights, dense or of experts, its bias, gpt-oss's activation and the sum
# over experts run through. Functions of all others end the process, or say no where they are asked whether to be used.
SOURCES = (
    "ggml-cuda", "add-id", "binbcast", "mmid", "mmq", "mmvq", "moe-weighted-reduction", "quantize", "unary"
)  # fmt: skip
DECLARATION = re.compile(
    r"(?<!>\n)^(?!template|static|typedef|using|struct|extern|return|#|//)(\w[\w:<>*& ]*?)\b(\w+)\(([^(){};]*)\);",
    re.MULTILINE,
)


def leave_out(cuda: Path) -> None:
    """Take the kernels that are not wanted out of the folder ``ggml-cuda``."""
    instances = cuda / "template-instances"
    for path in instances.glob("*.cu"):
        if path.stem.upper() not in {f"MMQ-INSTANCE-{kind}" for kind in KEPT}:
            # cmake names files of attention one by one, the others by pattern.
            path.write_text("") if path.name.startswith("fattn-vec") else path.unlink()
    included, stubs = [], []
    for path in sorted(cuda.glob("*.cu")):
        header = path.with_suffix(".cuh")
        if path.stem in SOURCES:
            continue
        path.unlink()
        if not header.exists():
            continue
        included.append(f'#include "{header.name}"')
        for result, name, parameters in DECLARATION.findall(header.read_text()):
            body = "return false;" if result.strip() == "bool" else 'GGML_ABORT("left out");'
            stubs.append(f"{result}{name}({re.sub(r' = [^,]*', '', parameters)}) {{ {body} }}")
    (cuda / "left-out.cu").write_text("\n".join([*included, *stubs, ""]))
    for name, called in (("mmq.cu", "mul_mat_q_case"), ("mmvq.cu", "mul_mat_vec_q_switch_ncols_dst")):
        text = (cuda / name).read_text()
        # A case up to its last "break", which calls the template of its own format.
        case = re.compile(
            rf"        case GGML_TYPE_(\w+):\n(?:(?!        case ).*\n)*? *{called}<GGML_TYPE_\1>(?s:.*?)break;\n"
        )
        text, count = case.subn(lambda match: match[0] if match[1] in KEPT else "", text)
        if count < len(KEPT) or re.search(rf"{called}<GGML_TYPE_(?!{'|'.join(KEPT)})", text):
            raise SystemExit(f"{name} is not as this script knows it ({count} cases of {called})")
        (cuda / name).write_text(text)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sdist", type=Path, help="llama_cpp_python-0.3.36.tar.gz")
    parser.add_argument("out", type=Path, help="a folder, made here")
    parser.add_argument("--arch", default="90", help="compute capability of the GPU, as cmake names it (default: 90)")
    parser.add_argument("--cublas", type=Path, help="folder with include/ and lib/libcublas.so.13")
    parser.add_argument("--jobs", type=int, default=2)
    return parser.parse_args()


def main() -> int:
    given = arguments()
    out = given.out.resolve()
    if out.exists():
        return refused(f"{out} exists; name a folder that does not")
    if not given.sdist.is_file():
        return refused(f"{given.sdist} is no file")
    out.mkdir(parents=True)
    with tarfile.open(given.sdist) as archive:
        archive.extractall(out / "source", filter="data")
    ggml = next((out / "source").glob("*/vendor/llama.cpp/ggml"), None)
    if ggml is None:
        return refused(f"{given.sdist} holds no vendor/llama.cpp/ggml; llama-cpp-python's sdist does")
    leave_out(ggml / "src" / "ggml-cuda")
    (ggml / "ggml.pc.in").touch()  # cmake asks for it, the sdist lacks it
    options = OPTIONS | {"CMAKE_CUDA_ARCHITECTURES": f"{given.arch}-real"}
    if given.cublas is not None:
        cublas = given.cublas.resolve()
        options |= {"CUDA_cublas_LIBRARY": f"{cublas}/lib/libcublas.so.13", "CMAKE_CUDA_FLAGS": f"-I{cublas}/include"}
    build, lib = out / "build", out / "lib"
    subprocess.run(["cmake", "-S", ggml, "-B", build, *(f"-D{n}={v}" for n, v in options.items())], check=True)
    names = ("ggml-base", "ggml-cpu", "ggml-cuda")
    subprocess.run(["cmake", "--build", build, f"-j{given.jobs}", "--target", *names], check=True)
    lib.mkdir()
    for name in names:
        # Under the name that the others ask the loader for.
        found = next(path for path in build.rglob(f"lib{name}.so.*") if re.fullmatch(r".*\.so\.\d+", path.name))
        shutil.copy(found, lib / found.name)
        subprocess.run(["strip", lib / found.name], check=True)
    return 0


def refused(why: str) -> int:
    print(f"build_llama_cpp: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
