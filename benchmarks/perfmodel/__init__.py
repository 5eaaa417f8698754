# SPDX-License-Identifier: Apache-2.0
"""Times on a GB10, predicted: counts of the shipped kernels on the virtual SM121, and a GB10's limits.

No part of it is a measurement of a GB10. :mod:`.gb10` has the assumptions with their sources and the time of launches
by their counts, :mod:`.l2` what an L2 of that size loses, :mod:`.moe` and :mod:`.dense` the counts of layers in any
size from runs of a few, :mod:`.step` a whole step of gpt-oss. The runs themselves are ``benchmarks/emulate.py``; what
it found is kept beside these modules in ``gb10_fits.csv``, ``gb10_dense.csv`` and ``gb10_kernels.csv``.

What is not modelled: other sectors that are written and read again (they count once), the clock under load, DRAM
refresh and page conflicts, the sort of a large batch's routing (one block), the producer warp's own pace, and a bound
on bytes in flight (``sm12x-instances`` has them).
"""
