"""The interface of trained heads, and what they share.

A head follows a sequence by the target's hidden states at its tokens. It returns logits of the next token and of the
tokens after drafted ones, level by level of a tree. It changes the speed, never the output.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch.nn import functional

from forerun.core.block import Block
from forerun.core.tree import DraftTree, IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows, attend, attend_in_order, merge
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.cache import Cache, append
from forerun.models.forward.scorer import Scorer, attending, is_sharded
from forerun.models.heads.shortlist import OutputMatrix, Shortlist, drafting

READ_ENTRIES = 64
"""Minimum number of entries processed at once. Fewer wait until a draft is needed, which may be never."""
ROTARY_FIELDS = (
    "hidden_size", "num_attention_heads", "max_position_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
)  # fmt: skip
"""Configuration entries that determine rotary positions."""
CONTEXT_ENTRIES = 16
"""Entries after which a head that saw nothing before can be judged: to read more costs more. Tokens per step of an
EAGLE-3 head that attends to its last entries alone (bundled target; greedy, temperature 0.8): 4 entries 1.95, 1.74; 16
2.24, 1.90; 32 2.29, 1.93; 64 2.34, 1.96; all 2.44, 2.00."""
GROWTH_TOKENS = 256
"""Minimum tokens by which a sequence's memory grows."""


class HeadSequence:
    """A head's state of a sequence, with memory for ``layers`` layers.

    Attributes:
        cache: the target's. It may hold tokens whose states the head has not seen.
        first: index of the first token whose states the head has seen.
        next: index of the next token whose states the head has not seen; None before it has seen any.
        pending: unprocessed states, with the tokens that follow each.
        rows: keys and values of each of the head's layers; ``lengths``: how many are committed.
        last: the token at ``next``.
        shortlist: the tokens that can be drafted; None for all of the head's.
        listed: number of tokens, from the first on, that were added to the shortlist.
    """

    def __init__(self, layers: int, cache: Cache) -> None:
        self.cache, self._layers = cache, layers
        self.shortlist: Shortlist | None = None
        self.listed = 0
        self.restart()

    def restart(self) -> None:
        """Forget all states, and what was computed from them."""
        layers = self._layers
        self.first = 0
        self.next: int | None = None
        self.last = -1
        self.pending: list[tuple[torch.Tensor, IntArray]] = []
        self.rows: list[Rows | None] = [None] * layers
        self.lengths = [0] * layers
        self.carried: list[torch.Tensor | None] = [None] * layers
        """Input of each layer but the first at its next entry, ``[1, hidden]``."""
        self.hidden: torch.Tensor | None = None
        """Output of the first layer at the last entry, ``[1, hidden]``."""

    @property
    def unread(self) -> int:
        return sum(len(tokens) for _, tokens in self.pending)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, place: int) -> Rows:
        """Write keys and values ``[1, Hkv, n, d]`` from ``place`` on. Returns all up to their end."""
        end = place + k.shape[2]
        self.rows[layer] = rows = append(self.rows[layer], (k, v), place, _grown(end))
        return tuple(each[:, :, :end] for each in rows)


def _grown(tokens: int) -> int:
    """Return the capacity of a sequence's memory when it grows to hold ``tokens`` tokens."""
    return tokens + max(GROWTH_TOKENS, tokens // 4)


class Growth:
    """A tree that grows after a sequence, as the head sees it.

    ``hidden`` is the head's output at each node, ``[n, hidden]``, with the sequence's end in row 0; or logits of each
    level, ``[levels, V]``, of a head that computes all levels at once.
    """

    def __init__(self, sequence: HeadSequence, hidden: torch.Tensor) -> None:
        self.sequence, self.hidden = sequence, hidden
        self._depths, self._ancestors = [0], [{0}]
        self._tails: list[list[int]] = [[] for _ in sequence.rows]  # by layer, nodes with stored keys

    def __len__(self) -> int:
        """Return the number of nodes, including the sequence's end."""
        return len(self._depths)

    def add(self, parents: Sequence[int]) -> int:
        """Add nodes of one level. Returns their depth."""
        for parent in parents:
            self._depths.append(self._depths[parent] + 1)
            self._ancestors.append(self._ancestors[parent] | {len(self._ancestors)})
        return self._depths[-1]

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
        levels: maximum depth of its trees.
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
        """Prepare to draft for a target. Raises ``ValueError`` if the head does not fit it."""
        if is_sharded(target.model):
            raise ValueError(
                "the target is sharded over several processes; a trained head needs its embeddings and output matrix "
                "in one process"
            )

    @abstractmethod
    def open(self, cache: Cache) -> HeadSequence:
        """Start a sequence, with the target's cache of it."""

    def needs(self, tokens: int) -> int:
        """Return the maximum bytes of a sequence of ``tokens`` tokens."""
        shortlist = 0 if self.output is None else self.output.needs()
        return self.token_bytes * _grown(tokens) + shortlist

    def record(self, sequence: HeadSequence, tokens: IntArray, start: int, states: torch.Tensor) -> None:
        """Take hidden states ``[n, layers * hidden]`` of a sequence's tokens from ``start`` on. If they do not continue
        the earlier ones, the head restarts there."""
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
        """Start a tree after each sequence. Also returns logits of the next tokens, ``[n, D]``; with shortlists, D is
        the longest's length, and a shorter one's rows end in padding."""

    @abstractmethod
    def extend(
        self, growths: Sequence[Growth], parents: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]
    ) -> torch.Tensor:
        """Add nodes of one level to each tree.

        Args:
            parents: of each tree's new nodes; 0 is the sequence's end, and nodes are numbered from 1 as they are added.

        Returns:
            Logits after each new node of all trees, ``[n, D]``.
        """


