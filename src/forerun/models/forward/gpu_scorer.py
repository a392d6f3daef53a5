"""A decoder on a GPU: all rows' attention in two kernels a layer, sums in a fixed order, small passes as CUDA graphs.

A known decoder runs as few kernels (``gpu_forward.py``). Else the model's own code runs, and its linear layers, means
and attention go to the kernels of ``kernels/gpu``. Caches keep their own memory, and a pass has a table of addresses.
Caches that choose among keys (low-rank) or lie elsewhere (offloaded) take the way of ``Scorer``, row by row.

A whole chunk of a prompt has a pass of its own, in which torch's libraries compute products and attention: many times
faster, with bits that depend on the chunk's length and place. These are the same whatever is drafted and whatever else
is decoded, as every prompt is cut at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows, contiguous_numbers
from forerun.kernels.gpu import attend
from forerun.kernels.gpu.linear import GPU_LINEAR_DTYPES
from forerun.kernels.gpu.pass_tables import TABLE_ALIGNMENT, PassDescription, PassTables, scan_programs
from forerun.kv.cache import Cache, LayerShape
from forerun.kv.full_cache import FullCache
from forerun.models.forward.architecture import known_on_gpu
from forerun.models.forward.cuda_graphs import GraphCache
from forerun.models.forward.gpu_forward import Attention, GpuForward, library_attention, library_product
from forerun.models.forward.scorer import PassResult, Scorer

PROMPT_CHUNK_TOKENS = 512
"""Tokens of a prompt's chunk that libraries read: enough that arithmetic, not memory, decides how long it takes."""


class LayerQueries(NamedTuple):
    """Each layer's queries ``[1, H, n, d]`` and attention parameters in a pass."""

    queries: dict[int, torch.Tensor]
    specs: dict[int, AttentionSpec]


class TableLayers(NamedTuple):
    """A model's layers as tables have them.

    Attributes:
        places: each layer's index in the tables.
        likes: each layer's keys and values of no token, ``[1, Hkv, 0, d]`` and ``[1, Hkv, 0, dv]``.
        group: the most query heads of a KV head.
        programs: over which a KV head's scan is spread.
        uniform: whether all keys and values have one shape.
    """

    places: dict[int, int]
    likes: dict[int, Rows]
    group: int
    programs: int
    uniform: bool


class TableRow(NamedTuple):
    """Where a row's keys and values are: addresses ``[layers, 2]``, strides in bytes ``[layers, 4]``, and the place of
    the block's first token."""

    addresses: IntArray
    strides: IntArray
    place: int


_Row = tuple[Block, Cache, TableRow]
_Kept = tuple[bool, tuple[int, ...]]
"""What a pass keeps: queries or not, and hidden states of these layers."""
_Results = tuple[PassResult, LayerQueries]


