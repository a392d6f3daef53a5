"""Settings of the drafters for long contexts: plain values, which the command line can show without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from forerun.core.checks import check_integer

Policy = Literal["stride", "acceptance", "verify"]
Sparse = Literal["low-rank", "retrieval"]

MTP = "mtp"
"""The ``draft_model`` that selects trained heads in the target's own files."""

QUANTISATIONS = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
"""Formats that gguf's quantiser writes; files with K-quants need llama.cpp's own tool. As a ``draft_model``: the
target's weights in that format."""


@dataclass(frozen=True)
class LongContextConfig:
    """Parameters of ``auto``, TriForce and its baselines; other drafters ignore them.

    Attributes:
        draft_model: the small model, a transformers decoder, for ``triforce``, ``triforce-auto`` and ``streaming``. For
            ``head`` and ``auto``: the folder of a trained head (``models/heads/loading.py``), or ``mtp`` for those in
            the target's files. For ``copy`` and ``auto``: the format (``q8_0``) of a copy of the target's weights.
        gamma1: draft length of the small model, in tokens.
        gamma2: maximum draft length that the target verifies, in tokens.
        cache_budget: tokens in a sparse cache of the target, per layer and KV head; in the low-rank one, that a query
            sees.
        refresh: when the retrieval cache selects its chunks again; see ``RetrievalConfig``.
        paced: set the draft length by measured time, down to none where drafts do not pay; if false, it is ``gamma2``.
        sinks, window: first and last tokens in a streaming cache. ``window`` is for the small model; the target's
            streaming cache fills ``cache_budget``.
        sparse: the target's sparse cache in ``auto`` and the ``triforce`` drafters. ``low-rank``: each query selects
            its own chunks (``LowRankCache``). ``retrieval``: chunks are selected in advance for the next queries, as in
            the paper (``RetrievalCache``). None: ``retrieval`` on a GPU, where it needs few calls; else ``low-rank``.

    Raises TypeError for a number that is not an integer, ValueError for one out of range.
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
    sparse: Sparse | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("gamma1", 1), ("gamma2", 1), ("cache_budget", 1), ("chunk", 1), ("sinks", 0), ("window", 1)
        ):  # fmt: skip
            check_integer(name, getattr(self, name), least)
        if self.sparse not in (None, "low-rank", "retrieval"):
            raise ValueError(f"sparse is {self.sparse!r}; allowed are 'low-rank' and 'retrieval'")
        if self.cache_budget < self.chunk:
            raise ValueError(f"cache_budget is {self.cache_budget}; it must be at least one chunk, {self.chunk} tokens")


def check_settings(settings: object) -> None:
    """Raise TypeError for settings of another class, such as a dictionary."""
    if settings is not None and not isinstance(settings, LongContextConfig):
        raise TypeError(f"settings is {settings!r}; it must be a forerun.LongContextConfig or None")
