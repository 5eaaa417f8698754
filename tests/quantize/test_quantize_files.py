# SPDX-License-Identifier: Apache-2.0
"""Files that ``sm12x-quantize`` and its readers take from others: each field wrong in each way, names that lead out of
the folder, tensors that no quantizer gives; and files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import copy
import errno
import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from toy_llama import llama, some_windows

from flashinfer_sm12x import files
from flashinfer_sm12x.files import replace_bytes
from flashinfer_sm12x.quantize import files as fields
from flashinfer_sm12x.quantize import manifest, measure
from flashinfer_sm12x.quantize.choice import Choice
from flashinfer_sm12x.quantize.files import FolderError, read_fields, read_text, require_writable
from flashinfer_sm12x.quantize.folder import Folder
from flashinfer_sm12x.quantize.manifest import MANIFEST
from flashinfer_sm12x.quantize.run import Run

FORMATS = {"qkv": "nvfp4", "o": "mxfp8", "lm_head": "mxint8"}
LAYER = "model.layers.0.self_attn"
FILE = f"{LAYER}.safetensors"


def quantized(to: Path, formats: dict[str, str]) -> Path:
    made = Run(llama(num_hidden_layers=1), to, formats, some_windows())
    made.fill()
    made.finish({"minutes": 0.5})
    return to


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to copy."""
    return quantized(tmp_path_factory.mktemp("finished") / "f", FORMATS)


@pytest.fixture(scope="module")
def finished_mxfp6(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(tmp_path_factory.mktemp("finished") / "f", dict.fromkeys(FORMATS, "mxfp6"))


# ------------------------------------------------------------------------------------------------------- wrong fields

MARK = "the value is here"
WRONG: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, "", "..", "../lm_head.safetensors", "/etc/passwd", "a/b.safetensors", "a\0b"),
    *("\ud800", "x" * 10_000, "\u0661", [], {}, ["x"], {"x": 1}),
)
LITERALS = ("NaN", "-Infinity", "1e999", "9" * 5000, "[" * 100_000 + "]" * 100_000)
"""Python's parser takes the first three, and ends on the others with errors that are not JSON's."""


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in a parsed JSON file, the whole included."""
    yield at
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in parts:
        yield from places(each, (*at, key))


def changed(good: Any, at: tuple[Any, ...], how: Any) -> str:
    """The text of the file with another value at a place; ``how`` is the value, a literal, or a function of the old
    one."""
    found = {"": copy.deepcopy(good)}
    around: Any = found
    place = ("", *at)
    for key in place[:-1]:
        around = around[key]
    if how == "missing":
        del around[place[-1]]
    else:
        around[place[-1]] = how(around[place[-1]]) if callable(how) else MARK if how in LITERALS else how
    text = json.dumps(found.get("", {}))
    return text.replace(json.dumps(MARK), how) if isinstance(how, str) and how in LITERALS else text


def nested(value: Any) -> Any:
    return {"x": value}


def other_type(value: Any) -> Any:
    return str(value) if isinstance(value, (int, float)) else [value]


def cases(good: Any, seed: int, count: int) -> list[tuple[tuple[Any, ...], Any, str]]:
    """A sample of all places and all ways, by a seed that is printed: place, way, text of the file."""
    print("seed", seed)
    ways = (*WRONG, *LITERALS, nested, other_type, "missing")
    every = [(at, how) for at in places(good) for how in ways if at or how != "missing"]
    return [(at, how, changed(good, at, how)) for at, how in random.Random(seed).sample(every, min(count, len(every)))]


def everything(folder: Path) -> dict[str, tuple[torch.Tensor, ...]]:
    """All that a user of the folder gets for its model: a server asks for each layer's parts, and compares its
    weights."""
    found, subject = Folder(folder), llama(num_hidden_layers=1)
    layers = [[f"{LAYER}.{part}_proj" for part in "qkv"], [f"{LAYER}.o_proj"], ["lm_head"]]
    weights = {}
    for names, kind in zip(layers, FORMATS, strict=True):
        for name in names:
            found.require_source(name, subject.model.get_submodule(name).weight)
        weights[kind] = (found.dequantized(names), *(part.scales for part in found.weights(names)))
    return weights


def same(one: dict[str, tuple[torch.Tensor, ...]], other: dict[str, tuple[torch.Tensor, ...]]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(a, b) for kind in one for a, b in zip(one[kind], other[kind], strict=True)
    )


def test_a_manifest_with_a_wrong_field_is_refused_or_means_the_same(finished: Path, tmp_path: Path) -> None:
    """Whatever a field is, its reader gets the same weights or a line with the file's name."""
    good, expected = json.loads((finished / MANIFEST).read_text()), everything(finished)
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    refused = 0
    for at, how, text in cases(good, 11, 400):
        (folder / MANIFEST).write_text(text)
        label = f"{'.'.join(map(str, at))} {how!r:.60}"
        try:
            assert same(everything(folder), expected), label
            assert at[:1] in (("run",), ("told",)), f"{label} went unseen"
        except FolderError as error:
            assert str(folder) in str(error), label
            assert "\n" not in str(error), label
            assert str(error).isprintable(), label
            assert len(str(error)) < 1000, label
            refused += 1
    assert refused > 280


