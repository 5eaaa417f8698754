# SPDX-License-Identifier: Apache-2.0
"""One vocabulary: the glossary of ``docs/kernels.md`` against C++ and Python, and numbers that both languages have.

A number that Python has too is a literal in both languages, ``constexpr int kName = 123;`` at the beginning of a line
and ``NAME = 123`` in a module, so that reading it needs no arithmetic. In C++ it stands beside the kernel that it
describes, with an assertion where it follows from others: a header of all of them would be an input of every module.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from documents import tracked
from layer_toys import REPO

from flashinfer.fused_moe.sm12x_validation import Mode

CXX = ("include", "csrc")
PYTHON = ("flashinfer", "flashinfer_sm12x", "benchmarks")
FAMILIES = {
    "flashinfer/sm12x_decode.py": "kDecode",
    "flashinfer/fused_moe/sm12x_router.py": "kRouter",
    "flashinfer_sm12x/doctor/probe/arrivals.py": "kOrder",
    "flashinfer_sm12x/doctor/probe/mma.py": "kMma",
}
"""Modules whose constants lack the prefix that those of their kernels have."""

Number = int | float
Numbers = Mapping[str, Number | None]
"""Constants of a language; None of what is no literal number."""


def plain(name: str) -> str:
    """A name without its language: of ``kScaleBlock``, ``SCALE_BLOCK`` and ``_SCALE_BLOCK`` the same."""
    return re.sub(r"^k(?=[A-Z])|_", "", name).lower()


# --- C++ --------------------------------------------------------------------------------------------------------------


def cxx_files() -> list[Path]:
    suffixes = {".h", ".cuh", ".cu", ".inl", ".cpp", ".jinja"}
    return [path for folder in CXX for path in tracked(f"{folder}/*") if path.suffix in suffixes]


def without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


CONSTANT = re.compile(r"^constexpr (?:bool|int|unsigned|float|size_t|u?int\d+_t) (k\w+ = [^;]*);", re.MULTILINE)
LITERAL = re.compile(r"(k\w+) = (0x[\dA-F]+|[\d']+(?:\.\d+)?)f?")
ENUM = re.compile(r"^enum class (\w+)(?: : \w+)? \{([^}]*)\}", re.MULTILINE)


def read_cxx(texts: list[str]) -> dict[str, Number | None]:
    """Constants of namespaces, and enumerators as ``Type__kName``."""
    numbers: dict[str, Number | None] = {}
    for text in map(without_comments, texts):
        for kind, members in ENUM.findall(text):
            last = -1
            for member in filter(None, (each.strip() for each in members.split(","))):
                name, _, given = member.partition("=")
                last = int(given, 0) if given else last + 1
                numbers[f"{kind}__{name.strip()}"] = last
        for declared in CONSTANT.findall(text):
            for each in re.split(r", (?=k\w+ = )", declared):
                literal = LITERAL.fullmatch(each)
                value = ast.literal_eval(literal[2].replace("'", "_")) if literal else None
                name = each.split()[0]
                assert name not in numbers or numbers[name] == value, f"{name} has two values"
                numbers[name] = value
    return numbers


@pytest.fixture(scope="module")
def cxx() -> dict[str, Number | None]:
    return read_cxx([path.read_text(encoding="utf-8") for path in cxx_files()])


# --- Python -----------------------------------------------------------------------------------------------------------


class Module(NamedTuple):
    """A module's source, its names (of a class's attribute ``Class.name``), and its constants."""

    text: str
    names: set[str]
    numbers: Numbers


def assignments(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr | None]]:
    """Names that statements give a value, with its expression where it is one for the name alone."""
    for statement in body:
        targets = [statement.target] if isinstance(statement, ast.AnnAssign) else getattr(statement, "targets", [])
        value = getattr(statement, "value", None)
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, value
            elif isinstance(target, ast.Tuple):
                values: list[ast.expr | None] = [None] * len(target.elts)
                if isinstance(value, ast.Tuple):
                    values = [*value.elts]
                elif value is not None and re.fullmatch(r"range\(\d+\)", ast.unparse(value)):
                    values = [ast.Constant(i) for i in range(len(target.elts))]
                yield from ((each.id, value) for each, value in zip(target.elts, values) if isinstance(each, ast.Name))


def is_number(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def read_python(text: str) -> Module:
    tree = ast.parse(text)
    values = dict(assignments(tree.body))
    names = {*values}
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            names.add(statement.name)
        if isinstance(statement, ast.ClassDef):
            inside = [name for name, _ in assignments(statement.body)]
            inside += [each.name for each in statement.body if isinstance(each, ast.FunctionDef)]
            names |= {f"{statement.name}.{name}" for name in inside}
    numbers = {
        name: value.value if isinstance(value, ast.Constant) else None
        for name, value in values.items()
        if name.isupper() and (isinstance(value, (ast.BinOp, ast.UnaryOp)) or is_number(value))
    }
    return Module(text, names, numbers)


@pytest.fixture(scope="module")
def python() -> dict[str, Module]:
    paths = [path for folder in PYTHON for path in tracked(f"{folder}/*.py")]
    return {str(path.relative_to(REPO)): read_python(path.read_text(encoding="utf-8")) for path in paths}


# --- Namesakes --------------------------------------------------------------------------------------------------------


def namesakes(cxx: Numbers, python: Mapping[str, Module]) -> Iterator[tuple[str, str, Number | None, str]]:
    """(file, Python's constant, its number, C++'s constant of the same name); enumerators where a comment names the
    enum."""
    for file, module in python.items():
        theirs = [name.rpartition("__") for name in cxx]
        by_name = {
            plain(last): enum + mark + last for enum, mark, last in theirs if re.search(rf"#.*{enum}", module.text)
        }
        prefix = plain(FAMILIES.get(file, ""))
        for name, value in module.numbers.items():
            for candidate in {plain(name), prefix + plain(name)} & by_name.keys():
                yield file, name, value, by_name[candidate]


def disagreements(cxx: Numbers, python: Mapping[str, Module]) -> list[str]:
    return [
        f"{file}: {name} is {value}, {theirs.replace('__', '::')} {cxx[theirs]}; None: write it as a number"
        for file, name, value, theirs in namesakes(cxx, python)
        if (single := cxx[theirs]) is None or value is None or not math.isclose(single, value, rel_tol=2.0**-24)
    ]


def test_constants_of_the_same_name_are_equal_in_both_languages(cxx, python) -> None:
    """Whatever Python has under the name of a constant of C++: ``SCALE_BLOCK`` and ``kScaleBlock``."""
    found = {(name, theirs) for _, name, _, theirs in namesakes(cxx, python)}
    assert found >= {
        ("BLOCK_M", "kBlockM"),
        ("SCALE_BLOCK", "kScaleBlock"),
        ("K_BLOCK", "kKBlock"),
        ("FUSED_MOE_ROUTED_ROWS", "kFusedMoeRoutedRows"),
        ("IN_KERNEL_ROUTED_ROWS", "kInKernelRoutedRows"),
        ("FEW_ROUTED_ROWS", "kFewRoutedRows"),
        ("MAX_Q_LEN", "kDecodeMaxQLen"),
        ("LOG2_E", "kLog2E"),
        ("MAX_K", "kRouterMaxK"),
        ("PANEL_TOKENS", "kPanelTokens"),
        ("MXFP4_SWIZZLED", "TokenFormat__kMxfp4Swizzled"),
        ("SOURCE_ROUNDS", "kOrderSourceRounds"),
    }
    assert disagreements(cxx, python) == []


MENTION = re.compile(r"\bk[A-Z]\w*")


def mentions(module: Module) -> Iterator[tuple[int, str, str]]:
    """(line, C++'s constant that a comment behind code names, or the docstring of a constant; the code)."""
    lines = module.text.splitlines()
    for number, line in enumerate(lines):
        code, mark, comment = line.partition("  # ")
        if mark and code.strip():
            yield from ((number + 1, name, code) for name in MENTION.findall(comment))
        if line.startswith('"""') and number and re.match(r"[A-Z_0-9]+ = ", lines[number - 1]):
            yield from ((number + 1, name, lines[number - 1]) for name in MENTION.findall(line))


def numbers_in(code: str) -> set[float]:
    code = re.sub(r"^(\s*)\w+ = ", r"\1", code)
    return {float(each.replace("_", "")) for each in re.findall(r"(?<![\w.])\d[\d_]*(?:\.\d+)?(?![\w.])", code)}


def wrong_mentions(cxx: Numbers, python: Mapping[str, Module]) -> list[str]:
    return [
        f"{file}:{line}: {name}, which is {cxx.get(name, 'unknown')}: {code.strip()}"
        for file, module in python.items()
        for line, name, code in mentions(module)
        if cxx.get(name) not in numbers_in(code)
    ]


def test_a_number_whose_comment_names_a_constant_of_cxx_is_that_constant(cxx, python) -> None:
    named = {name for module in python.values() for _, name, _ in mentions(module)}
    assert named >= {
        "kNarrowTokens",
        "kMaxRowTopK",
        "kEpilogueWarps",
        "kDefaultStepLimit",
        "kFewRoutedRows",
        "kMaxLocalExperts",
        "kRouterVector",
    }
    assert wrong_mentions(cxx, python) == []


def test_the_moe_modes_have_one_name_and_number_in_both_languages(cxx) -> None:
    """:attr:`Mode.AUTO` is resolved before a launch."""
    of_cxx = {plain(name.removeprefix("MoeMode__k")): number for name, number in cxx.items() if "MoeMode__" in name}
    assert of_cxx == {plain(mode.name): mode.value for mode in Mode if mode is not Mode.AUTO}


# --- The glossary -----------------------------------------------------------------------------------------------------


class Word(NamedTuple):
    word: str
    means: str
    cxx: list[str]
    python: list[str]
    not_said: list[str]


def glossary(page: str) -> list[Word]:
    """The rows of the table under "Words"."""
    (section,) = re.findall(r"^## Words\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    header, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line[:2] == "| "
    )
    assert header == ["word", "means", "in C++", "in Python", "not"]
    return [Word(row[0], row[1], *(re.findall(r"`([^`]+)`", cell) for cell in row[2:])) for row in rows]


@pytest.fixture(scope="module")
def words() -> list[Word]:
    return glossary((REPO / "docs/kernels.md").read_text(encoding="utf-8"))


def numbers_of(name: str, python: Mapping[str, Module]) -> list[Number] | None:
    """What a name such as ``instances.BLOCK_M`` or ``Instance.stages`` is in Python, if there is one; it may be no
    number."""
    owner, _, last = name.partition(".")
    found = [
        module.numbers.get(last)
        for file, module in python.items()
        if (Path(file).stem == owner and last in module.names) or name in module.names
    ]
    return [number for number in found if number is not None] if found else None


def wrong_words(words: list[Word], cxx: Numbers, python: Mapping[str, Module], code: str) -> list[str]:
    """What the glossary says of names and numbers that does not hold; ``code`` is C++ without comments."""
    wrong = []
    for word in words:
        absent = [name for name in word.cxx if re.search(rf"\b{name}\b", code) is None]
        absent += [name for name in word.python if numbers_of(name, python) is None]
        wrong += [f"{word.word}: there is no {name}" for name in absent]
        numbers = {name: cxx[name] for name in word.cxx if name in cxx}
        ours = {name: value for name in word.python for value in numbers_of(name, python) or []}
        if ours and (not numbers or len({*numbers.values(), *ours.values()}) != 1):
            wrong.append(f"{word.word}: {numbers} {ours}")
        means = {
            int(number.replace(",", "")) for number in re.findall(r"\b\d[\d,]*\b", word.means.replace("four", "4"))
        }
        wrong += [f"{word.word}: {name} is {value}" for name, value in numbers.items() if value not in means]
    return wrong


def cxx_code() -> str:
    return without_comments("\n".join(path.read_text(encoding="utf-8") for path in cxx_files()))


def test_the_glossarys_names_exist_and_its_numbers_are_equal(words, cxx, python) -> None:
    assert len(words) == len({word.word for word in words}) > 20
    assert wrong_words(words, cxx, python, cxx_code()) == []


def said(text: str, words: list[Word]) -> list[str]:
    """The glossary's names for nothing that a text has all the same."""
    return [
        no
        for word in words
        for no in word.not_said
        if re.search(rf"(?<![\w-]){re.escape(no)}(?![\w-])", text, re.IGNORECASE if no.islower() else 0)
    ]


def of_other_size(text: str) -> list[str]:
    """Lines that count scale blocks as K blocks or the other way round."""
    swapped = r"\bk_block \* (?:kScaleBlock|SCALE_BLOCK|BLOCK_SIZE|32)\b|\bscale_block \* (?:kKBlock|K_BLOCK|128)\b"
    swapped += r"|\bk_block [/%] kScaleChunkBlocks\b"
    return [line.strip() for line in text.splitlines() if re.search(swapped, line)]


def test_words_that_stand_for_nothing_are_not_said(words) -> None:
    assert sum(len(word.not_said) for word in words) >= 10
    files = [*cxx_files(), *(path for folder in PYTHON for path in tracked(f"{folder}/*.py"))]
    for path in files:
        text = path.read_text(encoding="utf-8")
        assert said(text, words) == [], path
        assert of_other_size(text) == [], path


# --- What these tests notice ------------------------------------------------------------------------------------------


def test_a_constant_that_drifts_is_seen() -> None:
    toy = read_cxx(
        [
            "constexpr int kBlock = 32;  // elements\nconstexpr int kFourBlocks = 1'28, kHalf = kBlock / 2;\n",
            "constexpr uint8_t kByte = 0xFF;\nconstexpr float kShare = 1.5f;\nconstexpr int kF = f(1, 2);\n"
            "enum class Kind : int { kFirst = 0, kNext, kLast = 7 };\n",
        ]
    )
    assert toy == {
        "Kind__kFirst": 0,
        "Kind__kNext": 1,
        "Kind__kLast": 7,
        "kBlock": 32,
        "kFourBlocks": 128,
        "kHalf": None,
        "kByte": 255,
        "kShare": 1.5,
        "kF": None,
    }
    good = "BLOCK = 32\n_FOUR_BLOCKS: int = 128\nBYTE = 255\nNEXT, LAST = 1, 7  # Kind\nOTHER = 1 << 3\n"
    assert disagreements(toy, {"a.py": read_python(good)}) == []
    for old, new in (
        ("BLOCK = 32", "BLOCK = 16"),
        ("255", "254"),
        ("1, 7", "1, 8"),
        ("255", "256 - 1"),  # equal, and no literal: said, not passed over
        ("BYTE = 255", "HALF = 16"),  # of which C++ has no literal
    ):
        assert len(disagreements(toy, {"a.py": read_python(good.replace(old, new))})) == 1, new
    with pytest.raises(AssertionError, match="kBlock has two values"):
        read_cxx(["constexpr int kBlock = 32;", "constexpr int kBlock = 16;"])
    assert wrong_mentions(toy, {"a.py": read_python("ROWS = 32  # kBlock\n")}) == []
    for line in ("ROWS = 31  # kBlock\n", "ROWS = 32  # kBlocks\n", 'ROWS = 31\n"""Rows: kBlock."""\n'):
        assert len(wrong_mentions(toy, {"a.py": read_python(line)})) == 1, line


def test_a_word_that_drifts_is_seen() -> None:
    page = (
        "## Words\n\n| word | means | in C++ | in Python | not |\n|---|---|---|---|---|\n"
        "| block | 32 | `kBlock`, `block` | `a.BLOCK`, `Row.block` | `32-block` |\n\n## Next\n"
    )
    cpp, code = read_cxx(["constexpr int kBlock = 32;"]), "constexpr int kBlock = 32; int block;"
    module = "BLOCK = 32\n\n\nclass Row:\n    block: int\n"
    words = glossary(page)
    assert words == [Word("block", "32", ["kBlock", "block"], ["a.BLOCK", "Row.block"], ["32-block"])]
    assert wrong_words(words, cpp, {"a.py": read_python(module)}, code) == []
    for text, source, renamed in (
        (page, module.replace("32", "16"), code),
        (page, module.replace("block:", "blocks:"), code),
        (page, module, code.replace("int block", "int a_block")),
        (page.replace("`kBlock`", "`kBlocks`"), module, code),
        (page.replace("| 32 |", "| 16 |"), module, code),
    ):
        assert len(wrong_words(glossary(text), cpp, {"a.py": read_python(source)}, renamed)) >= 1
    assert said("// the 32-block of a lane", words) == ["32-block"]
    assert said("// the block of 32-blocks", words) == []
    assert of_other_size("if (k_block * kScaleBlock < k)") and of_other_size("k_block / kScaleChunkBlocks")
    assert not of_other_size("if (scale_block * kScaleBlock < k && k_block * kKBlock < k)")
