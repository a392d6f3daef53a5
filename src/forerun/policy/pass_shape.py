"""The size of a pass: all that its cost depends on, as numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from forerun.policy.cost_curve import CostTable


@dataclass(slots=True)
class PassShape:
    """What a pass reads besides drafts.

    Attributes:
        left: tokens that each row still wants; of the rows that may be drafted for.
        cached: tokens that each row looks back on.
        pending: committed tokens of each row that the pass reads; 1 for a row that only decodes.
        budgets: maximum number of nodes of each row's draft.
        depths: maximum depth of each row's draft.
        beside: tokens that the pass reads for prompts of other rows.
        undrafted_left, undrafted_cached: of the rows that decode in the pass without a draft.
        closed: whether the batch ends with its last row; false in a server, where others come in their place.
        tokens: that the pass reads without drafts.
        waiting: rows that decode in the pass, so that they wait for it and for all drafts.
        decodes: whether it reads one token of each of these rows and nothing else.
    """

    left: list[int]
    cached: list[int]
    pending: list[int]
    budgets: list[int]
    depths: list[int]
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

    def plain(self, table: CostTable) -> float:
        """Cost of the pass without drafts."""
        return self.cost(self.pending, table)

    def cost(self, tokens: list[int], table: CostTable) -> float:
        """Cost of the pass if it reads so many tokens of each row that may be drafted for."""
        return table.cost(tokens, self.cached, self.beside + len(self.undrafted_left), self.undrafted_cached)

    def alone(self, table: CostTable) -> float:
        """Cost of a pass that only decodes these rows, without drafts."""
        return table.cost([1] * self.waiting, [*self.cached, *self.undrafted_cached])

    def added(self, table: CostTable, nodes: int) -> float:
        """What ``nodes`` nodes of each row that may be drafted for add to the pass."""
        rows, (passes, looks) = len(self.left), table.curves(self.tokens + len(self.left) * nodes + 1)
        looking = sum(
            cached * (looks[pending + nodes] - looks[pending])
            for cached, pending in zip(self.cached, self.pending, strict=True)
        )
        return float(passes[self.tokens + rows * nodes] - passes[self.tokens] + looking)
