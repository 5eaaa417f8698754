# SPDX-License-Identifier: Apache-2.0
"""The wheel absent, broken, or shadowed: the message says what was found and what helps."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from layer_toys import FORK_FILES, WHEEL_FILES, Run, write_fork, write_wheel

PIN = "flashinfer-python==0.7.2.post1"


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    return write_fork(tmp_path / "fork", FORK_FILES)


def import_error(run_python: Run, path: list[Path]) -> str:
    code = """if True:
        try:
            import flashinfer
        except ImportError as error:
            print(type(error).__name__, error.name, error.path, sep="|")
            print(error)
    """
    return run_python("-c", code, path=path, bare=True).stdout


def command(*options: str) -> str:
    return " ".join([f'"{sys.executable}" -m pip install', *options, f'"{PIN}"'])


def test_absent(run_python: Run, fork: Path) -> None:
    kind, *message = import_error(run_python, [fork]).splitlines()
    assert kind == f"ImportError|flashinfer|{fork / 'flashinfer'}"
    assert f"in {fork}) extends the wheel {PIN}." in message[0]
    assert message[1] == "Found: no flashinfer-python on sys.path."
    assert message[2] == f"Install it with:  {command()}"


def test_the_pinned_one_is_taken_from_behind_another(run_python: Run, fork: Path, tmp_path: Path) -> None:
    old = write_wheel(tmp_path / "old", WHEEL_FILES, "0.5.0")
    new = write_wheel(tmp_path / "new", WHEEL_FILES)
    code = "import flashinfer; print(flashinfer.__path__[1])"
    assert run_python("-c", code, path=[fork, old, new], bare=True).stdout.strip() == str(new / "flashinfer")


def test_metadata_without_the_package(run_python: Run, fork: Path, tmp_path: Path) -> None:
    """An interrupted uninstall, or an editable install of upstream, leaves such metadata behind."""
    wheel = write_wheel(tmp_path / "wheel", {})
    message = import_error(run_python, [fork, wheel])
    assert f"\nFound: flashinfer-python 0.7.2.post1 in {wheel}, without its package directory flashinfer/.\n" in message
    assert f"\nInstall it with:  {command('--force-reinstall --no-deps')}\n" in message


def test_what_was_found_is_all_named(run_python: Run, fork: Path, tmp_path: Path) -> None:
    old = write_wheel(tmp_path / "old", {}, "0.5.0")
    new = write_wheel(tmp_path / "new", {}, "0.8.0")
    lacks = "without its package directory flashinfer/"
    message = import_error(run_python, [fork, old, new])
    assert f"Found: flashinfer-python 0.5.0 in {old}, {lacks}; flashinfer-python 0.8.0 in {new}, {lacks}.\n" in message


def test_our_own_directory_is_not_taken_for_the_wheel(run_python: Run, fork: Path) -> None:
    """Metadata of that name beside the fork (an unfortunate copy) must not make it extend itself."""
    write_wheel(fork, {})
    assert "without its package directory" in import_error(run_python, [fork])


def test_a_second_attempt_works_after_the_wheel_appears(run_python: Run, fork: Path, tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "wheel", WHEEL_FILES)
    code = f"""if True:
        import sys
        sys.path.remove({str(wheel)!r})
        try:
            import flashinfer
        except ImportError:
            sys.path.append({str(wheel)!r})
        import flashinfer
        print(flashinfer.__version__)
    """
    assert run_python("-c", code, path=[fork, wheel], bare=True).stdout == "0.7.2.post1\n"
