# SPDX-License-Identifier: Apache-2.0
"""The two versions: this fork's own, and that of the wheel it is layered over."""

__fork_version__ = "0.1.0"
UPSTREAM_DISTRIBUTION = "flashinfer-python"
UPSTREAM_VERSION = "0.7.2.post1"
