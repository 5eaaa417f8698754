# SPDX-License-Identifier: Apache-2.0
# The wheel also installs a top-level package, b12x. It looks for its code at
# find_spec("flashinfer").origin/../experimental/b12x/_api.py, which is this file: without it, b12x would find nothing.
from flashinfer._layer import extend

_upstream = extend(globals())
