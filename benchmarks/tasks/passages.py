"""Passages of 200 to 1,500 tokens, from books or Python's documentation, and functions of its library without hints."""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

from benchmarks.training.material import paragraphs, stdlib_files

SHORTEST, LONGEST = 200, 1500  # allowed length of a passage in tokens
MARGIN = 1.1
"""Factor by which the target length stays inside these bounds, because a passage ends with a whole sentence."""
CHARS = 6  # the most characters per token, on average
MODULES = 40  # modules whose documentation is read if there are no books
LINES = range(8, 41)  # allowed number of lines of a function
A_FILE = 2  # the most functions from one file
_END = re.compile(r"[.!?][\"”’')]*\s")


@dataclass(frozen=True)
class Passages:
    """The source of passages: texts, each a list of paragraphs."""

    bodies: Sequence[Sequence[str]]

    @classmethod
    def read(cls, books: Path | None, seed: str) -> Passages:
        """Read a folder's ``.txt`` files, or Python's documentation; raise ValueError if all are short."""
        files = sorted(books.glob("*.txt")) if books is not None else []
        bodies = [paragraphs(file.read_text(encoding="utf-8", errors="replace")) for file in files]
        if books is None:
            bodies = list(_documentation(seed))
        long = [body for body in bodies if sum(map(len, body)) > 2 * CHARS * LONGEST]
        if not long:
            raise ValueError(f"--books is {books}; it has no .txt file of {2 * CHARS * LONGEST:,} characters or more")
        return cls(long)

    def draw(self, rng: Random, count: Callable[[str], int]) -> str:
        """Draw a passage that begins with a paragraph and ends with a sentence; ``count`` counts tokens."""
        low, high = SHORTEST * MARGIN, LONGEST / MARGIN
        while True:
            tokens = low * (high / low) ** rng.random()
            body = rng.choice(self.bodies)
            text = _from(body, rng.randrange(len(body)), int(CHARS * tokens))
            passage = _cut(text, int(tokens * len(text) / max(1, count(text))))
            if SHORTEST <= count(passage) <= LONGEST:
                return passage


def sources(seed: str) -> Iterator[tuple[str, ast.Module]]:
    """Yield the standard library's files as text and parsed, in a seeded order."""
    paths = stdlib_files()
    Random(seed).shuffle(paths)
    for path in paths:
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            yield text, ast.parse(text)
        except SyntaxError:  # templates, which are no Python modules
            continue


def sentences(passage: str) -> list[str]:
    ends = [0, *(match.end() for match in _END.finditer(passage)), len(passage)]
    return [part for begin, end in itertools.pairwise(ends) if (part := passage[begin:end].strip())]


def _documentation(seed: str) -> Iterator[list[str]]:
    """Yield the docstrings of each module with enough of them."""
    found = 0
    for _, module in sources(seed):
        body = [part for text in _docstrings(module) for part in paragraphs(text)]
        if sum(map(len, body)) > 2 * CHARS * LONGEST:
            yield body
            found += 1
        if found == MODULES:
            return


def _docstrings(module: ast.Module) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(module):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            name = getattr(node, "name", "")
            yield f"{name}: {inspect.cleandoc(text)}" if name else text


def _from(body: Sequence[str], start: int, chars: int) -> str:
    """Return paragraphs from ``start`` on, until they have ``chars`` characters."""
    taken: list[str] = []
    size = 0
    for part in body[start:]:
        if size >= chars:
            break
        taken.append(part)
        size += len(part) + 2
    return "\n\n".join(taken)[:chars]


def _cut(text: str, chars: int) -> str:
    """Return the text up to the last end of a sentence within ``chars`` characters."""
    ends = [match.end() for match in _END.finditer(text[:chars])]
    return text[: ends[-1] if ends else chars].strip()


def functions(seed: str, count: int) -> list[str]:
    """Return ``count`` functions, by seed and version of Python."""
    return list(islice(_all(seed), count))


def _all(seed: str) -> Iterator[str]:
    for number, (text, module) in enumerate(sources(seed)):
        fitting = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and _fits(node)]
        Random(f"{seed}/{number}").shuffle(fitting)
        lines = text.split("\n")
        for node in fitting[:A_FILE]:
            yield textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))


def _fits(node: ast.FunctionDef) -> bool:
    """Return whether a function has an allowed length, and arguments without annotations."""
    given = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
    own = [argument for argument in given if argument.arg not in ("self", "cls")]
    hinted = node.returns is not None or any(argument.annotation is not None for argument in given)
    return bool(own) and not hinted and (node.end_lineno or 0) - node.lineno + 1 in LINES
