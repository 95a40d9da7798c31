"""Traces: what a kernel writes down, as it is read; the GPU path by a CuPy made of NumPy, the processor for real."""

from __future__ import annotations

import re
import struct
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashviz as fv
from budgets import BUDGETS
from flashviz import cuda
from flashviz.cuda import cpu, gpu, sources
from flashviz.cuda.nvrtc import Nvrtc, NvrtcMissingError
from flashviz.cuda.sources import folders
from flashviz.cuda.trace import (
    CAPACITY,
    DEFINE,
    RECORD,
    RECORDS,
    REGION,
    REGIONS,
    TraceError,
    TraceOverflowError,
    buffers,
    decode,
)
from flashviz.cuda.trace_files import read_traces, write_traces
from flashviz.slots import Block

KERNELS = sorted(path.stem for folder in folders() for path in folder.glob("*.cu"))
needs_compiler = pytest.mark.skipif(not cpu.status().usable, reason="no C++ compiler is here")


BEGIN = 3 * 2**32 - 13  # the lower half of the clock wraps within a block


def a_plan(Nq: int = 8) -> cuda.Plan:
    Q, K, L = np.ones((1, 2, Nq, 8), "f4"), np.ones((1, 2, 9, 8), "f4"), np.ones((1, 2, Nq), "f4")
    kernel = cuda.Kernel("flash_attention_2", {"Br": 4, "Bc": 4, "D": 8})
    return cuda.plan(kernel, (Q, K, K.copy(), Q.copy(), L, Nq, 9, 0.5, 0, 2, 2))


def written(plan: cuda.Plan, room: int, actions: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray]:
    """Buffers as if each block had done the same ``actions``, (id, tiles...), 10 ns apart."""
    records, regions = buffers(plan, room)
    for index in range(len(regions)):
        x, y = index % plan.grid[0], index // plan.grid[0] % plan.grid[1]
        regions[index] = (len(actions), 0, y, x, 40 + index, 0, BEGIN + index, BEGIN + 5 + index + 10 * len(actions))
        for n, (number, *tiles) in enumerate(actions[:room]):
            first, second = (*tiles, 0)[:2]
            records[index, n] = (number, 0, len(tiles), first, second, (BEGIN + 2 + index + 10 * n) % 2**32)
    return records, regions


# -- what a trace says -------------------------------------------------------------------------------------------------


def test_a_trace_is_read() -> None:
    plan = a_plan()
    ids = plan.source.trace_ids
    trace = decode(plan, *written(plan, 5, [(ids["load_q"], 0), (ids["scores"], 3, 7), (ids["store_o"], -1)]), "gpu")
    assert (trace.kernel, trace.device, trace.grid, trace.capacity) == ("flash_attention_2", "gpu", (2, 2, 1), 5)
    assert [block.block for block in trace.blocks] == [Block(0, 0, 0), Block(0, 0, 1), Block(0, 1, 0), Block(0, 1, 1)]
    block = trace.blocks[2]
    assert (block.index, block.begin - BEGIN, block.end - BEGIN) == (2, 2, 37)
    assert [(a.name, a.tiles) for a in block.actions] == [("load_q", (0,)), ("scores", (3, 7)), ("store_o", (-1,))]
    assert [(a.start - BEGIN, a.end - BEGIN) for a in block.actions] == [(4, 14), (14, 24), (24, 37)]
    assert {(a.multiprocessor, a.role) for a in block.actions} == {(42, "")}
    assert (trace.most, trace.begin - BEGIN, trace.end - BEGIN) == (3, 0, 38)


def test_blocks_are_sorted_by_what_they_say_and_not_by_their_number() -> None:
    plan = a_plan()
    records, regions = written(plan, 5, [(0, 0)])
    regions["tile"] = 1 - regions["tile"]
    assert [block.index for block in decode(plan, records, regions, "gpu").blocks] == [1, 0, 3, 2]


