# SPDX-License-Identifier: Apache-2.0
"""This fork's own package. Its modules import neither ``flashinfer`` nor torch, so that they can be used before, or
without, ``import flashinfer``, whose ``__init__`` runs upstream's code. Its subpackages import what they need.

===============  =====================================================================================
``versions``     this fork's version, the tested wheels of upstream, and what is installed
``variables``    every environment variable: its values and its default
``host_memory``  memory of a host that shares it with its GPU
``files``        output that is written whole or not at all; JSON whose errors name the file
``counted``      counts in messages
``signals``      Ctrl-C, SIGTERM and SIGHUP end a command in a line
``build``        the build engine: CUDA toolchain, build hash, jobs, trust, diagnosis
``vllm``         vLLM's plugin
``doctor``       ``python -m flashinfer sm12x-doctor``
``quantize``     ``python -m flashinfer sm12x-quantize``
===============  =====================================================================================

``flashinfer/`` is the overlay over upstream's wheel: operators, planner, kernel tables, module generators, references.
"""
