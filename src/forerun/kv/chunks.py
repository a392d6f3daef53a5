"""One layer of the retrieval cache: the chunks it holds, and the means by which it chooses them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.kv.full_cache import FullCache
from forerun.kv.kv_rows import Rows, append, compact, reserve

ROOM = 64
"""A buffer grows by at least this many tokens."""


class ChosenChunks:
    """One layer's rows: the chosen chunks in slots, then recent tokens, then the block being scored."""

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._rows: Rows | None = None
        self._means = torch.empty(0)  # [Hkv, room, d]; half precision is enough for choosing
        self._known = 0  # number of means so far
        self._chosen = torch.empty(0, 0, dtype=torch.int64)  # [Hkv, slots], the chunk in each slot

    def choose(self, query: torch.Tensor, source: FullCache, layer: int, end: int, count: int) -> None:
        """Hold the ``count`` best chunks of a layer's first ``end`` tokens for the query ``[1, H, d]``."""
        self.extend(source.read(layer, self.known, end)[0])
        held = self._chosen.shape[1]
        if held < count:  # all chunks so far are held, in order: append the next ones
            first = held * self._chunk
            keys, values = source.read(layer, first, count * self._chunk)
            self.write(first, keys, values)
            self._chosen = torch.arange(count, device=keys.device).repeat(keys.shape[1], 1)
        if count < self._known:
            self._replace(self._best(query, count), source, layer)

    def extend(self, keys: torch.Tensor) -> None:
        """Add the means of the next keys, ``[1, Hkv, m * chunk, d]``."""
        if keys.shape[2]:
            self._extend_means(self._cut(keys[0]))

    @property
    def known(self) -> int:
        """Tokens whose means are known."""
        return self._known * self._chunk

    def write(self, place: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values ``[1, Hkv, n, d]`` at index ``place``; those at later indices may be lost."""
        self._rows = append(self._rows, (k, v), place, _grown(place + k.shape[2]))

    def reserve(self, place: int, count: int) -> Rows:
        """Its keys and values, with room for ``count`` more at index ``place``."""
        assert self._rows is not None
        self._rows = reserve(self._rows, self._rows, place, place + count, _grown(place + count))
        return self._rows

    def read(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of indices ``first`` to ``last`` (excluded)."""
        assert self._rows is not None
        keys, values = self._rows
        return keys[:, :, first:last], values[:, :, first:last]

    def compact(self, place: int, path: Sequence[int]) -> None:
        """Move the nodes of ``path``, of a tree at index ``place``, side by side."""
        assert self._rows is not None
        compact(self._rows, place, path)

    @property
    def key_bytes(self) -> int:
        """Bytes reserved for keys and values."""
        return sum(t.nbytes for t in self._rows or ())

    @property
    def known_bytes(self) -> int:
        """Bytes of the means so far."""
        return self._means[:, : self._known].nbytes if self._known else 0

    @property
    def mean_bytes(self) -> int:
        """Bytes reserved for the chunk means."""
        return self._means.nbytes

    def _cut(self, rows: torch.Tensor) -> torch.Tensor:
        """A view of ``[Hkv, m * chunk, d]`` as ``[Hkv, m, chunk, d]``."""
        return rows.view(rows.shape[0], -1, self._chunk, rows.shape[2])

    def _extend_means(self, chunks: torch.Tensor) -> None:
        heads, new, _, d = chunks.shape
        count = self._known + new
        if not self._known or self._means.shape[1] < count:
            room = chunks.new_empty(heads, count + count // 8 + ROOM, d, dtype=torch.bfloat16)
            if self._known:
                room[:, : self._known] = self._means[:, : self._known]
            self._means = room
        self._means[:, self._known : count] = chunks.mean(2)
        self._known = count

    def _best(self, query: torch.Tensor, count: int) -> torch.Tensor:
        """The chunks with the best scores, ``[Hkv, count]``; the first chunk always comes first.

        Half precision finds the candidates, single precision decides. The whole reserved buffer is multiplied, because
        oneDNN compiles and keeps a program for each new shape.
        """
        means, summed = self._means, query.view(self._means.shape[0], -1, self._means.shape[2]).sum(1)
        coarse = torch.bmm(means, summed.to(means.dtype).unsqueeze(-1))[:, : self._known, 0]
        coarse[:, 0] = torch.inf
        some = coarse.topk(min(self._known, count + max(ROOM, count // 4)), -1, sorted=False).indices
        near = means.gather(1, some.unsqueeze(-1).expand(-1, -1, means.shape[2]))
        scores = torch.bmm(near.float(), summed.float().unsqueeze(-1)).squeeze(-1)
        scores[some == 0] = torch.inf
        return some.gather(1, scores.topk(count, -1).indices)

    def _replace(self, best: torch.Tensor, source: FullCache, layer: int) -> None:
        """Write the chunks of ``best`` that are not held yet into slots whose chunks are no longer wanted."""
        assert self._rows is not None
        wanted = torch.zeros(best.shape[0], self._known, dtype=torch.bool, device=best.device)
        wanted.scatter_(1, best, True)
        stays = wanted.gather(1, self._chosen)
        wanted.scatter_(1, self._chosen, False)
        head, slot = (~stays).nonzero(as_tuple=True)  # per head as many as in `wanted`, in the same order
        chunk = wanted.nonzero(as_tuple=True)[1]
        self._chosen[head, slot] = chunk
        for mine, new in zip(self._rows, source.chunks(layer, head, chunk, self._chunk), strict=True):
            slots = self._cut(mine[0, :, : best.shape[1] * self._chunk])
            slots[head, slot] = new


class HeldChunks:
    """Chunks of one layer, in slots, and nothing else. Those that are wanted and not held are copied, in place of those
    that were not wanted for longest.

    Args:
        chunk: tokens of a chunk.
    """

    def __init__(self, chunk: int) -> None:
        self._chunk = chunk
        self._held = torch.empty(0, 0, dtype=torch.int64)  # [Hkv, slots], the chunk in each slot
        self._age = torch.empty(0, 0, dtype=torch.int64)  # [Hkv, slots], calls since it was wanted
        self._slots: Rows = ()  # [Hkv, slots, chunk, d]

    def hold(self, best: torch.Tensor, wanted: torch.Tensor, known: int, source: FullCache, layer: int) -> None:
        """Hold those of the chunks ``[Hkv, slots]``, of the first ``known`` ones of a layer, that are wanted.

        Args:
            wanted: bool ``[Hkv, slots]``. At the first call all are held.
        """
        if self._held.shape != best.shape:
            heads, count = best.shape
            head = torch.arange(heads, device=best.device).repeat_interleave(count)
            new = source.chunks(layer, head, best.flatten(), self._chunk)
            self._slots = tuple(t.view(heads, count, *t.shape[1:]) for t in new)
            self._held, self._age = best.clone(), torch.zeros_like(best)
            return
        mark = torch.zeros(best.shape[0], known, dtype=torch.bool, device=best.device).scatter_(1, best, wanted)
        self._age = torch.where(mark.gather(1, self._held), 0, self._age + 1)
        mark.scatter_(1, self._held, False)
        head, chunk = mark.nonzero(as_tuple=True)
        if len(head):
            oldest = self._age.argsort(1, descending=True)  # wanted ones come last, and there is room for all
            slot = oldest[torch.arange(best.shape[1], device=best.device) < mark.sum(1, keepdim=True)]
            self._held[head, slot], self._age[head, slot] = chunk, 0
            for slots, rows in zip(self._slots, source.chunks(layer, head, chunk, self._chunk), strict=True):
                slots[head, slot] = rows

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, ``[1, Hkv, slots * chunk, d]``."""
        keys, values = (t.flatten(1, 2)[None] for t in self._slots)
        return keys, values

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(t.nbytes for t in self._slots)


def _grown(end: int) -> int:
    """Tokens that a buffer which must hold ``end`` has room for."""
    return end + max(ROOM, end // 32)
