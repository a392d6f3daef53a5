"""What a request may lose to drafts that do not pay.

Estimates can be wrong, and only drafting shows it. The time lost that way stays under a small share of what the text
takes. So one that cannot be predicted takes hardly longer than with plain decoding, whatever others gave before it.
"""

from __future__ import annotations

from forerun.core.request import Request

EXPLORATION_SHARE = 0.01
"""The share of a text's plain steps that drafts without success may take. What is not lost is left for later texts."""
EXPLORATION_START = 1.0
"""What an engine's first text may lose at its start, in plain steps. A later text may lose as much there, if earlier
ones left it."""
CREDIT_SHARE = 0.06
"""Where this share of a text's maximum length is more than ``EXPLORATION_START``, a later text may lose so much at its
start. With ``EXPLORATION_SHARE`` that is 7 %, what ``forerun bench never-slower`` allows a single draw. Halved and
doubled, it changes simulated texts by at most 1.7 %; with 0.04, SmolLM2 gave up texts at temperature 0.8 that pay."""
STAKE = 0.25
"""The share of what is left that a single draft may lose while drafts have saved nothing in a text; and the share of a
plain step that a chain may always take, if chains pay. There, halved it loses up to 12 % of simulated speed where a
drafted token takes 1/50 of a pass (nothing at 1/200), and doubled it changes that by at most 5 %."""
SAVINGS = 16.0
"""The maximum of what was saved, in plain steps: how long drafts are trusted after they stop paying."""


class ExplorationBudget:
    """Compares the time of a request's steps with drafts to what plain steps would have taken for the same tokens.

    It may lose what it saved before. Beyond that, it may lose an amount that grows with the text. Amounts are in plain
    steps. In a batch the others wait for a row's drafts, so these cost the row what all rows wait together.

    Args:
        request: whose drafts these are.
        credit: what earlier texts left over.
    """

    def __init__(self, request: Request, credit: float) -> None:
        self._request = request
        self._start = min(max(EXPLORATION_START, CREDIT_SHARE * request.max_new_tokens), credit)
        self._saved = self._lost = 0.0

    @property
    def left(self) -> float:
        """What may be lost."""
        return self._saved + self._start + growth(self._request) - self._lost

    def affords(self, cost: float) -> bool:
        """Whether ``cost`` may be spent. A cost above ``EXPLORATION_START`` may be spent as soon as that is left, so
        every source is tried now and then."""
        left = self.left
        return left > 0 and left >= min(cost, EXPLORATION_START)

    def stake(self, least: float) -> float:
        """What a single draft may lose: what is left, once drafts have saved something in this text. Before, it is a
        part of it, so that bad luck at first does not end all trials, but as much as the least draft takes, if it is
        there."""
        return self.left if self._saved > 0 else max(self.left * STAKE, min(self.left, least))

    @property
    def untouched(self) -> bool:
        """Whether nothing was lost lately, so that what does not promise enough may be tried."""
        return growth(self._request) >= self._lost

    def record(self, saved: float) -> None:
        """A step's drafts saved this; less than 0 if they lost."""
        balance = self._saved + saved
        self._saved = within_savings(balance)
        self._lost -= min(balance, 0.0)


def growth(request: Request) -> float:
    """What a text of this length may lose, whatever came before."""
    return EXPLORATION_SHARE * (len(request) - request.prompt_length)


def within_savings(steps: float) -> float:
    """As much of it as counts as saved: at least nothing, at most ``SAVINGS``."""
    return min(max(steps, 0.0), SAVINGS)
