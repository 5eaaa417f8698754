# SPDX-License-Identifier: Apache-2.0
"""Runs one job of a build for ninja, measures it, and ends with the build. Run as a script, by ``executor``.

Usage: ``python -I -S _launch.py <file descriptor> <number of the job>``, in the folder with ``JOBS_FILE``

What ninja lacks: it neither measures memory nor waits for some, what it runs does not end when the process that wants
the build is killed, and a command counts as unfinished while a daemon that it left behind holds its output open. Here
the output goes to memory first, which serves where the disk is full too.

It is a process of its own for another reason: the kernel counts the memory of the process that forks towards the peak of
the child (``exec`` keeps the high-water mark of the address space it replaces), so a compiler that a serving process with
gigabytes of weights started itself would seem to need gigabytes.
"""

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time

JOBS_FILE = "jobs.json"


def _end_with(build: int) -> None:
    """Wait until nobody holds the other end of the pipe; then end this process, the compiler driver, and its compilers."""
    os.read(build, 1)
    os.killpg(0, signal.SIGKILL)


def _wait_for_memory(need: int, root: str) -> None:
    """Wait until ``need`` bytes are free or no other job runs."""
    sys.path.append(os.path.dirname(__file__))
    from pathlib import Path

    from jobs import available_memory  # type: ignore[import-not-found]

    running = os.open(JOBS_FILE, os.O_RDWR)  # stays open, and so stays the lock that says that a job runs
    try:
        while True:
            try:
                fcntl.flock(running, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if available_memory(Path(root)) >= need:
                    break
            time.sleep(0.1)
        fcntl.flock(running, fcntl.LOCK_SH)
    except OSError:  # a file system without locks
        return


def main() -> int:
    build, number = int(sys.argv[1]), int(sys.argv[2])

    def end(signum: int, _: object) -> None:
        try:
            os.write(1, (json.dumps({"job": number, "returncode": -signum}) + "\n").encode())
        finally:
            os.killpg(0, signal.SIGKILL)

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, end)
    threading.Thread(target=_end_with, args=(build,), daemon=True).start()
    with open(JOBS_FILE) as file:
        job = json.load(file)[number]
    if job["need"] is not None:
        _wait_for_memory(job["need"], job["machine"])
    output, started = os.memfd_create("output"), time.monotonic()
    try:
        returncode = subprocess.run(job["command"], stdout=output, stderr=output).returncode
    except OSError as error:
        os.write(output, f"{job['command'][0]}: {error.strerror}\n".encode())
        returncode = 127
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    measured: dict[str, float | str] = {"returncode": returncode, "peak_memory": usage.ru_maxrss * 1024}
    measured["cpu_seconds"] = usage.ru_utime + usage.ru_stime
    measured["output"] = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
    print(json.dumps({"job": number, "wall_seconds": time.monotonic() - started, **measured}), flush=True)
    return int(returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
