"""Two drafters in one tree: a model where a trie knows nothing, a trie where it knows much.

Whether the model is worth its passes depends on what drafts with it: for a level whose own pass takes a few
milliseconds, a small model's four passes can take longer than they save. So where the level reports its rounds, the
model is asked only while rounds with it give more tokens a second than rounds without.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer

from forerun.core.pass_context import PassContext
from forerun.core.request import Request
from forerun.core.tree import DraftTree
from forerun.core.verify import Outcome
from forerun.drafting.drafter import Drafter
from forerun.kv.cache import Cache
from forerun.models.forward.runtime import Runtime
from forerun.models.forward.scorer import Scorer
from forerun.policy.exploration_budget import EXPLORATION_SHARE

TRIAL_ROUNDS = 4
"""Minimum rounds of a trial. Its rate leaves out the first, in which a model reads what it has missed. In simulation,
halving or doubling this number or the next changes tokens a second by at most 6 %."""
ROUND_MEMORY = 0.9
"""Weight of earlier rounds: some ten count."""


class MergedDrafter(Drafter):
    """Asks a cheap drafter first, and a costly one for rows where the first is not confident.

    Args:
        cheap: estimates the probabilities of its nodes, as a trie does.
        costly: a model.
        confident: accepted nodes expected of the cheap draft from which on the costly one is not asked.
    """

    def __init__(self, cheap: Drafter, costly: Drafter, confident: float) -> None:
        self.cheap = cheap
        self.costly = costly
        self.confident = confident
        self._choice = CostlyDrafterChoice()

    def bind(self, target: Scorer, runtime: Runtime) -> None:
        self.cheap.bind(target, runtime)
        self.costly.bind(target, runtime)

    def spell(self, tokenizer: Tokenizer) -> None:
        self.cheap.spell(tokenizer)
        self.costly.spell(tokenizer)

    def warm_up(self) -> None:
        self.cheap.warm_up()
        self.costly.warm_up()

    def warm(self, namespace: str, sequences: Iterable[Sequence[int]]) -> None:
        """Let the cheap drafter learn."""
        self.cheap.warm(namespace, sequences)

    @property
    def nbytes(self) -> int:
        """What both keep."""
        return self.cheap.nbytes + self.costly.nbytes

    def begin(self, request: Request) -> None:
        self.cheap.begin(request)
        self.costly.begin(request)

    def prefilled(self, request: Request, cache: Cache) -> None:
        self.cheap.prefilled(request, cache)
        self.costly.prefilled(request, cache)

    def needs(self, tokens: int) -> int:
        return self.cheap.needs(tokens) + self.costly.needs(tokens)

    def catch_up(self, request: Request, tokens: int) -> bool:
        return self.cheap.catch_up(request, tokens) and self.costly.catch_up(request, tokens)

    def propose(self, context: PassContext) -> list[DraftTree]:
        """Draft one tree for each row; the rows share the costly drafter's passes."""
        trees = self.cheap.propose(context)
        unsure = [row for row, tree in enumerate(trees) if _expected(tree) < self.confident]
        self._choice.open = bool(unsure)
        if not self._choice.costly:
            return trees
        for row, tree in zip(unsure, self.costly.propose(context.of(unsure)), strict=True):
            # under rejection sampling a tree without q would be worth less than the chain alone
            merge = len(tree) and tree.q is None
            trees[row] = tree.merged(trees[row], context.budgets[row]) if merge else (tree if len(tree) else trees[row])
        return trees

    def record_round(self, tokens: int, seconds: float) -> None:
        """Learn whether rounds with the costly drafter give more tokens a second."""
        self._choice.record(tokens, seconds)

    def observe(self, request: Request, outcome: Outcome) -> None:
        self.cheap.observe(request, outcome)
        self.costly.observe(request, outcome)

    def finish(self, request: Request) -> None:
        self.cheap.finish(request)
        self.costly.finish(request)


class CostlyDrafterChoice:
    """Whether to ask the costly drafter, by tokens a second. The slower choice is tried again as soon as what it lost
    the last time is less than ``EXPLORATION_SHARE`` of the time since then."""

    def __init__(self) -> None:
        self.costly = True
        self.open = False
        """Whether the last proposal was a case for the costly drafter."""
        self._sums = {True: (0.0, 0.0), False: (0.0, 0.0)}  # tokens and seconds
        self._trial = {True: (0.0, 0.0), False: (0.0, 0.0)}  # the same, of all rounds when it was slower the last time
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0  # since the choice changed

    def record(self, tokens: int, seconds: float) -> None:
        """Learn from a round."""
        if not self.open:
            return
        self._rounds, self._tokens, self._seconds = self._rounds + 1, self._tokens + tokens, self._seconds + seconds
        if self._rounds > 1:
            before = self._sums[self.costly]
            self._sums[self.costly] = ROUND_MEMORY * before[0] + tokens, ROUND_MEMORY * before[1] + seconds
        if self._rounds < TRIAL_ROUNDS:
            return
        rate = self._rate(self.costly)
        if rate <= self._rate(not self.costly):
            self._trial[self.costly] = self._tokens, self._seconds
        else:
            trial_tokens, trial_seconds = self._trial[not self.costly]
            if trial_seconds - trial_tokens / rate > EXPLORATION_SHARE * self._seconds:
                return
        self.costly = not self.costly
        self._rounds, self._tokens, self._seconds = 0, 0, 0.0

    def _rate(self, costly: bool) -> float:
        """Tokens a second; infinite for a choice that was not tried yet."""
        tokens, seconds = self._sums[costly]
        return tokens / seconds if seconds else float("inf")


def _expected(tree: DraftTree) -> float:
    """Nodes that the drafter expects to be accepted."""
    return 0.0 if tree.probability is None else float(tree.probability.sum())
