"""Python functions to edit: whole functions of the standard library without type hints."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from itertools import islice
from random import Random

from benchmarks.tasks.passages import sources

LINES = range(8, 41)  # allowed number of lines of a function
A_FILE = 2  # the most functions from one file


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
