"""The size of a pass: everything that its cost depends on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.policy.cost_curve import CostTable


@dataclass(slots=True)
class PassShape:
    """What a pass scores besides drafts. Lists are by row that may have a draft.

    Attributes:
        left, cached: tokens still to generate, and cached tokens.
        pending: committed tokens that the pass scores; 1 for a row that only decodes.
        budgets: maximum nodes of the draft; its depth is at most ``left`` - 1.
        beside: tokens of other rows' prompts.
        undrafted_left, undrafted_cached: of rows that decode without a draft.
        closed: whether no new rows replace finished ones, as they do in a server.
        tokens, waiting: tokens scored without drafts, and rows that decode and so wait for the pass and all drafts.
        decodes: whether it only scores one token of each of these rows.
    """

    left: list[int]
    cached: list[int]
    pending: list[int]
    budgets: list[int]
    beside: int = 0
    undrafted_left: list[int] = field(default_factory=list)
    undrafted_cached: list[int] = field(default_factory=list)
    closed: bool = True
    tokens: int = field(init=False)
    waiting: int = field(init=False)
    decodes: bool = field(init=False)

    def __post_init__(self) -> None:
        self.waiting = len(self.left) + len(self.undrafted_left)
        self.tokens = sum(self.pending) + len(self.undrafted_left) + self.beside
        self.decodes = self.tokens == self.waiting

    def __len__(self) -> int:
        return len(self.left)

    def alone(self, table: CostTable) -> float:
        """Return the cost of a pass that only decodes these rows."""
        return table.decoding(self.waiting, sum(self.cached) + sum(self.undrafted_cached))

    def cost(self, table: CostTable, nodes: Sequence[int]) -> float:
        """Return the cost of the pass with this many nodes of each row that may have a draft."""
        tokens = [pending + count for pending, count in zip(self.pending, nodes, strict=True)]
        others = [1] * len(self.undrafted_left)
        return table.cost(tokens + others, self.cached + self.undrafted_cached, self.beside)
