"""Compile what almost every test needs, each worker of a run another part of it.

A clean checkout has no machine code yet, and compiling it takes a minute. Without this every worker would spend it.
"""

from __future__ import annotations

import os

import torch

from forerun.engine.engine import Engine
from forerun.trie.trie import Trie
from support.tiny import PROMPTS, tiny


def compile_part() -> None:
    """Compile this worker's part: tries, or passes; nothing where there are no workers."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if not worker:
        return
    if int(worker.removeprefix("gw")) % 2:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            Engine(tiny("llama", dtype), "none").generate(PROMPTS[1], max_new_tokens=2)
    else:
        trie = Trie()
        trie.begin(0, "", [1, 2, 3, 1, 2])
        trie.extend(0, [3, 1])
        trie.finish(0)
