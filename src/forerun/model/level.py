"""A level of a hierarchy: a model that reads along with requests, through one cache for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from forerun.caches.base import READ_BLOCK, Cache
from forerun.caches.full import FullCache
from forerun.caches.view import View
from forerun.core.block import Block
from forerun.core.request import Request
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.model.flat import flatten
from forerun.model.scorer import Scorer

UNLIMITED = 1 << 30
"""More tokens than are ever drafted."""

Progress = Callable[[int, int], None]
"""Called with tokens done and to do."""

CacheFactory = Callable[[Scorer, FullCache], Cache]
"""From a level's model, and the target's cache of a request, to the level's cache of it."""


@torch.inference_mode()
def read(
    scorer: Scorer,
    cache: Cache,
    text: IntArray,
    block_size: int = READ_BLOCK,
    on_read: Callable[[int], None] = lambda count: None,
    most: int | None = None,
) -> None:
    """Read what a cache does not hold of a text, and would not forget.

    Args:
        block_size: tokens in one pass, at most.
        on_read: called with the tokens of each pass.
        most: tokens after which it ends at the end of a pass; None reads all of the text.
    """
    done = 0
    while cache.length < len(text) and (most is None or done < most):
        count = min(block_size, cache.next_read(len(text)))
        block = Block(text[cache.length : cache.length + count], DraftTree.empty(), cache.length)
        scorer.score([block], [cache])
        cache.commit(block, [])
        done += count
        on_read(count)


def counting(total: int, on_prefill: Progress | None) -> Callable[[int], None]:
    """For ``read``: tells of the tokens of all passes so far, and of ``total``."""
    done = 0

    def count(tokens: int) -> None:
        nonlocal done
        done += tokens
        if on_prefill is not None:
            on_prefill(done, total)

    return count


@dataclass
class _Reader:
    """One request's cache, and the tokens that were read into it from the prompt's last on."""

    cache: Cache
    first: int
    read: IntArray


class Level:
    """A scorer and what makes its caches.

    A level follows the text of a request by itself: before a pass it takes back what it read on trial and what did not
    come true, and reads what is new.

    Args:
        scorer: the model; it reads by a shorter way where there is one, which rounds differently (``flat.py``).
        cache: makes a request's cache. A ``View`` reads through the target's; any other reads the prompt itself.
    """

    def __init__(self, scorer: Scorer, cache: CacheFactory) -> None:
        self.scorer = flatten(scorer)
        scorer.keeps_queries = True
        self._make = cache
        self._readers: dict[int, _Reader] = {}

    def begin(self, request: Request, source: Cache) -> None:
        """Make the request's cache; ``catch_up`` reads the prompt into it."""
        if not isinstance(source, FullCache):
            raise TypeError(f"the target's cache is a {type(source).__name__}; a FullCache is needed")
        cache = self._make(self.scorer, source)
        first = request.prompt_length - 1
        self._readers[request.id] = _Reader(cache, first, np.empty(request.max_new_tokens + 1, np.int64))

    def catch_up(self, request: Request, tokens: int) -> bool:
        """Read a piece of the prompt, of about so many tokens; a view looks at a piece of what the target has read.

        Returns:
            Whether nothing is left: the cache holds the prompt but for its last token, or the level cannot read it, or
            there is nothing to look at before the target's next pass.
        """
        reader = self._readers[request.id]
        if isinstance(reader.cache, View):
            return _prepare(reader.cache, tokens)
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
        """How many tokens can be drafted behind the text by passes that cost what decoding costs: none before the
        prompt has been read, nor behind a token that a smaller vocabulary lacks."""
        cache = self.cache(request)
        if isinstance(cache, View):
            looked = cache.settled > 0 or cache.whole
            ready = looked and cache.ready and cache.source.length == len(request) - 1
        else:
            ready = cache.length >= self._readers[request.id].first
        return self._reads(request.tokens[self._readers[request.id].first :], len(request)) if ready else 0

    def _reads(self, tokens: IntArray, length: int | None = None) -> int:
        """Tokens that the model can draft behind these, which end a text of ``length`` tokens (by default they are all
        of it); 0 if it cannot read them."""
        if int(tokens.max()) >= self.scorer.vocabulary:
            return 0
        limit = self.scorer.limit
        return UNLIMITED if limit is None else max(0, limit + 1 - (len(tokens) if length is None else length))

    def whole(self, request: Request) -> bool:
        """Whether the request's cache holds all that the target's does."""
        cache = self.cache(request)
        return isinstance(cache, View) and cache.whole

    def follow(self, request: Request) -> None:
        """Take back what was read on trial, but for what has come true; the last token is always read anew."""
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
        """One pass over what each cache does not hold of its request's text, and a tree under it.

        Returns:
            For each row the block, for ``commit``, and logits as from ``Scorer.score``.
        """
        caches = [self.cache(request) for request in requests]
        blocks = [
            Block(request.tokens[cache.length :].copy(), tree, cache.length)
            for request, tree, cache in zip(requests, trees, caches, strict=True)
        ]
        return list(zip(blocks, self.scorer.score(blocks, caches), strict=True))

    def commit(self, request: Request, block: Block, path: Sequence[int]) -> None:
        """Keep the block's pending tokens and the tree nodes of ``path``, on trial."""
        reader = self._readers[request.id]
        reader.cache.commit(block, path)
        place, kept = block.start - reader.first, np.concatenate((block.pending, block.tree.tokens[list(path)]))
        reader.read[place : place + len(kept)] = kept

    def verified(self, request: Request, outcome: Outcome) -> None:
        """The target has read on, and verified what was drafted; nothing, if the request was not begun here yet."""
        cache = self.cache(request) if request.id in self._readers else None
        if not isinstance(cache, View):
            return
        if len(outcome.tree):
            nodes = len(outcome.logits)  # the root and the tree's nodes are the pass's last rows
            rows = [-nodes, *(node + 1 - nodes for node in outcome.verdict.path)]
            cache.verified(rows, outcome.tree.drafted, len(outcome.verdict.path))
        _prepare(cache, READ_BLOCK)

    def nbytes(self, request: Request) -> int:
        """Bytes of the request's cache."""
        return self.cache(request).nbytes

    def needs(self, tokens: int) -> int:
        """Bytes that the cache of a text of so many tokens holds at most."""
        return self._make(self.scorer, FullCache()).needs(self.scorer.kv, tokens)


def _prepare(cache: View, tokens: int) -> bool:
    """Let a cache get ready for its first choice, piece by piece, and then make it.

    The choice costs as much as many passes. It belongs to reading the prompt, or to the step that ends it.
    """
    if cache.settled or not cache.ready or cache.whole:
        return True
    if not cache.prepare(tokens):
        return False
    cache.sync()
    return True