@pytest.mark.parametrize("key", ["kind", "n", "file", "source"])
def test_fields_that_belong_to_another_module_are_refused(finished: Path, tmp_path: Path, key: str) -> None:
    good = json.loads((finished / MANIFEST).read_text())
    q, head = good["modules"][f"{LAYER}.q_proj"], good["modules"]["lm_head"]
    q[key], head[key] = head[key], q[key]
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    (folder / MANIFEST).write_text(json.dumps(good))
    with pytest.raises(FolderError, match=rf"^{folder}"):
        everything(folder)


def test_nothing_outside_of_the_folder_is_read(finished: Path, tmp_path: Path) -> None:
    """A right file with the right hash elsewhere: by an absolute name, and by one with dots."""
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    (folder / FILE).rename(tmp_path / FILE)
    for name in (f"../{FILE}", str(tmp_path / FILE)):
        good = json.loads((finished / MANIFEST).read_text())
        good["files"][name] = good["files"].pop(FILE)
        for module in good["modules"].values():
            module["file"] = name if module["file"] == FILE else module["file"]
        (folder / MANIFEST).write_text(json.dumps(good))
        with pytest.raises(FolderError, match=r"it must be the name of a file beside it, ending with \.safetensors"):
            Folder(folder)


def test_a_manifest_without_one_part_is_refused(finished: Path, tmp_path: Path) -> None:
    """Whichever module is left out, and a whole kind."""
    good = json.loads((finished / MANIFEST).read_text())
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    for left_out in good["modules"]:
        less = {**good, "modules": {name: each for name, each in good["modules"].items() if name != left_out}}
        (folder / MANIFEST).write_text(json.dumps(less))
        with pytest.raises(
            FolderError, match=rf"{folder}.*(has a tensor that its manifest does not know of|no module)"
        ):
            Folder(folder).tensors(FILE)
    (folder / MANIFEST).write_text(json.dumps({**good, "formats": {}, "modules": {}, "files": {}}))
    with pytest.raises(FolderError, match=r"has no layers at all"):
        Folder(folder)


# ------------------------------------------------------------------------------------------------------ wrong tensors


def rehash(folder: Path, data: bytes, file: str = FILE) -> None:
    """Write a file, and its hash into the manifest."""
    (folder / file).write_bytes(data)
    label = json.loads((folder / MANIFEST).read_text())
    label["files"][file] = hashlib.sha256(data).hexdigest()
    (folder / MANIFEST).write_text(json.dumps(label))


Change = Callable[[dict[str, torch.Tensor]], Any]


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors: tensors.__setitem__(f"{LAYER}.{name}", change(tensors[f"{LAYER}.{name}"]).contiguous())