def test_overflow_says_how_large_the_buffer_must_be() -> None:
    plan = a_plan()
    with pytest.raises(TraceOverflowError) as caught:
        decode(plan, *written(plan, 2, [(0, 0)] * 7), "gpu")
    assert caught.value.needed == 7
    assert (
        "performed 7 actions and the trace has room for 2; it must have room for 7 a block, 448 bytes for 4 blocks"
        in str(caught.value)
    )
    assert "launch with trace=7" in str(caught.value)
    assert len(decode(plan, *written(plan, 7, [(0, 0)] * 7), "gpu").blocks[0].actions) == 7


def test_a_block_that_wrote_nothing_is_named() -> None:
    plan = a_plan()
    records, regions = written(plan, 2, [(0, 0)])
    regions["begin"][2] = 0
    with pytest.raises(TraceError, match=r"1 of 4 blocks wrote no trace, first blockIdx \(0, 1, 0\).*TRACE_BLOCK"):
        decode(plan, records, regions, "gpu")


def test_two_blocks_of_one_place_are_named() -> None:
    plan = a_plan()
    records, regions = written(plan, 2, [(0, 0)])
    regions["tile"] = 0
    with pytest.raises(TraceError, match=r"\(0, 0, 0\) and \(1, 0, 0\) both say TRACE_BLOCK\(0, 0, 0\)"):
        decode(plan, records, regions, "gpu")


@pytest.mark.parametrize("late", [1, 2, 3])
def test_an_action_that_is_longer_than_the_clock_is_no_shorter_one(late: int) -> None:
    plan = a_plan()
    records, regions = written(plan, 2, [(0, 0)] * 2)
    regions["end"][1] += late * 2**32
    with pytest.raises(TraceError, match=r"an action of block \(0, 0, 1\) took longer than 4.29 s"):
        decode(plan, records, regions, "gpu")
    regions["end"][1] -= late * 2**32
    records["nanoseconds"][1] = records["nanoseconds"][1, ::-1]  # time does not run backwards
    with pytest.raises(TraceError, match=r"an action of block \(0, 0, 1\)"):
        decode(plan, records, regions, "gpu")


def test_actions_of_functions_that_nothing_announces_are_named() -> None:
    plan = a_plan()
    records, regions = written(plan, 2, [(0, 0)])
    regions["called"][2] = 6
    with pytest.raises(TraceError, match=r"6 actions of blockIdx \(0, 1, 0\) are .* TRACE_BLOCK_AND_CALLS\("):
        decode(plan, records, regions, "gpu")


@pytest.mark.parametrize(("field", "value"), [("action", 99), ("tiles", 0), ("tiles", 3), ("role", 1)])
def test_a_record_that_no_trace_line_writes_is_refused(field: str, value: int) -> None:
    plan = a_plan()
    records, regions = written(plan, 2, [(0, 0)])
    records[field][3, 0] = value
    with pytest.raises(TraceError, match="not a TRACE line"):
        decode(plan, records, regions, "gpu")


# -- on the processor --------------------------------------------------------------------------------------------------

COUNTING = """// @kernel    counting
// @grid      4, 1, 2
// @block     33
// @array     x [N]
#include "include/trace.cuh"

__global__ void counting(float* x, int N, int least) {
    const int b = blockIdx.z * gridDim.x + blockIdx.x;
    TRACE_BLOCK(b, -b, 7 - b);
    if (b < least) return;
    for (int n = 0; n < b; ++n) {
        TRACE(one, -n);
        if (threadIdx.x == 0) x[b] += 1.f;
        TRACE(two, 1 << 30, -2147483647 - 1);
    }
}
"""


def counting(tmp_path: Path, trace: Any, **options: Any) -> tuple[cuda.Launched, np.ndarray]:
    path = tmp_path / "counting.cu"
    path.write_text(COUNTING)
    x = np.arange(8, dtype="f4") * 100
    return cuda.launch(cuda.Kernel(path), (x, 8, 2), device="cpu", trace=trace, **options), x


@needs_compiler
def test_what_a_kernel_writes_is_what_is_read(tmp_path: Path) -> None:
    launched, _ = counting(tmp_path, True)
    assert launched.trace is not None
    blocks = launched.trace.blocks
    assert [block.block for block in blocks] == [Block(b, -b, 7 - b) for b in range(8)]
    assert [len(block.actions) for block in blocks] == [0, 0, 4, 6, 8, 10, 12, 14]  # blocks 0 and 1 return at once
    assert [(a.name, a.tiles) for a in blocks[3].actions[-2:]] == [("one", (-2,)), ("two", (2**30, -(2**31)))]
    for block in blocks:
        times = [block.begin, *(a.start for a in block.actions), block.end]
        assert times == sorted(times)
        assert block.begin > 0
        assert all(a.end == b.start for a, b in zip(block.actions, block.actions[1:], strict=False))
        assert {a.multiprocessor for a in block.actions} <= {0}


