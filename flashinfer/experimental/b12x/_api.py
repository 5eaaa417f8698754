# SPDX-License-Identifier: Apache-2.0
# The wheel also installs a top-level package, b12x. It looks for its code at
# find_spec("flashinfer").origin/../experimental/b12x/_api.py, which is this file: without it, b12x would find nothing.
import flashinfer as _flashinfer

if hasattr(_flashinfer, "__fork_version__"):
    from flashinfer._layer import extend

    _upstream = extend(globals())
else:
    # It was found by our place on sys.path; what was imported then is upstream's package alone, and so is b12x.
    import importlib.util as _util
    import os as _os
    import sys as _sys

    assert _flashinfer.__file__ is not None
    _folder = _os.path.join(_os.path.dirname(_flashinfer.__file__), "experimental", "b12x")
    _spec = _util.spec_from_file_location(
        __name__, _os.path.join(_folder, "_api.py"), submodule_search_locations=[_folder]
    )
    assert _spec is not None
    assert _spec.loader is not None
    globals().update(__file__=_spec.origin, __path__=[_folder], __spec__=_spec, __loader__=_spec.loader)
    _spec.loader.exec_module(_sys.modules[__name__])