def with_byte(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        found = tensor.view(torch.uint8).clone()
        found.flatten()[-3] = value
        return found.view(tensor.dtype)

    return change


FACTOR = "k_proj.weight_global_scale"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        *(
            (put(FACTOR, lambda t, value=value: torch.full_like(t, value)), rf"{FACTOR} is .*; it must be positive and")
            for value in (0.0, -1.0, float("nan"), float("inf"), 1e-45, 1e-36)
        ),
        (put(FACTOR, lambda t: t * 2), r"the parts of one matrix have several global scales"),
        (put(FACTOR, lambda t: t.expand(2)), rf"{FACTOR} is torch\.float32 \[2\]"),
        (put(FACTOR, lambda t: t.double()), rf"{FACTOR} is torch\.float64 \[1\]"),
        (lambda tensors: tensors.pop(f"{LAYER}.{FACTOR}"), rf"has no tensor '{LAYER}\.{FACTOR}'"),
        (lambda tensors: tensors.__setitem__("more", torch.zeros(1)), r"does not know of: 'more'"),
        (put("q_proj.weight_packed", lambda t: t[:-1]), r"q_proj\.weight_packed is torch\.uint8 \[95, 48\]"),
        (put("q_proj.weight_packed", lambda t: t.view(torch.int8)), r"q_proj\.weight_packed is torch\.int8 \[96, 48\]"),
        (put("q_proj.weight_packed", lambda t: t.t()), r"q_proj\.weight_packed is torch\.uint8 \[48, 96\]"),
        (put("q_proj.weight_scale", lambda t: t.view(torch.uint8)), r"q_proj\.weight_scale is torch\.uint8 \[96, 6\]"),
        (
            put("o_proj.weight_scale", lambda t: torch.cat([t, t[:, :1]], 1).view(torch.int32)),
            r"o_proj\.weight_scale is torch\.int32 \[96, 1\]",
        ),
        (
            put("q_proj.weight_scale", with_byte(0x7F)),
            r"q_proj\.weight_scale has the byte 0x7f; a scale is at most 0x7e",
        ),
        (put("q_proj.weight_scale", with_byte(0x81)), r"q_proj\.weight_scale has the byte 0x81"),
        (
            put("o_proj.weight_scale", with_byte(0xFF)),
            r"o_proj\.weight_scale has the byte 0xff; a scale is at most 0xf6",
        ),
        (put("o_proj.weight_scale", with_byte(0xF7)), r"o_proj\.weight_scale has the byte 0xf7"),
        (put("o_proj.weight", with_byte(0x7F)), r"o_proj\.weight holds NaN"),
        (put("o_proj.weight", with_byte(0xFF)), r"o_proj\.weight holds NaN"),
    ],
)
def test_tensors_that_no_quantizer_gives_are_refused_with_a_right_hash(
    finished: Path, tmp_path: Path, change: Change, words: str
) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    tensors = load_file(folder / FILE)
    change(tensors)
    rehash(folder, save(tensors))
    with pytest.raises(FolderError, match=rf"^{folder}.*{words}"):
        everything(folder)


def test_each_formats_largest_scale_is_finite_and_passes(finished_mxfp6: Path, tmp_path: Path) -> None:
    """The bound on UE8M0 bytes is where float32 ends: 7.5 x 2^125 is a number, 7.5 x 2^126 is not."""
    folder = Path(shutil.copytree(finished_mxfp6, tmp_path / "f"))
    for byte, refused in ((127 + 125, False), (127 + 126, True)):
        tensors = load_file(finished_mxfp6 / FILE)
        put("q_proj.weight_scale", with_byte(byte))(tensors)
        rehash(folder, save(tensors))
        with pytest.raises(FolderError, match=r"a scale is at most 0xfc") if refused else contextlib.nullcontext():
            assert Folder(folder).dequantized([f"{LAYER}.{part}_proj" for part in "qkv"]).isfinite().all()


@pytest.mark.parametrize(
    "data",
    [b"", b"\0" * 7, b"version https://git-lfs.github.com/spec/v1\n", b"\xff" * 100, b"\x02\0\0\0\0\0\0\0[]", "cut"],
)
def test_what_is_no_file_of_tensors_is_named_with_a_right_hash(finished: Path, tmp_path: Path, data: Any) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    rehash(folder, (folder / FILE).read_bytes()[:-5] if data == "cut" else data)
    with pytest.raises(FolderError, match=rf"^{folder / FILE} (is no file of tensors \(|has no tensor)"):
        everything(folder)


def test_losses_of_another_models_folder_are_not_measured(finished: Path) -> None:
    """Of the same sizes: its weights would fit."""
    windows = some_windows(9, (20, 20))
    choice = Choice(**FORMATS, folder=str(finished))
    measure.scores(llama(num_hidden_layers=1), windows, [choice])
    other = llama(num_hidden_layers=1)
    other.model.model.layers[0].self_attn.v_proj.weight.data[0, 0] += 1
    with pytest.raises(FolderError, match=rf"^{finished} was made of another {LAYER}\.v_proj than this checkpoint's"):
        measure.scores(other, windows, [choice])
    other = llama(num_hidden_layers=1)
    other.model.lm_head.weight.data[0, 0] += 1
    head = Choice(lm_head="mxint8", folder=str(finished))
    with pytest.raises(FolderError, match=r"was made of another lm_head than"):
        measure.scores(other, windows, [head])


# --------------------------------------------------------------------------------------------------- files and fields


@pytest.mark.parametrize("text", ["", "{", "[1]", "null", '"x"', "{} {}", '{"a": NaN}', '{"a": 1e999}', "[" * 100_000])
def test_what_is_no_json_object_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(FolderError, match=rf"^{tmp_path}/x\.json is no list of songs: .*; sing$"):
        read_fields(tmp_path / "x.json", "no list of songs", "sing")


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir], ids=["missing", "a folder"])
def test_what_cannot_be_read_is_named(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "x")
    with pytest.raises(FolderError, match=rf"^{tmp_path}/x cannot be read: "):
        read_fields(tmp_path / "x", "no list", "write one")
    with pytest.raises(FolderError, match=rf"^{tmp_path}/x cannot be read: "):
        read_text(tmp_path / "x")


