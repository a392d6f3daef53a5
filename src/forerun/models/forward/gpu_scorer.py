"""A decoder on a GPU: all rows' attention in two kernels a layer, sums in a fixed order, small passes as CUDA graphs.

A known decoder runs as few kernels (``gpu_forward.py``). Else the model's own code runs, and its linear layers, means
and attention go to the kernels of ``kernels/gpu``. Caches keep their own memory, and a pass has a table of addresses.
Caches that choose among keys (low-rank) or lie elsewhere (offloaded) take the way of ``Scorer``, row by row.

A whole chunk of a prompt has a pass of its own, in which torch's libraries compute products and attention: many times
faster, with bits that depend on the chunk's length and place. These are the same whatever is drafted and whatever else
is decoded, as every prompt is cut at the same places.

Its logic has run on a CPU, in Triton's interpreter. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.fair_lock import FairLock
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.gpu.linear import GPU_LINEAR_DTYPES
from forerun.kernels.gpu.pass_tables import PassDescription, PassTables, SpareRow
from forerun.kv.cache import Cache, LayerShape
from forerun.kv.full_cache import FullCache
from forerun.models.forward.architecture import WeightWatch, known_on_gpu
from forerun.models.forward.cuda_graphs import GraphCache
from forerun.models.forward.gpu_forward import (
    Attention,
    GpuForward,
    library_attention,
    library_product,
    ordered_attention,
)
from forerun.models.forward.scorer import Scorer

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
        likes: each layer's keys and values of no token, ``[1, Hkv, 0, d]``.
        group: the most query heads of a KV head.
        uniform: whether all keys and values have one shape.
    """

    places: dict[int, int]
    likes: dict[int, tuple[torch.Tensor, torch.Tensor]]
    group: int
    uniform: bool


class TableRow(NamedTuple):
    """Where a row's keys and values are: addresses ``[layers, 2]``, strides in bytes ``[layers, 4]``, and the place of
    the block's first token."""

    addresses: IntArray
    strides: IntArray
    place: int


