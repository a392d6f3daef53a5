"""Prefill a prompt into a cache in separate passes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from forerun.core.block import Block
from forerun.core.tree import DraftTree, IntArray
from forerun.kv.cache import READ_BLOCK, Cache
from forerun.models.forward.scorer import Scorer

Progress = Callable[[int, int], None]


@torch.inference_mode()
def read_prompt(
    scorer: Scorer,
    cache: Cache,
    text: IntArray,
    block_size: int = READ_BLOCK,
    on_read: Callable[[int], None] = lambda count: None,
    most: int | None = None,
) -> None:
    """Prefill a cache with a prompt's tokens that it does not hold yet and would not evict at once, in passes of up to
    ``block_size`` tokens, whose numbers ``on_read`` receives. Stop after ``most`` tokens, if given, at the end of a
    pass."""
    done = 0
    while cache.length < len(text) and (most is None or done < most):
        count = cache.next_read(len(text))
        count = count if scorer.reads_whole(cache) else min(block_size, count)
        whole = count == scorer.prompt_chunk and cache.length % count == 0
        block = Block(text[cache.length : cache.length + count], DraftTree.empty(), cache.length, whole)
        scorer.score([block], [cache])
        cache.commit(block, [])
        done += count
        on_read(count)


def counting(total: int, on_prefill: Progress | None) -> Callable[[int], None]:
    """Return an ``on_read`` for ``read_prompt`` that reports the tokens prefilled so far, and ``total``."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        if on_prefill is not None:
            on_prefill(done, total)

    return count
