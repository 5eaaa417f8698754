import pytest

from flashinfer.compilation_context import CompilationContext


@pytest.mark.parametrize(
    "value,expected",
    [
        ("12.1a", {(12, "1a")}),
        ("9.0a;12.1a", {(9, "0a"), (12, "1a")}),
        ("8.0 9.0a", {(8, "0"), (9, "0a")}),
        (" 9.0a ;\t10.3a ", {(9, "0a"), (10, "3a")}),
        ("12.0f", {(12, "0f")}),
        ("8.9 9.0", {(8, "9"), (9, "0a")}),
    ],
)
def test_separators_and_suffixes(monkeypatch, value, expected):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", value)
    assert expected == CompilationContext().TARGET_CUDA_ARCHS


@pytest.mark.parametrize(
    "value,named",
    [
        ("sm_121a", "'sm_121a' is not a compute capability"),
        ("12.1a,9.0a", "'12.1a,9.0a' is not a compute capability"),
        ("9.0a 12", "'12' in '9.0a 12' is not a compute capability"),
        ("8.9a", "the suffix 'a' exists from compute capability 9.0 on"),
        ("9.0f", "the suffix 'f' exists from compute capability 10.0 on"),
        (" ; ", "names no architecture"),
    ],
)
def test_what_is_wrong_is_named(monkeypatch, value, named):
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", value)
    with pytest.raises(ValueError) as error:
        CompilationContext()
    assert named in str(error.value)
    assert "FLASHINFER_CUDA_ARCH_LIST=12.1a" in str(error.value)
