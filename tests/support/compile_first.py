"""Compile what almost every test needs, each worker of a run another part of it.

A clean checkout has no machine code yet, and compiling it takes a minute. Without this every worker would spend it.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch


def _trie_learns() -> None:
    from forerun.trie.trie import Trie

    trie = Trie()
    trie.begin(0, "", [1, 2, 3, 1, 2])
    trie.extend(0, [3, 1])
    trie.finish(0)


def _trie_drafts() -> None:
    from forerun.trie.trie import Trie

    trie = Trie()
    trie.begin(0, "", [1, 2, 3, 1, 2])
    trie.retrieve(0, 8, 4)


def _passes(*dtypes: torch.dtype) -> None:
    import forerun
    from support.tiny import PROMPTS, tiny

    for dtype in dtypes:
        forerun.Engine(tiny("llama", dtype), "none").generate(PROMPTS[1], max_new_tokens=2)


PARTS: list[Callable[[], None]] = [
    _trie_learns,
    lambda: _passes(torch.float64),
    _trie_drafts,
    lambda: _passes(torch.float32, torch.bfloat16),
]


def compile_part() -> None:
    """Compile this worker's part; nothing where there are no workers."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if worker and count > 1:
        for part in PARTS[int(worker.removeprefix("gw")) :: count]:
            part()
