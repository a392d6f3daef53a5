"""Output of a long measurement's report: files after each part, and JSON or tables on stdout."""

from __future__ import annotations

from pathlib import Path

from benchmarks.reporting.tables import Report
from forerun.cli.terminal import show_report, stdout


class Delivery:
    """Writes a report as it grows, so that an interrupted run keeps what it has measured.

    Args:
        report: the report.
        folder: of the files.
        name: of the files.
        as_json: print one JSON object at the end instead of tables.
    """

    def __init__(self, report: Report, folder: Path, name: str, as_json: bool) -> None:
        self._report = report
        self._folder = folder
        self._name = name
        self._as_json = as_json
        self._printed: set[str] = set()
        self._written: dict[Path, None] = {}

    def save(self) -> None:
        """Write the report so far; its current part may be incomplete."""
        self._written |= dict.fromkeys(self._report.write(self._folder, self._name))

    def part(self) -> None:
        """Write the report so far, and print its new parts."""
        self.save()
        new = [part for part in self._report.text if part not in self._printed]
        if not self._as_json and new:
            head = [] if self._printed else [self._report.heading]
            _print("\n".join([*head, *(self._report.text[part] for part in new)]))
        self._printed.update(new)

    def end(self) -> None:
        """Print the remaining parts, and the machine and settings."""
        self.part()
        show_report(self._report.json if self._as_json else self._report.footer, self._written)


def deliver(report: Report, folder: Path, name: str, as_json: bool) -> None:
    """Write ``name.json``, ``name.md`` and the plots into ``folder``, and print the JSON or the Markdown."""
    Delivery(report, folder, name, as_json).end()


def _print(text: str) -> None:
    stdout().print(text, soft_wrap=True, markup=False)
