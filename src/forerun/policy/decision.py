"""A step's decision, with what it cost."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from forerun.core.tree import DraftTree
from forerun.policy.gains import RowGains
from forerun.policy.ledger import TokenValues
from forerun.policy.pass_shape import PassShape
from forerun.policy.tree_pruning import PrunedTrees


@dataclass(slots=True)
class Decision:
    """What a step under way drafts. Costs and worths are in plain passes, times in seconds.

    Attributes:
        rows: what drafts recently gained, by row that may have a draft.
        token_values, values: what tokens of all waiting rows save, and the first token of a row that may have a draft.
        cost_to_go: of all waiting rows.
        plain, alone: cost of the pass without drafts, and without prompts either.
        fixed, slopes: cost of having nodes at all, and of a node of each row; ``prices``: of that node, in tokens.
        known, classes: length of each row's known suffix, None if unknown; and its class.
        lacks: slack missing for the cheapest action that was rejected for lack of it.
        costly: whether the costly source may propose now or soon; ``trusted``: whether its drafts surely pay;
            ``reserved``: slack that cheap sources leave to it.
        proposing: the class of each row for which the cheap source proposes a tree.
        extended: by row of the costly source, the class of the tree that it extends, and that tree.
        worth_it: what is worth scoring without and with the costly source, under unlimited slack.
        chain: draft length of chains scored instead of trees; ``passes``: guessed cost of one of their passes.
        trial, costly_trial: whether the drafts, or those of the costly source, are not expected to pay.
        planning: time of the decision and proposals: the cheap source's (``proposal``), the costly one's
            (``extension``), and the chains' (``drafting``).
    """

    shape: PassShape
    rows: Sequence[RowGains]
    token_values: TokenValues
    values: list[float]
    cost_to_go: float
    plain: float
    alone: float
    fixed: float = 0.0
    slopes: list[float] = field(default_factory=list)
    prices: list[float] = field(default_factory=list)
    known: Sequence[int | None] = ()
    classes: list[int] = field(default_factory=list)
    lacks: float = math.inf
    costly: bool = False
    trusted: bool = False
    reserved: float = 0.0
    proposing: dict[int, int] = field(default_factory=dict)
    extended: dict[int, tuple[int, DraftTree]] = field(default_factory=dict)
    trees: Sequence[DraftTree] = ()
    worth_it: tuple[PrunedTrees, PrunedTrees] | None = None
    pruned: PrunedTrees | None = None
    chain: int = 0
    passes: float = 0.0
    trial: bool = False
    costly_trial: bool = False
    planning: float = 0.0
    proposal: float = 0.0
    extension: float = 0.0
    drafting: float = 0.0

    def values_after(self, tokens: Mapping[int, float]) -> list[float]:
        """Return what a token of each row saves after so many tokens of these rows."""
        if not self.token_values.fade:
            return self.values
        every = [tokens.get(row, 0.0) for row in range(self.shape.waiting)]
        return self.token_values.after(every)[: len(self.shape)]

    @property
    def plain_step(self) -> bool:
        """Whether the step drafts nothing."""
        return not self.proposing and not self.extended and not self.chain


@dataclass(slots=True)
class PlainSteps:
    """Steps that draft nothing by an earlier decision.

    Attributes:
        left, steps: for how many more steps the decision holds, and for how many it held so far.
        suffix: length of the known suffix at which a row of a lower class would propose a tree; infinite if none would.
        unchecked: steps in which no suffix can become that long, as it grows by a token per step.
        deciding, passed: seconds of checking, and of the passes.
    """

    decision: Decision
    left: int
    suffix: float = math.inf
    unchecked: float = math.inf
    steps: int = 0
    deciding: float = 0.0
    passed: float = 0.0
