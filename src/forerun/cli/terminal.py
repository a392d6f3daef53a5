"""Output: generated text goes to stdout unchanged, everything else to stderr."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.style import Style

PATIENCE = 0.5
"""Seconds before long work shows progress: longer silence looks like a hang."""

BAR = 20
"""Columns of the bar, so that it and its label fit into 80."""

FILE_WIDTH = 200
"""Columns of tables in a file or a pipe: no cell is cut off."""

DRAFTED = Style(color="green", bold=True)

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def stdout(colour: bool | None = None) -> Console:
    """Return the console for results; by default coloured in a terminal unless ``NO_COLOR`` is set."""
    no_colour = bool(os.environ.get("NO_COLOR")) if colour is None else not colour
    console = Console(force_terminal=colour, no_color=no_colour, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def stderr() -> Console:
    """Return the console for progress and statistics."""
    return Console(stderr=True, highlight=False)


def say(line: str) -> None:
    """Print a progress line on stderr, without wrapping."""
    stderr().print(line, soft_wrap=True, markup=False)


def show_report(report: str | dict[str, Any], written: Iterable[Path]) -> None:
    """Print a report, as Markdown or one JSON object; after Markdown, list the files on stderr."""
    if isinstance(report, dict):
        typer.echo(json.dumps(report))
    else:
        stdout().print(report, soft_wrap=True, markup=False)
        say(f"written: {', '.join(map(str, written))}")


def printable(text: str) -> str:
    """Replace control characters that could move the cursor or rename the window."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


class TextWriter:
    """A writer of generated text to stdout without delay: unchanged into a pipe, coloured in a terminal."""

    def __init__(self, colour: bool | None) -> None:
        console = stdout(colour)
        self._plain = not console.is_terminal
        self._style = DRAFTED if console.color_system and not console.no_color else Style.null()
        self._colours = console._color_system
        self._ended = True

    def write(self, text: str, drafted: bool) -> None:
        self._ended = text.endswith("\n")  # before writing, as Ctrl-C may interrupt that
        if not self._plain:
            style = self._style if drafted else Style.null()
            sys.stdout.write(style.render(printable(text), color_system=self._colours))
        else:
            sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        if not self._ended:
            sys.stdout.write("\n")
        sys.stdout.flush()


@contextmanager
def working(console: Console, what: str) -> Iterator[Callable[..., None]]:
    """Show a bar in a terminal while work exceeds ``PATIENCE``; yield a function of work done, to do, and a label."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(BAR), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(what, total=None)

    def show(done: int, total: int | None = None, now: str = what) -> None:
        of = "" if total is None else f" of {total:,}"
        bar.update(task, completed=done, total=total, description=f"{now}: {done:,}{of}")

    timer = threading.Timer(PATIENCE, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()
        timer.join()
        bar.stop()


@contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Callable[..., None]]:
    """Show a progress bar in a terminal; yield a function of work done, work to do, and what is done now."""
    now = TextColumn("{task.fields[now]}", style="dim")
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), now)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, now="")
        yield lambda done, total, now="": bar.update(task, completed=done, total=total, now=now)


@contextmanager
def preparing(what: str) -> Iterator[None]:
    """Show this work, and the kernels that it compiles, in a terminal."""
    from forerun.core.compile_notice import MESSAGE, counted_functions  # loads numba, which help must not

    with working(stderr(), what) as show, counted_functions(lambda functions: show(functions, now=MESSAGE)):
        yield


class PrefillBar:
    """A progress bar for a long prefill; call it with tokens done and to do, then ``close`` it."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("reading the prompt", total=None)
        self._begin = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._begin > PATIENCE:
            self._bar.start()
            self._bar.update(self._task, completed=done, total=total)

    def close(self) -> None:
        if self._bar.live.is_started:
            self._bar.stop()
