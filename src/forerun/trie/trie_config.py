"""How the trie keeps texts, and how it learns."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TrieConfig:
    """How texts are kept, and how fast the worth of evidence is learned.

    Attributes:
        capacity: most bytes of a namespace; when it is reached, the oldest outputs are dropped.
        namespaces: most namespaces. When there are more, the one used longest ago is dropped, unless a request is live
            in it. Together they take up to ``namespaces * capacity`` bytes: 4 GiB, by default.
        prompt_capacity: most tokens of a prompt that are indexed; of a longer prompt it is the end.
        learning_rate: of the mixer's weights; with 0 nothing is learned about evidence.
    """

    capacity: int = 1 << 26
    namespaces: int = 64
    prompt_capacity: int = 1 << 20
    learning_rate: float = 0.003

    def __post_init__(self) -> None:
        _demand("capacity", self.capacity, 1 << 16 <= self.capacity <= 1 << 36, "2**16 to 2**36")
        _demand("namespaces", self.namespaces, self.namespaces >= 1, "at least 1")
        _demand("prompt_capacity", self.prompt_capacity, 1 <= self.prompt_capacity <= 1 << 24, "1 to 2**24")
        _demand("learning_rate", self.learning_rate, 0 <= self.learning_rate <= 0.1, "0 to 0.1")


def _demand(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}")
