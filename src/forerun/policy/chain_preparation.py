"""Decide whether preparing a prompt for chains pays: they need a sparse cache, whose cost must be saved later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.policy.choice import Choice
from forerun.policy.time_model import NOTHING_KNOWN, TimeModel

PREPARING_READS = 8.0
"""First guess of the cost of preparing a cached token, in multiples of what it adds to a plain pass; both read all
keys. Measured in both types: 6 to 9 for the bundled model, 5 to 11 for SmolLM2. A small model's prefill is extra."""
TREES_GAIN = 1.07
"""Tokens that trees alone yield in the time of a plain step; savings of chains are counted from there. For the bundled
model and SmolLM2 in both types, after 16,000 and 32,000 tokens, 1.06 to 1.09 lead to the same decisions."""
PREFILL_SHARE = 0.05
"""Share of a prompt's prefill that preparation may cost before drafts have saved anything. Measured over a sparse cache
after 16,000 tokens: 0.5 %."""
LEAST_COST = 1e-6
"""Minimum cost of preparing a token, in plain passes."""


@dataclass(frozen=True)
class Prompt:
    """A request before chains are drafted for it, in tokens; ``short``: whether preparation needs a single pass."""

    length: int
    prompt_length: int
    left: int
    short: bool


class ChainPreparation:
    """Estimates what preparation costs, and whether it pays; ``most``: maximum draft length, ``trees``: whether there
    are cheap sources, too."""

    def __init__(self, choice: Choice, most: int, trees: bool) -> None:
        self._choice, self._most, self._trees = choice, most, trees
        self._seconds = TimeModel(1.0, NOTHING_KNOWN)  # as a multiple of the first guess

    def guess(self, prompt: Prompt) -> float:
        """Guess the cost of preparation, in plain passes."""
        choice = self._choice
        each = PREPARING_READS * float(choice.costs.table.costs.cached(1))
        return max(each, LEAST_COST) * prompt.length + choice.draft.reading(prompt.prompt_length)

    def pays(self, prompt: Prompt, gain: float) -> bool:
        """Return whether chains are expected to save more in the rest of a request than preparing it costs. ``gain``:
        tokens per plain step of recent steps without chains."""
        choice, length, cached = self._choice, min(self._most, prompt.left - 1), prompt.length - 1
        if length < 1:
            return False
        table, lengths = choice.costs.table, np.arange(1, length + 1)
        plain = table.cost([1], [cached])
        passes = plain + choice.costs.correction.each * np.array(
            [table.cost([1 + n], [cached]) - plain for n in lengths.tolist()]
        )
        draft, rate = choice.costs.draft_line([cached]), choice.chains.rate()
        best = float(((1 + (rate**lengths).cumsum()) / (draft.start + draft.each * lengths + passes)).max())
        trees = max(TREES_GAIN, gain) if prompt.short else TREES_GAIN
        saved = prompt.left * ((plain / trees if self._trees else plain) - 1 / best)
        cost = self._seconds.scale * self.guess(prompt)
        allowed = choice.ledger.slack + PREFILL_SHARE * choice.costs.table.prefill(prompt.prompt_length)
        return saved > cost and cost <= allowed

    def record(self, prompt: Prompt, seconds: float) -> None:
        """Record that preparing a request lasted ``seconds``; book what its prefill does not pay."""
        if unit := self._choice.costs.unit:
            cost = seconds / unit
            self._seconds.record(cost / self.guess(prompt))
            free = PREFILL_SHARE * self._choice.costs.table.prefill(prompt.prompt_length)
            self._choice.ledger.book(max(cost - free, 0.0), 0.0)