@pytest.mark.parametrize("data", [b"caf\xe9", b"\xff\xfea\0", b"a" * 9000 + b"\x80"])
def test_a_text_that_is_not_utf8_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "notes.txt").write_bytes(data)
    first = next(at for at, byte in enumerate(data) if byte >= 0x80)
    with pytest.raises(FolderError, match=rf"^{tmp_path}/notes\.txt is not UTF-8: byte {first} is {data[first]:#04x}$"):
        read_text(tmp_path / "notes.txt")


# ------------------------------------------------------------------------------------------------------- whole or not


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)], capture_output=True)
    except OSError:
        pytest.skip("there is no mount")
    if done.returncode:
        pytest.skip("needs root, to mount a file system of 64 KiB")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.privileges
def test_a_full_disk_leaves_the_old_file_and_nothing_else(small_disk: Path) -> None:
    replace_bytes(small_disk / "x", b"old")
    with pytest.raises(OSError, match=rf"No space left on device: '{small_disk}/x'") as error:
        replace_bytes(small_disk / "x", bytes(1 << 20))
    assert error.value.errno == errno.ENOSPC
    assert (small_disk / "x").read_bytes() == b"old"
    assert [path.name for path in small_disk.iterdir()] == ["x"]
    (small_disk / "rest").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize))
    with pytest.raises(FolderError, match=rf"^--out: {small_disk} cannot be written: No space left on device; choose"):
        require_writable(small_disk, "--out")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("where", ["write", "close", "fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, number: int
) -> None:
    """At each step at which a full disk or a quota can be told; a network's file system tells it when a file is
    closed."""
    replace_bytes(tmp_path / "x", b"old")

    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    class Failing:
        def __init__(self, *given: Any) -> None:
            self.file = open(*given)  # noqa: SIM115

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            self.file.close()
            if where == "close":
                fail()

        def __getattr__(self, name: str) -> Any:
            return fail if name == where else getattr(self.file, name)

    with monkeypatch.context() as patched:
        if where in ("fsync", "replace"):
            patched.setattr(files.os, where, fail)
        else:
            patched.setattr(files, "open", Failing, raising=False)
        with pytest.raises(OSError, match=rf"{os.strerror(number)}: '{tmp_path}/x'"):
            replace_bytes(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_interrupted_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_bytes(tmp_path / "x", b"old")

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(files.os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_bytes(tmp_path / "x", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]


def test_what_killed_runs_have_left_is_gone_from_a_finished_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "f").mkdir()
    made = Run(llama(num_hidden_layers=1), tmp_path / "f", FORMATS, some_windows())
    with contextlib.suppress(KeyboardInterrupt), monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda _: None)  # a kill leaves no time for it
        patched.setattr(files.os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        replace_bytes(tmp_path / "f" / "lm_head.safetensors", b"half")
    assert len(list((tmp_path / "f").glob(".lm_head.safetensors.new-*.safetensors"))) == 1
    for name in (".lm_head.safetensors.4711", f".{MANIFEST}.12"):  # of versions before
        (tmp_path / "f" / name).write_bytes(b"half")
    others = {".nfs0001", ".gitignore", ".config.settings", ".x.new-y.txt"}
    for name in others:
        (tmp_path / "f" / name).write_bytes(b"another's")
    made.fill()
    made.finish({})
    assert {path.name for path in (tmp_path / "f").iterdir()} == {MANIFEST, FILE, "lm_head.safetensors", *others}


def test_trying_a_folder_leaves_the_disk_as_it_was(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b", "--out")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FolderError, match=rf"^--out: {folder} cannot be written: .*; choose another folder$"):
            require_writable(folder, "--out")
    require_writable(tmp_path, "--out")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_manifests_reader_imports_nothing_of_flashinfer() -> None:
    """vLLM's plugin reads manifests before flashinfer may be imported."""
    for module in (files, fields, manifest):
        text = Path(str(module.__file__)).read_text(encoding="utf-8")
        assert "import torch" not in text
        assert "from flashinfer" not in text


def test_save_file_writes_what_the_tests_change(finished: Path, tmp_path: Path) -> None:
    """An unchanged file with its own hash passes: what the tests above refuse, they refuse for the change."""
    folder = Path(shutil.copytree(finished, tmp_path / "f"))
    save_file(load_file(folder / FILE), tmp_path / "again")
    rehash(folder, (tmp_path / "again").read_bytes())
    assert same(everything(folder), everything(finished))