class GpuScorer(Scorer):
    """A scorer for a model on a GPU for which Triton is installed.

    Args:
        model: the model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._lock = FairLock()
        self._begin()

    def _begin(self) -> None:
        known = known_on_gpu(self.model) and self.model.dtype in GPU_LINEAR_DTYPES
        self._forward = GpuForward(self.model) if known else None
        self.prompt_chunk = PROMPT_CHUNK_TOKENS if known else None
        self._watch = WeightWatch(self.model)
        self._inputs = self.model.get_input_embeddings()
        self._graphs: GraphCache[tuple[torch.Tensor, LayerQueries]] | None = None
        self._asking = False

    @cached_property
    def _tabled(self) -> TableLayers | None:
        """None if tables cannot describe the layers."""
        shapes = Scorer(self.model).kv.layers
        heads = getattr(self.model.config.get_text_config(), "num_attention_heads", 0)
        known = heads and all(not heads % shape.heads for shape in shapes.values())
        if not known or any(shape.width != self.model.dtype.itemsize for shape in shapes.values()):
            return None
        uniform = list(shapes) == list(range(len(shapes))) and len(set(shapes.values())) == 1
        first = next(iter(shapes.values()))
        return TableLayers(
            {layer: place for place, layer in enumerate(shapes)},
            {layer: self._nothing(shape) for layer, shape in shapes.items()},
            max(heads // shape.heads for shape in shapes.values()),
            uniform and first.dim == first.out_dim,
        )

    def _nothing(self, shape: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        make = torch.empty(1, shape.heads, 0, shape.dim, dtype=self.model.dtype, device=self.device)
        return make, make.new_empty(1, shape.heads, 0, shape.out_dim)

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        tabled = self._tabled
        with self._lock:
            if not self._watch.same():
                self._begin()
            rows = None if tabled is None else _rows(tabled, blocks, caches)
            if tabled is not None and rows is not None:
                return self._score(tabled, blocks, caches, rows)
        return super().score(blocks, caches)

    def _score(
        self, tabled: TableLayers, blocks: Sequence[Block], caches: Sequence[Cache], rows: Sequence[TableRow]
    ) -> list[torch.Tensor]:
        """Whole chunks of prompts one by one, and all else together."""
        logits: dict[int, torch.Tensor] = {}
        whole = [n for n, block in enumerate(blocks) if block.whole_chunk and self._forward is not None]
        for n in whole:
            logits[n] = self._read(tabled, blocks[n], caches[n], rows[n])
        others = [n for n in range(len(blocks)) if n not in whole]
        if others:
            some = [blocks[n] for n in others], [caches[n] for n in others], [rows[n] for n in others]
            logits |= zip(others, self._score_together(tabled, *some), strict=True)
        return [logits[n] for n in range(len(blocks))]

    def _read(self, tabled: TableLayers, block: Block, cache: Cache, row: TableRow) -> torch.Tensor:
        """A whole chunk of a prompt."""
        if not isinstance(cache, FullCache) or self._forward is None:
            return self._score_together(tabled, [block], [cache], [row])[0]
        batch = self._description(tabled, [block], [cache], [row])
        places = PassTables(batch.sizes, self.device, batch.aligned)
        places.fill(batch)
        keys_and_values = [cache.read(layer, 0, cache.length + len(block)) for layer in tabled.places]
        layers = LayerQueries({}, {})
        attention = _recording(layers, self.keeps_queries, library_attention(keys_and_values))
        logits = self._forward.run(places, attention, library_product)
        self._hand_over_queries(layers, [block], [cache])
        return logits

    def _score_together(
        self, tabled: TableLayers, blocks: Sequence[Block], caches: Sequence[Cache], rows: Sequence[TableRow]
    ) -> list[torch.Tensor]:
        batch = self._description(tabled, blocks, caches, rows)
        if self._graphs is None or self._asking != self.keeps_queries:  # a recording keeps queries, or it does not
            self._asking = self.keeps_queries
            self._graphs = GraphCache(self._run, self._spare(tabled), self.device)
        logits, layers = self._graphs.run(batch)
        self._hand_over_queries(layers, blocks, caches)
        return list(torch.split(logits[: batch.sizes.wanted].clone(), [len(block.tree) + 1 for block in blocks]))

    def _description(
        self, tabled: TableLayers, blocks: Sequence[Block], caches: Sequence[Cache], rows: Sequence[TableRow]
    ) -> PassDescription:
        placed = [Block(block.pending, block.tree, row.place) for block, row in zip(blocks, rows, strict=True)]
        positions = np.concatenate([cache.positions(block) for cache, block in zip(caches, blocks, strict=True)])
        addresses, width = np.stack([row.addresses for row in rows], 1), self.model.dtype.itemsize
        strides = np.stack([row.strides for row in rows], 1) // width
        return PassDescription(placed, addresses, strides, positions, tabled.group, width)

    def _run(self, places: PassTables) -> tuple[torch.Tensor, LayerQueries]:
        """A pass, whose input is in the tables."""
        if self._forward is not None:
            layers = LayerQueries({}, {})
            return self._forward.run(places, _recording(layers, self.keeps_queries, ordered_attention)), layers
        assert self._tabled is not None
        rows = TabledPass(places, self._tabled.places, self.keeps_queries)
        return Scorer._forward_model(self, places.ids, places.positions, rows, places.wanted), rows.layers

    def _spare(self, tabled: TableLayers) -> SpareRow:
        likes = tabled.likes.values()
        self._spare_memory = [max((both[i] for both in likes), key=_head_numbers).new_zeros(_most(likes, i)) for i in (0, 1)]
        keys, values = self._spare_memory
        return SpareRow((keys.data_ptr(), values.data_ptr()), (0, 0, 0, 0))

    def _hand_over_queries(self, layers: LayerQueries, blocks: Sequence[Block], caches: Sequence[Cache]) -> None:
        """Give full caches what sparse caches read from them."""
        first = 0
        for block, cache in zip(blocks, caches, strict=True):
            last = first + len(block)
            if isinstance(cache, FullCache):
                cache.specs, cache.queries = dict(layers.specs), {}
            if isinstance(cache, FullCache) and self.keeps_queries and cache.wants_queries(block):
                for layer, queries in layers.queries.items():
                    cache.record_queries(layer, queries[:, :, first:last].clone())
            first = last
