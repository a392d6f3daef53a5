"""A level of a hierarchy: a model that follows requests, with one cache per request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.kv.cache import READ_BLOCK, Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.view import View
from forerun.models.forward.scorer import Scorer

UNLIMITED = 1 << 30
"""More tokens than any draft has."""

Progress = Callable[[int, int], None]
"""Called with tokens done and to do."""

CacheFactory = Callable[[Scorer, FullCache], Cache]
"""Makes a level's cache for a request, from the level's model and the target's cache for that request."""


@torch.inference_mode()
def read(
    scorer: Scorer,
    cache: Cache,
    text: IntArray,
    block_size: int = READ_BLOCK,
    on_read: Callable[[int], None] = lambda count: None,
    most: int | None = None,
) -> None:
    """Read a text into a cache: all tokens that it does not hold yet and would not evict at once.

    Args:
        block_size: maximum tokens of one pass.
        on_read: called with the tokens of each pass.
        most: tokens after which it ends at the end of a pass; None reads all of the text.
    """
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
    """An ``on_read`` for ``read`` that reports the tokens read so far, and ``total``."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        if on_prefill is not None:
            on_prefill(done, total)

    return count


@dataclass
class _LevelCache:
    """One request's cache, and the tokens that were read into it from the prompt's last token on."""

    cache: Cache
    first: int
    read: IntArray


class Level:
    """A scorer and a factory for its caches.

    A level follows a request's text by itself. Before a pass it drops speculative tokens that were not committed, and
    reads the text's new tokens.

    Args:
        scorer: the model.
        cache: makes a request's cache. A ``View`` reads the target's cache; any other cache reads the prompt itself.
        beyond: tokens of a text before which nothing is drafted in it.
    """

    def __init__(self, scorer: Scorer, cache: CacheFactory, beyond: int = 0) -> None:
        self.scorer = scorer
        scorer.keep_queries(beyond)
        self._make = cache
        self._readers: dict[int, _LevelCache] = {}

    def begin(self, request: Request, source: Cache) -> None:
        """Make the request's cache; ``catch_up`` reads the prompt into it."""
        if not isinstance(source, FullCache):
            raise TypeError(f"the target's cache is a {type(source).__name__}; a FullCache is needed")
        cache = self.scorer.adopt(self._make(self.scorer, source))
        first = request.prompt_length - 1
        self._readers[request.id] = _LevelCache(cache, first, np.empty(request.max_new_tokens + 1, np.int64))

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read a piece of the prompt, of about ``tokens`` tokens; a view looks at a piece that the target has read.

        Returns:
            Whether nothing is left: the cache holds the prompt but for its last token, or the level cannot read it, or
            there is nothing to look at before the target's next pass.
        """
        reader = self._readers[request.id]
        if isinstance(reader.cache, View):
            return self._prepare(request, reader.cache, tokens)
        if self._reads(request.prompt) > 0:
            text = request.tokens[: reader.first]
            read(self.scorer, reader.cache, text, min(READ_BLOCK, tokens), most=tokens)
            return reader.cache.length >= reader.first
        return True

    def finish(self, request: Request) -> None:
        """Free the request's cache."""
        self._readers.pop(request.id, None)

    def cache(self, request: Request) -> Cache:
        """The request's cache."""
        return self._readers[request.id].cache

    def room(self, request: Request) -> int:
        """Number of tokens that can be drafted after the text at the cost of decoding passes.

        None before the prompt has been read, and none after a token that the level's vocabulary lacks.
        """
        cache = self.cache(request)
        if isinstance(cache, View):
            looked = cache.settled > 0 or cache.whole
            ready = looked and cache.ready and cache.source.length == len(request) - 1
        else:
            ready = cache.length >= self._readers[request.id].first
        return self._reads(request.tokens[self._readers[request.id].first :], len(request)) if ready else 0

    def _reads(self, tokens: IntArray, length: int | None = None) -> int:
        """How many tokens the model can draft after ``tokens``, the end of a text of ``length`` tokens (by default all
        of it); 0 if it cannot read them."""
        if int(tokens.max()) >= self.scorer.vocabulary:
            return 0
        limit = self.scorer.limit
        return UNLIMITED if limit is None else max(0, limit + 1 - (len(tokens) if length is None else length))

    def whole(self, request: Request) -> bool:
        """Whether the request's cache holds all tokens of the target's."""
        cache = self.cache(request)
        return isinstance(cache, View) and cache.whole

    def follow(self, request: Request) -> None:
        """Drop speculative tokens that were not committed. The last token is always read again."""
        reader = self._readers[request.id]
        if isinstance(reader.cache, View):
            reader.cache.sync()
            return
        length, first = reader.cache.length, reader.first
        read, text = reader.read[: length - first], request.tokens[first : min(length, len(request) - 1)]
        same = read[: len(text)] == text
        if len(text) < len(read) or not same.all():
            reader.cache.truncate(first + (len(text) if same.all() else int(same.argmin())))

    def score(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> list[tuple[Block, torch.Tensor]]:
        """One pass over the tokens of each text that its cache lacks, and a tree after them.

        Returns:
            For each row its block, for ``commit``, and logits as from ``Scorer.score``.
        """
        caches = [self.cache(request) for request in requests]
        blocks = [
            Block(request.tokens[cache.length :].copy(), tree, cache.length)
            for request, tree, cache in zip(requests, trees, caches, strict=True)
        ]
        return list(zip(blocks, self.scorer.score(blocks, caches), strict=True))

    def commit(self, request: Request, block: Block, path: Sequence[int]) -> None:
        """Keep the block's pending tokens and the tree nodes of ``path``, as speculative tokens."""
        reader = self._readers[request.id]
        reader.cache.commit(block, path)
        place, kept = block.start - reader.first, np.concatenate((block.pending, block.tree.tokens[list(path)]))
        reader.read[place : place + len(kept)] = kept

    def verified(self, request: Request, outcome: Outcome) -> None:
        """Called when the target has verified a draft. Does nothing if the request has not begun here yet, or while
        the cache holds all of the text, so that there is nothing to choose."""
        cache = self.cache(request) if request.id in self._readers else None
        if not isinstance(cache, View) or cache.whole:
            return
        if len(outcome.tree):
            nodes = len(outcome.logits)  # the root and the tree's nodes are the pass's last rows
            rows = [-nodes, *(node + 1 - nodes for node in outcome.verdict.path)]
            cache.verified(rows, len(outcome.tree), len(outcome.verdict.path))
        self._prepare(request, cache, READ_BLOCK)

    def _prepare(self, request: Request, cache: View, tokens: int) -> bool:
        """Let a view get ready for its first choice, piece by piece, make it, and make a pass that is thrown away.

        The choice costs as much as many passes, and the first pass touches memory and writes programs. All that belongs
        to reading the prompt, or to the step that ends it. It would spoil the first time of a draft that is measured.
        """
        if cache.settled or not cache.ready or cache.whole:
            return True
        if not cache.prepare(tokens):
            return False
        cache.sync()
        next_token = request.tokens[cache.length : cache.length + 1]
        if len(next_token) and self._reads(next_token, cache.length + 1) > 0:
            self.scorer.score([Block(next_token.copy(), DraftTree.empty(), cache.length)], [cache])
        return True

    def needs(self, tokens: int) -> int:
        """Maximum bytes of the cache of a text with ``tokens`` tokens."""
        shape = self.scorer.kv  # a view has a fork of the source's recurrent states
        return self._make(self.scorer, FullCache()).needs(shape, tokens) + shape.state_bytes
