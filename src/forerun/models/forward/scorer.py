"""A transformers decoder as a scorer: one forward pass gives logits at every node of every row's tree.

Rows are packed into one sequence, each with its own positions, so ragged rows need no padding. Attention is the only
operation that mixes tokens; it is Forerun's own and keeps rows apart. It is registered once in transformers' attention
interface, and finds the pass that runs in its thread. No model code is changed. Outside of a pass, and in other
threads, a model keeps its own attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.linear import ordered_modules
from forerun.kernels.runtime.addresses import head_rows
from forerun.kv.cache import Cache, KVShape
from forerun.kv.full_cache import FullCache
from forerun.kv.rerotation import Rotation
from forerun.models.forward.implementations import experts, use_implementations
from forerun.models.forward.inputs import learned_positions
from forerun.models.forward.packing import HeadShape, PackedPass, address
from forerun.models.forward.sharded import gather_logits

Result = TypeVar("Result")
AnyCache = TypeVar("AnyCache", bound=Cache)

ATTENTION_NAME = "forerun"
"""Forerun's entry in transformers' attention interface."""


class AttentionPass(Protocol):
    """What the attention function needs of a forward pass."""

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        """Each row's attention over its own cache; ``[1, H, n, d]`` in and out."""


@dataclass(frozen=True)
class Pass:
    """A forward pass over any caches: its rows, in the order of the packed sequence."""

    blocks: Sequence[Block]
    caches: Sequence[Cache]
    packings: dict[HeadShape, PackedPass] = field(default_factory=dict)

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec
    ) -> torch.Tensor:
        full = [cache for cache in self.caches if isinstance(cache, FullCache)]
        if len(full) == len(self.caches) and ordered_modules.attends(q, k, v):
            return self._attend_in_order(layer, q, k, v, spec, full)
        if len(self.blocks) == 1:
            return self.caches[0].attend(layer, q, k, v, self.blocks[0], spec)
        sizes = [len(block) for block in self.blocks]
        split = [torch.split(t, sizes, 2) for t in (q, k, v)]
        rows = zip(self.caches, *split, self.blocks, strict=True)
        return torch.cat([cache.attend(layer, *qkv, block, spec) for cache, *qkv, block in rows], 2)

    def _attend_in_order(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec,
        caches: Sequence[FullCache],
    ) -> torch.Tensor:  # fmt: skip
        """All rows at once, in a fixed order of sums."""
        sizes = [len(block) for block in self.blocks]
        parts = [torch.split(t, sizes, 2) for t in (q, k, v)]
        rows = []
        for cache, queries, keys, values in zip(caches, *parts, strict=True):
            rows.append(cache.append(layer, keys, values))
            cache.record_queries(layer, queries, spec)
        packed = self._packed(HeadShape(q.shape[1], k.shape[1], q.shape[3], v.shape[3]))
        table = packed.rows([(*head_rows(keys)[1:], *head_rows(values)[1:]) for keys, values in rows])
        tables = {
            "rows": address(table), "units": address(packed.units), "unit_count": packed.unit_count,
            "token_rows": address(packed.token_rows), "cache_positions": address(packed.cache_positions),
            "parents": address(packed.parents),
        }  # fmt: skip
        how = (spec.scaling, spec.window, spec.softcap, spec.sinks)
        return ordered_modules.attend(q, rows, tables, (packed.slot_size, packed.states_bytes), how)

    def _packed(self, heads: HeadShape) -> PackedPass:
        """The pass as kernels see it; reused by layers with the same heads."""
        if heads not in self.packings:
            self.packings[heads] = PackedPass(self.blocks, heads, torch.get_num_threads())
        return self.packings[heads]


_running: ContextVar[AttentionPass | None] = ContextVar("running", default=None)
"""This thread's pass. It cannot be a keyword argument: some models pass none down to their attention."""


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """The function registered with transformers, with its shapes: ``[1, H, n, d]`` in, ``[1, n, H, d]`` out."""
    rows = _running.get()
    if rows is None:
        raise RuntimeError("the 'forerun' attention works only inside a Forerun pass")
    if attention_mask is not None:
        raise RuntimeError("this model's attention has a mask of its own, which is not supported")
    spec = AttentionSpec(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux)
    layer: Any = module.layer_idx
    return rows.attend(layer, query, key, value, spec).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, attention)


