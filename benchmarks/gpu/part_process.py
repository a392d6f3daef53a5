"""One part of ``python -m benchmarks gpu`` as a process: an error of a GPU ends the process that made it.

Each row is written as it is measured, so that a part that is killed keeps its rows.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

from benchmarks.gpu import parts, speculation_parts
from benchmarks.gpu.gpu_bench import GpuBench
from benchmarks.gpu.interpreter import gpu_code
from forerun.bench.machine import Row

PARTS: dict[str, Callable[[GpuBench], Iterator[Row]]] = {
    "machine": parts.machine, "bits": parts.bits, "kernels": parts.kernels, "choices": parts.choices,
    "auto": speculation_parts.auto, "triforce": speculation_parts.triforce, "offload": speculation_parts.offload,
}  # fmt: skip
"""The parts in their order."""
INTERPRETED = ("bits", "kernels", "choices", "auto")
"""Parts whose dry run interprets GPU kernels. TriForce's would last for minutes; the CPU's kernels cover that code,
too."""


def rows_file(out: Path, name: str) -> Path:
    return out / f"{name}.jsonl"


def measure(name: str, bench: GpuBench, out: Path) -> None:
    """Measure a part, and write a line for each row. An error becomes a row, and is raised again."""
    code = gpu_code(bench.device) if name in INTERPRETED else nullcontext()
    with rows_file(out, name).open("w", encoding="utf-8") as file, code:
        try:
            for row in PARTS[name](bench):
                file.write(json.dumps(row) + "\n")
                file.flush()
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            file.write(json.dumps({"error": f"{type(error).__name__}: {first}"}) + "\n")
            raise


def main() -> None:
    name, out, dry_run = sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "dry-run"
    try:
        measure(name, GpuBench.smallest() if dry_run else GpuBench.of_card(), out)
    except Exception:
        traceback.print_exc()  # to the part's log
        sys.exit(1)


if __name__ == "__main__":
    main()
