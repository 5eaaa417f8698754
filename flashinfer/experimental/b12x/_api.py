# SPDX-License-Identifier: Apache-2.0
# The wheel also installs a top-level package, b12x. It looks for its code at
# find_spec("flashinfer").origin/../experimental/b12x/_api.py, which is this file: without it, b12x would find nothing.
import flashinfer as _flashinfer

if hasattr(_flashinfer, "__fork_version__"):
    from flashinfer._layer import extend

    _upstream = extend(globals())
else:
    # It was found by our place on sys.path; what was imported then is upstream's package alone, and so is b12x.
    import os as _os
    from importlib.machinery import SourceFileLoader as _SourceFileLoader

    assert _flashinfer.__file__ is not None
    __path__ = [_os.path.join(_os.path.dirname(_flashinfer.__file__), "experimental", "b12x")]
    __file__ = _os.path.join(__path__[0], "_api.py")
    __loader__ = _SourceFileLoader(__name__, __file__)
    assert __spec__ is not None
    __spec__.loader, __spec__.origin, __spec__.submodule_search_locations = __loader__, __file__, __path__
    _code = __loader__.get_code(__name__)
    assert _code is not None
    exec(_code, globals())
