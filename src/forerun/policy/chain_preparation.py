"""Whether reading a prompt for chains pays: they need a cache of it, and what that takes has to be saved later."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from forerun.policy.choice import Choice
from forerun.policy.time_model import NOTHING_KNOWN, TimeModel

PREPARING_READS = 8.0
"""First guess of what it costs to prepare a cached token for chains: so many times what it adds to a plain pass. Both
read all keys. Measured: 6 to 9 for the bundled model and 5 to 11 for SmolLM2, in both types. A small model has to read
the prompt besides."""
TREES_GAIN = 1.07
"""Tokens that trees alone are assumed to give in the time of a plain step; what chains save counts from there. 1.06 to
1.09 decide the same for the bundled model and SmolLM2, both types, after 16,000 and 32,000 tokens."""
PREFILL_SHARE = 0.05
"""The share of a prompt's prefill that preparing it may cost before drafts have saved anything. Measured after 16,000
tokens: 0.5 % over a sparse cache."""
LEAST_COST = 1e-6
"""Preparing costs something, whatever the curve says, in plain passes."""


@dataclass(frozen=True)
class Prompt:
    """What is known of a request before chains are drafted for it.

    Attributes:
        length: tokens so far.
        prompt_length: tokens of its prompt.
        left: tokens that it still wants.
        short: whether preparing it takes a single pass.
    """

    length: int
    prompt_length: int
    left: int
    short: bool


class ChainPreparation:
    """Estimates what preparing takes, and whether it pays.

    Args:
        choice: of the level.
        most: maximum length of a chain.
        trees: whether there are cheap sources, too.
    """

    def __init__(self, choice: Choice, most: int, trees: bool) -> None:
        self._choice, self._most, self._trees = choice, most, trees
        self._seconds = TimeModel(1.0, NOTHING_KNOWN)  # as a multiple of the first guess

    def guess(self, prompt: Prompt) -> float:
        """First guess of what preparing costs, in plain passes."""
        choice = self._choice
        each = PREPARING_READS * float(choice.table.costs.cached(1))
        return max(each, LEAST_COST) * prompt.length + choice.draft.reading(prompt.prompt_length)

    def pays(self, prompt: Prompt, gain: float) -> bool:
        """Whether chains are expected to save more in the rest of a request than preparing it costs.

        Args:
            prompt: of the request.
            gain: tokens per plain step of recent steps without chains.
        """
        choice, length, cached = self._choice, min(self._most, prompt.left - 1), prompt.length - 1
        if length < 1:
            return False
        table, lengths = choice.table, np.arange(1, length + 1)
        plain = table.cost([1], [cached])
        passes = plain + choice.correction.each * np.array(
            [table.cost([1 + n], [cached]) - plain for n in lengths.tolist()]
        )
        draft, rate = choice.draft_line([cached]), choice.chains.rate()
        best = float(((1 + (rate**lengths).cumsum()) / (draft.start + draft.each * lengths + passes)).max())
        trees = max(TREES_GAIN, gain) if prompt.short else TREES_GAIN
        saved = prompt.left * ((plain / trees if self._trees else plain) - 1 / best)
        cost = self._seconds.scale * self.guess(prompt)
        allowed = choice.ledger.slack + PREFILL_SHARE * choice.table.prefill(prompt.prompt_length)
        return saved > cost and cost <= allowed

    def record(self, prompt: Prompt, seconds: float) -> None:
        """Preparing a request took ``seconds``. What its prefill does not pay is booked."""
        if unit := self._choice.unit:
            cost = seconds / unit
            self._seconds.record(cost / self.guess(prompt))
            free = PREFILL_SHARE * self._choice.table.prefill(prompt.prompt_length)
            self._choice.ledger.book(max(cost - free, 0.0), 0.0)
