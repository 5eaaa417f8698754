# SPDX-License-Identifier: Apache-2.0
"""Runs one command, measures it, and ends with whoever started it. Run as a script by ``executor``.

Usage: ``python -I -S _launch.py <parent pid> <report's file descriptor> <command> ...``

A process of its own for two reasons. The kernel counts the memory of the process that forks towards the peak of the
child (``exec`` keeps the high-water mark of the address space it replaces), so a compiler that a serving process with
gigabytes of weights started itself would seem to need gigabytes. And when that process is killed, this one notices and
takes the compiler with it.
"""

import json
import os
import signal
import sys


def _die_with(parent: int) -> None:
    """Have the kernel send SIGTERM when the parent ends, however it ends."""
    try:
        import ctypes

        set_parent_death_signal = 1  # PR_SET_PDEATHSIG, <linux/prctl.h>
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM, 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return
    if os.getppid() != parent:
        sys.exit(1)


def main() -> int:
    parent, report, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    os.set_inheritable(report, False)

    def end(number: int, _: object) -> None:
        os.write(report, json.dumps({"returncode": -number}).encode())
        # The whole group, this process included: the compiler driver, and the compilers that it started.
        os.killpg(0, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    _die_with(parent)
    try:
        child = os.posix_spawnp(command[0], command, os.environ)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", flush=True)
        return 127
    _, status, usage = os.wait4(child, 0)
    measured = {
        "returncode": os.waitstatus_to_exitcode(status),
        "peak_memory": usage.ru_maxrss * 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }
    os.write(report, json.dumps(measured).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
