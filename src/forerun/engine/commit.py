"""What a step adds to a request, and how a streamer of transformers takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation.streamers import BaseStreamer

from forerun.core.request import Request
from forerun.core.verify import Outcome


@dataclass(frozen=True)
class Commit:
    """What one step added to a request.

    Attributes:
        request: whose.
        tokens: what was added; none if the request failed.
        drafted: how many of them, from the first on, were accepted drafts.
        proposed: nodes of the draft that the step verified.
        origins: the ``Origin`` of each token.
        seconds: that the step took; of the first one, since the request was admitted.
    """

    request: Request
    tokens: list[int]
    drafted: int
    proposed: int = 0
    origins: Sequence[int] = ()
    seconds: float = 0.0


def committed(request: Request, length: int, outcome: Outcome | None, seconds: float) -> Commit:
    """What a step added behind the first ``length`` tokens; without an outcome the request failed, or read its prompt.

    Args:
        seconds: that the step took.
    """
    tokens = request.tokens[length:].tolist()
    if outcome is None:
        return Commit(request, tokens, 0)
    first = request.stats.steps == 1
    took = request.stats.prefill_seconds if first else seconds
    return Commit(request, tokens, len(outcome.verdict.path), len(outcome.tree), outcome.origins, took)


def feed(
    streamer: BaseStreamer | None, requests: Sequence[Request], commits: Iterable[Commit], with_prompt: bool = True
) -> None:
    """Run to the end, handing tokens to a streamer as transformers does.

    Raises:
        ValueError: if there is a streamer, which takes one sequence, and several requests.
    """
    if streamer is None:
        for _ in commits:
            pass
        return
    if len(requests) != 1:
        raise ValueError(f"a streamer takes one sequence; there are {len(requests)}")
    if with_prompt:
        streamer.put(torch.from_numpy(requests[0].prompt)[None])
    for commit in commits:
        for token in commit.tokens:
            streamer.put(torch.tensor([token]))
    streamer.end()
