"""Rows as Markdown tables, and reports of several tables and plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.long_context.rows import Row
from forerun.bench.machine import footer, machine
from forerun.bench.report import replace_file, shown

Cell = Callable[[Row], str]


def listing(rows: Sequence[Row], columns: Mapping[str, str]) -> str:
    """A table of all rows.

    Args:
        rows: what it shows.
        columns: headings by the values' names.
    """
    lines = [f"| {' | '.join(columns.values())} |", "|" + "---|" * len(columns)]
    lines += [f"| {' | '.join(shown(row.get(name)) for name in columns)} |" for row in rows]
    return "\n".join(lines) + "\n"


def speed_cell(row: Row) -> str:
    """A speed-up, and the acceptance rate in brackets."""
    accepted = "" if row["acceptance"] is None else f" ({row['acceptance']:.3f})"
    return f"{row['speed_up']:.2f}x{accepted}"


def number_cell(name: str) -> Cell:
    """A value with three decimals."""
    return lambda row: "-" if row.get(name) is None else f"{row[name]:.3f}"


@dataclass
class Report:
    """A command's results, collected part by part, and written at the end or after each part.

    Attributes:
        title: of the Markdown file.
        settings: of the measurement.
        label: a note on all tables and plots, such as a simulated acceptance rate; may be empty.
        parts: rows by part; adding a part again replaces it.
        text: each part's Markdown.
    """

    title: str
    settings: Row
    label: str = ""
    parts: dict[str, list[Row]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    plots: dict[str, Callable[[Path], None]] = field(default_factory=dict)

    def add(self, name: str, heading: str, rows: Sequence[Row], *tables: str) -> None:
        """Add a part: its rows go into the JSON, its tables into the Markdown."""
        self.parts[name] = [row | ({"simulated": self.label} if self.label else {}) for row in rows]
        self.text[name] = "\n".join([f"## {self.named(heading)}\n", *tables])

    def named(self, title: str) -> str:
        """A title with the label."""
        return f"{title} ({self.label})" if self.label else title

    def titled(self, title: str) -> str:
        """A plot's title, with the label on a second line."""
        return f"{title}\n({self.label})" if self.label else title

    def plot(self, name: str, draw: Callable[[Path], None]) -> None:
        """Add a plot; ``draw`` draws it into a file."""
        self.plots[name] = draw

    @property
    def heading(self) -> str:
        """The first line of the Markdown."""
        return f"# {self.named(self.title)}\n"

    @property
    def footer(self) -> str:
        """Machine, versions and settings."""
        return footer(self.settings)

    @property
    def markdown(self) -> str:
        """All tables, with machine, versions and settings."""
        return "\n".join([self.heading, *self.text.values(), self.footer])

    @property
    def json(self) -> Row:
        """All rows as plain values."""
        said = {"simulated": self.label} if self.label else {}
        return {"machine": machine(), "settings": self.settings, **said, "parts": self.parts}

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
