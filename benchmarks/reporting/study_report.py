"""Reports of several tables and plots: rows as Markdown, files after each part, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.reporting import plots
from benchmarks.reporting.plots import Frame, Line
from forerun.bench.machine import Row, caption, footer, machine
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
    """A command's results, collected part by part, and written at the end or after each part.

    Attributes:
        title: of the Markdown file.
        settings: of the measurement.
        parts: rows by part; adding a part again replaces it.
        text: each part's Markdown.
    """

    title: str
    settings: Row
    parts: dict[str, list[Row]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    plots: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def add(self, name: str, heading: str, rows: Sequence[Row], *tables: str) -> None:
        """Add a part: its rows go into the JSON, its tables into the Markdown."""
        self.parts[name] = list(rows)
        self.text[name] = "\n".join([f"## {heading}\n", *tables])

    def plot(self, name: str, draw: Callable[[Path], None]) -> None:
        self.plots[name] = draw

    def lines(self, name: str, frame: Frame, found: Sequence[Line]) -> None:
        self.plot(name, lambda path: plots.lines(path, self.framed(frame), found))

    def bars(self, name: str, frame: Frame, groups: Sequence[str], found: Sequence[Line]) -> None:
        self.plot(name, lambda path: plots.bars(path, self.framed(frame), groups, found))

    def framed(self, frame: Frame) -> Frame:
        """Return the frame with the model and machine as its note."""
        return replace(frame, note=self.note)

    @property
    def note(self) -> str:
        """What was measured where and when, for plots."""
        return caption(self.settings)

    @property
    def heading(self) -> str:
        """The first line of the Markdown."""
        return f"# {self.title}\n"

    @property
    def footer(self) -> str:
        return footer(self.settings)

    @property
    def markdown(self) -> str:
        return "\n".join([self.heading, *self.text.values(), self.footer])

    @property
    def json(self) -> Row:
        return {"machine": machine(), "settings": self.settings, "parts": self.parts}

    def write(self, folder: Path, name: str) -> list[Path]:
        """Write ``name.json``, ``name.md`` and a ``.png`` for each new plot into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{name}.json", folder / f"{name}.md"]
        for path, text in zip(paths, (json.dumps(self.json, indent=1) + "\n", self.markdown), strict=True):
            replace_file(path, text)
        for plot, draw in self.plots.items():
            paths.append(folder / f"{name}-{plot}.png")
            draw(paths[-1])
        self.plots.clear()
        return paths


class Delivery:
    """Writes files of a report as it grows, so that an interrupted run keeps what it has measured.

    ``as_json`` prints one JSON object at the end instead of tables.
    """

    def __init__(self, report: Report, folder: Path, name: str, as_json: bool) -> None:
        self.report = report
        self._folder = folder
        self._name = name
        self._as_json = as_json
        self._printed: set[str] = set()
        self._written: dict[Path, None] = {}

    def save(self) -> None:
        """Write the report so far; its current part may be incomplete."""
        self._written |= dict.fromkeys(self.report.write(self._folder, self._name))

    def part(self) -> None:
        """Write the report so far, and print its new parts."""
        self.save()
        new = [part for part in self.report.text if part not in self._printed]
        if not self._as_json and new:
            head = [] if self._printed else [self.report.heading]
            text = "\n".join([*head, *(self.report.text[part] for part in new)])
            stdout().print(text, soft_wrap=True, markup=False)
        self._printed.update(new)

    def end(self) -> None:
        """Print the remaining parts, and the machine and settings."""
        self.part()
        show_report(self.report.json if self._as_json else self.report.footer, self._written)


def deliver(report: Report, folder: Path, name: str, as_json: bool) -> None:
    """Write ``name.json``, ``name.md`` and the plots into ``folder``, and print the JSON or the Markdown."""
    Delivery(report, folder, name, as_json).end()
