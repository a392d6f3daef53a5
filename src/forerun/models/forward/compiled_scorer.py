"""The forward pass of common decoders as one program, without Python between its operations.

On a CPU, a pass over a few tokens should take the time that memory needs to deliver the weights once. For a small model
the Python around its operations takes as long again. So the target's passes run as a program if the model has a known
structure (``parts.py``) and a comparison with its own forward pass succeeds (``gate.py``). If the model is changed, the
next pass notices; if no program fits any more, it uses the model's own forward pass.

The kernels sum in a fixed order, so a token's logits have the same bits whatever shares its pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.fair_lock import FairLock
from forerun.kernels import gpu
from forerun.kernels.runtime.vector_ir import LINE
from forerun.kv.cache import Addresses, Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward.architecture import known
from forerun.models.forward.compiled_forward import CompiledForward, Parts, Size
from forerun.models.forward.flat import flatten
from forerun.models.forward.gpu_scorer import GpuScorer
from forerun.models.forward.packing import Packed, address
from forerun.models.forward.scorer import Scorer, SelfTest, tested
from forerun.models.forward.sharded import is_sharded
from forerun.models.forward.topk_tables import Choice
from forerun.models.forward.weight_watch import WeightWatch

SPARE = 4096
"""Extra bytes in each thread's scratch memory."""
LEAST = 16
"""Tokens and rows that a program has room for, at least. Writing one takes up to as long as a pass over one token (0.9
ms for the bundled model, 5 for SmolLM2), so it should be rare. Room that is not used costs some hundred kilobytes."""


