"""A script that compiles grammars on trial for ``GrammarPool``, so it imports little. Input: a line with the
tokenizer's arguments and the limits, then a line per grammar. Output: an empty line for each, valid or not, until a
limit ends it."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    """Answer lines until the input ends."""
    from llguidance import LLMatcher, LLTokenizer

    first = json.loads(sys.stdin.readline())
    tokenizer = LLTokenizer(**first["tokenizer"])
    if hasattr(os, "nice"):
        os.nice(10)
    _limit_memory(first["memory"])
    _answer()
    for line in sys.stdin:
        _limit_time(first["seconds"])
        with suppress(ValueError):
            kind, text = json.loads(line)
            if kind == "json":
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=first["style"])
            else:
                grammar = LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)
            matcher = LLMatcher(tokenizer, grammar, log_level=0)
            if not matcher.is_error():
                matcher.compute_bitmask()
        _answer()


def _answer() -> None:
    sys.stdout.write("\n")
    sys.stdout.flush()


def _limit_memory(size: int) -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + size  # a failed allocation ends this process
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _limit_time(seconds: int) -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, resource.RLIM_INFINITY))  # then the system ends it


if __name__ == "__main__":
    main()
