"""Draft with a trained head: a tree of its likeliest continuations, grown level by level (EAGLE-2, Li et al., 2024).

The head extends the likeliest nodes of each level. A node's estimate is the product of the head's probabilities down to
it, and the likeliest nodes of all levels are the tree. Coupled sampling has known noise, so a token ranks by log p +
noise, as in the target, and its estimate is its share among the exponentials of these sums. Under rejection sampling
the head draws a chain independently, and returns ``q``.

Over a shortlist (``models/heads/shortlist.py``) of frequent tokens and those of the prompt, the output and other
drafters' proposals, probabilities are shares among its tokens, and ``q`` is 0 for all others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from forerun.core.block import Block
from forerun.core.origin import Origin
from forerun.core.request import Request
from forerun.core.sampling import MASK64, mixed
from forerun.core.sampling_kernels import gumbel_of
from forerun.core.transfers import to_cpu
from forerun.core.tree import ROOT, DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source, Wants
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.head import Head, HeadSequence
from forerun.models.heads.shortlist import Shortlist

WIDTH = 8
"""Nodes per level that the head extends; EAGLE-2's default is 10, over 6 levels."""
CANDIDATES = 32
"""Tokens among which noise chooses; a head gives the rest a few hundredths of the probability."""
LEAST_CHANCE = 0.05
"""Minimum estimate of a node that is extended: a level costs about this share of a small target's pass."""
FORCED_TOKENS = 16
"""Maximum tokens after those that the target has scored, forced by a grammar; the head extends them from its states."""

FloatArray = npt.NDArray[np.float64]


