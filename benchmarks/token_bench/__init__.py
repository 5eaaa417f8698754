# SPDX-License-Identifier: Apache-2.0
"""Parts of ``bench_token.py``: the model and its operators, measurement, tables, picture."""
