# SPDX-License-Identifier: Apache-2.0
"""Applies the changes of tests/mutations.toml, one at a time, and says which tests notice.

A worker has a copy of the checkout and a build cache of its own. For each change it restores the unchanged tree's
cache, applies the change, and runs the change's tests in order until one fails; only files that the change touches are
compiled. Before that, the same tests must pass without any change.

A change ends as

    killed       a test failed
    equivalent   nothing observable changes; the list says why, and none of its tests failed
    survived     no test failed: one is missing
    broken       it could not be tried: its text is not there, it does not compile, or its tests cannot be run

and the exit status is 1 if one survived or is broken.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import datetime
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
LIST = "tests/mutations.toml"
MARKED = re.compile(r"\[-(.*?)-\]|\{\+(.*?)\+\}", re.DOTALL)  # as git diff --word-diff marks what goes and what comes
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", "not gpu")
PLUGINS = ("-p", "no:cacheprovider", "-p", "separate_instances")
GOOD = ("killed", "equivalent")
VERDICTS = (*GOOD, "survived", "broken")


@dataclasses.dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        name: A few words that tell it from the others.
        file: The file, from the checkout's root.
        old, new: The text, which stands there exactly once, and what takes its place.
        tests: Tests that should notice, cheapest first: node ids, or ``FILE -k EXPRESSION``.
        equivalent: Why nothing observable changes; empty where a test must notice.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""


@dataclasses.dataclass
class Outcome:
    """The result of a change: a word of the module's docstring, the test or the reason, and the CPU seconds that it
    took."""

    mutation: Mutation
    verdict: str
    by: str = ""
    cpu_seconds: float = 0.0


def read_list(path: Path) -> list[Mutation]:
    """The list in a file, whose head says how it is written.

    Raises:
        ValueError: an entry is not complete, or a name stands twice.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    files, names, equivalent = (data.get(table, {}) for table in ("files", "tests", "equivalent"))
    mutations: dict[str, Mutation] = {}
    for file, entries in data["changes"].items():
        for name, entry in entries.items():
            if list(map(type, entry)) != [list, str] or not MARKED.search(entry[1]):
                raise ValueError(f"{name} is {entry}; it must be [[tests], text with [-old-] or {{+new+}}]")
            if name in mutations:
                raise ValueError(f"{name} stands twice")
            tests, text = entry
            old, new = MARKED.sub(r"\1", text), MARKED.sub(r"\2", text)
            if not tests and name not in equivalent:
                raise ValueError(f"{name} names no test")
            parts = (re.split("(::| -k )", names.get(test, test), maxsplit=1) for test in tests)
            nodes = tuple(files.get(where, where) + "".join(rest) for where, *rest in parts)
            mutations[name] = Mutation(name, files.get(file, file), old, new, nodes, equivalent.get(name, ""))
    if unknown := equivalent.keys() - mutations.keys():
        raise ValueError(f"equivalent names no change: {', '.join(unknown)}")
    return list(mutations.values())


def changed(text: str, mutation: Mutation) -> str:
    """``text`` with the change.

    Raises:
        ValueError: the old text does not stand in it exactly once.
    """
    count = text.count(mutation.old)
    if count != 1 or mutation.old == mutation.new:
        raise ValueError(f"{mutation.name}: the old text stands {count} times in {mutation.file}")
    return text.replace(mutation.old, mutation.new)


def rotated(mutations: Sequence[Mutation], count: int, turn: int) -> list[Mutation]:
    """``count`` that a test must notice; consecutive turns go round the whole list."""
    ready = [mutation for mutation in mutations if not mutation.equivalent]
    first = turn * count
    return [ready[i % len(ready)] for i in range(first, first + min(count, len(ready)))]


def test_arguments(test: str) -> list[str]:
    """pytest's arguments for one entry of ``tests``."""
    where, marker, expression = test.partition(" -k ")
    return [where, "-k", expression] if marker else [test]


