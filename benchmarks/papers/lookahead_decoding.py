"""Lookahead decoding: the target drafts for itself by Jacobi iteration, in the pass that verifies.

Fu et al., 2024, "Break the Sequential Dependency of LLM Inference Using Lookahead Decoding", section 3. Not to be
confused with the Lookahead framework behind the trie. A window of guesses lies ahead of the text: ``window`` columns
are positions, ``ngram - 1`` levels are iterations. Every step predicts one more level from the last, which completes
one n-gram per column; the n-grams that begin with the last committed token are what is verified.

Level 0 is a chain whose column 0 is the root itself. Level l, column i hangs under level l-1, column i, hence at depth
l + i, where it stands for the token l + i positions after the root. The window's nodes are ordinary nodes of the
tree: a guess that the target accepts by chance is right all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from forerun.core.request import Request
from forerun.core.sampling import Salt, uniform
from forerun.core.tree import DraftTree, IntArray
from forerun.core.verify import Outcome
from forerun.decoding.recipes import Setup
from forerun.decoding.row import Row
from forerun.decoding.source import Limit, Source
from forerun.policy.cost_curve import CostCurve


@dataclass(frozen=True)
class JacobiConfig:
    """The window's size and the pool's; the paper's W, N and G, by default its values for a 7B model on one A100.

    A pass scores ``(ngram - 1) * window - 1`` guesses besides the n-grams, so the two take
    ``(ngram - 1) * (window + guesses)`` nodes of the budget. If the window does not fit into it, there is none.

    Attributes:
        window: positions guessed at once, the root included.
        ngram: length of the n-grams collected; ``ngram - 1`` of their tokens are drafted.
        guesses: n-grams kept, and drafted, for each first token; the most recently found stay.

    Raises:
        ValueError: for ``window`` or ``guesses`` below 1, or ``ngram`` below 2.
    """

    window: int = 15
    ngram: int = 5
    guesses: int = 15

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("ngram", 2), ("guesses", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")

    @property
    def nodes(self) -> int:
        """A budget that holds both."""
        return (self.ngram - 1) * (self.window + self.guesses)


LIKELY, SPEED_UP = 0.425, 3.106
"""The paper's fit for LLaMA-2-7B-Chat: chance that a guessed token is right, and steps by steps with a good guess."""

CHOICES = (
    *(JacobiConfig(window, ngram, window) for ngram in (2, 3, 4) for window in (2, 3, 5, 7)),
    *(JacobiConfig(window, 5, window) for window in (7, 10, 15)),
)
"""What ``fitted_jacobi`` chooses from by the cost of passes."""


def expected_tokens(config: JacobiConfig) -> float:
    """Tokens per step by the paper's scaling law (section 4.2), with as many guesses as the window is wide."""
    depth = np.arange(1, config.ngram)
    accepted = 1 + (1 - (1 - LIKELY**depth) ** config.window).sum()
    return float((SPEED_UP - 1 + accepted) / SPEED_UP)


def best_config(costs: CostCurve) -> JacobiConfig:
    """The one that gives the most tokens by cost, as far as the law knows."""

    def speed(config: JacobiConfig) -> float:
        scored = (config.ngram - 1) * config.window + config.ngram - 1  # the root, the window and one n-gram
        return expected_tokens(config) / float(costs.passes(scored))

    return max(CHOICES, key=speed)


