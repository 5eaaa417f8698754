# SPDX-License-Identifier: Apache-2.0
"""Modules that the operators of the SM12x family share, in the order in which a call uses them.

=============  ================================================================================
``operator``   a call's arguments as one tuple; the operator that ``torch.compile`` sees
``device_class``  what the kernels serve, one row a class of GPUs: its tables, thresholds and MMAs
``devices``    which GPU it is, and whether this fork or upstream computes there
``checks``     what an argument may be: one vocabulary for all operators
``tune``       what upstream's autotuner has timed
``backend``    the backend that runs the kernels: a CUDA device, the virtual one, or none (CPU tensors)
``instances``  the one table of kernel instances
``signals``    Ctrl-C, SIGTERM and SIGHUP end a command in a line
``models``     sizes of models and layers; bytes of a matrix
=============  ================================================================================
"""
