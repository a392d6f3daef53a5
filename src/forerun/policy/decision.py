"""A step's decision, and the first guess of what chains cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.core.tree import DraftTree
from forerun.policy.cost_curve import CostTable, FloatArray
from forerun.policy.pass_shape import PassShape
from forerun.policy.tree_pruning import PrunedTrees


@dataclass(frozen=True)
class DraftPasses:
    """First guess of the cost of a pass that drafts a token of a chain, in plain passes.

    Attributes:
        reads: how many of a row's cached tokens it reads.
        weight: its cost relative to the target's pass over that many cached tokens.
        small: costs of a small model that drafts directly for requests of at most ``alone`` cached tokens; its pass
            over one token costs ``share``, and it reads at most ``window`` cached tokens.
    """

    reads: Callable[[int], int] = lambda cached: cached
    weight: float = 1.0
    small: CostTable | None = None
    share: float = 1.0
    window: int = 0
    alone: int = 0

    def are_alone(self, cached: Sequence[int]) -> bool:
        """Return whether the small model drafts directly."""
        return self.small is not None and max(cached) <= self.alone

    def cost(self, cached: Sequence[int], table: CostTable) -> float:
        """Return the cost of a pass over one token of each row; ``table``: the target's costs."""
        if self.small is not None and self.are_alone(cached):
            return self.share * self.small.cost([1] * len(cached), [min(each, self.window) for each in cached])
        return self.weight * table.cost([1] * len(cached), list(map(self.reads, cached)))

    def reading(self, tokens: int) -> float:
        """Return the cost of the small model's prefill of ``tokens`` tokens."""
        return 0.0 if self.small is None else self.share * self.small.cost([min(tokens, self.window)], [0])


@dataclass(slots=True)
class Decision:
    """The decision for a step under way, with what it cost. Costs and worths are in plain passes.

    Attributes:
        values: worth of a token, by row.
        cost_to_go: of all waiting rows.
        plain, alone: cost of the pass without drafts, and without prompts either.
        kinds: class of each row's predicted gain.
        lacks: slack missing for the cheapest action that was rejected for lack of it.
        costly: whether the costly source may propose now or soon; ``trusted``: whether its drafts surely pay;
            ``reserved``: slack that cheap sources leave to it.
        asked: by proposing row, the class of its prediction.
        deeper: by row of the costly source, the class of its prediction, and the tree before.
        worth_it: what is worth scoring without and with the costly source, under unlimited slack.
        chain: draft length of chains scored instead of trees; ``passes``: guessed cost of one of their passes.
        trial, deeper_trial: whether the drafts, or those of the costly source, are not expected to pay.
        added: worth of what the costly source added.
        planning: seconds of deciding and of the sources; ``asking``, ``deepening``, ``drafting``: of these.
    """

    shape: PassShape
    values: FloatArray
    cost_to_go: float
    plain: float
    alone: float
    kinds: list[int] = field(default_factory=list)
    lacks: float = math.inf
    costly: bool = False
    trusted: bool = False
    reserved: float = 0.0
    asked: dict[int, int] = field(default_factory=dict)
    deeper: dict[int, tuple[int, DraftTree]] = field(default_factory=dict)
    trees: Sequence[DraftTree] = ()
    worth_it: tuple[PrunedTrees, PrunedTrees] | None = None
    pruned: PrunedTrees | None = None
    chain: int = 0
    passes: float = 0.0
    trial: bool = False
    deeper_trial: bool = False
    added: float = 0.0
    planning: float = 0.0
    asking: float = 0.0
    deepening: float = 0.0
    drafting: float = 0.0

    @property
    def rests(self) -> bool:
        """Whether the step drafts nothing."""
        return not self.asked and not self.deeper and not self.chain
