"""Heads that predict the next hidden state from a token and a hidden state: EAGLE-3 and MTP."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.tree import DraftTree, IntArray
from forerun.kernels.attention.attention import AttentionSpec, attend_in_order
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.cache import Cache
from forerun.models.forward.scorer import attending
from forerun.models.heads.head import Growth, Head, HeadSequence
from forerun.models.heads.shortlist import drafting


class RecurrentHead(Head):
    """A head that predicts the next hidden state from a token and a hidden state: first the target's, later its own.
    ``depth_layers`` layers take turns: each reads the previous one's output and the next token. ``shift`` is an entry's
    position minus its token's index."""

    depth_layers = 1
    shift = 0

    @abstractmethod
    def features(self, states: torch.Tensor) -> torch.Tensor:
        """Project the target's states to the first layer's input, ``[n, hidden]``."""

    @abstractmethod
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Embed tokens ``[n]``."""

    @abstractmethod
    def forward(
        self, layer: int, embeddings: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Run a layer, ``[n, hidden]`` in and out. Its attention calls ``attend`` of the running pass."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits ``[n, D]`` from a layer's output."""

    def open(self, cache: Cache) -> HeadSequence:
        return HeadSequence(self.depth_layers, cache)

    def read(self, sequences: Sequence[HeadSequence]) -> None:
        sequences = [sequence for sequence in sequences if sequence.pending]
        if not sequences:
            return
        states = torch.cat([states for sequence in sequences for states, _ in sequence.pending])
        entries = {sequence: np.concatenate([tokens for _, tokens in sequence.pending]) for sequence in sequences}
        with Ordered():
            parts = torch.split(self.features(states), [len(own) for own in entries.values()])
            given = dict(zip(sequences, parts, strict=True))
            for layer in range(self.depth_layers):
                given = self._read_layer(layer, given, entries)
        for sequence in sequences:
            sequence.pending.clear()

    def _read_layer(
        self, layer: int, given: Mapping[HeadSequence, torch.Tensor], entries: Mapping[HeadSequence, IntArray]
    ) -> dict[HeadSequence, torch.Tensor]:
        """Run a layer over last tokens ``[n, hidden]``; drop the last one's output, which lacks a next token."""
        if not given:
            return {}
        counts = [len(part) for part in given.values()]
        tokens = np.concatenate([entries[sequence][-count:] for sequence, count in zip(given, counts, strict=True)])
        ends = [(sequence.next or 0) + 1 + self.shift for sequence in given]
        positions = np.concatenate([np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)])
        with attending(Reading(list(given), counts)):
            out = self._forward(layer, tokens, torch.cat(list(given.values())), positions)
        left = {}
        for sequence, part in zip(given, torch.split(out, counts), strict=True):
            sequence.lengths[layer] += len(part)
            if layer == 0:
                sequence.hidden = part[-1:]
            if layer + 1 < self.depth_layers:
                before, sequence.carried[layer + 1] = sequence.carried[layer + 1], part[-1:]
                mine = part[:-1] if before is None else torch.cat([before, part[:-1]])
                if len(mine):
                    left[sequence] = mine
        return left

    def _forward(self, layer: int, tokens: IntArray, hidden: torch.Tensor, positions: IntArray) -> torch.Tensor:
        ids, places = (torch.from_numpy(each).to(hidden.device) for each in (tokens, positions))
        return self.forward(layer, self.embed(ids), hidden, places)

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        self.read(sequences)
        growths = [Growth(sequence, sequence.hidden) for sequence in sequences if sequence.hidden is not None]
        with Ordered():
            return growths, self._logits(growths, [growth.hidden for growth in growths])

    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        levels = list(zip(growths, parents, tokens, strict=True))
        turns = [growth.add(above) % self.depth_layers for growth, above, _ in levels]
        with Ordered():
            for layer in sorted(set(turns)):
                self._extend_layer(layer, [level for level, turn in zip(levels, turns, strict=True) if turn == layer])
            return self._logits(growths, [growth.hidden[-len(above) :] for growth, above, _ in levels])

    def _extend_layer(self, layer: int, levels: Sequence[tuple[Growth, Sequence[int], Sequence[int]]]) -> None:
        growths, counts = [growth for growth, _, _ in levels], [len(tokens) for _, _, tokens in levels]
        hidden = torch.cat([growth.hidden[list(parents)] for growth, parents, _ in levels])
        places = [(growth.sequence.next or 0) + growth.depth + self.shift for growth in growths]
        with attending(Growing(growths, counts)):
            tokens = np.concatenate([tokens for _, _, tokens in levels])
            out = self._forward(layer, tokens, hidden, np.repeat(places, counts))
        for growth, part in zip(growths, torch.split(out, counts), strict=True):
            growth.hidden = torch.cat([growth.hidden, part])

    def _logits(self, growths: Sequence[Growth], hidden: Sequence[torch.Tensor]) -> torch.Tensor:
        with drafting([growth.sequence.shortlist for growth in growths], list(map(len, hidden))):
            return self.logits(torch.cat(list(hidden)))


class Reading:
    """A pass over new entries of sequences."""

    def __init__(self, sequences: Sequence[HeadSequence], counts: Sequence[int]) -> None:
        self._sequences, self._counts = sequences, counts

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Compute attention of each entry over its sequence up to there; ``[1, H, n, d]`` in and out."""
        parts = (torch.split(each, list(self._counts), 2) for each in (k, v))
        rows = [
            sequence.store(layer, *pair, sequence.lengths[layer])
            for sequence, *pair in zip(self._sequences, *parts, strict=True)
        ]
        blocks = [
            Block(np.zeros(count, np.int64), DraftTree.empty(), sequence.lengths[layer])
            for sequence, count in zip(self._sequences, self._counts, strict=True)
        ]
        return attend_in_order(q, rows, blocks, spec)


class Growing:
    """A pass over new nodes of trees."""

    def __init__(self, growths: Sequence[Growth], counts: Sequence[int]) -> None:
        self._growths, self._counts = growths, counts

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        parts = (torch.split(each, list(self._counts), 2) for each in (q, k, v))
        outs = [growth.attend(layer, *own, spec) for growth, *own in zip(self._growths, *parts, strict=True)]
        return torch.cat(outs, 2)
