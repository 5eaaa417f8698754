"""JIT modules of the MXFP4 and MXFP8 kernels for SM120 and SM121.

The kernels are in ``include/flashinfer/sm12x``, their launchers and bindings in
``csrc/sm12x``. Each source of a module holds one instance, rendered from a template
and the table in ``instances.py``, so that a module builds in parallel.
"""
