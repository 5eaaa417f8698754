# SPDX-License-Identifier: Apache-2.0
"""``python <checkout>/flashinfer_sm12x/doctor``: the doctor for machines on which ``import flashinfer`` itself
fails."""

import contextlib
import os
import sys

if not sys.flags.isolated:
    # Start anew without PYTHONPATH, site-packages and the working directory, where a file may shadow a module of
    # Python's; the doctor's questions run with all of them. Also open the first three descriptors. A closed standard
    # output becomes /dev/full, so that a write to it fails and is not taken for printed.
    with contextlib.suppress(OSError):
        while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
            os.set_inheritable(descriptor, True)
            if descriptor == 1:
                os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        os.execv(sys.executable, [sys.executable, "-I", "-S", os.path.dirname(__file__), *sys.argv[1:]])

# Search this tree after Python's own modules, and not this folder, which Python puts first.
sys.path[:] = [*sys.path[1:], os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))]
try:
    from flashinfer_sm12x import doctor

    status = doctor.main(sys.argv[1:])
except SystemExit as ended:  # argparse's
    status = int(ended.code or 0)
except KeyboardInterrupt:
    status = 130
except (ImportError, OSError, SyntaxError, ValueError) as error:
    status = 1
    with contextlib.suppress(OSError):
        os.write(
            2,
            f"sm12x-doctor: this copy of the fork is not whole: {error}; check it out again\n".encode(errors="replace"),
        )
for stream in filter(None, (sys.stdout, sys.stderr)):
    with contextlib.suppress(OSError, ValueError):
        stream.flush()
os._exit(status)  # Python would flush once more, and end with a traceback where nobody listens
