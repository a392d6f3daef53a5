"""The process of a peer: reads orders from stdin and answers, one JSON object per line.

``python -m benchmarks.peers.child MODULE`` serves the module's ``Engine``, without importing torch. The first order has
its arguments, each further one a method's name and arguments. Libraries may write to stdout, so answers go to a copy.

An ``Engine`` has ``said``, its version, build, precision and settings; ``generate(ids, new)``, which continues greedily
and returns ``count``, the new tokens, ``tokens`` or ``text``, and ``first``, the seconds until the first of them; and
``forget()``, which drops what earlier requests left.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO


def serve(engine: object, orders: Iterable[str], answers: TextIO) -> None:
    """Carry out orders until there are none; errors are answers, too."""
    for line in orders:
        order = json.loads(line)
        begin = time.perf_counter()
        try:
            found = getattr(engine, order["call"])(**order["given"]) or {}
            _answer(answers, {"seconds": time.perf_counter() - begin, **found})
        except Exception as error:
            _answer(answers, {"error": f"{type(error).__name__}: {error}"})


def _answer(answers: TextIO, found: dict[str, Any]) -> None:
    answers.write(json.dumps(found) + "\n")
    answers.flush()


def main() -> None:
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
