"""Every kernel, instantiation and architecture without a GPU: what it costs by NVRTC, and a run with every memory access looked at.

    .venv/bin/python tools/budgets.py

Compiles each file of kernels/ for sm_75, sm_80 and sm_90 (from its least architecture up, or for the one that it is for), with tracing off and on, and fails on an error, a
spill, stack, or more registers or shared memory than BUDGETS allows. Then checks each file, all instantiations and shapes, on the
processor. A new kernel states its budget here.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from flashviz.checks.kernels import check
from flashviz.cuda import find
from flashviz.cuda.nvrtc import Nvrtc
from flashviz.cuda.sources import folders

ARCHS = (75, 80, 90)
TRACING = {"off": (), "on": ("-DFLASHVIZ_TRACE",)}


@dataclass(frozen=True)
class Budget:
    """Registers a thread, without and with tracing, and bytes of shared memory a block, the most of any instantiation.

    ``spilled`` is how many bytes may be spilled with tracing on, of stack, of stores and of loads each; ``always`` without it as well,
    which is for a kernel whose header says why.
    """

    registers: int
    traced: int
    shared: int
    spilled: int = 0
    always: int = 0

    def may_spill(self, traced: bool) -> int:
        """Bytes of stack, of stores and of loads."""
        return max(self.spilled, self.always) if traced else self.always


BUDGETS = {
    "flash_attention_1": Budget(64, 72, 147_968),
    "flash_attention_2": Budget(64, 72, 147_968),
    "flash_attention_2_warps": Budget(128, 136, 98_304),
    "flash_attention_2_registers": Budget(255, 255, 200_192),
    "flash_attention_2_tf32": Budget(255, 255, 126_720),
    "flash_attention_2_mma": Budget(128, 160, 52_224, spilled=8),
    "flash_attention_2_async": Budget(168, 168, 87_040, spilled=24),
    "flash_attention_2_tuned": Budget(255, 255, 98_304, spilled=104, always=8),
    "flash_attention_2_rope": Budget(64, 72, 147_968),
    "attention_library": Budget(64, 72, 147_968),
    "attention_short": Budget(64, 72, 147_968),
    "flash_decoding_split": Budget(64, 72, 67_584),
    "flash_decoding_combine": Budget(48, 48, 10_304),
    "flash_decoding_vectors": Budget(112, 160, 4_160),
    "flash_decoding_heads": Budget(160, 176, 33_280),
    "safe_softmax": Budget(32, 32, 12_304),
    "online_softmax": Budget(32, 32, 12_304),
    "fused_softmax": Budget(56, 56, 67_600),
    "rope_rows": Budget(32, 32, 16_384),
    "rope_pairs_rows": Budget(32, 32, 16_384),
    "standard_scores": Budget(56, 64, 49_152),
    "standard_softmax": Budget(48, 48, 65_536),
    "standard_values": Budget(48, 56, 49_152),
    "hopper_scores": Budget(168, 168, 81_920),
    "hopper_values": Budget(168, 168, 32_768),
    "hopper_copy": Budget(32, 32, 8_208),
    "hopper_ring": Budget(40, 40, 12_336),
    "flash_attention_3": Budget(168, 168, 196_736, spilled=24),
}


def files() -> list[str]:
    return sorted({path.stem for folder in folders() for path in folder.glob("*.cu")})


def costs(file: str) -> tuple[list[str], list[str]]:
    """Lines of the table for one file, and what is wrong."""
    nvrtc = Nvrtc()
    sources = {function: find(file, function) for function in find(file).kernels}
    lines, wrong = [], []
    most: dict[tuple[str, str], int] = {}
    targets = dict.fromkeys(target for source in sources.values() for target in source.targets(ARCHS))
    for arch in targets:
        for tracing, options in TRACING.items():
            of = {
                source.signature.instance(values): (function, source.shared_bytes(values))
                for function, source in sources.items()
                if arch in source.targets(ARCHS)
                for values in source.header.instances or ({},)
            }
            if not of:
                continue
            compiled = nvrtc.compile(find(file).assembled, list(of), arch, options)
            where = f"{file}.cu, sm_{arch}, tracing {tracing}"
            if not compiled.ok:
                wrong += [f"{where}: {problem}" for problem in compiled.problems] or [f"{where}: {compiled.log}"]
                continue
            for name, (function, dynamic) in of.items():
                used = compiled.resources.get(name)
                if used is None:
                    wrong.append(f"{where}: {name} is not in what was compiled")
                    continue
                shared = used.static_shared + dynamic
                budget = BUDGETS.get(function)
                allowed = 0 if budget is None else budget.traced if options else budget.registers
                most[function, tracing] = max(most.get((function, tracing), 0), used.registers)
                most[function, "shared"] = max(most.get((function, "shared"), 0), shared)
                if budget is None:
                    wrong.append(f"{where}: {function} has no budget in tools/budgets.py")
                    continue
                for what, value, limit in (
                    ("registers", used.registers, allowed),
                    ("bytes of shared memory", shared, budget.shared),
                    ("bytes of stack", used.stack, budget.may_spill(bool(options))),
                    ("bytes spilled", max(used.spill_stores, used.spill_loads), budget.may_spill(bool(options))),
                ):
                    if value > limit:
                        wrong.append(f"{where}: {name} uses {value:,} {what}; its budget is {limit:,}")
    for function in sources:
        row = [most.get((function, tracing), 0) for tracing in TRACING]
        lines.append(f"{function:<30}{row[0]:>4}{row[1]:>10}{most.get((function, 'shared'), 0):>16,}")
    return lines, sorted(set(wrong))


def checked(file: str) -> tuple[str, bool]:
    """What a check of one file says, and whether it is nothing; why there is none, where the processor cannot run the file."""
    if reason := find(file).not_on_processor:
        return f"{file}.cu: {reason}", True
    report = check(file, everything=True, limit=600)
    return str(report), report.ok


def main() -> int:
    failed: list[str] = []
    start = time.monotonic()
    with ProcessPoolExecutor(2) as pool:
        print(
            "kernel               registers, traced, bytes of shared memory: the most of any instantiation and architecture"
        )
        for lines, wrong in pool.map(costs, files()):
            print("\n".join(lines), flush=True)
            failed += wrong
        print(f"\non the processor, every access looked at ({time.monotonic() - start:.0f} s)")
        for text, ok in pool.map(checked, files()):
            print(text, flush=True)
            failed += [] if ok else [text.splitlines()[0]]
    print(f"\n{time.monotonic() - start:.0f} s")
    for line in failed:
        print(f"FAILED {line}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