class JacobiSource(Source):
    """Drafts the pool's n-grams that begin with the last token, and sends the window along.

    The window moves on by one position a step, however many tokens were accepted, as the authors' code does by default:
    its n-grams are found by their first token, wherever in the window they arose.

    Args:
        config: the sizes.
    """

    def __init__(self, config: JacobiConfig | None = None) -> None:
        self.config = config or JacobiConfig()

    def open(self, row: Row) -> _Window:
        """Fill level 0 with tokens of the prompt, enough for one column to drop out with each level that is added."""
        columns = self.config.window + self.config.ngram - 2
        return _Window(_random_tokens(row.request, columns)[None], _Pool(self.config.guesses))

    def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[DraftTree]:
        both = zip(rows, limits, strict=True)
        return [self._draft(row.states[self], row.request, limit.nodes) for row, limit in both]

    def _draft(self, state: _Window, request: Request, budget: int) -> DraftTree:
        """The pool's n-grams, then the window if it fits into the budget and under ``request.max_draft_depth``."""
        levels, depth = state.levels, request.max_draft_depth
        n_grams = state.pool.branches(int(request.tokens[-1]), depth)
        state.sent = levels.size - 1 <= budget and sum(levels.shape) - 2 <= depth
        if not state.sent:
            return DraftTree.from_branches(n_grams, budget)
        levels[0, 0] = request.tokens[-1]
        return _join(DraftTree.from_branches(n_grams, budget - levels.size + 1), levels)

    def learn(self, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> None:
        """Advance each window by the new level, unless it did not come back whole."""
        for row, outcome in zip(rows, outcomes, strict=True):
            state: _Window = row.states[self]
            if state.sent and (new_level := _new_level(state.levels, outcome)) is not None:
                state.advance(new_level, self.config.ngram)
            state.sent = False


def fitted_jacobi(setup: Setup) -> JacobiSource:
    """Lookahead decoding with the sizes that suit what the target's passes cost."""
    return JacobiSource(best_config(setup.runtime.costs(setup.target)))


class _Pool:
    """The n-grams found so far, by their first token: at most ``size`` each, the oldest give way."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._rests: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, first: int, *rest: int) -> None:
        """Add an n-gram, or make it the most recent one."""
        rests = self._rests.setdefault(first, {})
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._size:
            del rests[next(iter(rests))]

    def branches(self, first: int, max_depth: int) -> Iterable[tuple[int, ...]]:
        """What may follow ``first``, most recent n-gram first."""
        return (rest[:max_depth] for rest in reversed(self._rests.get(first, {})))


@dataclass
class _Window:
    """One request's. ``levels`` are the window's tokens ``[level, column]``; ``sent``: the last tree had them."""

    levels: IntArray
    pool: _Pool
    sent: bool = field(default=False)

    def advance(self, new_level: IntArray, ngram: int) -> None:
        """Move on by one position: the last column is predicted, the first is dropped.

        While levels are missing they keep their guesses and lose column 0. Once there are ``ngram - 1``, each takes the
        place of the one above; it stands one position further on, so the columns are the same in number.
        """
        levels = np.vstack([self.levels, new_level])
        if len(levels) < ngram:
            self.levels = levels[:, 1:].copy()
            return
        for column in levels.T.tolist():
            self.pool.add(*column)
        self.levels = levels[1:]


def _join(branches: DraftTree, levels: IntArray) -> DraftTree:
    """Branches, and after them a window ``[level, column]`` without its first token, which is the root."""
    columns = levels.shape[1]
    tokens = levels.ravel()[1:]
    parents = np.arange(len(tokens)) - columns
    parents[: columns - 1] = np.arange(-1, columns - 2)
    parents[parents >= 0] += len(branches)
    return DraftTree(np.concatenate([branches.tokens, tokens]), np.concatenate([branches.parents, parents]))


def _new_level(levels: IntArray, outcome: Outcome) -> IntArray | None:
    """What the target predicts after each column of the last level ``[column]``; None if the window was cut."""
    window, columns = levels.size - 1, levels.shape[1]
    tree = outcome.tree
    if len(tree) < window or not np.array_equal(tree.tokens[len(tree) - window :], levels.ravel()[1:]):
        return None
    rows = np.arange(len(tree) + 1 - columns, len(tree) + 1)
    if len(levels) == 1:
        rows[0] = 0  # level 0 begins with the root
    best = outcome.logits[torch.from_numpy(rows).to(outcome.logits.device, non_blocking=True)].argmax(-1)
    return np.asarray(best.tolist(), np.int64)


def _random_tokens(request: Request, count: int) -> IntArray:
    """Tokens of the prompt, drawn with replacement: a pure function of the prompt and the request's seed."""
    picks = [int(uniform(request.sampler.seed, i, Salt.DRAFT) * 2**32) % len(request.prompt) for i in range(count)]
    return request.prompt[picks]
