"""What a call with ``backend="sm12x"`` may look like.

Nothing here looks at an element. Errors name the argument, what it was and what it
may be.
"""

from __future__ import annotations

import enum
import functools
import operator
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..jit.sm12x.instances import MAX_EXPERTS, Format
