# SPDX-License-Identifier: Apache-2.0
"""Compiles modules with nvcc and ninja. Nothing here imports flashinfer or torch: the doctor tries a build with it.

================  ====================================================================
``toolchain``     finds the CUDA compiler, its headers and libraries, and ninja
``build_hash``    the hash of everything that goes into an object or a library
``record``        names the inputs that changed since an older library
``engine``        writes the build plan, runs ninja, places the library
``jobs``          how many compilers at once, by cores and free memory
``trust``         refuses files that other users can write; writes files atomically
``diagnosis``     errors of compilers in words, with their fix
``inspect_sass``  registers, spills and instructions of a compiled kernel
================  ====================================================================

``flashinfer/jit/sm12x`` describes the modules that are built.
"""
