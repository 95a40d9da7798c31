import pytest

from flashviz.cuda.expressions import evaluate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("ceil(Nq / Br)", 3),
        ("Br * (D + 1)", 2080),
        ("Nq % Br == 1", True),
        ("min(512, max(32, Br))", 32),
        ("-D // 3", -22),
    ],
)
def test_arithmetic(expression: str, value: float) -> None:
    assert evaluate(expression, {"Nq": 65, "Br": 32, "D": 64}) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "x.y", "a if b else c", "[1]", "f(2)", "1 +", "'a'", "2 ** 9"]
)
def test_anything_else_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="not"):
        evaluate(expression, {"a": 1, "b": 2, "c": 3, "x": 1})


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(ValueError, match=r"Hkv has no value; known are Hq"):
        evaluate("Hq % Hkv", {"Hq": 2})


def test_division_by_zero() -> None:
    with pytest.raises(ValueError, match="divides by zero"):
        evaluate("Hq % Hkv", {"Hq": 2, "Hkv": 0})
