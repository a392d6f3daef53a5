"""A decoder on a GPU: attention of all rows in two kernels per layer, fixed order of sums, CUDA graphs of small passes.

A supported decoder runs as few kernels (``gpu_forward.py``); otherwise the model's code runs with the linear layers,
means and attention of ``kernels/gpu``. Caches stay in place; a pass has a table of addresses. Offloaded layers are
fetched into fixed buffers, and written back afterwards. Caches that select keys (low-rank) run row by row.

A complete prompt chunk has a separate pass, with torch's products and attention: many times faster, with bits that
depend on the chunk's length and place. All prompts are cut at the same places, so nothing else changes these bits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.fairness import FairLock
from forerun.core.transfers import adjoined, present
from forerun.core.tree import DraftTree, IntArray
from forerun.core.work_clock import work_seconds
from forerun.kernels.attention.attention import AttentionSpec, Rows, contiguous_numbers
from forerun.kernels.gpu import attend, token_choice
from forerun.kernels.gpu.linear import GPU_LINEAR_DTYPES
from forerun.kernels.gpu.pass_tables import (
    TABLE_ALIGNMENT,
    PassDescription,
    PassTables,
    are_aligned,
    scan_programs,
)
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward import cuda_graphs
from forerun.models.forward.architecture import known_on_gpu
from forerun.models.forward.cuda_graphs import RECORDED_TOKENS, GraphCache
from forerun.models.forward.gpu_forward import Attention, GpuForward, library_attention, library_product
from forerun.models.forward.scorer import PassResult, Scorer
from forerun.models.forward.weight_watch import Change, WeightWatch

PROMPT_CHUNK_TOKENS = 512
"""Tokens of a chunk for torch's libraries: enough for arithmetic, not memory, to dominate."""
PROGRAM_ATTRIBUTE = "_forerun_gpu"


class LayerQueries(NamedTuple):
    """Queries in a pass, ``[layers, H, n, d]`` of the layers that have one shape; each layer's attention parameters."""

    queries: dict[tuple[int, ...], torch.Tensor]
    specs: dict[int, AttentionSpec]

    def joined(self) -> LayerQueries:
        """Join queries of one shape, so that few operations copy them."""
        layers = defaultdict[torch.Size, list[int]](list)
        for (layer,), q in self.queries.items():
            layers[q.shape].append(layer)
        queries = {tuple(own): torch.cat([self.queries[layer,] for layer in own]) for own in layers.values()}
        return self._replace(queries=queries)


class TableLayers(NamedTuple):
    """A model's layers as tables describe them.

    ``likes``: each layer's empty keys and values, ``[1, Hkv, 0, d]`` and ``[1, Hkv, 0, dv]``. ``group``: maximum query
    heads per KV head. ``uniform``: whether all keys and values have one shape.
    """

    places: dict[int, int]
    likes: dict[int, Rows]
    group: int
    programs: int
    uniform: bool

    def attend(self, layer: int, *given: Any, **more: Any) -> torch.Tensor:
        """See ``attend.attend``; ``layer`` is the model's."""
        return attend.attend(self.places[layer], *given, **more)


class TableRow(NamedTuple):
    """Where a row's keys and values are: addresses ``[layers, 2]``, strides in bytes, and where the block starts."""

    addresses: IntArray
    strides: IntArray | tuple[int, ...]
    place: int


class TableMemory(NamedTuple):
    """Where a pass's rows are: addresses as their caches returned them, and as tables have them."""

    given: list[IntArray]
    addresses: IntArray
    strides: IntArray
    aligned: bool

    @classmethod
    def of(cls, rows: Sequence[TableRow], width: int) -> TableMemory:
        given = [row.addresses for row in rows]
        addresses = np.stack(given, 1)
        strides = np.stack([np.broadcast_to(np.array(row.strides), (len(addresses), 4)) for row in rows], 1) // width
        return cls(given, addresses, strides, are_aligned(addresses, strides))

    def holds(self, rows: Sequence[TableRow]) -> bool:
        """Return whether these rows have not moved: a cache returns one array until its memory moves."""
        return len(rows) == len(self.given) and all(
            row.addresses is known for row, known in zip(rows, self.given, strict=True)
        )


