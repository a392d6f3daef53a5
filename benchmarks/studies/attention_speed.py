"""Attention of few queries over many keys, beside what the machine could do: python -m benchmarks attention

For each number of queries and keys: how fast keys and values are read (GB/s), the arithmetic (GFLOP/s), and the
share of the roofline, the lower of the measured memory bandwidth and the measured speed of a large matrix product.
Keys that fit into a cache can be read faster than memory, so shares above 1 are possible there.

Rounds in which other processes took more than a twentieth of the cores are dropped (Linux), if any are left then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.reporting.options import numbers
from forerun.cli.options import DebugOptions
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import BACKENDS, AttentionSpec, attend_in_order

KERNELS = ("torch", "in order")
Functions = dict[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(DebugOptions):
    """Attention of few queries over many keys, beside what the machine could do."""

    queries: Annotated[str, typer.Option(help="Commas between.")] = "1,2,4,8,9,16,17,32"
    keys: Annotated[str, typer.Option(help="Commas between.")] = "2048,16384,131072"
    heads: Annotated[int, typer.Option(help="Of queries and keys.")] = 8
    dim: Annotated[int, typer.Option(help="Of a head.")] = 64
    threads: Annotated[int, typer.Option(help="By default as many as torch takes.")] = 0
    seconds: Annotated[float, typer.Option(help="Per line.")] = 0.5


def run(options: AttentionOptions) -> None:
    """Print the table."""
    if options.threads:
        torch.set_num_threads(options.threads)
    memory, compute = roofline(options.seconds)
    print(f"{torch.get_num_threads()} threads, reading {memory:.1f} GB/s, matrix product {compute:.0f} GFLOP/s")
    print(f"{options.heads} heads of {options.dim}, float32")
    print(f"{'keys':>7} {'queries':>7} " + "".join(f"{name:>12} GB/s GFLOP/s share" for name in KERNELS))
    for m in numbers("--keys", options.keys, int, 1):
        k, v = (torch.randn(1, options.heads, m + 64, options.dim)[:, :, :m] for _ in range(2))
        for n in numbers("--queries", options.queries, int, 1):
            times = measure(calls(n, k, v), options.seconds)
            gb, gflop = (k.numel() + v.numel()) * 4 / 1e9, 4 * n * k.numel() / 1e9
            best = max(gb / memory, gflop / compute)
            cells = (f"{gb / t:17.1f} {gflop / t:7.0f} {best / t:5.2f}" for t in times.values())
            print(f"{m:7} {n:7} " + "".join(cells), flush=True)


def roofline(seconds: float) -> tuple[float, float]:
    """Memory bandwidth in GB/s and matrix product in GFLOP/s, the best of what is measured."""
    numbers, square = torch.ones(1 << 26), torch.ones(1024, 1024)
    times = measure({"sum": numbers.sum, "product": lambda: square @ square}, 2 * seconds)
    return numbers.nbytes / times["sum"] / 1e9, 2 * 1024**3 / times["product"] / 1e9


def calls(n: int, k: torch.Tensor, v: torch.Tensor) -> Functions:
    """Attention of ``n`` queries by each kernel."""
    q, spec = torch.randn(1, k.shape[1], n, k.shape[3]), AttentionSpec(k.shape[3] ** -0.5)
    block = Block(np.zeros(n, np.int64), DraftTree.empty(), k.shape[2] - n)
    flash, ours = KERNELS
    return {
        flash: lambda: BACKENDS["flash_cpu"](q, k, v, spec, None),
        ours: lambda: attend_in_order(q, [(k, v)], [block], spec),
    }


def measure(functions: Functions, seconds: float) -> dict[str, float]:
    """The best time of each in rounds of all, until ``seconds`` have passed."""
    rounds: list[tuple[bool, dict[str, float]]] = []
    for function in functions.values():
        function()
    end = time.perf_counter() + seconds
    while len(rounds) < 3 or time.perf_counter() < end:
        times, begin, before = dict.fromkeys(functions, float("inf")), time.perf_counter(), by_others()
        while time.perf_counter() < begin + seconds / 8:
            for name, function in functions.items():
                start = time.perf_counter()
                function()
                times[name] = min(times[name], time.perf_counter() - start)
        passed = time.perf_counter() - begin
        rounds.append((by_others() - before < 0.05 * passed * (os.cpu_count() or 1) + 0.011, times))
    undisturbed = [times for quiet, times in rounds if quiet] or [times for _, times in rounds]
    return {name: min(times[name] for times in undisturbed) for name in functions}


def by_others() -> float:
    """Seconds of processor time that other processes have had since the machine started."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    fields = [int(field) for field in stat.read_text().split("\n")[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK") - time.process_time()
