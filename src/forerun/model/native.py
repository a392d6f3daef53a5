"""The forward pass of common decoders as one program, without Python between its operations.

On a CPU, a pass over a few tokens should take the time that memory needs to deliver the weights once. For a small model
the Python around its operations takes as long again. So the target's passes run as a program if the model has a known
structure (``parts.py``) and a comparison with its own forward pass succeeds (``gate.py``). If the model is changed, the
next pass notices; if no program fits any more, it uses the model's own forward pass.

The kernels sum in a fixed order, so a token's logits have the same bits whatever shares its pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from forerun.caches.base import Cache
from forerun.caches.full import FullCache
from forerun.core.block import Block
from forerun.core.turns import Turns
from forerun.kernels.vector import LINE
from forerun.model.packing import Packed, address
from forerun.model.parts import known
from forerun.model.program import Parts, Size, Written
from forerun.model.scorer import Scorer
from forerun.model.sharded import is_sharded
from forerun.model.streamed import run_by_layers
from forerun.model.watch import Watch

SPARE = 4096
"""Extra bytes in each thread's scratch memory."""


class NativeScorer(Scorer):
    """A scorer that runs a program of kernels over the model's own weights, for full caches.

    Args:
        model: one that ``parts.known`` knows; see ``native``.
    """

    def reads_whole(self, cache: Cache) -> bool:
        """See ``Scorer.reads_whole``."""
        return self._parts is not None and isinstance(cache, FullCache) and cache.offloaded

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._turns = Turns()
        self._slots = self._states = torch.empty(0, dtype=torch.uint8)
        self._read()

    def _read(self) -> None:
        """Read the model's current modules and weights."""
        self._watch = Watch(self.model)
        self._inputs = self.model.get_input_embeddings()
        self._parts = Parts(self.model) if known(self.model) else None
        self._written: Written | None = None

    def score(self, blocks: Sequence[Block], caches: Sequence[Cache]) -> list[torch.Tensor]:
        """See ``Scorer.score``. Caches other than full ones take the model's own forward pass."""
        full = [cache for cache in caches if isinstance(cache, FullCache)]
        if len(full) == len(caches):
            with self._turns:
                if not self._watch.same():
                    self._read()
                if self._parts is not None:
                    run = run_by_layers if any(cache.offloaded for cache in full) else NativeScorer._run
                    logits = run(self, self._parts, blocks, full)
                    return list(torch.split(logits, [len(block.tree) + 1 for block in blocks]))
        return super().score(blocks, caches)

    def _run(self, parts: Parts, blocks: Sequence[Block], caches: Sequence[FullCache]) -> torch.Tensor:
        packed = Packed(blocks, parts.heads, torch.get_num_threads())
        written, wanted = self.room(parts, packed), packed.wanted
        heads, layers, strides = parts.heads, len(parts.layers), []
        for row, (cache, count) in enumerate(zip(caches, packed.counts, strict=True)):
            store = cache.reserve(layers, heads.kv_heads, heads.dim, parts.dtype, count)
            written.kv[:, row] = cache.addresses
            strides.append((store.stride(2) * parts.width, store.stride(3) * parts.width) * 2)
        rows = packed.rows(strides)
        logits = torch.empty(len(wanted), parts.head.out_features, dtype=torch.float32)
        wanted_now = {"wanted": len(wanted), "wanted_list": address(wanted), "y": logits.data_ptr()}
        written.program.run(**wanted_now, **self.fields(packed, rows))
        self._tell(parts, written, packed, caches)
        return logits

    def fields(self, packed: Packed, rows: bytearray) -> dict[str, int]:
        """A program's fields for a pass that there is ``room`` for, given its table of rows; but for its output."""
        return {
            "n": packed.n, "ids": address(packed.ids), "rows": address(rows), "units": address(packed.units),
            "unit_count": packed.unit_count, "owners": address(packed.owners), "positions": address(packed.positions),
            "parents": address(packed.parents), "parts": self._states.data_ptr(), "slots": self._slots.data_ptr(),
            "slot_size": len(self._slots) // torch.get_num_threads() // LINE * LINE,
        }  # fmt: skip

    def _check(self, packed: Packed) -> None:
        """Refuse token ids that the embedding does not have."""
        least, most = int(packed.ids.min()), int(packed.ids.max())
        if least < 0 or most >= self.vocabulary:
            wrong = least if least < 0 else most
            raise IndexError(f"token {wrong} is not in the vocabulary of {self.vocabulary} tokens")

    def room(self, parts: Parts, packed: Packed) -> Written:
        """Buffers for this pass's tokens, rows and positions. If one has to grow, the program is rewritten.

        Raises:
            IndexError: if the embedding does not have a token of the pass.
        """
        self._check(packed)
        threads = torch.get_num_threads()
        slot = max(packed.slot_size, parts.room(packed.n)) + SPARE
        if len(self._slots) < threads * slot:
            self._slots = torch.empty(threads * slot, dtype=torch.uint8)
        if len(self._states) < packed.parts_size:
            self._states = torch.empty(packed.parts_size + packed.parts_size // 4, dtype=torch.uint8)
        if parts.positions < packed.reach:
            parts.reach(packed.reach)
        needed, before = Size(packed.n, len(packed.blocks), threads, self.keeps_queries), self._written
        if before is None or not before.size.holds(needed) or before.positions != parts.positions:
            tokens, rows = 1 << max(3, (packed.n - 1).bit_length()), needed.rows
            if before is not None:
                tokens, rows = max(tokens, before.size.tokens), max(rows, before.size.rows)
            self._written = before = Written(parts, Size(tokens, rows, threads, self.keeps_queries))
        return before

    def _tell(self, parts: Parts, written: Written, packed: Packed, caches: Sequence[FullCache]) -> None:
        """Give full caches what sparse caches read from them: queries and attention parameters."""
        heads, first, specs = parts.heads, 0, {i: layer.spec for i, layer in enumerate(parts.layers)}
        for cache, count in zip(caches, packed.counts, strict=True):
            cache.specs = dict(specs)
            if self.keeps_queries:  # a copy, as the next pass overwrites them
                turned = written.mixed[:, first : first + count, : heads.heads * heads.dim].clone()
                parted = turned.view(*turned.shape[:2], heads.heads, heads.dim).transpose(1, 2)
                for layer, queries in enumerate(parted):
                    cache.asked(layer, queries[None])
            first += count


def native(scorer: Scorer) -> Scorer:
    """A ``NativeScorer`` if the model's structure is known; else ``scorer`` itself. The gate compares their logits."""
    whole = type(scorer) is Scorer and not is_sharded(scorer.model)
    return NativeScorer(scorer.model) if whole and known(scorer.model) else scorer
