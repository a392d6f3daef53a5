"""The process of a peer: reads orders from stdin, one JSON object a line, and answers in the same way.

``python -m forerun.bench.peers.child MODULE`` serves the ``Engine`` of a module. The first order holds its arguments.
Libraries write to stdout as they like, so answers go to a copy of it and all else to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, Protocol, TextIO


class Served(Protocol):
    """What a peer's module has under the name ``Engine``; its arguments are those of the first order."""

    said: str
    """Version, precision and settings."""

    def generate(self, ids: list[int], new: int) -> dict[str, Any]:
        """Continue greedily: ``count`` new tokens, as ``tokens`` or as ``text``."""

    def forget(self) -> None:
        """Drop what was learned from earlier texts."""


def serve(engine: Served, orders: Iterable[str], answers: TextIO) -> None:
    """Carry out orders until there are none; an error is an answer, too."""
    for line in orders:
        order = json.loads(line)
        try:
            found = _carry_out(engine, order)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        _answer(answers, found)


def _carry_out(engine: Served, order: dict[str, Any]) -> dict[str, Any]:
    if order.get("forget"):
        engine.forget()
        return {}
    begin = time.perf_counter()
    found = engine.generate(order["ids"], order["new"])
    return {"seconds": time.perf_counter() - begin, **found}


def _answer(answers: TextIO, found: dict[str, Any]) -> None:
    answers.write(json.dumps(found) + "\n")
    answers.flush()


def main() -> None:
    """Serve the module that the command line names."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    try:
        engine = importlib.import_module(sys.argv[1]).Engine(**json.loads(sys.stdin.readline()))
    except Exception as error:
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return
    _answer(answers, {"said": engine.said})
    serve(engine, sys.stdin, answers)


if __name__ == "__main__":
    main()