def emulator_preload(root: Path) -> str:
    """The value that ``LD_PRELOAD`` needs so that a torch that brings CUDA runs on the emulator's runtime; else
    nothing."""
    command = [sys.executable, "-m", "vsm.preload"]
    environment = {**os.environ, "PYTHONPATH": str(root / "emulator" / "python")}
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def copy_tree(source: Path, target: Path) -> None:
    """Make ``target`` the tracked files of ``source`` as they are now; files that are so already are left alone. The
    emulator, which no change touches, is ``source``'s own, with its libraries."""
    # Whoever's checkout it is: it is only read.
    command = ["git", "-c", "safe.directory=*", "-C", str(source), "ls-files", "-z"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout
    files = {os.fsdecode(name) for name in listed.split(b"\0") if name and not name.startswith(b"emulator/")}
    files = {name for name in files if (source / name).is_file()}
    for path in sorted(target.rglob("*"), reverse=True) if target.is_dir() else []:
        if path.is_file() and not path.is_symlink() and str(path.relative_to(target)) not in files:
            path.unlink()
    for name in files:
        content = (source / name).read_bytes()
        to = target / name
        if not to.is_file() or to.read_bytes() != content:
            to.parent.mkdir(parents=True, exist_ok=True)
            to.write_bytes(content)
            shutil.copymode(source / name, to)
    if not (target / "emulator").is_symlink():
        (target / "emulator").symlink_to(source / "emulator", target_is_directory=True)


def replace_tree(target: Path, source: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)


@dataclasses.dataclass
class Worker:
    """A copy of the tree, a build cache, and the cores that its processes may use.

    The folders stay where they are from run to run: what was compiled for the unchanged tree is then found again.
    """

    folder: Path
    cores: set[int]
    limit: float
    preload: str

    def __post_init__(self) -> None:
        self.tree, self.cache, self.seed = (self.folder / name for name in ("tree", "cache", "seed"))

    def prepare(self, source: Path) -> None:
        """Copy the tree."""
        copy_tree(source, self.tree)
        self.cache.mkdir(exist_ok=True)

    def run_tests(self, tests: Sequence[str]) -> tuple[int, str, float]:
        """pytest's exit status, its output, and the CPU time of it and all that it started. -1: it took too long."""
        paths = (self.tree, self.tree / "tests")
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FLASHINFER_WORKSPACE_BASE": str(self.cache),
            "OMP_NUM_THREADS": "1",
            "MAX_JOBS": str(len(self.cores)),
        }
        if any("test_virtual_" in test for test in tests):
            environment["LD_PRELOAD"] = self.preload or environment.get("LD_PRELOAD", "")
        arguments = [argument for test in tests for argument in test_arguments(test)]
        with open(self.folder / "output.txt", "w+", encoding="utf-8", errors="replace") as output:
            process = subprocess.Popen(
                [*PYTEST, *PLUGINS, *arguments],
                cwd=self.tree,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            os.sched_setaffinity(process.pid, self.cores)
            timer = threading.Timer(self.limit, os.killpg, (process.pid, signal.SIGKILL))
            timer.start()
            _, status, usage = os.wait4(process.pid, 0)
            timer.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(0)
            text = output.read()
        return process.returncode, text, usage.ru_utime + usage.ru_stime

    def try_mutation(self, mutation: Mutation) -> Outcome:
        """Apply it, run its tests until one fails, and take it back."""
        outcome = Outcome(mutation, "survived", mutation.equivalent)
        path = self.tree / mutation.file
        original, times = path.read_text(encoding="utf-8"), path.stat()
        try:
            path.write_text(changed(original, mutation), encoding="utf-8")
            replace_tree(self.cache, self.seed)
            for test in mutation.tests:
                code, text, cpu = self.run_tests([test])
                outcome.cpu_seconds += cpu
                verdict, by = judge(code, text, test)
                if verdict != "survived":
                    outcome.verdict, outcome.by = verdict, by
                    break
        except ValueError as error:
            outcome.verdict, outcome.by = "broken", str(error)
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # ninja compares it
        if outcome.verdict == "survived" and mutation.equivalent:
            outcome.verdict = "equivalent"
        return outcome


def judge(code: int, text: str, test: str) -> tuple[str, str]:
    """The verdict on a change from the exit status and the output of its test."""
    if re.search(r"^E .*JitBuildError: building ", text, re.MULTILINE) or code in (2, 3, 4, 5):
        lines = [line for line in text.splitlines() if re.match(r"E  |ERROR|.*error:|no tests", line)]
        return "broken", " ".join(lines[:2]) or f"pytest ended with {code}"
    if code == 0:
        passed = re.search(r"(\d+) passed", text)
        return ("survived", "") if passed else ("broken", f"{test} ran no test")
    if code < 0:
        return "killed", f"{test}, which does not end ({signal.Signals(-code).name})"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE)
    return "killed", failed[1] if failed else test


