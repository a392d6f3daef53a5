"""Reports of several tables and plots: written after each part, printed at the end."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame, Line
from forerun.bench.machine import Row, caption, footer, machine, plain_values
from forerun.bench.report import replace_file, shown
from forerun.cli.terminal import show_report, stdout


def listing(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """Format a table of all rows; ``columns`` are headings by the values' names."""
    lines = [f"| {' | '.join(columns.values())} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(shown(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def speed_cell(row: Row) -> str:
    """Return a speed-up, and the acceptance rate in brackets."""
    accepted = "" if row["acceptance"] is None else f" ({row['acceptance']:.3f})"
    return f"{row['speed_up']:.2f}x{accepted}"


@dataclass
class Report:
    """A command's results, part by part. They go into ``name.json``, ``name.md`` and ``name-PLOT.png`` in ``folder``.

    ``as_json`` prints one JSON object at the end instead of tables.
    """

    title: str
    settings: Row
    folder: Path = Path()
    name: str = ""
    as_json: bool = False
    parts: dict[str, list[Row]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    plots: dict[str, Callable[[Path], None]] = field(default_factory=dict)
    _printed: set[str] = field(default_factory=set)
    _written: dict[Path, None] = field(default_factory=dict)

    @classmethod
    def of(cls, title: str, options: Any, name: str, **more: Any) -> Report:
        """Return a command's report; ``more`` are settings beyond the options, or in place of them."""
        return cls(title, plain_values(options) | more, options.out, name, getattr(options, "json", False))

    def add(self, name: str, heading: str, rows: Sequence[Row], *tables: str) -> None:
        """Add or replace a part: its rows go into the JSON, its tables into the Markdown."""
        self.parts[name] = list(rows)
        self.text[name] = "\n".join([f"## {heading}\n", *tables])

    def plot(self, name: str, draw: Callable[[Path], None]) -> None:
        self.plots[name] = draw

    def lines(self, name: str, frame: Frame, found: Sequence[Line]) -> None:
        self.plot(name, lambda path: plots.lines(path, self.framed(frame), found))

    def bars(self, name: str, frame: Frame, groups: Sequence[str], found: Sequence[Line]) -> None:
        self.plot(name, lambda path: plots.bars(path, self.framed(frame), groups, found))

    def framed(self, frame: Frame) -> Frame:
        return replace(frame, note=self.note)

    @property
    def note(self) -> str:
        return caption(self.settings)

    @property
    def markdown(self) -> str:
        return "\n".join([f"# {self.title}\n", *self.text.values(), footer(self.settings)])

    @property
    def json(self) -> Row:
        return {"machine": machine(), "settings": self.settings, "parts": self.parts}

    def save(self) -> None:
        """Write the report so far, so that an interrupted command keeps it; draw each new plot."""
        self.folder.mkdir(parents=True, exist_ok=True)
        paths = [self.folder / f"{self.name}.json", self.folder / f"{self.name}.md"]
        for path, text in zip(paths, (json.dumps(self.json, indent=1) + "\n", self.markdown), strict=True):
            replace_file(path, text)
        for plot, draw in self.plots.items():
            paths.append(self.folder / f"{self.name}-{plot}.png")
            draw(paths[-1])
        self.plots.clear()
        self._written |= dict.fromkeys(paths)

    def part(self) -> None:
        """Write the report so far, and print its new parts."""
        self.save()
        new = [text for part, text in self.text.items() if part not in self._printed]
        if not self.as_json and new:
            head = [] if self._printed else [f"# {self.title}\n"]
            stdout().print("\n".join([*head, *new]), soft_wrap=True, markup=False)
        self._printed.update(self.text)

    def end(self) -> None:
        """Write the report; print the remaining parts, the machine and the settings."""
        self.part()
        show_report(self.json if self.as_json else footer(self.settings), self._written)
