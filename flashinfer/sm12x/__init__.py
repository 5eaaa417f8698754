# SPDX-License-Identifier: Apache-2.0
"""What this fork's operators, probe and benchmarks share."""
