"""Draft over a shortlist: the rows of the output matrix whose tokens are likely to come next.

The output matrix is most of a head's cost on a CPU: a third of Qwen3.5-0.8B's weights, and thirteen times those of an
EAGLE-3 layer of that width. But nearly all next tokens are frequent, occurred in the request, or are proposed by
another drafter, too. So a head computes only these logits, from copied rows: of frequent tokens once, of a request's as
they come. The target verifies with the full matrix, so a missing token costs a draft and never changes the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from forerun.core.tree import BoolArray, IntArray
from forerun.kernels.linear.weight_matrix import Weights
from forerun.models.forward.scorer import Scorer
from forerun.models.forward.static_lists import LISTED_TOKENS
from forerun.models.heads.matrices import multiply, weights_of
from forerun.models.loading.stored_weights import StoredLinear
from forerun.trie.recycled import RecycledRows

OWN_TOKENS = 2048
"""Maximum tokens per request besides the frequent ones; the latest stay. The first 32,000 tokens of War and Peace have
3,220 distinct ones beyond SmolLM2's first 2,048. A row has 2 to 8 KB."""
FIRST_TOKENS = 256
"""Initial capacity of a request's memory, which doubles."""

_shortlists: ContextVar[Sequence[tuple[Shortlist, int]]] = ContextVar("shortlists", default=())
"""Shortlists of the sequences whose rows this thread multiplies, with their numbers of rows; empty for all tokens."""


def frequent_tokens(lists: RecycledRows, vocabulary: int) -> IntArray:
    """Return the tokens of every shortlist, ascending: the vocabulary's first, frequent ones, and those in lists."""
    named = lists.tokens[lists.tokens >= 0]
    return np.union1d(np.arange(min(LISTED_TOKENS, vocabulary)), named).astype(np.int64)


class OutputMatrix:
    """Computes logits from a head's final output: over all tokens, or inside ``drafting`` over shortlists. ``weights``
    returns the current matrix, ``[V, hidden]`` or packed bytes; a model may replace it."""

    def __init__(self, weights: Callable[[], Weights]) -> None:
        self._weights = weights
        self.frequent: IntArray | None = None
        self._common: Weights | None = None

    @classmethod
    def of(cls, rows: torch.Tensor) -> OutputMatrix:
        """Use a head's matrix, made by ``weight_beside``."""
        return cls(lambda: weights_of(rows))

    @classmethod
    def of_target(cls, target: Scorer, tokens: int | None = None) -> OutputMatrix:
        """Use the target's matrix, or its first ``tokens`` rows."""

        def weights() -> Weights:
            module: Any = target.model.get_output_embeddings()
            if isinstance(module, StoredLinear):
                found = module.packed_weights
            else:
                bias: torch.Tensor | None = getattr(module, "bias", None)
                found = Weights(module.weight.detach(), str(module.weight.dtype), bias)
            return found if tokens is None else _part(found, slice(tokens))

        return cls(weights)

    def __len__(self) -> int:
        return len(self._weights().rows)

    def shorten(self, frequent: IntArray) -> None:
        """Use shortlists from now on, which share these tokens, unless they would cover half of all tokens."""
        if 2 * (len(frequent) + OWN_TOKENS) < len(self):
            self.frequent, self._common = frequent, self.take(frequent)

    def take(self, tokens: IntArray) -> Weights:
        weights = self._weights()
        return _part(weights, torch.from_numpy(tokens).to(weights.rows.device))

    def needs(self) -> int:
        """Return the maximum bytes of a request's shortlist."""
        if self.frequent is None:
            return 0
        rows, ids = self._weights().rows, np.dtype(np.int64).itemsize
        own = OWN_TOKENS * (rows.stride(0) * rows.element_size() + ids)
        return own + len(self.frequent) * ids + len(rows)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[n, V]``, or ``[n, D]`` over shortlists, padded to the longest."""
        shortlists = _shortlists.get()
        if self._common is None or not shortlists:
            return multiply(hidden, self._weights())
        parts = torch.split(hidden, [count for _, count in shortlists])
        own = [multiply(part, shortlist.weights) for (shortlist, _), part in zip(shortlists, parts, strict=True)]
        widest = max(part.shape[-1] for part in own)
        padded = torch.cat([pad(part, (0, widest - part.shape[-1])) for part in own])
        return torch.cat([multiply(hidden, self._common), padded], -1)


def _part(weights: Weights, places: torch.Tensor | slice) -> Weights:
    bias = None if weights.bias is None else weights.bias.detach()[places]
    return weights._replace(rows=weights.rows[places], bias=bias)


class Shortlist:
    """The tokens that one request can draft, and the weights of those that are not shared."""

    def __init__(self, matrix: OutputMatrix) -> None:
        assert matrix.frequent is not None
        self._matrix, self._count, self._next = matrix, 0, 0
        self._named: BoolArray = np.zeros(len(matrix), np.bool_)
        self._named[matrix.frequent] = True
        self._common = len(matrix.frequent)
        self._tokens: IntArray = np.concatenate((matrix.frequent, np.zeros(FIRST_TOKENS, np.int64)))
        self.weights = matrix.take(np.zeros(FIRST_TOKENS, np.int64))

    @property
    def tokens(self) -> IntArray:
        """The target's ids of the logits' columns, int64 ``[D]``."""
        return self._tokens[: self._common + self._count]

    def add(self, tokens: IntArray) -> None:
        """Add tokens that may come next, replacing the oldest when full. Ids outside the matrix are ignored."""
        tokens = tokens[(tokens >= 0) & (tokens < len(self._named))]
        new = tokens[~self._named[tokens]]
        if not len(new):
            return
        _, last = np.unique(new[::-1], return_index=True)  # where each was named last, from the end
        new = new[::-1][np.sort(last)[:OWN_TOKENS]][::-1].astype(np.int64)
        count = min(self._count + len(new), OWN_TOKENS)
        self._make_room(count)
        places, own = (self._next + np.arange(len(new))) % OWN_TOKENS, self._tokens[self._common :]
        self._named[own[places[places < self._count]]] = False
        own[places], self._named[new] = new, True
        self._count, self._next = count, int(places[-1] + 1) % OWN_TOKENS
        rows, at = self._matrix.take(new), torch.from_numpy(places).to(self.weights.rows.device)
        self.weights.rows[at] = rows.rows
        if self.weights.bias is not None and rows.bias is not None:
            self.weights.bias[at] = rows.bias

    def _make_room(self, count: int) -> None:
        room = len(self.weights.rows)
        while room < count:
            room *= 2
        if room > len(self.weights.rows):
            self._tokens = np.resize(self._tokens, self._common + room)
            first = torch.arange(room, device=self.weights.rows.device) % len(self.weights.rows)
            self.weights = _part(self.weights, first)


@contextmanager
def drafting(shortlists: Sequence[Shortlist | None], counts: Sequence[int]) -> Iterator[None]:
    """Compute logits over shortlists in this context, one per sequence, None for all tokens; ``counts``: their rows."""
    known = [(shortlist, count) for shortlist, count in zip(shortlists, counts, strict=True) if shortlist is not None]
    before = _shortlists.set(known)
    try:
        yield
    finally:
        _shortlists.reset(before)
