"""What a step adds to a request, and how a streamer of transformers takes it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from transformers.generation.streamers import BaseStreamer

from forerun.core.request import Request


@dataclass(frozen=True)
class Commit:
    """Tokens that one step added to a request; the first ``drafted`` of them were accepted drafts."""

    request: Request
    tokens: list[int]
    drafted: int


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
