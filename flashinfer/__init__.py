# SPDX-License-Identifier: Apache-2.0
"""FlashInfer with MXFP4 mixture-of-experts kernels for SM120 and SM121 (RTX Blackwell, DGX Spark).

A layer over the wheel ``flashinfer-python``: everything that is not here comes from there (``flashinfer._layer``).
``__version__`` is the wheel's, ``__fork_version__`` is this layer's. Over a wheel that was not tested, and with
``FLASHINFER_SM12X_MOE=0``, this is the wheel's package, without ``__fork_version__``.
"""

_before = set(globals())

import sys as _sys

# While `python -m flashinfer COMMAND` imports this package, argv is ["-m", COMMAND, ...]; before COMMAND there stood
# `-m flashinfer`, `-mflashinfer` or `-Xdev -Bm flashinfer`.
_as_program = _sys.argv[:1] == ["-m"] and _sys.orig_argv[-len(_sys.argv)].rpartition("m")[2] == "flashinfer"
if _as_program and _sys.argv[1:2] == ["sm12x-doctor"]:
    # Before anything is imported of what the doctor is to look at, and which may be what is wrong.
    import os as _os
    import runpy as _runpy

    del _sys.argv[1]
    try:
        _tree = _os.path.dirname(_os.path.dirname(__file__))
        _runpy.run_path(_os.path.join(_tree, "flashinfer_sm12x", "doctor"), run_name="__main__")
    except OSError as error:
        raise SystemExit(f"python -m flashinfer: this copy of the fork is not whole: {error}") from None

from flashinfer_sm12x.versions import upstream_alone as _upstream_alone

if _reason := _upstream_alone():
    from flashinfer._layer import hand_over as _hand_over

    _hand_over(globals(), _before, _reason)
else:
    try:
        from flashinfer._layer import extend as extend

        try:
            _upstream = extend(globals())
        except ValueError:
            from flashinfer_sm12x.variables import check_imported as _check_imported

            _check_imported()
            raise
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        # The wheel, the cache or a variable, and what fixes it.
        if _as_program:
            raise SystemExit(f"python -m flashinfer: {error}") from None
        raise

    from typing import TYPE_CHECKING, Any

    from flashinfer_sm12x.versions import __fork_version__ as __fork_version__

    if TYPE_CHECKING:
        __version__ = __fork_version__  # of its type

        def __getattr__(name: str) -> Any: ...