class HeadSource(Source):
    """Drafts trees with a head, for all rows of a batch together; raises ValueError for a head that does not fit the
    target.

    Args:
        width: nodes per level that the head extends, and children of each; at least 1.
        frequent: returns the tokens in all shortlists; None to draft over all of the head's tokens.
    """

    def __init__(
        self, head: Head, target: Scorer, width: int = WIDTH, frequent: Callable[[], IntArray] | None = None
    ) -> None:
        if width < 1:
            raise ValueError(f"width is {width}; it must be at least 1")
        head.bind(target)
        self.head, self.width, self._target, self._frequent = head, width, target, frequent
        self.wants = Wants(states=head.layers)

    def warm_up(self) -> None:
        if self._frequent is not None and self.head.output is not None:
            self.head.output.shorten(self._frequent())
        self.seconds = min(self._measure() for _ in range(2))  # the first one compiles

    @torch.inference_mode()
    def _measure(self) -> float:
        """Return the seconds of a trial: reading states, and growing half the levels, since most trees end early."""
        tokens = np.arange(self.head.context + 1) % self._target.vocabulary
        block, cache = Block(tokens[:-1], DraftTree.empty(), 0), self._target.adopt(FullCache())
        [(_, states, _)] = self._target.score_rows([block], [cache], self.head.layers)
        assert states is not None
        cache.commit(block, [])
        sequence, request = self.head.open(cache), Request(tokens.tolist(), self.head.levels + 1)
        began = time.perf_counter()
        self.head.record(sequence, tokens, 0, states)
        self._update_shortlist(sequence, request, DraftTree.empty())
        self._grow([_GrowingTree(sequence, request, 1 + self.head.levels // 2, self.head.levels * self.width)])
        return time.perf_counter() - began

    def needs(self, tokens: int) -> int:
        return self.head.needs(tokens)

    def open(self, row: Row) -> HeadSequence:
        return self.head.open(row.cache)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            if outcome.states is not None:
                skipped = 0 if self.trusted else max(0, len(outcome.states) - self.head.context)
                start, states = outcome.start + skipped, outcome.states[skipped:]
                self.head.record(row.states[self], row.request.tokens, start, states)

    def ready(self, row: Row) -> bool:
        sequence: HeadSequence = row.states[self]
        if sequence.next is None or len(row.request) - sequence.next > 1 + FORCED_TOKENS:
            return False
        return sequence.first == 0 or sequence.next - sequence.first >= self.head.context

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        for row, limit in zip(rows, limits, strict=True):
            self._update_shortlist(row.states[self], row.request, limit.beside)
        trees = [
            _GrowingTree(row.states[self], row.request, min(self.head.levels, row.request.max_draft_depth), limit.nodes)
            for row, limit in zip(rows, limits, strict=True)
        ]
        growing = [tree for tree in trees if tree.depth > 0 and tree.unread is not None]
        if growing:
            self._grow(growing)
        return [tree.tree().by(Origin.HEAD) for tree in trees]

    def _update_shortlist(self, sequence: HeadSequence, request: Request, beside: DraftTree) -> None:
        """Add new tokens of a request and of other drafters' proposals to its shortlist."""
        matrix = self.head.output
        if matrix is None or matrix.frequent is None:
            return
        if sequence.shortlist is None:
            sequence.shortlist = Shortlist(matrix)
        sequence.shortlist.add(request.tokens[sequence.listed :])
        sequence.shortlist.add(beside.tokens)
        sequence.listed = len(request)

    def _grow(self, trees: Sequence[_GrowingTree]) -> None:
        growths, logits = self.head.start([tree.sequence for tree in trees])
        rows = list(logits[:, None])
        for tree, growth, row in zip(trees, growths, range(len(rows)), strict=True):
            for token in () if tree.unread is None else tree.unread.tolist():
                rows[row] = self.head.extend([growth], [[len(growth) - 1]], [[token]])
            tree.base = len(growth) - 1
        active = list(zip(trees, growths, rows, strict=True))
        while active:
            for tree, _, own in active:
                tree.offer(own, self._tokens_of(tree.sequence), self._target.vocabulary, self.width)
            levels = [(tree, growth, tree.next_level(self.width)) for tree, growth, _ in active]
            levels = [level for level in levels if len(level[2])]
            if not levels:
                return
            parents = [[tree.asked_number(tree.parents[node]) for node in nodes] for tree, _, nodes in levels]
            tokens = [[tree.tokens[node] for node in nodes] for tree, _, nodes in levels]
            logits = self.head.extend([growth for _, growth, _ in levels], parents, tokens)
            parts = torch.split(logits, [len(nodes) for _, _, nodes in levels])
            active = [(tree, growth, part) for (tree, growth, _), part in zip(levels, parts, strict=True)]

    def _tokens_of(self, sequence: HeadSequence) -> torch.Tensor | None:
        """Map each column of a request's logits to the target's ids; None if they are equal."""
        if sequence.shortlist is None:
            return self.head.tokens
        return torch.from_numpy(sequence.shortlist.tokens).to(self._target.device)


class _Offer(NamedTuple):
    """Children of each extended node, best first, with their estimates; ``[n, w]`` each."""

    tokens: IntArray
    chances: FloatArray


class _GrowingTree:
    """A row's tree under way, of at most ``depth`` levels and ``budget`` nodes."""

    def __init__(self, sequence: HeadSequence, request: Request, depth: int, budget: int) -> None:
        self.sequence, self.fork, self.depth, self._budget = sequence, request.fork(), min(depth, budget), budget
        unread = None if sequence.next is None else request.tokens[sequence.next + 1 :]
        self.unread: IntArray | None = unread if unread is None or len(unread) <= FORCED_TOKENS else None
        """Tokens after those that the head can process; None if it has not seen enough of the request."""
        self.base = 0
        """The head's number of the request's last token."""
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self._chances: list[float] = []
        self._asked: dict[int, int] = {ROOT: 0}
        """By node, the order in which the head extended it."""
        self._level, self._offered = [ROOT], range(0)
        self._reached = 0
        self._q: list[torch.Tensor] = []

    def asked_number(self, node: int) -> int:
        return self.base + self._asked[node]

    def offer(self, logits: torch.Tensor, known: torch.Tensor | None, vocabulary: int, width: int) -> None:
        """Add the ``width`` likeliest children of each node of the last level.

        Args:
            logits: the head's, ``[n, D]``.
            known: ids of the columns, ``[D]``, if not all; further columns are padding.
            vocabulary: size of the target's vocabulary.
        """
        logits = logits if known is None else logits[:, : len(known)]
        offer = self._choose(logits.float(), known, vocabulary, width)
        first, self._reached = len(self.tokens), self._reached + 1
        for node, tokens, chances in zip(self._level, offer.tokens.tolist(), offer.chances.tolist(), strict=True):
            above = 1.0 if node == ROOT else self._chances[node]
            for token, chance in zip(tokens, chances, strict=True):
                if chance > 0:
                    self.tokens.append(token)
                    self.parents.append(node)
                    self._chances.append(above * chance)
        self._offered = range(first, len(self.tokens))

    def next_level(self, width: int) -> list[int]:
        """Return the nodes to extend next: the likeliest of the last level, sorted by parent."""
        if self._reached >= self.depth:
            return []
        ends = self.fork.eos_token_ids
        likely = [
            node for node in self._offered if self._chances[node] >= LEAST_CHANCE and self.tokens[node] not in ends
        ]
        self._level = sorted(sorted(likely, key=lambda node: -self._chances[node])[:width])
        for node in self._level:
            self._asked[node] = len(self._asked)
        return self._level

    def tree(self) -> DraftTree:
        if not self.tokens:
            return DraftTree.empty()
        chances = np.array(self._chances)
        keep = np.zeros(len(chances), np.bool_)
        keep[np.argsort(-chances, kind="stable")[: self._budget]] = True
        q = torch.stack(self._q) if self._q else None
        stated = None if self._q else chances
        return DraftTree(np.array(self.tokens), np.array(self.parents), q=q, probability=stated).select(keep)

    def _choose(self, logits: torch.Tensor, known: torch.Tensor | None, vocabulary: int, width: int) -> _Offer:
        sampler = self.fork.sampler
        if sampler.takes_best:
            return _Offer(*_best(logits.softmax(-1), known, width))
        if known is not None and sampler.nameless and sampler.method != "rejection":
            scores = sampler.scores_of_rows(logits)
        else:
            scores, known = self._scores(logits, known, vocabulary), None
        if sampler.method == "rejection":
            return self._draw(scores)
        tokens, values = _best(scores, known, CANDIDATES)
        if sampler.method == "coupled":
            values = values + self._noise(tokens)
        with np.errstate(invalid="ignore"):  # processors may reject all tokens that the head has
            shares = np.exp(values - values.max(-1, keepdims=True))
            shares = np.nan_to_num(shares / shares.sum(-1, keepdims=True))
        order = np.argsort(-shares, axis=-1, kind="stable")[:, :width]
        return _Offer(np.take_along_axis(tokens, order, -1), np.take_along_axis(shares, order, -1))

    def _scores(self, logits: torch.Tensor, known: torch.Tensor | None, vocabulary: int) -> torch.Tensor:
        """Return processed scores over the target's vocabulary, ``[n, V]``, as the sampler would at each node."""
        if known is not None:
            whole = logits.new_full((len(logits), vocabulary), -torch.inf)
            logits = whole.index_copy_(1, known, logits)
        if self.fork.sampler.rowwise:
            return self.fork.sampler.scores_of_rows(logits)
        return torch.stack(
            [self.fork.scores(own, self._path(node)) for own, node in zip(logits, self._level, strict=True)]
        )

    def _noise(self, tokens: IntArray) -> FloatArray:
        """Return the noise that the target will add to these tokens at the next level's position, ``[n, w]``."""
        seed, place = np.uint64(mixed(self.fork.sampler.seed & MASK64)), len(self.fork) + self._reached
        known = {token: gumbel_of(seed, place, token) for token in set(tokens.ravel().tolist())}
        return np.array([[known[token] for token in own] for own in tokens.tolist()])

    def _draw(self, scores: torch.Tensor) -> _Offer:
        """Draw one token from the last node's distribution, which is ``q``."""
        sampler = self.fork.sampler
        token = sampler.choose(scores[-1], len(self.fork) + self._reached, sampler.draft_salt())
        self._q.append(scores[-1].double().softmax(-1))
        return _Offer(np.array([[token]]), np.ones((1, 1)))

    def _path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]


def _best(scores: torch.Tensor, known: torch.Tensor | None, count: int) -> tuple[IntArray, FloatArray]:
    """Return the ``count`` best tokens of scores ``[n, D]``, and these, in one transfer; ``known``: see ``offer``."""
    top = scores.topk(min(count, scores.shape[-1]))
    chosen = top.indices if known is None else known[top.indices]
    tokens, bits = to_cpu([chosen.flatten(), top.values.double().flatten().view(torch.int64)])
    return tokens.reshape(chosen.shape), bits.view(np.float64).reshape(chosen.shape)
