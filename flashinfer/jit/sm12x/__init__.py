# SPDX-License-Identifier: Apache-2.0
"""The SM12x kernel family's modules: what they are made of, and how they are built.

Nothing is imported here: ``flashinfer.jit.cpp_ext`` needs ``toolchain`` while ``flashinfer.jit`` is still loading.

=================  ====================================================================================
``toolchain``      where the CUDA compiler, its headers and libraries are
``modules``        the JIT specs: sources and flags of each module
``spec``           how such a spec fits upstream's ``JitSpec``
``prebuilt``       libraries of an installed wheel, in place of a build
``content_key``    the hash that names what is built
``build``          from such a plan to a library: ninja, the lock, the log
``trust``          whose files are loaded and compiled
``cache``          which modules lie compiled, and removing some
``jobs``           how many compilers may run, by memory and cores
``diagnosis``      from a compiler's output to a short error
=================  ====================================================================================
"""