@needs_compiler
@pytest.mark.parametrize("room", [1, 13, 14, 1000])
def test_a_second_launch_finds_the_arrays_as_the_first_found_them(tmp_path: Path, room: int) -> None:
    launched, x = counting(tmp_path, room)
    assert launched.trace is not None
    assert launched.trace.capacity == max(room, 14)
    assert launched.trace.most == 14
    assert x.tolist() == [100 * b + (b if b >= 2 else 0) for b in range(8)]


CALLING = COUNTING.replace(
    "__global__",
    """__device__ void two(float* x, int b) {
    TRACE(two, 1 << 30, -2147483647 - 1);
    if (threadIdx.x == 0) x[b] += 1.f;
}

__global__""",
).replace("        TRACE(two, 1 << 30, -2147483647 - 1);\n", "        two(x, b);\n")


@needs_compiler
@pytest.mark.parametrize("room", [3, 14])
def test_actions_in_functions_are_those_of_the_kernel(tmp_path: Path, room: int) -> None:
    path = tmp_path / "counting.cu"
    assert CALLING.count("        two(x, b);") == 1
    path.write_text(CALLING.replace("TRACE_BLOCK(", "TRACE_BLOCK_AND_CALLS("))
    x = np.zeros(8, "f4")
    launched = cuda.launch(cuda.Kernel(path), (x, 8, 2), device="cpu", trace=room)
    written_out, _ = counting(tmp_path, 14)
    assert launched.trace is not None
    assert written_out.trace is not None
    for one, two in zip(launched.trace.blocks, written_out.trace.blocks, strict=True):
        assert [(a.name, a.tiles) for a in one.actions] == [(a.name, a.tiles) for a in two.actions]
    path.write_text(CALLING)
    with pytest.raises(TraceError, match=r"2 actions of blockIdx \(2, 0, 0\) .* must say TRACE_BLOCK_AND_CALLS"):
        cuda.launch(cuda.Kernel(path), (x, 8, 2), device="cpu", trace=room)


@needs_compiler
@pytest.mark.parametrize("text", [COUNTING, CALLING.replace("TRACE_BLOCK(", "TRACE_BLOCK_AND_CALLS(")])
def test_what_finds_no_room_is_counted_and_not_written(tmp_path: Path, text: str) -> None:
    path = tmp_path / "counting.cu"
    path.write_text(text)
    plan = cuda.plan(cuda.Kernel(path), (np.zeros(8, "f4"), 8, 2))
    records, regions = buffers(plan, 9)
    records.view("u1")[...] = 0xAB
    on = {RECORDS: records, REGIONS: regions, CAPACITY: np.uint64(3)}  # says that less room is there than is
    cpu.run(plan, defines=(DEFINE,), device_globals=on)
    assert regions["count"].tolist() == [0, 0, 4, 6, 8, 10, 12, 14]
    kept = records.reshape(-1)
    untouched = (kept.view("u1").reshape(-1, RECORD.itemsize) == 0xAB).all(axis=1)
    assert untouched.tolist() == [*([True] * 6), *([False] * 18), *([True] * 48)]  # 3 of each block, of 0 and 1 none


@needs_compiler
def test_tracing_collects_every_launch_inside(tmp_path: Path) -> None:
    assert counting(tmp_path, False)[0].trace is None
    with cuda.tracing([20]) as traces:
        counting(tmp_path, False)
        counting(tmp_path, 16)
        counting(tmp_path, False)
    assert [trace.capacity for trace in traces] == [20, 16, 256]
    assert counting(tmp_path, False)[0].trace is None