class GpuScorer(Scorer):
    """A scorer for a model on a GPU for which Triton is installed.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._read_model()

    def _read_model(self) -> None:
        known = known_on_gpu(self.model) and self.model.dtype in GPU_LINEAR_DTYPES
        self._decoder = GpuForward(self.model) if known else None
        self.prompt_chunk = PROMPT_CHUNK_TOKENS if known else None
        super()._read_model()  # now that the decoder has moved weights
        self._graphs: dict[_Kept, GraphCache[_Results]] = {}
        self.__dict__.pop("_layers", None)  # they depend on the weights' type

    @property
    def recordings(self) -> int:
        """The number of passes recorded so far."""
        return sum(graphs.recordings for graphs in self._graphs.values())

    @cached_property
    def _layers(self) -> TableLayers | None:
        """None if tables cannot describe the layers, or there are others, which keep a state of the text."""
        if self.recurrent:
            return None
        shapes = Scorer(self.model).kv.layers
        heads = getattr(self.model.config.get_text_config(), "num_attention_heads", 0)
        known = heads and all(not heads % shape.heads for shape in shapes.values())
        if not known or any(shape.width != self.model.dtype.itemsize for shape in shapes.values()):
            return None
        first = next(iter(shapes.values()))
        in_order = list(shapes) == list(range(len(shapes)))
        alike = len({replace(shape, window=None) for shape in shapes.values()}) == 1
        return TableLayers(
            {layer: place for place, layer in enumerate(shapes)},
            {layer: self._no_tokens(shape) for layer, shape in shapes.items()},
            max(heads // shape.heads for shape in shapes.values()),
            scan_programs(self.device, min(shape.heads for shape in shapes.values())),
            in_order and alike and first.dim == first.out_dim,
        )

    def _no_tokens(self, shape: LayerShape) -> Rows:
        keys = torch.empty(1, shape.heads, 0, shape.dim, dtype=self.model.dtype, device=self.device)
        return keys, keys.new_empty(1, shape.heads, 0, shape.out_dim)

    def _pass(self, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]) -> PassResult:
        tables = self._layers
        with self._lock:
            rows = None if tables is None else _rows(tables, blocks, caches)
            if tables is not None and rows is not None:
                return self._score(tables, list(zip(blocks, caches, rows, strict=True)), layers)
        return super()._pass(blocks, caches, layers)

    def _score(self, tables: TableLayers, rows: Sequence[_Row], layers: tuple[int, ...]) -> PassResult:
        """Whole chunks of prompts one by one, and all else together."""
        chunks = [self._reads_chunk(block, cache) for block, cache, _ in rows]
        if not any(chunks):
            return self._score_together(tables, rows, layers)
        others = [row for row, chunk in zip(rows, chunks, strict=True) if not chunk]
        together = iter(self._by_row(tables, others, layers))
        parts = [
            self._read_chunk(tables, row, layers) if chunk else next(together)
            for row, chunk in zip(rows, chunks, strict=True)
        ]
        states = [part.states for part in parts if part.states is not None]
        return PassResult(torch.cat([part.logits for part in parts]), torch.cat(states) if states else None)

    def _reads_chunk(self, block: Block, cache: Cache) -> bool:
        return block.whole_chunk and len(block) == self.prompt_chunk and isinstance(cache, FullCache)

    def _by_row(self, tables: TableLayers, rows: Sequence[_Row], layers: tuple[int, ...]) -> list[PassResult]:
        if not rows:
            return []
        logits, states = self._score_together(tables, rows, layers)
        each = torch.split(logits, [len(block.tree) + 1 for block, _, _ in rows])
        if states is None:
            return [PassResult(own, None) for own in each]
        return list(map(PassResult, each, torch.split(states, [len(block) for block, _, _ in rows])))

    def _read_chunk(self, tables: TableLayers, row: _Row, states_of: tuple[int, ...]) -> PassResult:
        """A whole chunk of a prompt, by torch's libraries."""
        block, cache, _ = row
        assert self._decoder is not None
        assert isinstance(cache, FullCache)
        batch = self._description(tables, [row])
        places = PassTables(batch.sizes, self.device, batch.aligned)
        places.fill(batch)
        memory = [cache.read(layer, 0, cache.length + len(block)) for layer in tables.places]
        layers = LayerQueries({}, {})
        attention = _recording(layers, self.keeps_queries(block, cache), library_attention(memory))
        result = self._decoder.run(places, attention, states_of, library_product)
        self._hand_over_queries(layers, [row])
        return result

    def _score_together(self, tables: TableLayers, rows: Sequence[_Row], states_of: tuple[int, ...]) -> PassResult:
        keeps = any(self.keeps_queries(block, cache) for block, cache, _ in rows)
        batch, kept = self._description(tables, rows), (keeps, states_of)
        if kept not in self._graphs:  # a recording keeps queries and states, or it does not
            self._graphs[kept] = GraphCache(partial(self._run, tables, kept), self._spare(tables), self.device)
        (logits, states), layers = self._graphs[kept].run(batch)
        self._hand_over_queries(layers, rows)
        states = None if states is None else states[: batch.sizes.tokens].clone()
        return PassResult(logits[: batch.sizes.wanted].clone(), states)

    def _description(self, tables: TableLayers, rows: Sequence[_Row]) -> PassDescription:
        placed = [Block(block.pending, block.tree, row.place) for block, _, row in rows]
        positions = np.concatenate([cache.positions(block) for block, cache, _ in rows])
        addresses, width = np.stack([row.addresses for *_, row in rows], 1), self.model.dtype.itemsize
        strides = np.stack([row.strides for *_, row in rows], 1) // width
        return PassDescription(placed, addresses, strides, positions, tables.group, tables.programs)

    def _run(self, tables: TableLayers, kept: _Kept, places: PassTables) -> _Results:
        """A pass, whose input is in the tables."""
        keeps_queries, states_of = kept
        if self._decoder is not None:
            layers = LayerQueries({}, {})
            return self._decoder.run(places, _recording(layers, keeps_queries, attend.attend), states_of), layers
        rows = TabledPass(places, tables, keeps_queries)
        return self._forward(places.ids, places.positions, rows, places.wanted, states_of), rows.layers

    def _spare(self, tables: TableLayers) -> torch.Tensor:
        """Memory for one token; see ``PassTables.fill``."""
        most = max(t.shape[3] for rows in tables.likes.values() for t in rows)
        keys, _ = next(iter(tables.likes.values()))
        return keys.new_zeros(2, -(-most // TABLE_ALIGNMENT) * TABLE_ALIGNMENT)

    def _hand_over_queries(self, layers: LayerQueries, rows: Sequence[_Row]) -> None:
        """Give full caches what sparse caches read from them."""
        first = 0
        for block, cache, _ in rows:
            last = first + len(block)
            if isinstance(cache, FullCache):
                cache.begin_pass(layers.specs)
                if layers.queries and self.keeps_queries(block, cache):
                    for layer, queries in layers.queries.items():
                        cache.record_queries(layer, queries[:, :, first:last], block)
            first = last


class TabledPass:
    """A pass as the attention function sees it (``Scorer``): over rows whose places are in tables.

    Args:
        places: the tables.
        tables: the layers that they have.
        keeps: whether to keep queries.
    """

    def __init__(self, places: PassTables, tables: TableLayers, keeps: bool) -> None:
        self.places, self.tables, self.keeps = places, tables, keeps
        self.layers = LayerQueries({}, {})

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        keys, values = self.tables.likes[layer]
        if (k.shape[1::2], v.shape[1::2]) != (keys.shape[1::2], values.shape[1::2]) or (
            q.shape[1] > k.shape[1] * self.tables.group
        ):
            raise RuntimeError(
                f"layer {layer} has other heads than in the pass before: {q.shape}, {k.shape}, {v.shape}"
            )
        if self.keeps:
            self.layers.queries[layer] = q
        self.layers.specs[layer] = spec
        place = self.tables.places[layer]
        attend.store(place, contiguous_numbers(k), contiguous_numbers(v), self.places)
        return attend.attend(place, contiguous_numbers(q), k.shape[1], self.places, spec, v.shape[3])


def _recording(layers: LayerQueries, keeps: bool, attention: Attention) -> Attention:
    """Attention that notes each layer's queries, if they are kept, and parameters."""

    def recorded(
        layer: int, q: torch.Tensor, kv_heads: int, places: PassTables, spec: AttentionSpec, **more: Any
    ) -> torch.Tensor:
        if keeps:
            layers.queries[layer] = q
        layers.specs[layer] = spec
        return attention(layer, q, kv_heads, places, spec, **more)

    return recorded


def _rows(tables: TableLayers, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[TableRow] | None:
    """Where all rows' keys and values are; None if a cache does not say, or its queries choose."""
    found = []
    for block, cache in zip(blocks, caches, strict=True):
        if not tables.uniform:
            if not isinstance(cache, FullCache) or cache.offloaded:
                return None  # others make room for layers of one shape
            rows = cache.reserve_layers(tables.likes, len(block))
            addresses = np.array([[t.data_ptr() for t in rows[layer]] for layer in tables.places], np.int64)
            strides = np.array([_strides(rows[layer]) for layer in tables.places], np.int64)
            found.append(TableRow(addresses, strides, cache.length))
            continue
        row = cache.addressed(list(tables.likes), next(iter(tables.likes.values()))[0], len(block))
        if row is None or row.topk is not None:
            return None
        found.append(TableRow(row.layers, np.tile(np.array(row.strides), (len(row.layers), 1)), row.place))
    return found


def _strides(rows: Rows) -> list[int]:
    """Bytes from head to head and from token to token, of keys and of values."""
    return [stride * t.element_size() for t in rows for stride in t.stride()[1:3]]
