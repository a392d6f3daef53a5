"""A decoder on a GPU: all rows' attention in two kernels a layer, sums in a fixed order, small passes as CUDA graphs.

The model's own code runs; its linear layers, means and attention go to the kernels of ``kernels/gpu``. Caches keep
their own memory, and a pass has a table of addresses. Caches that choose among keys (low-rank) or lie elsewhere
(offloaded) take the way of ``Scorer``, row by row.

Its logic has run on a CPU, in Triton's interpreter. It has not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.fair_lock import FairLock
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.gpu.pass_tables import PassDescription, PassTables, SpareRow
from forerun.kv.cache import Addresses, Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward.architecture import WeightWatch
from forerun.models.forward.cuda_graphs import GraphCache
from forerun.models.forward.scorer import PassResult, Scorer


class LayerQueries(NamedTuple):
    """Each layer's queries ``[1, H, n, d]`` and attention parameters in a pass."""

    queries: dict[int, torch.Tensor]
    specs: dict[int, AttentionSpec]


class _UniformLayers(NamedTuple):
    """What all layers have in common: their number, keys of no token ``[1, Hkv, 0, d]``, query heads of a KV head."""

    layers: int
    like: torch.Tensor
    group: int


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
        self._watch = WeightWatch(self.model)
        self._inputs = self.model.get_input_embeddings()
        self._graphs: GraphCache[tuple[torch.Tensor, torch.Tensor | None, LayerQueries]] | None = None
        self._kept: tuple[bool, tuple[int, ...]] = (False, ())
        """What recordings keep: queries or not, and hidden states of these layers."""

    @cached_property
    def _alike(self) -> _UniformLayers | None:
        """None if layers differ."""
        shapes = Scorer(self.model).kv.layers
        config, first = self.model.config.get_text_config(), next(iter(shapes.values()))
        alike = list(shapes) == list(range(len(shapes))) and all(shape == first for shape in shapes.values())
        heads = getattr(config, "num_attention_heads", 0)
        if not alike or first.dim != first.out_dim or not heads or heads % first.heads:
            return None
        like = torch.empty(1, first.heads, 0, first.dim, dtype=self.model.dtype, device=self.device)
        return None if like.element_size() != first.width else _UniformLayers(len(shapes), like, heads // first.heads)

    def _pass(self, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]) -> PassResult:
        alike = self._alike
        with self._lock:
            if not self._watch.same():
                self._begin()
            rows = None if alike is None else _addressed(alike, blocks, caches)
            if alike is not None and rows is not None:
                return self._score(alike, blocks, caches, rows, layers)
        return super()._pass(blocks, caches, layers)

    def _score(
        self,
        alike: _UniformLayers,
        blocks: Sequence[Block],
        caches: Sequence[Cache],
        rows: Sequence[Addresses],
        states_of: tuple[int, ...],
    ) -> PassResult:
        placed = [Block(block.pending, block.tree, row.place) for block, row in zip(blocks, rows, strict=True)]
        positions = np.concatenate([cache.positions(block) for cache, block in zip(caches, blocks, strict=True)])
        addresses = np.stack([row.layers for row in rows], 1)
        strides = np.array([row.strides for row in rows]) // alike.like.element_size()
        batch = PassDescription(placed, addresses, strides, positions, alike.group)
        if self._graphs is None or self._kept != (self.keeps_queries, states_of):
            self._kept = self.keeps_queries, states_of
            self._graphs = GraphCache(self._run, self._spare(alike), self.device)
        logits, states, layers = self._graphs.run(batch)
        self._hand_over_queries(layers, blocks, caches)
        kept = None if states is None else states[: batch.sizes.tokens].clone()
        return PassResult(logits[: batch.sizes.wanted].clone(), kept)

    def _run(self, places: PassTables) -> tuple[torch.Tensor, torch.Tensor | None, LayerQueries]:
        """A pass, whose input is in the tables."""
        keeps_queries, states_of = self._kept
        rows = TabledPass(places, keeps_queries)
        result = self._forward(places.ids, places.positions, rows, places.wanted, states_of)
        return *result, rows.layers

    def _spare(self, alike: _UniformLayers) -> SpareRow:
        self._spare_memory = alike.like.new_zeros(2, alike.like.shape[1], 1, alike.like.shape[3])
        keys, values = self._spare_memory
        return SpareRow((keys.data_ptr(), values.data_ptr()), (*keys.stride()[:2], *values.stride()[:2]))

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


class TabledPass:
    """A pass as the attention function sees it (``Scorer``): over rows whose places are in tables.

    Args:
        places: the tables.
        keeps: whether to keep queries.
    """

    def __init__(self, places: PassTables, keeps: bool) -> None:
        self.places, self.keeps = places, keeps
        self.layers = LayerQueries({}, {})

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        from forerun.kernels.gpu import attend as there  # which needs Triton

        if self.keeps:
            self.layers.queries[layer] = q
        self.layers.specs[layer] = spec
        there.store(layer, k, v, self.places)
        how = (spec.scaling, spec.window, spec.softcap, spec.sinks)
        return there.attend(layer, q, k.shape[1], v.shape[3], self.places, how)


def _addressed(alike: _UniformLayers, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[Addresses] | None:
    """Where all rows' keys and values are; None if a cache does not say, or its queries choose."""
    found = []
    for block, cache in zip(blocks, caches, strict=True):
        row = cache.addressed(alike.layers, alike.like, len(block))
        if row is None or row.topk is not None:
            return None
        found.append(row)
    return found
