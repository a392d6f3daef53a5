"""How a long measurement's report leaves the program: files, then JSON or tables on stdout."""

from __future__ import annotations

import json
from pathlib import Path

from forerun.bench.tables import Report
from forerun.cli.terminal import stderr, stdout


def deliver(report: Report, folder: Path, name: str, as_json: bool) -> None:
    """Write ``name.json``, ``name.md`` and the plots into ``folder``, and print one of the first two."""
    paths = report.write(folder, name)
    if as_json:
        print(json.dumps(report.json))  # noqa: T201
        return
    stdout().print(report.markdown, soft_wrap=True, markup=False)
    stderr().print(f"written: {', '.join(map(str, paths))}")
