"""The interface of trained heads, and what they share.

A head follows a sequence by the target's hidden states at its tokens. It returns logits of the next token and of the
tokens after drafted ones, level by level of a tree. It changes the speed, never the output.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch

from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows, attend, merge
from forerun.kv.cache import Cache, append
from forerun.models.forward.scorer import Scorer, is_sharded
from forerun.models.heads.shortlist import OutputMatrix, Shortlist

READ_ENTRIES = 64
"""Minimum entries processed at once. Fewer wait until a draft is needed, which may be never."""
CONTEXT_ENTRIES = 16
"""Entries after which a head that saw nothing before can be judged: more would cost more. Tokens per step of an EAGLE-3
head that attends to its last entries alone (bundled target; greedy, temperature 0.8): 4 entries 1.95, 1.74; 16 2.24,
1.90; 32 2.29, 1.93; 64 2.34, 1.96; all 2.44, 2.00."""
GROWTH_TOKENS = 256


class HeadSequence:
    """A head's state of a sequence. The target's ``cache`` may hold tokens whose states the head has not seen."""

    def __init__(self, layers: int, cache: Cache) -> None:
        self.cache, self._layers = cache, layers
        self.shortlist: Shortlist | None = None  # the tokens that can be drafted; None for all of the head's
        self.listed = 0  # number of tokens, from the first on, that were added to the shortlist
        self.restart()

    def restart(self) -> None:
        """Forget all states, and what was computed from them."""
        layers = self._layers
        self.first = 0  # index of the first token whose states the head has seen
        self.next: int | None = None  # index of the next token to see; None before any
        self.last = -1
        self.pending: list[tuple[torch.Tensor, IntArray]] = []  # unprocessed states, and the tokens that follow
        self.rows: list[Rows | None] = [None] * layers  # keys and values of each of the head's layers
        self.lengths = [0] * layers  # committed keys of each
        self.carried: list[torch.Tensor | None] = [None] * layers
        """Input of each layer but the first at its next entry, ``[1, hidden]``."""
        self.hidden: torch.Tensor | None = None
        """Output of the first layer at the last entry, ``[1, hidden]``."""

    @property
    def unread(self) -> int:
        return sum(len(tokens) for _, tokens in self.pending)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, place: int) -> Rows:
        """Write keys and values ``[1, Hkv, n, d]`` from ``place`` on; return all up to their end."""
        end = place + k.shape[2]
        self.rows[layer] = rows = append(self.rows[layer], (k, v), place, _grown(end))
        return tuple(each[:, :, :end] for each in rows)


def _grown(tokens: int) -> int:
    return tokens + max(GROWTH_TOKENS, tokens // 4)


class Growth:
    """A tree that grows after a sequence, as the head sees it. ``hidden``: the head's output at each node, ``[n,
    hidden]``, in row 0 at the sequence's end; or all levels' logits, ``[levels, V]``, if computed at once."""

    def __init__(self, sequence: HeadSequence, hidden: torch.Tensor) -> None:
        self.sequence, self.hidden = sequence, hidden
        self._depths, self._ancestors = [0], [{0}]
        self._tails: list[list[int]] = [[] for _ in sequence.rows]  # by layer, nodes with stored keys

    def __len__(self) -> int:
        return len(self._depths)

    @property
    def depth(self) -> int:
        return self._depths[-1]

    def add(self, parents: Sequence[int]) -> int:
        """Add nodes of one level; return their depth."""
        for parent in parents:
            self._depths.append(self._depths[parent] + 1)
            self._ancestors.append(self._ancestors[parent] | {len(self._ancestors)})
        return self.depth

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Compute attention of the last nodes over the sequence and their ancestors; ``[1, H, n, d]`` in and out."""
        tail, held, count = self._tails[layer], self.sequence.lengths[layer], q.shape[2]
        keys, values = self.sequence.store(layer, k, v, held + len(tail))
        nodes = range(len(self._depths) - count, len(self._depths))
        tail += nodes
        seen = np.zeros((count, held + len(tail)), np.bool_)
        for row, node in enumerate(nodes):
            place = held + (self._depths[node] - 1) // len(self._tails)
            seen[row, max(0, place + 1 - spec.window) if spec.window else 0 : held] = True
            seen[row, held:] = [other in self._ancestors[node] for other in tail]
        bias = torch.zeros(seen.shape, dtype=q.dtype).masked_fill_(torch.from_numpy(~seen), -torch.inf)
        return merge(attend(q, keys, values, spec, bias.to(q.device)), sinks=spec.sinks)


class Head(ABC):
    """A trained head. One serves all sequences of an engine.

    Attributes:
        layers: the target's layers whose hidden states it reads; see ``Scorer.score_rows``.
        tokens: the target's id of each token in the head's vocabulary, int64 ``[D]``; None if they are equal.
        output: the output matrix, if one covers the target's vocabulary, so that shortlists are possible.
        context: entries after which it can be judged if it saw nothing before.
        token_bytes: bytes of a token's keys and values in all of its layers, once bound.
    """

    layers: tuple[int, ...] = ()
    tokens: torch.Tensor | None = None
    output: OutputMatrix | None = None
    levels = 6
    context = CONTEXT_ENTRIES
    token_bytes: int

    def bind(self, target: Scorer) -> None:
        """Prepare to draft for a target; raise ValueError if the head does not fit it."""
        if is_sharded(target.model):
            raise ValueError(
                "the target is sharded over several processes; a trained head needs its embeddings and output matrix "
                "in one process"
            )

    @abstractmethod
    def open(self, cache: Cache) -> HeadSequence:
        """Start a sequence with the target's cache."""

    def needs(self, tokens: int) -> int:
        """Return the maximum bytes of a sequence of ``tokens`` tokens."""
        shortlist = 0 if self.output is None else self.output.needs()
        return self.token_bytes * _grown(tokens) + shortlist

    def record(self, sequence: HeadSequence, tokens: IntArray, start: int, states: torch.Tensor) -> None:
        """Record hidden states ``[n, layers * hidden]`` of tokens from ``start`` on, restarting there after a gap."""
        if sequence.next != start:
            sequence.restart()
            sequence.first = start
        end = min(start + len(states), len(tokens) - 1)
        sequence.pending.append((states[: end - start], tokens[start + 1 : end + 1].copy()))
        sequence.next, sequence.last = end, int(tokens[end])
        if sequence.unread >= READ_ENTRIES:
            self.read([sequence])

    @abstractmethod
    def read(self, sequences: Sequence[HeadSequence]) -> None:
        """Process everything pending."""

    @abstractmethod
    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        """Start trees; return them and logits of the next tokens, ``[n, D]``, padded to the longest shortlist's D."""

    @abstractmethod
    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Add nodes of one level to each tree; return logits after each, ``[n, D]``. Parent 0 is the sequence's end."""