class RecurrentHead(Head):
    """A head that predicts the next hidden state from a token and a hidden state: EAGLE-3 and MTP.

    The first states are the target's, later ones the head's. Its ``depth_layers`` layers take turns: each reads the
    previous one's output and the next token. ``shift`` is an entry's position minus its token's index.
    """

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
        """Run a layer over its part of each sequence, ``[n, hidden]`` for the last n tokens. Returns the next layer's
        part: without the last entry, which needs the token after and waits."""
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
        given = [growth.hidden[list(above)] for growth, above in zip(growths, parents, strict=True)]
        depths = [growth.add(above) for growth, above in zip(growths, parents, strict=True)]
        turns = [depth % self.depth_layers for depth in depths]
        with Ordered():
            for layer in sorted(set(turns)):
                chosen = [number for number, turn in enumerate(turns) if turn == layer]
                counts = [len(parents[number]) for number in chosen]
                positions = [
                    np.full(len(parents[number]), (growths[number].sequence.next or 0) + depths[number] + self.shift)
                    for number in chosen
                ]
                ids = np.concatenate([np.array(tokens[number], np.int64) for number in chosen])
                with attending(_Growing([growths[number] for number in chosen], counts)):
                    hidden = torch.cat([given[number] for number in chosen])
                    out = self._forward(layer, ids, hidden, np.concatenate(positions))
                for number, part in zip(chosen, torch.split(out, counts), strict=True):
                    given[number] = part
                    growths[number].hidden = torch.cat([growths[number].hidden, part])
            return self._logits(growths, given)

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


class _Growing:
    """A pass over new nodes of trees."""

    def __init__(self, growths: Sequence[Growth], counts: Sequence[int]) -> None:
        self._growths, self._counts = growths, counts

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Compute attention of each node over its sequence and its ancestors; ``[1, H, n, d]`` in and out."""
        parts = (torch.split(each, list(self._counts), 2) for each in (q, k, v))
        outs = [growth.attend(layer, *own, spec) for growth, *own in zip(self._growths, *parts, strict=True)]
        return torch.cat(outs, 2)


class HeadFile:
    """A head's weights by name, from a folder's safetensors files; ``kind`` names the head in messages. Raises
    ``ValueError`` if there is no such file, or it cannot be read."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind, self._tensors = folder, kind, dict[str, torch.Tensor]()
        for file in sorted(folder.glob("*.safetensors")):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118  # it is no dictionary
                        plain = name.removeprefix("model.").replace("midlayer.", "layers.0.")
                        self._tensors[plain] = opened.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{file} cannot be read: {error}") from error
        if not self._tensors:
            raise ValueError(f"{folder} has no weights: there is no .safetensors file in it")

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return a tensor. Raises ``ValueError`` if it is missing or has another shape."""
        if name not in self._tensors:
            raise ValueError(f"the {self._kind} head in {self._folder} lacks the tensor {name}")
        tensor = self._tensors[name]
        if tensor.shape != shape:
            raise ValueError(
                f"the {self._kind} head in {self._folder} has {name} of shape {list(tensor.shape)}; "
                f"its configuration says {list(shape)}"
            )
        return tensor

    def find(self, name: str, *shape: int) -> torch.Tensor | None:
        """Return a tensor, or None if it is missing."""
        return self.take(name, *shape) if name in self._tensors else None


def config_of(folder: Path) -> dict[str, Any]:
    """Read a folder's ``config.json``. Raises ``ValueError`` if that fails."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} holds no head: its config.json cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{folder} holds no head: its config.json is not an object")
    return config


def count_in(config: Mapping[str, Any], name: str, folder: Path) -> int:
    """Return a positive integer of a configuration. Raises ``ValueError`` if it is missing or something else."""
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r} in {folder / 'config.json'}; it must be an integer of at least 1")
    return value


def check_layers(layers: Sequence[Any], count: int, name: str, folder: Path) -> tuple[int, ...]:
    """Return the target's layers that a head reads, as ``Scorer.score_rows`` takes them. Raises ``ValueError``
    for one that a target of ``count`` layers lacks."""
    if not layers or not all(isinstance(layer, int) and 0 <= layer <= count for layer in layers):
        raise ValueError(f"{name} is {list(layers)!r} in {folder / 'config.json'}, and the target has {count} layers")
    return tuple(layers)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Apply a root mean square norm, computed in at least float32."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary positions to ``[1, H, n, d]``, by angles ``[1, n, d]``."""
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def input_embeddings(target: Scorer, tokens: torch.Tensor) -> torch.Tensor:
    """Embed tokens with the target's matrix, without the factor that its module may apply."""
    module: Any = target.model.get_input_embeddings()
    weight = module.weight
    embedded: torch.Tensor = functional.embedding(tokens, weight) if weight.is_floating_point() else module(tokens)
    return embedded
