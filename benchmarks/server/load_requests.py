"""What clients ask of a server: prompts of several tasks in turn, answers of mixed lengths, greedy and sampled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class LoadRequest:
    """One request.

    Attributes:
        task: what kind of text it is.
        prompt: a text to continue, or what the user says to a model that chats.
        tokens: of the answer, at most.
        temperature: 0 is greedy.
        seed: of the noise.
    """

    task: str
    prompt: str
    tokens: int
    temperature: float
    seed: int


def mixed(
    prompts: Mapping[str, Sequence[str]], lengths: Sequence[int], temperature: float, seed: int
) -> list[LoadRequest]:
    """All prompts, from each task in turn; the same for the same arguments.

    Every second turn through the tasks is sampled. Lengths are drawn anew for each.

    Args:
        prompts: by task.
        lengths: tokens of the answers, to draw from.
        temperature: of those that are sampled.
        seed: of the draw; each request has a seed of its own that follows from it.
    """
    rng = Random(f"serving/{seed}")
    turns = max(map(len, prompts.values()))
    return [
        LoadRequest(task, found[turn], rng.choice(lengths), temperature if turn % 2 else 0.0, rng.randrange(1 << 31))
        for turn in range(turns)
        for task, found in prompts.items()
        if turn < len(found)
    ]
