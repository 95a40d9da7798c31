"""Every example in a docstring runs and shows what it says."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import flashviz

MODULES = sorted(m.name for m in pkgutil.walk_packages(flashviz.__path__, "flashviz.") if m.name != "flashviz.__main__")


@pytest.mark.parametrize("name", ["flashviz", *MODULES])
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "flashviz":
            raise
        pytest.skip(f"{name} needs {error.name}")
    assert doctest.testmod(module).failed == 0


def test_there_are_examples() -> None:
    finder = doctest.DocTestFinder()
    for name in ("flashviz", "flashviz.recorder", "flashviz.checks.traffic", "flashviz.programs.flash_attention_2"):
        assert any(t.examples for t in finder.find(importlib.import_module(name)))


def test_an_example_that_is_wrong_is_seen() -> None:
    wrong = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    assert doctest.DocTestRunner(verbose=False).run(wrong, out=lambda text: None).failed == 1
