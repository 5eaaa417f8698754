# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer sm12x-quantize``: QKV, O and LM head of a checkpoint, quantized once with error feedback.

The package also measures the loss of each format and mode on a language model; ``benchmarks/bench_accuracy.py`` makes
tables of it. It needs transformers, which FlashInfer does not require; only ``files``, ``manifest`` and ``folder``,
which vLLM's plugin uses, do without.

==============  ==============================================================================
``files``       fields of files, checked before use; files written whole or not at all
``manifest``    the manifest of a folder of quantized layers
``folder``      its tensors: how they are written, read and checked
``formats``     the formats of weights and tokens: rounding to them
``choice``      formats by layer, as one choice
``checkpoint``  a checkpoint's folder, read as vLLM reads it
``models``      models as transformers has them, from a folder, a hub or a GGUF file
``gpt_oss``     transformers' gpt-oss with this fork's experts
``texts``       what models read: for calibration, for evaluation
``measure``     the losses of a choice
``run``         the model over text, its layers one after the other, and the losses
``command``     the command line
``endings``     the line that a command ends with
==============  ==============================================================================

:mod:`flashinfer.quantization.error_feedback` has the arithmetic.
"""
