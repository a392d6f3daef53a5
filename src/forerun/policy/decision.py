"""The size of a pass, and what a step decides to draft in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from forerun.core.tree import DraftTree
from forerun.policy.gains import RowGains


@dataclass(slots=True)
class PassShape:
    """What a pass scores besides drafts. Lists are by row; rows that may have a draft come first.

    Attributes:
        left, cached: tokens still to generate, and cached tokens.
        pending: committed tokens that the pass scores of a row that may have a draft; 1 if it only decodes.
        budgets: maximum nodes of such a row's draft; its depth is at most ``left`` - 1.
        beside: tokens of other rows' prompts.
        closed: whether no new rows replace finished ones, as they do in a server.
        tokens: scored without drafts; ``decodes``: whether they are one of each row.
    """

    left: list[int]
    cached: list[int]
    pending: list[int]
    budgets: list[int]
    beside: int = 0
    closed: bool = True
    tokens: int = field(init=False)
    decodes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = sum(self.pending) + len(self.left) - len(self.pending) + self.beside
        self.decodes = self.tokens == len(self.left)


class Pruned(NamedTuple):
    """The part of a step's trees that is worth scoring, and its cost; for the rest see ``STEP_RECORD``."""

    trees: list[DraftTree]
    nodes: int
    worth: float
    expected: float
    added: float
    cost: float


@dataclass(slots=True)
class Decision:
    """What a step under way drafts.

    Attributes:
        rows: what drafts recently gained, by row that may have a draft.
        known: length of each row's known suffix, None if unknown; None without a cheap source.
        proposing: rows for which the cheap source proposes trees; ``limits``: by row, the maximum nodes of the tree,
            and the minimum stated probability at which one can pay.
        due: whether a plain step is due to be measured.
        costly, trusted: whether the costly source may propose now or soon, and whether its drafts surely pay.
        trees: proposed ones; ``extended``: by row of the costly source, the tree that it extends.
        worth_it: what is worth scoring without and with the costly source, under unlimited slack.
        chain: draft length of chains scored instead of trees.
        planning: seconds of the decision and proposals: the cheap source's (``proposal``), the costly one's
            (``extension``), and the chains' (``drafting``).
    """

    shape: PassShape
    rows: Sequence[RowGains]
    known: Sequence[int | None] | None
    proposing: list[int]
    limits: list[tuple[int, float]]
    due: bool = False
    costly: bool = False
    trusted: bool = False
    trees: Sequence[DraftTree] = ()
    extended: dict[int, DraftTree] = field(default_factory=dict)
    worth_it: tuple[Pruned, Pruned] | None = None
    chain: int = 0
    planning: float = 0.0
    proposal: float = 0.0
    extension: float = 0.0
    drafting: float = 0.0

    @property
    def plain_step(self) -> bool:
        """Whether the step drafts nothing."""
        return not self.proposing and not self.extended and not self.chain


@dataclass(slots=True)
class PlainSteps:
    """Steps that draft nothing by the last decision.

    Attributes:
        rows, kinds: what drafts recently gained, and the class of the known suffix, by row.
        left, steps: for how many more steps the decision holds, and for how many it held so far.
        suffix: length of the known suffix at which a row of a lower class would propose a tree; infinite if none would.
        unchecked: steps in which no suffix can become that long, as it grows by a token per step.
        deciding, passed: seconds of checking, and of the passes.
    """

    rows: Sequence[RowGains]
    kinds: list[int]
    left: int
    suffix: float = math.inf
    unchecked: float = math.inf
    steps: int = 0
    deciding: float = 0.0
    passed: float = 0.0
