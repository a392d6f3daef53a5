"""Prepare requests for chains: they need a sparse cache, whose cost must be saved later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from forerun.decoding import proposals
from forerun.decoding.row import Row
from forerun.decoding.source import Source
from forerun.kv.cache import READ_BLOCK
from forerun.policy.choice import Choice
from forerun.policy.gains import RowGains

PREPARING_READS = 8.0
"""First guess of preparing a cached token, relative to what it adds to a plain pass: both read all keys. Measured in
both types: 6 to 9 for the bundled model, 5 to 11 for SmolLM2. A small model's prefill is extra."""
TREES_GAIN = 1.07
"""Tokens that trees alone yield in the time of a plain step, from which savings of chains are counted. After 16,000 and
32,000 tokens of the bundled model and SmolLM2 in both types, 1.06 to 1.09 decide alike."""
PREFILL_SHARE = 0.05
"""Share of a prompt's prefill that preparation may cost before drafts save; measured at 16,000 tokens: 0.5 %."""
LEAST_COST = 1e-6
"""Minimum cost of preparing a token, in plain passes."""


@dataclass
class PreparedRow(RowGains):
    """A row, and how far it is prepared for chains.

    Attributes:
        unread, ready: whether preparation has not started, or is finished.
        due: length of the request at which to reconsider whether it pays; ``pays``: the last answer.
        seconds: spent on it.
    """

    unread: bool = True
    ready: bool = False
    due: int = 0
    pays: bool = False
    seconds: float = 0.0


class ChainPreparation:
    """Decides when preparation pays, and runs it.

    Args:
        longest: maximum draft length.
        beyond: cached tokens that a row needs before chains are drafted.
        trees: whether there are cheap sources, too.
    """

    def __init__(
        self, choice: Choice, chains: Source, longest: int, beyond: int, trees: bool, clock: Callable[[], float]
    ) -> None:
        self._choice, self._chains, self._longest, self._beyond = choice, chains, longest, beyond
        self._trees, self._clock = trees, clock

    def read(self, row: Row, state: PreparedRow, tokens: int) -> bool:
        """Prepare a piece of a prompt, if that is expected to pay; return whether the row need not wait for more."""
        if state.ready or (state.unread and (not self._may_start(row, state) or _is_short(row))):
            return True
        return self.go_on(row, state, tokens)

    def go_on(self, row: Row, state: PreparedRow, tokens: int) -> bool:
        """Prepare a piece of a prompt; return whether the row is ready."""
        if state.ready:
            return True
        state.unread, began = False, self._clock()
        state.ready = proposals.read(self._chains, row, tokens)
        state.seconds += self._clock() - began
        if state.ready:
            self._choice.learn_preparation(state.seconds, self._guess(row), self._free(row))
        return state.ready

    def allows(self, rows: Sequence[Row], states: Sequence[PreparedRow]) -> bool:
        """Return whether all rows can have chains. A short row is prepared if another one already is."""
        begun = not all(state.unread for state in states)
        allowed = [
            self._may_start(row, state) or (begun and _is_short(row)) for row, state in zip(rows, states, strict=True)
        ]
        return all(allowed)

    def _may_start(self, row: Row, state: PreparedRow) -> bool:
        """Decide whether to prepare a row, every ``READ_BLOCK`` tokens, or when a short one's answer has doubled."""
        if not state.unread or not self._trees:
            return True
        length = len(row.request)
        if length >= state.due:
            state.due = length + (length - row.request.prompt_length + 1 if _is_short(row) else READ_BLOCK)
            state.pays = length > self._beyond and self._pays(row)
        return state.pays

    def _guess(self, row: Row) -> float:
        choice, request = self._choice, row.request
        each = PREPARING_READS * float(choice.costs.costs.cached(1))
        return max(each, LEAST_COST) * len(request) + choice.draft.prefill(request.prompt_length)

    def _free(self, row: Row) -> float:
        return PREFILL_SHARE * self._choice.costs.prefill(row.request.prompt_length)

    def _pays(self, row: Row) -> bool:
        """Return whether chains are expected to save more in the rest of a request than preparing it costs."""
        choice, length, cached = self._choice, min(self._longest, row.wants - 1), len(row.request) - 1
        if length < 1:
            return False
        table, lengths = choice.costs, np.arange(1, length + 1)
        plain = table.decoding(1, cached)
        passes = plain + choice.node_share * np.array([table.cost([1 + n], [cached]) - plain for n in lengths.tolist()])
        draft, rate = choice.draft_line([cached]), choice.chains.rate()
        best = float(((1 + (rate**lengths).cumsum()) / (draft.start + draft.each * lengths + passes)).max())
        trees = max(TREES_GAIN, choice.gain) if _is_short(row) else TREES_GAIN
        saved = row.wants * ((plain / trees if self._trees else plain) - 1 / best)
        cost = choice.preparing * self._guess(row)
        return saved > cost and cost <= choice.ledger.slack + self._free(row)


def _is_short(row: Row) -> bool:
    return len(row.request) <= READ_BLOCK
