# SPDX-License-Identifier: Apache-2.0
"""Measure what formats and modes cost on a language model: models as transformers has them, texts, and losses.

``benchmarks/bench_accuracy.py`` makes tables of it, ``sm12x-quantize`` quantizes these models. Needs transformers, which
the package does not require.
"""
