# SPDX-License-Identifier: Apache-2.0
"""``python -m flashinfer sm12x-quantize``: QKV, O and LM head of a checkpoint, quantized once with error feedback.

===========  ==================================================================================
``manifest`` what a folder of it says of itself
``folder``   its tensors: how they are written, read and checked
``run``      the model over text, its layers one after the other, and the losses
``command``  the command line
===========  ==================================================================================

:mod:`flashinfer.quantization.error_feedback` has the arithmetic.
"""
