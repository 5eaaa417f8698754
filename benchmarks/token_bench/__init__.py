# SPDX-License-Identifier: Apache-2.0
"""Parts of ``bench_token.py``: sizes and bytes, the model and its operators, measurement, prediction, tables, picture."""
