# SPDX-License-Identifier: Apache-2.0
from flashinfer._layer import extend

_upstream = extend(globals())