class CompiledScorer(Scorer):
    """A scorer that runs a program of kernels over the model's own weights.

    Args:
        model: one that ``parts.known`` knows; see ``native``.
        otherwise: takes the passes over caches that a program cannot read; by default the model's own forward pass.
    """

    def reads_whole(self, cache: Cache) -> bool:
        """See ``Scorer.reads_whole``."""
        return self._parts is not None and isinstance(cache, FullCache) and cache.offloaded

    def __init__(self, model: PreTrainedModel, otherwise: Scorer | None = None) -> None:
        super().__init__(model)
        self._otherwise = otherwise
        self._lock = FairLock()
        self._slots = self._states = torch.empty(0, dtype=torch.uint8)
        self._read()

    def _read(self) -> None:
        """Read the model's current modules and weights."""
        self._watch = WeightWatch(self.model)
        self._inputs = self.model.get_input_embeddings()
        self._parts = Parts(self.model) if known(self.model) else None
        self._written: dict[bool, CompiledForward] = {}  # by whether queries choose

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """See ``Scorer.score``."""
        with self._lock:
            if not self._watch.same():
                self._read()
            logits = None if self._parts is None else self._score(self._parts, blocks, caches)
        if logits is not None:
            return list(torch.split(logits, [len(block.tree) + 1 for block in blocks]))
        return super().score(blocks, caches) if self._otherwise is None else self._otherwise.score(blocks, caches)

    def _score(self, parts: Parts, blocks: Sequence[Block], caches: Sequence[Cache]) -> torch.Tensor | None:
        """All rows' logits; None if a program cannot read some of the caches."""
        full = [cache for cache in caches if isinstance(cache, FullCache)]
        if len(full) == len(caches) and any(cache.offloaded for cache in full):
            from forerun.models.forward.layer_streaming import run_by_layers  # imported only where memory is bounded

            return run_by_layers(self, parts, blocks, full)
        count = len(parts.layers)
        rows = [cache.addressed(count, parts.like, len(block)) for cache, block in zip(caches, blocks, strict=True)]
        known = [row for row in rows if row is not None]
        if len(known) < len(rows) or len({row.sought is None for row in known}) > 1:
            return None
        return self._run(parts, blocks, caches, known)

    def _run(
        self, parts: Parts, blocks: Sequence[Block], caches: Sequence[Cache], rows: Sequence[Addresses]
    ) -> torch.Tensor:
        placed = [
            block if row.place == block.start else Block(block.pending, block.tree, row.place)
            for block, row in zip(blocks, rows, strict=True)
        ]
        positions = np.concatenate([cache.positions(block) for cache, block in zip(caches, blocks, strict=True)])
        packed = Packed(placed, parts.heads, torch.get_num_threads(), positions)
        choice = None if rows[0].sought is None else Choice(packed, rows)
        written, wanted = self.room(parts, packed, choice), packed.wanted
        for number, row in enumerate(rows):
            written.kv[:, number] = row.layers
        if choice is not None:
            choice.fill(written.sought, self._states.data_ptr())
        table = packed.rows([row.strides for row in rows])
        logits = torch.empty(len(wanted), parts.head.out_features, dtype=torch.float32)
        wanted_now = {"wanted": len(wanted), "wanted_list": address(wanted), "y": logits.data_ptr()}
        written.program.run(**wanted_now, **self.fields(packed, table, choice))
        self._tell(parts, written, packed, caches)
        return logits

    def fields(self, packed: Packed, rows: bytearray, choice: Choice | None = None) -> dict[str, int]:
        """A program's fields for a pass that there is ``room`` for, given its table of rows; but for its output."""
        work = packed if choice is None else choice
        return {
            "n": packed.n, "ids": address(packed.ids), "rows": address(rows), "units": address(work.units),
            "unit_count": work.unit_count, "owners": address(packed.owners), "positions": address(packed.positions),
            "places": address(packed.places), "parents": address(packed.parents), "parts": self._states.data_ptr(),
            "slots": self._slots.data_ptr(),
            "slot_size": len(self._slots) // torch.get_num_threads() // LINE * LINE,
        }  # fmt: skip

    def _check(self, packed: Packed) -> None:
        """Refuse token ids that the embedding does not have."""
        least, most = int(packed.ids.min()), int(packed.ids.max())
        if least < 0 or most >= self.vocabulary:
            wrong = least if least < 0 else most
            raise IndexError(f"token {wrong} is not in the vocabulary of {self.vocabulary} tokens")

    def room(self, parts: Parts, packed: Packed, choice: Choice | None = None) -> CompiledForward:
        """Buffers for this pass's tokens, rows and positions. If one has to grow, the program is rewritten.

        Raises:
            IndexError: if the embedding does not have a token of the pass.
        """
        self._check(packed)
        threads = torch.get_num_threads()
        work = packed if choice is None else choice
        slot = max(work.slot_size, parts.room(packed.n)) + SPARE
        if len(self._slots) < threads * slot:
            self._slots = torch.empty(threads * slot, dtype=torch.uint8)
        if len(self._states) < work.parts_size:
            self._states = torch.empty(work.parts_size + work.parts_size // 4, dtype=torch.uint8)
        if parts.positions < packed.reach:
            parts.reach(packed.reach)
        chooses = choice is not None
        needed = Size(packed.n, len(packed.blocks), threads, self.keeps_queries and not chooses, chooses)
        before = self._written.get(chooses)
        if before is None or not before.size.holds(needed) or before.positions != parts.positions:
            tokens, rows = (max(LEAST, 1 << (count - 1).bit_length()) for count in (packed.n, needed.rows))
            if before is not None:
                tokens, rows = max(tokens, before.size.tokens), max(rows, before.size.rows)
            self._written[chooses] = before = CompiledForward(parts, replace(needed, tokens=tokens, rows=rows))
        return before

    def _tell(self, parts: Parts, written: CompiledForward, packed: Packed, caches: Sequence[Cache]) -> None:
        """Give full caches what sparse caches read from them: queries and attention parameters."""
        heads, first, specs = parts.heads, 0, {i: layer.spec for i, layer in enumerate(parts.layers)}
        for cache, block, count in zip(caches, packed.blocks, packed.counts, strict=True):
            if isinstance(cache, FullCache):
                cache.specs, cache.queries = dict(specs), {}
            if (
                isinstance(cache, FullCache) and self.keeps_queries and cache.wants_queries(block)
            ):  # of what is overwritten
                turned = written.mixed[:, first : first + count, : heads.heads * heads.dim].clone()
                parted = turned.view(*turned.shape[:2], heads.heads, heads.dim).transpose(1, 2)
                for layer, queries in enumerate(parted):
                    cache.record_queries(layer, queries[None])
            first += count


def native(scorer: Scorer) -> Scorer:
    """A ``CompiledScorer`` if the model's structure is known, a ``GpuScorer`` on a GPU; else ``scorer`` itself. The gate
    compares their logits."""
    whole = type(scorer) is Scorer and not is_sharded(scorer.model)
    if whole and gpu.runs_on(scorer.device):
        return GpuScorer(scorer.model)
    return CompiledScorer(scorer.model) if whole and known(scorer.model) else scorer


def inner(scorer: Scorer, self_test: SelfTest = tested) -> Scorer:
    """The same model for a level of a hierarchy, whose logits decide what is drafted: the fastest pass over each cache.
    It may round differently from the scorer that verifies."""
    flat = flatten(scorer, self_test)
    if isinstance(scorer, GpuScorer):
        return GpuScorer(scorer.model, flat)
    return CompiledScorer(scorer.model, flat) if isinstance(scorer, CompiledScorer) else flat