def table(outcomes: Sequence[Outcome]) -> str:
    """A table to read: a line for each change, and a last one that counts them."""
    lines = [f"{o.verdict:10} {o.cpu_seconds:4.0f} s  {o.mutation.name}: {o.by}" for o in outcomes]
    counts = collections.Counter(outcome.verdict for outcome in outcomes)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    return "\n".join([*lines, "", f"{len(outcomes)} changes: {summary}"])


def share_cores(jobs: int) -> list[set[int]]:
    """The cores of each of ``jobs`` workers, which share them as evenly as they can."""
    cores = sorted(os.sched_getaffinity(0))
    return [set(cores[job % len(cores) :: jobs]) for job in range(jobs)]


def run(
    mutations: Sequence[Mutation], root: Path, work: Path, jobs: int, limit: float, preload: str = ""
) -> list[Outcome]:
    """Try all of ``mutations``; the outcomes in their order.

    Args:
        mutations: The changes to try.
        root: The checkout. It is only read.
        work: Folder of copies and caches.
        jobs: Workers beside each other.
        limit: Seconds that a test may take.
        preload: ``LD_PRELOAD`` of the tests.

    Raises:
        RuntimeError: their tests do not pass without any change.
    """
    tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
    workers = [
        Worker(work / str(i), cores, limit, preload) for i, cores in enumerate(share_cores(min(jobs, len(mutations))))
    ]
    print(f"the tests without any change, in {', '.join(str(worker.folder) for worker in workers)}", flush=True)
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    number = itertools.count(1)

    def begin(worker: Worker) -> None:
        worker.prepare(root)
        run_baseline(worker, tests)
        replace_tree(worker.seed, worker.cache)  # what is in the cache now is that of the unchanged tree
        idle.put(worker)

    def attempt(mutation: Mutation) -> Outcome:
        worker = idle.get()
        try:
            outcome = worker.try_mutation(mutation)
        finally:
            idle.put(worker)
        print(f"{next(number)}/{len(mutations)} {outcome.verdict:10} {mutation.name}: {outcome.by}", flush=True)
        return outcome

    with concurrent.futures.ThreadPoolExecutor(len(workers)) as pool:
        list(pool.map(begin, workers))
        return list(pool.map(attempt, mutations))


def run_baseline(worker: Worker, tests: Sequence[str]) -> None:
    """All tests pass in the unchanged tree, which leaves in the cache what they need. Node ids go together.

    Raises:
        RuntimeError: one does not; the text is pytest's.
    """
    together = [test for test in tests if " -k " not in test]
    patient = dataclasses.replace(worker, limit=10 * worker.limit)
    for group in [*([test] for test in tests if " -k " in test), *filter(None, [together])]:
        try:
            code, text, _ = patient.run_tests(group)
        except OSError as error:
            code, text = 1, f"{group} could not be run: {error}"
        if code != 0:
            raise RuntimeError(f"tests fail without any change:\n{text[-4000:]}")


def main(arguments: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=max(1, cores // 2), help="workers beside each other (cores / 2)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="changes whose name or file contains it"
    )
    parser.add_argument("--rotate", type=int, metavar="K", help="K changes, other ones every day")
    parser.add_argument("--turn", type=int, help="instead of the day's number, for --rotate")
    parser.add_argument("--list", action="store_true", help="print the changes that would be tried")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds that a change's test may take (600)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "mutate", help="folder of copies and caches")
    options = parser.parse_args(arguments)

    mutations = read_list(ROOT / LIST)
    if options.only:
        mutations = [m for m in mutations if any(text in m.name or text in m.file for text in options.only)]
    if options.rotate is not None:
        day = datetime.date.today().toordinal() if options.turn is None else options.turn
        mutations = rotated(mutations, options.rotate, day)
    if options.list or not mutations:
        print("\n".join(f"{m.name}  ({m.file})" for m in mutations))
        return 0 if mutations else 2

    jobs = min(options.jobs, len(mutations))
    outcomes = run(mutations, ROOT, options.work, jobs, options.limit, emulator_preload(ROOT))
    print("", table(outcomes), sep="\n")
    return 0 if all(outcome.verdict in GOOD for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
