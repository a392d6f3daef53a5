"""How likely a model finds the tokens of its text.

It is the model's own distribution: its logits before temperature, cuts, penalties and grammars. Each row of logits is
worked out by itself, in float64, so that the same logits give the same bits whatever shared the pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Logprob:
    """One token of a text.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens at its place, likeliest first, each with its own; of equally likely ones, the lower
            id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprob_of(logits: torch.Tensor, token: int, top: int) -> Logprob:
    """How likely a token is by logits ``[V]``, and which ``top`` tokens are likeliest."""
    logprobs = torch.log_softmax(logits.to(torch.float64, copy=True), -1)
    best: list[tuple[int, float]] = []
    if top:
        least = logprobs.topk(min(top, len(logprobs))).values[-1]
        among = (logprobs >= least).nonzero()[:, 0].tolist()  # ascending, and with all that are as likely as the last
        best = sorted(((each, float(logprobs[each])) for each in among), key=lambda pair: -pair[1])[:top]
    return Logprob(token, float(logprobs[token]), tuple(best))
