"""The kernels compiled for real machines, with no GPU: skipped only where the NVRTC wheel is missing."""

import pytest

from budgets import BUDGETS
from flashviz.cuda import find
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError, Problem
from flashviz.cuda.sources import folders

ARCHS = (75, 80, 90)


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))


def every_target() -> list[tuple[str, str]]:
    """Each kernel file with each architecture that it is compiled for."""
    files = sorted(path.stem for folder in folders() for path in folder.glob("*.cu"))
    return [(file, target) for file in files for target in find(file).targets(ARCHS)]


def test_every_file_has_a_target() -> None:
    assert {file for file, _ in every_target()} == {p.stem for folder in folders() for p in folder.glob("*.cu")}


@pytest.mark.parametrize(("kernel", "arch"), every_target())
def test_every_instance_compiles_without_spills(nvrtc: Nvrtc, kernel: str, arch: str) -> None:
    kernels = [find(kernel, function) for function in find(kernel).kernels]
    instances = [s.signature.instance(values) for s in kernels for values in s.header.instances or ({},)]
    compiled = nvrtc.compile(kernels[0].assembled, instances, arch)
    assert compiled.ok, compiled.problems
    assert set(compiled.resources) == set(instances)
    for name, used in compiled.resources.items():
        assert 0 < used.registers <= BUDGETS[name.partition("<")[0]].registers, name
        allowed = BUDGETS[name.partition("<")[0]].always
        assert max(used.spill_stores, used.spill_loads, used.stack) <= allowed, name
        assert used.static_shared == 0, name
    assert compiled.cubin[:4] == b"\x7fELF"
    assert "warning" not in compiled.log.lower()


def problems(nvrtc: Nvrtc, old: str, new: str, instance: str = "flash_attention_2<4, 4, 8>") -> tuple[Problem, ...]:
    code = find("flash_attention_2").assembled
    assert old in code
    compiled = nvrtc.compile(code.replace(old, new, 1), [instance], 80)
    assert not compiled.ok
    assert compiled.problems
    return compiled.problems


def test_an_error_names_the_files_own_line(nvrtc: Nvrtc) -> None:
    (problem,) = problems(nvrtc, "float m_new = mi[r];", "float m_new = mm[r];")
    line = next(n for n, text in enumerate(find("flash_attention_2").text.splitlines(), 1) if "float m_new" in text)
    assert (problem.file, problem.line) == ("flash_attention_2.cu", line)
    assert "The name mm is not declared" in str(problem)


def test_a_helper_without_device_is_an_error(nvrtc: Nvrtc) -> None:
    problem = problems(nvrtc, "    __device__ SharedTile<Cols> tile", "    SharedTile<Cols> tile")[0]
    assert problem.file == "shared.cuh"
    assert "needs __device__" in problem.hint


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("li[r] = 0.f;", "li[r] = 0.f", "A ; is missing"),
        ("template <int Br", "#include <math.h>\ntemplate <int Br", "no toolkit or host headers"),
        (
            "    SharedCarver carve;\n    const",
            "    SharedCarver carve; __shared__ float big[99999]; big[threadIdx.x] = 1; O[0] = big[threadIdx.x + 1];\n    const",
            "Use smaller tiles",
        ),
    ],
)
def test_hints(nvrtc: Nvrtc, old: str, new: str, words: str) -> None:
    assert any(words in str(p) for p in problems(nvrtc, old, new))


def test_an_instance_that_the_template_does_not_have(nvrtc: Nvrtc) -> None:
    compiled = nvrtc.compile(find("flash_attention_2").assembled, ["flash_attention_2<1, 2>"], 80)
    assert not compiled.ok
    assert "cannot determine which instance" in str(compiled.problems[0])


def test_an_architecture_that_nvrtc_does_not_know(nvrtc: Nvrtc) -> None:
    with pytest.raises(RuntimeError, match="INVALID_OPTION for sm_50"):
        nvrtc.compile("", [], 50)
