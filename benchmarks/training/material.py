"""The raw texts: books, word problems and Python's standard library, each split into training and held-out.

Held out are ``HELD_OUT_MODULES``, every twentieth word problem, and all books outside the training folder.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

from benchmarks.reporting.common_options import json_lines
from benchmarks.training.tasks import Material

HELD_OUT_MODULES = frozenset(
    f"{name}.py"
    for name in "calendar configparser csv fractions heapq queue sched shelve statistics textwrap".split()  # noqa: SIM905
)
_SKIPPED = frozenset(["test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "encodings"])
_HELD_OUT_EVERY = 20


def read_books(folder: Path) -> tuple[str, ...]:
    """Return the paragraphs of every .txt file, in order."""
    paths = sorted(folder.glob("*.txt"))
    if not paths:
        raise ValueError(f"no .txt files in {folder}")
    texts = [path.read_text(encoding="utf-8", errors="replace") for path in paths]
    return tuple(part for text in texts for part in paragraphs(text))


def paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if len(part.strip()) > 1]


def stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    return [path for path in sorted(root.rglob("*.py")) if not _SKIPPED & set(path.relative_to(root).parts)]


def read_code() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the standard library's sources: (training, held out)."""
    train, held_out = list[str](), list[str]()
    for path in stdlib_files():
        text = path.read_text(encoding="utf-8", errors="replace")
        (held_out if path.name in HELD_OUT_MODULES else train).append(text)
    return tuple(train), tuple(held_out)


def read_maths(file: Path) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return the (prompt, answer) pairs of JSON lines: (training, held out); raise ValueError with the first wrong
    line."""
    pairs = []
    for place, row in json_lines(file):
        for name in ("prompt", "answer"):
            if not isinstance(row, dict) or not isinstance(row.get(name), str):
                raise ValueError(f"{place} has no {name}; each line needs a prompt and an answer, both text")
        pairs.append((row["prompt"].rstrip(" "), " " + row["answer"].strip()))
    held_out = tuple(pairs[::_HELD_OUT_EVERY])
    return tuple(pair for i, pair in enumerate(pairs) if i % _HELD_OUT_EVERY), held_out


def read(books: Path, maths: Path) -> Material:
    return Material(read_books(books), read_code()[0], read_maths(maths)[0])


def read_held_out(books: Path | None, maths: Path | None) -> Material:
    prose = read_books(books) if books else ()
    return Material(prose, read_code()[1], read_maths(maths)[1] if maths else ())