@needs_compiler
def test_a_traced_kernel_gives_the_same_bits(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    Q, K, V = (rng.standard_normal((2, n, 8), "f4") for n in (9, 11, 11))
    plain = fv.flash_attention_2(Q, K, V, device="cpu", record=False)
    traced = fv.flash_attention_2(Q, K, V, device="cpu")
    assert plain.recording is None
    assert (plain.O == traced.O).all()
    assert (plain.L == traced.L).all()


# -- roles -------------------------------------------------------------------------------------------------------------

ROLES = """// @kernel    roles
// @grid      2, 2
// @block     96
// @roles     producer, consumer 1, consumer 2, consumer 3
// @array     x [64]
#include "include/trace.cuh"

__global__ void roles(float* x, int N) {
    const int warp = threadIdx.x / 32;
    TRACE_ROLE(warp, threadIdx.x % 32 == 3, 5, -blockIdx.y, blockIdx.x);
    if (warp == 0) {
        for (int n = 0; n <= blockIdx.x; ++n) {
            TRACE(ask, n);
        }
        return;
    }
    for (int n = 0; n < N; ++n) {
        TRACE(use, n, warp);
        if (blockIdx.x + blockIdx.y == 0 && threadIdx.x % 32 == 5) x[warp] += 1.f;
    }
}
"""


def roles(tmp_path: Path, N: int, trace: Any, text: str = ROLES) -> tuple[cuda.KernelTrace, list[float]]:
    path = tmp_path / "roles.cu"
    path.write_text(text)
    x = np.zeros(64, "f4")
    launched = cuda.launch(cuda.Kernel(path), (x, N), device="cpu", trace=trace)
    assert launched.trace is not None
    return launched.trace, x[:4].tolist()


@needs_compiler
@pytest.mark.parametrize("room", [1, 5, 100])
def test_each_role_writes_in_a_place_of_its_own(tmp_path: Path, room: int) -> None:
    """One of the four roles has no warps; the fullest of the others decides how much room is needed."""
    trace, x = roles(tmp_path, 5, room)
    assert x == [0, 5, 5, 0]  # a second launch found what the first found
    assert (trace.capacity, trace.most) == (max(room, 5), 12)
    assert [b.block for b in trace.blocks] == [Block(5, -1, 0), Block(5, -1, 1), Block(5, 0, 0), Block(5, 0, 1)]
    for block in trace.blocks:
        did: dict[str, list[Any]] = {}
        for action in block.actions:
            did.setdefault(action.role, []).append((action.name, action.tiles))
        uses = [[("use", (n, warp)) for n in range(5)] for warp in (1, 2)]
        asked = [("ask", (n,)) for n in range(block.block.tile + 1)]
        assert did == {"producer": asked, "consumer 1": uses[0], "consumer 2": uses[1]}
        for role in did:
            own = [a for a in block.actions if a.role == role]
            assert block.begin <= own[0].start
            assert all(a.end == b.start for a, b in pairwise(own))
            assert own[-1].end <= block.end


@needs_compiler
def test_roles_that_header_and_kernel_say_differently_are_refused(tmp_path: Path) -> None:
    nameless = ROLES.replace("// @roles     producer, consumer 1, consumer 2, consumer 3\n", "")
    with pytest.raises(TraceError, match=r"in the place of role 0 has role 1.*TRACE_ROLE where its header has a line"):
        roles(tmp_path, 2, 9, nameless)
    with pytest.raises(TraceError, match=r"in the place of role 1 has role 0.*and TRACE_BLOCK where it has none"):
        roles(tmp_path, 2, 9, re.sub(r"TRACE_ROLE\(.*?, .*?, ", "TRACE_BLOCK(", ROLES).replace("2, 2", "1"))
    silent = ROLES.replace("threadIdx.x % 32 == 3", "false")
    with pytest.raises(TraceError, match=r"4 of 4 blocks wrote no trace, first blockIdx \(0, 0, 0\).*TRACE_ROLE\("):
        roles(tmp_path, 2, 9, silent)
    with pytest.raises(TraceError, match=r"the roles of blockIdx \(0, 0, 0\) say \(5, 0, \d\) and \(5, 0, \d\)"):
        roles(tmp_path, 2, 9, ROLES.replace("-blockIdx.y, blockIdx.x", "-blockIdx.y, 4 * blockIdx.x + warp"))


@needs_compiler
def test_roles_in_a_file(tmp_path: Path) -> None:
    trace, _ = roles(tmp_path, 3, True)
    write_traces(tmp_path / "roles.npz", [trace], {})
    (read,), _ = read_traces(tmp_path / "roles.npz")
    assert read.blocks == trace.blocks


def test_stored_files_of_before_are_read(tmp_path: Path) -> None:
    """Those that come with flashviz have no roles."""
    read, _ = read_traces(Path(fv.__file__).parent / "traces" / "flash_attention_2.npz")
    assert {action.role for block in read[0].blocks for action in block.actions} == {""}


# -- on a GPU, as CuPy is called ---------------------------------------------------------------------------------------


@needs_compiler
def test_a_traced_launch_on_a_gpu(fake: Any) -> None:
    machine = fake()
    rng = np.random.default_rng(1)
    Q, K, V = (rng.standard_normal((3, n, 8), "f4") for n in (9, 11, 11))
    run = fv.flash_attention_2(Q, K, V, causal=True, device="gpu")
    _, traced, untraced = [module["options"] for module in machine.modules]  # the first is the probe
    assert traced == (*untraced, f"-D{DEFINE}")
    assert len(machine.launches) == 1  # the buffer was as large as the loops say: no second launch
    assert run.device == "gpu"
    assert run.recording is not None
    assert (run.recording.source, run.recording.device) == ("kernel", "gpu")
    assert run.recording.launches[0].trace is not None
    assert run.recording.params == {**run.params, "multiprocessors": 132}
    assert fv.same(run, fv.flash_attention_2(Q, K, V, causal=True, device="numpy")) == []
    plain = fv.flash_attention_2(Q, K, V, causal=True, device="gpu", record=False)
    assert len(machine.modules) == 3
    assert len(machine.launches) == 2
    np.testing.assert_allclose(run.O, plain.O, atol=1e-6)


@pytest.mark.parametrize(("untraced", "registers"), [(5, 48), (8, 32), (3, 80)])
def test_as_many_traced_blocks_fit_on_a_multiprocessor(fake: Any, untraced: int, registers: int) -> None:
    machine = fake(fit=lambda options: untraced - (options == (*gpu.OPTIONS, f"-D{DEFINE}")))
    plan = replace(a_plan(), block=(256, 1, 1))
    for _ in range(2):
        gpu._function(sys.modules["cupy"], plan, (DEFINE,))
    traced = (*gpu.OPTIONS, f"-D{DEFINE}")
    limited = (*traced, f"--maxrregcount={registers}")
    assert [module["options"] for module in machine.modules] == [traced, gpu.OPTIONS, limited]


@needs_compiler
def test_a_buffer_that_overflows_on_a_gpu_is_made_larger(fake: Any) -> None:
    machine = fake()
    plan = a_plan()
    args = tuple(plan.arguments.values())
    launched = cuda.launch(cuda.Kernel("flash_attention_2", {"Br": 4, "Bc": 4, "D": 8}), args, trace=3)
    assert launched.trace is not None
    assert (launched.trace.most, launched.trace.capacity, launched.trace.device) == (17, 17, "gpu")
    assert len(machine.launches) == 2
    timed = cuda.launch(cuda.Kernel("flash_attention_2", {"Br": 4, "Bc": 4, "D": 8}), args, trace=17, repeat=2)
    assert timed.times is not None
    assert timed.trace is not None


# -- files -------------------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    q, K = rng.standard_normal((4, 1, 8), "f4"), rng.standard_normal((2, 37, 8), "f4")
    with cuda.tracing() as traces:
        fv.flash_decoding(q, K, K, splits=3, device="cpu", record=False)
    about = {"gpu": "none", "sizes": {"Nk": 37}, "driver": "–"}
    size = write_traces(tmp_path / "a.npz", traces, about)
    assert size == (tmp_path / "a.npz").stat().st_size
    read, said = read_traces(tmp_path / "a.npz")
    assert {**about, "format": 1} == said
    for one, two in zip(traces, read, strict=True):
        assert one.blocks == two.blocks
        assert (one.kernel, one.device, one.grid, one.threads) == (two.kernel, two.device, two.grid, two.threads)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for name, content in (("text.npz", b"hello"), ("empty.npz", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} is not a stored trace"):
            read_traces(tmp_path / name)
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    with pytest.raises(ValueError, match="not a stored trace"):
        read_traces(tmp_path / "other.npz")
    np.savez(tmp_path / "later.npz", about=np.frombuffer(b'{"format": 2}', np.uint8))
    with pytest.raises(ValueError, match="has format 2; this flashviz reads format 1"):
        read_traces(tmp_path / "later.npz")


# -- machine code ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except NvrtcMissingError as error:
        pytest.skip(str(error))


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each function in an ELF file of NVIDIA's."""
    (headers,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, headers + n * size) for n in range(count)]
    found = {}
    for name, kind, _, _, offset, length, *_ in sections:
        start = sections[names][4] + name
        label = cubin[start : cubin.index(b"\0", start)].decode()
        if kind == 1 and label.startswith(".text."):
            found[label] = cubin[offset : offset + length]
    return found


ARCHS = [pytest.param(75, marks=pytest.mark.slow), 80, pytest.param(90, marks=pytest.mark.slow)]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if cuda.find(kernel).trace_ids])
def test_tracing_off_is_the_machine_code_of_no_trace_lines(nvrtc: Nvrtc, kernel: str, arch: int) -> None:
    functions = [cuda.find(kernel, function) for function in cuda.find(kernel).kernels]
    if max(source.header.arch for source in functions) > arch:
        pytest.skip(f"{kernel} needs a newer architecture")
    (target,) = functions[0].targets((arch,))
    instances = [s.signature.instance(values) for s in functions for values in s.header.instances[1:3] or ({},)]
    code = functions[0].assembled
    bare, lines = re.subn(r"^([ \t]*)TRACE(?:_BLOCK|_BLOCK_AND_CALLS|_ROLE)?\([^;]*\);", r"\1", code, flags=re.M)
    assert lines >= len(functions[0].trace_ids) + 1

    # The compiler gives some functions other code from time to time, for one and the same source. So a function is compiled until
    # both sources have given the same code once; one with ever new code says nothing.
    off: dict[str, set[bytes]] = {}
    without: dict[str, set[bytes]] = {}
    apart: list[str] = []
    for _ in range(10):
        for source, known in ((code, off), (bare, without)):
            for name, found in machine_code(nvrtc.compile(source, instances, target).cubin).items():
                known.setdefault(name, set()).add(found)
        assert set(off) == set(without)
        apart = [name for name in off if not off[name] & without[name]]
        if not apart:
            break
    unsteady = [name for name in apart if len(off[name]) > 2 and len(without[name]) > 2]
    assert [name for name in apart if name not in unsteady] == []
    assert len(unsteady) <= len(off) / 2
    traced = nvrtc.compile(code, instances, target, (f"-D{DEFINE}",))
    assert all(found not in off[name] for name, found in machine_code(traced.cubin).items())
    for name, used in traced.resources.items():
        budget = BUDGETS[name.split("<")[0]]
        assert max(used.spill_stores, used.spill_loads, used.stack) <= budget.spilled, name
        assert used.static_shared == 0, name
        assert used.registers <= budget.traced, name
    assert "warning" not in traced.log.lower()


def test_records_have_the_sizes_that_the_kernels_write() -> None:
    text = sources.find("flash_attention_2").assembled
    sizes = {"unsigned short": 2, "unsigned char": 1, "unsigned": 4, "int": 4, "unsigned long long": 8}
    for struct_name, dtype in (("TraceRecord", RECORD), ("TraceRegion", REGION)):
        body = re.search(rf"struct [^;]*?{struct_name} {{(.*?)}};", text, re.S)
        assert body is not None
        fields = re.findall(
            r"^\s*(unsigned long long|unsigned short|unsigned char|unsigned|int) ([\w, ]+);", body[1], re.M
        )
        declared = [(name, sizes[kind]) for kind, names in fields for name in names.split(", ")]
        split = {"what": [("action", 2), ("role", 1), ("tiles", 1)]}  # fields of one 32-bit word, lowest bits first
        declared = [field for name, size in declared for field in split.get(name, [(name, size)])]
        assert declared == [(name, dtype[name].itemsize) for name in dtype.names or ()]
