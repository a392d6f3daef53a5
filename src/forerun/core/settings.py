"""What the drafters for long contexts are built with; plain values, so that a command line can show them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Policy = Literal["stride", "acceptance", "verify"]
Sparse = Literal["low-rank", "retrieval"]


@dataclass(frozen=True)
class Settings:
    """Parameters of TriForce and its baselines; the other drafters take none of them.

    Attributes:
        draft_model: the small model, a transformers decoder, of ``triforce``, ``triforce-auto``, ``streaming`` and
            ``streaming-hierarchy``.
        gamma1: tokens that the small model drafts at a time.
        gamma2: tokens that the target verifies at a time.
        cache_budget: tokens that a sparse cache of the target holds, for each layer and KV head; of low rank, what a
            query sees at most.
        chunk: tokens that the retrieval cache chooses together.
        refresh: when it chooses anew; see ``RetrievalConfig``.
        paced: draft as many of these as pay by the clock, none where none pay; otherwise always ``gamma2``.
        sinks, window: first and last tokens that streaming caches hold; ``window`` is the small model's, one of the
            target's fills its budget.
        sparse: the target's cache in ``triforce``, ``triforce-trie`` and ``triforce-auto``: each query finds what
            matters to it (``LowRankCache``), or chunks are retrieved for the queries to come, as in the paper
            (``RetrievalCache``).

    Raises:
        ValueError: for a value out of range.
    """

    draft_model: Any = None
    gamma1: int = 4
    gamma2: int = 12
    paced: bool = True
    cache_budget: int = 4096
    chunk: int = 8
    refresh: Policy = "acceptance"
    sinks: int = 4
    window: int = 252
    sparse: Sparse = "low-rank"

    def __post_init__(self) -> None:
        for name, least in (
            ("gamma1", 1), ("gamma2", 1), ("cache_budget", 1), ("chunk", 1), ("sinks", 0), ("window", 1)
        ):  # fmt: skip
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.sparse not in ("low-rank", "retrieval"):
            raise ValueError(f"sparse is {self.sparse!r}; allowed are 'low-rank' and 'retrieval'")
        if self.cache_budget < self.chunk:
            raise ValueError(
                f"cache_budget is {self.cache_budget}; it must hold a chunk, {self.chunk} tokens, at least"
            )
