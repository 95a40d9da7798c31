"""What the units of a GPU did while a kernel ran: the counters of NVIDIA's profiler ncu, where it is installed and may read them."""

from __future__ import annotations

import csv
import io
import shutil

import gpu

COUNTERS = {  # what the profile shows, and ncu's name for it
    "issue slots used, %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "FMA units, %": "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    "tensor cores, %": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
    "shared memory, %": "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
    "its accesses, 10^9": "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",
    "of them conflicts, 10^9": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "warps a scheduler": "smsp__warps_active.avg.per_cycle_active",
    "waits for shared memory": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "for its queue": "smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio",
    "at barriers": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "for registers": "smsp__average_warps_issue_stalled_dispatch_stall_per_issue_active.ratio",
    "for a unit": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
    "for HBM or L2": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
}


def profile(command: list[str], kernels: str, limit: float = 120) -> list[dict[str, float]]:
    """The counters of each launch of ``command`` whose kernel's name matches ``kernels``, in order; clocks are left as they are.

    Raises RuntimeError where ncu is missing or reads nothing.
    """
    if not shutil.which("ncu"):
        raise RuntimeError("ncu is not on the PATH")
    options = ["--clock-control", "none", "--csv", "--metrics", ",".join(COUNTERS.values()), "--kernel-name"]
    output = gpu.run_group(["ncu", *options, f"regex:{kernels}", *command], limit)
    if '"ID"' not in output:
        raise RuntimeError(f"ncu reported nothing: {output[-500:]}")
    launches: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(io.StringIO(output[output.index('"ID"') :])):
        launches.setdefault(row["ID"], {})[row["Metric Name"]] = row["Metric Value"].replace(",", "")
    return [
        {name: float(values.get(of, "nan")) / (1e9 if "10^9" in name else 1) for name, of in COUNTERS.items()}
        for values in launches.values()
    ]