class Scorer:
    """One set of weights; the caches come with each call.

    Args:
        model: a decoder that ``forerun.models.forward.gate`` admits.
    """

    follows: ClassVar[bool] = False
    """Whether another process decides what passes are made, because the model lies in several (``parallel``)."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._inputs: Any = model.get_input_embeddings()
        self.vocabulary = int(self._inputs.weight.shape[0])
        """Token ids that the model can read: rows of its input embedding, of all its parts together."""
        self.limit = learned_positions(model)
        """Number of learned positions, or None if there is no limit."""
        self._keeps_logits = model._supports_logits_to_keep()
        self.keeps_queries = False
        """Whether full caches keep each pass's queries; see ``keep_queries``."""

    def keep_queries(self) -> None:
        """Let full caches keep each pass's queries from now on, for sparse caches that choose by them."""
        self.keeps_queries = True

    @cached_property
    def kv(self) -> KVShape:
        """Shapes of a token's keys and values, from a pass over one token."""
        cache = FullCache()
        with torch.inference_mode():
            self.score([Block(np.zeros(1, np.int64), DraftTree.empty(), 0)], [cache])
        return cache.shape

    def reads_whole(self, cache: Cache) -> bool:
        """Whether a text is read into this cache in one pass, which takes all of it through one layer before the next:
        what is offloaded is then brought away once."""
        return False

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self._inputs.weight.device  # type: ignore[no-any-return]

    def adopt(self, cache: AnyCache) -> AnyCache:
        """A cache that passes will use, before anything is done to it."""
        return cache

    def rotation(self) -> Rotation | None:
        """See ``find_rotation``."""
        from forerun.models.forward.rotary_probe import find_rotation  # which makes passes

        return find_rotation(self.model)

    def led(self, work: Callable[[], Result]) -> Result:
        """Run ``work``, which makes passes, on the process that leads; the others return its result (plain values)."""
        return work()

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """One forward pass over all rows.

        Args:
            blocks: each row's input.
            caches: each row's cache; it holds the block as a speculative tail until ``commit``.

        Returns:
            For each row the logits after its last pending token (row 0) and at its tree's node i (row i + 1),
            ``[len(tree) + 1, V]``.
        """
        ids = torch.from_numpy(np.concatenate([block.tokens for block in blocks]))
        positions = np.concatenate([cache.positions(block) for block, cache in zip(blocks, caches, strict=True)])
        places = torch.from_numpy(positions).to(self.device)
        logits = self._forward(ids.to(self.device), places, Pass(blocks, caches), _wanted(blocks))
        return list(torch.split(logits, [len(block.tree) + 1 for block in blocks]))

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: AttentionPass, wanted: int | torch.Tensor
    ) -> torch.Tensor:
        """Logits ``[m, V]`` of the packed ids ``[n]``: of all ids if ``wanted`` is 0, else of those at its indices."""
        arguments: dict[str, Any] = {"logits_to_keep": wanted} if self._keeps_logits else {}
        with (
            use_implementations(self.model, attn=ATTENTION_NAME, experts=experts(self.model)),
            _run(rows),
            ordered_modules.Ordered(),
        ):
            found = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False, **arguments)
        logits = gather_logits(self.model, found.logits)[0]
        if not self._keeps_logits and isinstance(wanted, torch.Tensor):
            return logits[wanted.to(logits.device)]
        return logits


SelfTest = Callable[[Scorer, Callable[[], str | None]], str | None]
"""Runs the test of a scorer: why its logits are not the model's own, or None. It may remember a test that passed."""


def tested(scorer: Scorer, test: Callable[[], str | None]) -> str | None:
    """Run the test, and remember nothing."""
    return test()


@contextmanager
def _run(rows: AttentionPass) -> Iterator[None]:
    before = _running.set(rows)
    try:
        yield
    finally:
        _running.reset(before)


def _wanted(blocks: Sequence[Block]) -> int | torch.Tensor:
    """Which tokens need logits: 0 for all, or their indices in the packed sequence."""
    if all(len(block.pending) == 1 for block in blocks):
        return 0
    ends = np.cumsum([len(block) for block in blocks]).tolist()
    return torch.cat([torch.arange(end - len(block.tree) - 1, end) for end, block in zip(ends, blocks, strict=True)])
