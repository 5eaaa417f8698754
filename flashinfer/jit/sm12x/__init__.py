# SPDX-License-Identifier: Apache-2.0
"""The SM12x kernel family's modules: what they are made of, and how they are built.

Nothing is imported here: ``flashinfer.jit.cpp_ext`` needs ``toolchain`` while ``flashinfer.jit`` is still loading.

=================  ====================================================================================
``instances``      the one table of kernel instances
``toolchain``      where the CUDA compiler, its headers and libraries are
``modules``        the JIT specs: sources and flags of each module
``spec``           how such a spec fits upstream's ``JitSpec``
``prebuilt``       libraries of an installed wheel, in place of a build
``build``          the engine: what is fresh, what is built, under which lock; log and progress
``freshness``      content hashes, names of folders, and the manifest
``trust``          whose a cache may be; writing into it without following links
``jobs``           how many compilers may run, from memory and cores
``executor``       has ninja run compilers, and measures them
``diagnosis``      from a compiler's output to a short error
=================  ====================================================================================
"""
