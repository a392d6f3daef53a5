"""The Lookahead paper's trie and its three forms of a draft (sections 4.2 and 4.3.2), in plain Python.

A stage adds the branches after the context of one length, those of the largest weighted frequency first. A branch
longer than the counted contexts continues from its last tokens. If a stage yields too few nodes, a shorter context
follows.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal, get_args

import numpy as np

from forerun.core.request import Request
from forerun.core.tree import ROOT, DraftTree
from forerun.core.verify import Outcome
from forerun.decoding import recipes
from forerun.decoding.planner import Planner
from forerun.decoding.recipes import Recipe
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source

Form = Literal["hierarchical", "parallel", "single"]

Tokens = Sequence[int]


@dataclass(frozen=True)
class LookaheadTrieConfig:
    """The paper's parameters.

    Attributes:
        form: ``hierarchical`` merges shared prefixes, ``parallel`` does not, and ``single`` is the likeliest branch.
        branch_length: tokens of a branch, context included (L_b).
        max_prefix: longest context that is counted and matched.
        min_matches: the next shorter context is used too while there are fewer nodes (N_m).
        prompt_weight: weight of a count in the request's own tokens; in earlier outputs it is 1.
    """

    form: Form = "hierarchical"
    branch_length: int = 12
    max_prefix: int = 4
    min_matches: int = 64
    prompt_weight: float = 2.0

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ValueError(f"form is {self.form!r}; allowed: {', '.join(get_args(Form))}")
        if not 1 <= self.max_prefix < self.branch_length:
            raise ValueError(f"max_prefix is {self.max_prefix}; allowed: 1 to branch_length - 1")


class NGrams:
    """How often each token followed each context of one to ``orders`` tokens."""

    def __init__(self, orders: int) -> None:
        self.orders = orders
        self.followers: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def count(self, text: Tokens, start: int = 0) -> None:
        """Count the tokens from ``start`` on after their contexts."""
        for place in range(max(start, 1), len(text)):
            for order in range(1, min(self.orders, place) + 1):
                self.followers[tuple(text[place - order : place])][text[place]] += 1

    def after(self, context: tuple[int, ...]) -> Counter[int]:
        return self.followers.get(context, Counter())


@dataclass
class _Live:
    """A request: its n-grams, how many of its tokens are counted, and its output."""

    own: NGrams
    known: int
    output: list[int] = field(default_factory=list)


@dataclass
class _Branches:
    """A draft under construction."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def path(self, node: int) -> list[int]:
        path: list[int] = []
        while node != ROOT:
            path.append(node)
            node = self.parents[node]
        return path[::-1]

    def child(self, parent: int, token: int) -> int:
        same = (n for n, above in enumerate(self.parents) if above == parent and self.tokens[n] == token)
        return next(same, ROOT)

    def side_by_side(self, budget: int) -> DraftTree:
        """Return every branch separately, the heaviest leaf first, within the budget (section 4.2.1)."""
        leaves = sorted(set(range(len(self.tokens))) - set(self.parents), key=lambda leaf: -self.weights[leaf])
        tokens: list[int] = []
        parents: list[int] = []
        for leaf in leaves:
            path = self.path(leaf)[: budget - len(tokens)]
            parents += [ROOT if step == 0 else len(tokens) + step - 1 for step in range(len(path))]
            tokens += [self.tokens[node] for node in path]
        return DraftTree(np.array(tokens, np.int64), np.array(parents, np.int64))


class LookaheadTrieSource(Source):
    """Drafts from the request's prompt and from all that was generated in its namespace, by frequency."""

    def __init__(self, config: LookaheadTrieConfig | None = None) -> None:
        self.config = config or LookaheadTrieConfig()
        self._outputs: dict[str, NGrams] = defaultdict(lambda: NGrams(self.config.max_prefix))

    def warm(self, namespace: str, sequences: Iterable[Tokens]) -> None:
        """Index token ids as if they had been generated in ``namespace``."""
        for sequence in sequences:
            self._outputs[namespace].count(list(map(int, sequence)))

    def open(self, row: Row) -> _Live:
        own = NGrams(self.config.max_prefix)
        own.count(row.request.prompt.tolist())
        return _Live(own, row.request.prompt_length)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        for row in rows:
            self._count(row.states[self], row.request)

    def _count(self, live: _Live, request: Request) -> None:
        orders = self.config.max_prefix
        first, live.known = live.known, len(request)
        text = request.tokens[max(0, first - orders) :].tolist()
        live.own.count(text, min(first, orders))
        start = len(live.output)
        live.output += text[min(first, orders) :]
        self._outputs[request.drafts_from].count(live.output, start)

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        return [self.draft(row, limit.nodes) for row, limit in zip(rows, limits, strict=True)]

    def draft(self, row: Row, budget: int) -> DraftTree:
        config, draft = self.config, _Branches()
        text = row.request.tokens[-config.max_prefix :].tolist()
        for length in range(min(config.max_prefix, len(text)), 0, -1):
            if self._followers(row, tuple(text[-length:])):
                self._stage(row, draft, text, length, budget)
            if len(draft.tokens) >= config.min_matches or (config.form == "single" and draft.tokens):
                break
        if config.form == "parallel":
            return draft.side_by_side(budget)
        return DraftTree(np.array(draft.tokens, np.int64), np.array(draft.parents, np.int64))

    def _followers(self, row: Row, context: tuple[int, ...]) -> Counter[int]:
        """Return weighted counts of what followed a context in the request and in earlier outputs."""
        weights: Counter[int] = Counter(self._outputs[row.request.drafts_from].after(context))
        for token, times in row.states[self].own.after(context).items():
            weights[token] += self.config.prompt_weight * times  # type: ignore[assignment]
        return weights

    def _stage(self, row: Row, draft: _Branches, text: list[int], length: int, budget: int) -> None:
        """Add the branches after the last ``length`` tokens."""
        orders, single = self.config.max_prefix, self.config.form == "single"
        deepest = min(row.request.max_draft_depth, self.config.branch_length - length)
        frontier: list[tuple[float, int, int, int]] = []  # minus the weight, order of entry, node above, token
        number = count()

        def expand(node: int, order: int, weight: float | None) -> None:
            path = text + [draft.tokens[each] for each in draft.path(node)]
            followers = self._followers(row, tuple(path[-order:]))
            factor = 1.0 if weight is None else weight / max(sum(followers.values()), 1)
            for token, times in followers.items():
                heapq.heappush(frontier, (-factor * times, next(number), node, token))

        if deepest < 1:
            return
        expand(ROOT, length, None)
        for _ in range(budget):
            if not frontier or len(draft.tokens) >= budget:
                return
            minus, _, above, token = heapq.heappop(frontier)
            node = draft.child(above, token)
            if node == ROOT:
                node = len(draft.tokens)
                draft.tokens.append(token)
                draft.parents.append(above)
                draft.weights.append(-minus)
            if single:
                frontier.clear()
            if (depth := len(draft.path(node))) < deepest:
                expand(node, min(length + depth, orders), -minus)


RECIPES: dict[str, Recipe] = {
    **recipes.RECIPES,
    "lookahead-trie": Recipe(lambda setup: setup.over(Planner(LookaheadTrieSource()))),
}
"""Forerun's recipes, and the paper's trie, all of whose drafts are scored."""
