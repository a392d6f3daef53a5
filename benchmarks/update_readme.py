"""Put the last measured tables into the pages that show them.

    python -m benchmarks.update_readme [bench] [long] [scaling]

`bench`, of `forerun bench --out runs/bench-TYPE`, goes into README.md; `long`, of `forerun bench triforce`, into
docs/benchmarks.md; `scaling`, of `forerun capacity --published`, into docs/scaling.md.
"""

import json
import sys
from pathlib import Path

from benchmarks.capacity.published import COLUMNS as PUBLISHED
from benchmarks.capacity.report import SIZES, SPEEDS
from benchmarks.longcontext import PLAIN
from benchmarks.longrows import Row
from benchmarks.report import into_readme, means
from benchmarks.speed import BASELINE
from benchmarks.tables import listing, pivot, speed_cell

ROOT = Path(__file__).parents[1]
CAPACITY = ROOT / "runs" / "capacity" / "capacity.json"
LONG = ROOT / "runs" / "triforce" / "triforce.json"
REPORTS = {dtype: ROOT / "runs" / f"bench-{dtype}" / "speed.json" for dtype in ("float32", "bfloat16")}


def speed_table(reports: dict[str, Path]) -> str:
    """Tokens per second and the ratio to transformers by task, for each measured type of weights."""
    rows: list[Row] = []
    for dtype, report in reports.items():
        found = json.loads(report.read_text(encoding="utf-8"))["rows"]
        rows += [row | {"name": f"{row['contestant']}, {dtype}"} for row in [*found, *means(found)]]
    return pivot(rows, "name", "task", _speed).replace("| name |", "| |", 1)


def _speed(row: Row) -> str:
    ratio = "" if row["contestant"] == BASELINE else f" ({row['speed_up']:.1f}x)"
    return f"{row['tokens_per_second']:.0f}{ratio}"


def long_table(report: Path) -> str:
    """Speed-up and acceptance rate by context, and by temperature at the longest one."""
    parts: dict[str, list[Row]] = json.loads(report.read_text(encoding="utf-8"))["parts"]
    contexts = [row | {"at": f"{row['context']:,} tokens"} for row in parts["contexts"]]
    shown = [row for row in parts.get("temperatures", []) if row["temperature"] in (0.6, 1.0)]
    warm = [row | {"at": f"{row['context']:,}, T {row['temperature']:g}"} for row in shown]
    return pivot([row | {"drafter": row["contestant"]} for row in contexts + warm], "drafter", "at", _cell)


def _cell(row: Row) -> str:
    return f"{row['tokens_per_second']:.0f} tokens/s" if row["contestant"] == PLAIN else speed_cell(row)


def scaling_tables(report: Path) -> dict[str, str]:
    """The capacity report's tables by their markers."""
    parts: dict[str, list[Row]] = json.loads(report.read_text(encoding="utf-8"))["parts"]
    columns = {"sizes": SIZES, "speeds": SPEEDS, "published": PUBLISHED}
    return {name: listing(parts[name], shown) for name, shown in columns.items()}


if __name__ == "__main__":
    wanted = sys.argv[1:] or ["bench", "long", "scaling"]
    if "bench" in wanted and (there := {dtype: path for dtype, path in REPORTS.items() if path.exists()}):
        into_readme(ROOT / "README.md", speed_table(there), "bench")
    if "long" in wanted and LONG.exists():
        into_readme(ROOT / "docs" / "benchmarks.md", long_table(LONG), "long")
    if "scaling" in wanted and CAPACITY.exists():
        for name, table in scaling_tables(CAPACITY).items():
            into_readme(ROOT / "docs" / "scaling.md", table, name)
