# SPDX-License-Identifier: Apache-2.0
"""The SM12x kernel family's modules: sources, flags and libraries. ``flashinfer_sm12x.build`` compiles them.

=============  ====================================================================
``modules``    the JIT specs: sources and flags of each module
``spec``       how such a spec fits upstream's ``JitSpec``
``prebuilt``   libraries of an installed wheel, in place of a build
``cache``      which modules are compiled, and removing some
``report``     registers and spills of every compiled kernel
=============  ====================================================================
"""
