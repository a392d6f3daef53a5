"""Reads the raw texts: books, word problems and Python's standard library, each split into training and held-out.

Held out are the modules in `HELD_OUT_MODULES`, every twentieth word problem, and all books outside the training folder.
Files are sorted, so the same folder always gives the same material.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

from benchmarks.reporting.common_options import json_lines
from benchmarks.training.tasks import Material

HELD_OUT_MODULES = frozenset(
    f"{name}.py"
    for name in "calendar configparser csv fractions heapq queue sched shelve statistics textwrap".split()  # noqa: SIM905
)
_SKIPPED = frozenset(["test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "encodings"])
_HELD_OUT_EVERY = 20


def read_books(folder: Path) -> tuple[str, ...]:
    """Return the paragraphs of every .txt file in `folder`, in order."""
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise ValueError(f"no .txt files in {folder}")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return tuple(part for text in texts for part in paragraphs(text))


def paragraphs(text: str) -> list[str]:
    """Return the parts of a text between empty lines."""
    return [part.strip() for part in text.split("\n\n") if len(part.strip()) > 1]


def stdlib_files() -> list[Path]:
    """Return the standard library's files outside of `_SKIPPED` folders, sorted."""
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts)]


def read_code() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the sources of the standard library: (training, held out)."""
    train: list[str] = []
    held_out: list[str] = []
    for path in stdlib_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        (held_out if path.name in HELD_OUT_MODULES else train).append(text)
    return tuple(train), tuple(held_out)


def read_maths(file: Path) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the (prompt, answer) pairs of a JSON-lines file: (training, held out).

    Raises:
        ValueError: with the first line that has no such pair.
    """
    pairs = [_pair(place, row) for place, row in json_lines(file)]
    held_out = tuple(pairs[::_HELD_OUT_EVERY])
    return tuple(pair for i, pair in enumerate(pairs) if i % _HELD_OUT_EVERY), held_out


def _pair(place: str, row: Any) -> tuple[str, str]:
    for name in ("prompt", "answer"):
        if not isinstance(row, dict) or not isinstance(row.get(name), str):
            raise ValueError(f"{place} has no {name}; each line needs a prompt and an answer, both text")
    return row["prompt"].rstrip(" "), " " + row["answer"].strip()


def read(books: Path, maths: Path) -> Material:
    """Return the training material."""
    return Material(read_books(books), read_code()[0], read_maths(maths)[0])


def read_held_out(books: Path | None, maths: Path | None) -> Material:
    """Return the held-out material; `books` must not be the training folder."""
    prose = read_books(books) if books else ()
    return Material(prose, read_code()[1], read_maths(maths)[1] if maths else ())