_Row = tuple[Block, Cache, TableRow]
_Kept = tuple[bool, tuple[int, ...]]
"""Whether a pass keeps queries, and of which layers hidden states."""
_Results = tuple[PassResult, LayerQueries]


class GpuProgram:
    """A model's passes on a GPU, with their recordings, shared by all its scorers; for the model as it is when made."""

    def __init__(self, model: PreTrainedModel) -> None:
        known = known_on_gpu(model) and model.dtype in GPU_LINEAR_DTYPES
        self.decoder = GpuForward(model) if known else None
        self.lock = FairLock()
        """Held during a pass, as recordings share tables and results."""
        self.watch = WeightWatch(model)  # after the decoder moved weights
        self._plain, self._recorder = Scorer(model), cuda_graphs.Recorder()
        self.graphs: dict[_Kept, GraphCache[_Results]] = {}

    @classmethod
    def of(cls, model: PreTrainedModel) -> GpuProgram:
        """Return the model's program, a new one if the model has changed."""
        found = model.__dict__.get(PROGRAM_ATTRIBUTE)
        if not isinstance(found, cls) or found.watch.look() is Change.MODEL:
            found = model.__dict__[PROGRAM_ATTRIBUTE] = cls(model)
        return found

    def __reduce__(self) -> tuple[type[object], tuple[()]]:
        """Drop the program from copies of the model."""
        return object, ()

    @cached_property
    def layers(self) -> TableLayers | None:
        """None if tables cannot describe the layers, or some are recurrent."""
        if self._plain.recurrent:
            return None
        model = self._plain.model
        shapes = self._plain.kv.layers
        heads = getattr(model.config.get_text_config(), "num_attention_heads", 0)
        known = heads and all(not heads % shape.heads for shape in shapes.values())
        if not known or any(shape.width != model.dtype.itemsize for shape in shapes.values()):
            return None
        likes: dict[int, Rows] = {}
        for layer, shape in shapes.items():
            keys = torch.empty(1, shape.heads, 0, shape.dim, dtype=model.dtype, device=self._plain.device)
            likes[layer] = keys, keys.new_empty(1, shape.heads, 0, shape.out_dim)
        first = next(iter(shapes.values()))
        in_order = list(shapes) == list(range(len(shapes)))
        alike = len({replace(shape, window=None) for shape in shapes.values()}) == 1
        return TableLayers(
            {layer: place for place, layer in enumerate(shapes)},
            likes,
            max(heads // shape.heads for shape in shapes.values()),
            scan_programs(self._plain.device, min(shape.heads for shape in shapes.values())),
            in_order and alike and first.dim == first.out_dim,
        )

    def run(
        self, tables: TableLayers, batch: PassDescription, kept: _Kept, ids: torch.Tensor | None, away: Transfers
    ) -> _Results:
        """Run a pass, whose result is valid until the next. ``ids``: token ids ``[n]`` on the device, if not in
        ``batch``. A pass over offloaded layers (``away``) is not recorded, since copies end at variable times."""
        if away.rows:
            return self._run(tables, kept, away, PassTables.of(batch, self._plain.device, ids))
        if kept not in self.graphs:  # a recording keeps queries and states, or it does not
            most = max(t.shape[3] for rows in tables.likes.values() for t in rows)
            keys, _ = next(iter(tables.likes.values()))
            spare = keys.new_zeros(2, -(-most // TABLE_ALIGNMENT) * TABLE_ALIGNMENT)  # see ``PassTables.fill``
            run = partial(self._run, tables, kept, away)
            self.graphs[kept] = GraphCache(run, spare, keys.device, self._recorder)
        return self.graphs[kept].run(batch, ids)

    def _run(self, tables: TableLayers, kept: _Kept, away: Transfers, places: PassTables) -> _Results:
        keeps_queries, states_of = kept
        layers = LayerQueries({}, {})
        attention = _recording(layers, keeps_queries, away, tables.attend)
        if self.decoder is not None:
            result = self.decoder.run(places, attention, away.fetch, states_of)
        else:
            rows = TabledPass(places, tables, attention, away.fetch)
            result = self._plain._forward(places.ids, places.positions, rows, places.wanted, states_of)
        return _chosen(result, places), layers.joined()


class Transfers(NamedTuple):
    """Copies before and after each layer of a pass, for ``rows``: offloaded caches with their blocks' lengths."""

    rows: Sequence[tuple[FullCache, int]]

    @classmethod
    def of(cls, rows: Sequence[_Row]) -> Transfers:
        return cls(
            [(full, len(block)) for block, cache, _ in rows if (full := cache.full) is not None and full.offloaded]
        )

    def fetch(self, layer: int) -> None:
        for cache, count in self.rows:
            cache.fetch_layer(layer, count)

    def write_back(self, layer: int) -> None:
        for cache, count in self.rows:
            cache.write_back(layer, count)


class GpuScorer(Scorer):
    """A scorer for a model on a GPU, with Triton installed."""

    clock = staticmethod(work_seconds)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._read_model()

    def _read_model(self) -> None:
        self._memory: TableMemory | None = None
        self._program = GpuProgram.of(self.model)
        self.by_tables = self._program.layers is not None
        self.prompt_chunk = None if self._program.decoder is None else PROMPT_CHUNK_TOKENS
        super()._read_model()

    def renew(self) -> None:
        self.model.__dict__.pop(PROGRAM_ATTRIBUTE, None)
        super().renew()

    @property
    def recordings(self) -> int:
        """Number of recorded passes, over all scorers of the model."""
        return sum(len(graphs.keys) for graphs in self._program.graphs.values())

    @torch.inference_mode()
    def warm_up(self, states_of: tuple[int, ...] = ()) -> None:
        """Record passes of one row of every size; others, and long sequences, are recorded at first use."""
        tokens, cache = 1, FullCache(RECORDED_TOKENS)
        while self._program.layers is not None and tokens <= RECORDED_TOKENS:
            chain = DraftTree.chain(np.zeros(tokens - 1, np.int64))
            self.score_rows([Block(np.zeros(1, np.int64), chain, 0)], [cache], states_of)
            tokens *= 2

    def _pass(self, blocks: Sequence[Block], caches: Sequence[Cache], layers: tuple[int, ...]) -> PassResult:
        tables = self._program.layers
        with present(self.device), self._lock, self._program.lock:
            rows = None if tables is None else _rows(tables, blocks, caches)
            if tables is not None and rows is not None:
                return self._score(tables, list(zip(blocks, caches, rows, strict=True)), layers)
        return super()._pass(blocks, caches, layers)

    def _score(self, tables: TableLayers, rows: Sequence[_Row], layers: tuple[int, ...]) -> PassResult:
        chunks = [self._reads_chunk(block, cache) for block, cache, _ in rows]
        if not any(chunks):
            return self._score_together(tables, rows, layers)
        others = [row for row, chunk in zip(rows, chunks, strict=True) if not chunk]
        found = self._score_together(tables, others, layers).by_row([row[0] for row in others]) if others else []
        together = iter(found)
        parts = [
            self._read_chunk(tables, row, layers) if chunk else next(together)
            for row, chunk in zip(rows, chunks, strict=True)
        ]
        logits, states, best = ([t for part in parts if (t := part[place]) is not None] for place in range(3))
        return PassResult(torch.cat(logits), torch.cat(states) if states else None, torch.cat(best))

    def _reads_chunk(self, block: Block, cache: Cache) -> bool:
        return block.whole_chunk and len(block) == self.prompt_chunk and cache.full is not None

    def _read_chunk(self, tables: TableLayers, row: _Row, states_of: tuple[int, ...]) -> PassResult:
        block, cache, _ = row
        decoder = self._program.decoder
        full = cache.full
        assert decoder is not None and full is not None
        end, here = full.length + len(block), full.reserve_layers(tables.likes, len(block))
        memory = [tuple(t[:, :, :end] for t in here[layer]) for layer in tables.places]
        layers, away = LayerQueries({}, {}), Transfers.of([row])
        attention = _recording(layers, self.keeps_queries(block, cache), away, library_attention(memory))
        places = PassTables.of(self._description(tables, [row]), self.device)
        result = decoder.run(places, attention, away.fetch, states_of, library_product)
        self._hand_over_queries(layers, [row])
        return _chosen(result, places)

    def _score_together(self, tables: TableLayers, rows: Sequence[_Row], states_of: tuple[int, ...]) -> PassResult:
        kept = any(self.keeps_queries(block, cache) for block, cache, _ in rows), states_of
        batch, ids = self._description(tables, rows), _ids([block for block, _, _ in rows])
        (logits, states, best), layers = self._program.run(tables, batch, kept, ids, Transfers.of(rows))
        self._hand_over_queries(layers, rows)
        wanted = batch.sizes.wanted
        states = None if states is None else states[: batch.sizes.tokens].clone()
        return PassResult(logits[:wanted].clone(), states, None if best is None else best[:wanted].clone())

    def _description(self, tables: TableLayers, rows: Sequence[_Row]) -> PassDescription:
        where, memory = [row for *_, row in rows], self._memory
        if memory is None or not memory.holds(where):
            memory = self._memory = TableMemory.of(where, self.model.dtype.itemsize)
        places, positions = [row.place for row in where], [cache.position for _, cache, _ in rows]
        return PassDescription(
            [block for block, _, _ in rows], memory.addresses, memory.strides, tables.group, tables.programs, places,
            positions, memory.aligned,
        )  # fmt: skip

    def _hand_over_queries(self, layers: LayerQueries, rows: Sequence[_Row]) -> None:
        first = 0
        for block, cache, _ in rows:
            last = first + len(block)
            if (full := cache.full) is not None:
                full.begin_pass(layers.specs)
                if layers.queries and self.keeps_queries(block, full):
                    for own, queries in layers.queries.items():
                        full.record_queries(own, queries[:, :, first:last], block)
            first = last


class TabledPass(NamedTuple):
    """A pass for the attention function (``Scorer``) over rows in tables; ``fetch`` is called with each layer first."""

    places: PassTables
    tables: TableLayers
    attention: Attention
    fetch: Callable[[int], None]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        keys, values = self.tables.likes[layer]
        if (k.shape[1::2], v.shape[1::2]) != (keys.shape[1::2], values.shape[1::2]) or (
            q.shape[1] > k.shape[1] * self.tables.group
        ):
            raise RuntimeError(
                f"layer {layer} has different heads than in the previous pass: {q.shape}, {k.shape}, {v.shape}"
            )
        self.fetch(layer)
        attend.store(self.tables.places[layer], contiguous_numbers(k), contiguous_numbers(v), self.places)
        return self.attention(layer, contiguous_numbers(q), k.shape[1], self.places, spec, out_dim=v.shape[3])


def _recording(layers: LayerQueries, keeps: bool, away: Transfers, attention: Attention) -> Attention:
    """Wrap attention to note each layer's parameters, and queries if they are kept, and to write the layer back."""

    def recorded(
        layer: int, q: torch.Tensor, kv_heads: int, places: PassTables, spec: AttentionSpec, **more: Any
    ) -> torch.Tensor:
        if keeps:
            layers.queries[layer,] = q
        layers.specs[layer] = spec
        found = attention(layer, q, kv_heads, places, spec, **more)
        away.write_back(layer)
        return found

    return recorded


def _chosen(result: PassResult, places: PassTables) -> PassResult:
    return result._replace(best=token_choice.choose(result.logits, places.noise))


def _ids(blocks: Sequence[Block]) -> torch.Tensor | None:
    """Return token ids ``[n]`` that only the device has; None if the CPU has them."""
    given = [block.ids for block in blocks if block.ids is not None]
    return adjoined(given) if given else None


def _rows(tables: TableLayers, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[TableRow] | None:
    """Return where all rows' keys and values are on the device; None if a cache cannot say, or selects by queries."""
    found = []
    for block, cache in zip(blocks, caches, strict=True):
        full = cache.full
        if full is not None and (full.offloaded or not tables.uniform):
            rows = full.reserve_layers(tables.likes, len(block))
            addresses = np.array([[t.data_ptr() for t in rows[layer]] for layer in tables.places], np.int64)
            strides = np.array([_strides(rows[layer]) for layer in tables.places], np.int64)
            found.append(TableRow(addresses, strides, cache.length))
            continue
        row = None  # the others need layers of one shape
        if tables.uniform:
            row = cache.addressed(list(tables.likes), next(iter(tables.likes.values()))[0], len(block))
        if row is None or row.topk is not None:
            return None
        found.append(TableRow(row.layers, row.strides, row.place))
    return found


def _strides(rows: Rows) -> list[int]:
    return [stride * t.element_size() for t in rows for stride in t.stride()[1:3]]
