"""A progress bar on stderr, if that is a terminal."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Display:
    """A context manager around one training run; `show` moves the bar."""

    def __init__(self, name: str) -> None:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        self._bar = Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty())
        self._task = self._bar.add_task(name, total=1.0, note="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def show(self, progress: float, report: dict[str, Any]) -> None:
        """Set the bar to `progress`, and show the mean loss of each kind."""
        note = " ".join(f"{kind} {loss:.2f}" for kind, loss in report["loss"].items())
        self._bar.update(self._task, completed=progress, note=note)
