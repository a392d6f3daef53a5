"""One layer's keys in a few dimensions, by which the low-rank cache finds the chunks that matter to a query."""

from __future__ import annotations

from collections.abc import Callable

import torch

from forerun.kernels.attention.short_key_scan import CHUNK, GROUP, QUAD, ZERO, best_keys
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import Tensors

GROUPS = 8
"""An index grows by at least this many groups of chunks."""
SAMPLE = 2048
"""The dimensions are found from at most this many keys; see ``sampled``."""


class ShortKeys:
    """One layer's keys in a few dimensions, chunk by chunk.

    Args:
        of_keys, of_queries: projections ``[Hkv, d, rank]`` of keys (minus their mean) and of queries into those
            dimensions; the latter in float32.
        mean: of the keys, ``[Hkv, 1, d]``.
        group: query heads per KV head.
    """

    def __init__(self, of_keys: torch.Tensor, of_queries: torch.Tensor, mean: torch.Tensor, group: int) -> None:
        self.group = group
        self._of_keys, self._of_queries, self._mean = of_keys, of_queries.contiguous(), mean
        shape = (len(mean), 0, CHUNK, of_keys.shape[2] // QUAD, GROUP, QUAD)
        self._short = torch.empty(shape, dtype=torch.uint8, device=mean.device)
        self._known = 0  # chunks

    @classmethod
    def of(cls, keys: torch.Tensor, queries: torch.Tensor, rank: int) -> ShortKeys:
        """An index for a text, from some of its keys ``[Hkv, m, d]`` and of its queries ``[H, n, d]``.

        We want keys of rank r whose products with the queries are closest to the true products. They come from the r
        largest eigenvectors of S = Q^1/2 K Q^1/2, where Q and K are the second moments of queries and keys.
        """
        heads, _, d = keys.shape
        some = keys.double()
        mean = some.mean(1, keepdim=True)
        asked = queries.double().reshape(heads, -1, d)
        moments = _moments(asked)
        even = moments.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)[:, None, None] * torch.eye(d).to(moments)
        values, vectors = torch.linalg.eigh(moments + (0.01 + 1 / asked.shape[1]) * even)
        root, inverse = ((vectors * power.unsqueeze(1)) @ vectors.mT for power in (values.sqrt(), values.rsqrt()))
        best = torch.linalg.eigh(root @ _moments(some - mean) @ root)[1][:, :, -rank:]
        best = torch.nn.functional.pad(best, (0, -best.shape[2] % QUAD))  # narrow heads have fewer
        of_keys = root @ best
        scale = ((some - mean) @ of_keys).abs().amax(1, keepdim=True).clamp_min(1e-30) / 127
        of_queries = (inverse @ best * scale).float()
        return cls((of_keys / scale).to(keys.dtype), of_queries, mean.to(keys.dtype), len(queries) // heads)

    def tensors(self, length: int) -> Tensors:
        """The index of the full groups in a text's first ``length`` tokens, for ``of_tensors``. They do not change any
        more when the text goes on, so no copy is made."""
        groups = min(self._known, length // CHUNK) // GROUP
        return {
            "short": self._short[:, :groups],
            "of_keys": self._of_keys,
            "of_queries": self._of_queries,
            "mean": self._mean,
            "group": torch.tensor([self.group]),
        }

    @classmethod
    def of_tensors(cls, tensors: Tensors, length: int) -> ShortKeys:
        """An index from what ``tensors`` gave, for a text of which the first ``length`` tokens are the same. It writes
        nothing into these tensors: what it adds are whole groups."""
        index = cls(tensors["of_keys"], tensors["of_queries"], tensors["mean"], int(tensors["group"]))
        groups = min(tensors["short"].shape[1], length // CHUNK // GROUP)
        index._short, index._known = tensors["short"][:, :groups], groups * GROUP
        return index

    def extend(self, read: Callable[[int, int], torch.Tensor], length: int) -> None:
        """Index a text's keys up to ``length``, a multiple of ``CHUNK``.

        Args:
            read: gives the keys of some positions, ``[Hkv, m, d]``.
        """
        count = length // CHUNK
        groups = -(-count // GROUP)
        if self._short.shape[1] < groups:
            room = self._short.new_zeros(len(self._short), groups + groups // 16 + GROUPS, *self._short.shape[2:])
            room[:, : self._short.shape[1]] = self._short
            self._short = room
        if self._known < count:
            first = self._known // GROUP
            new = (read(first * GROUP * CHUNK, length) - self._mean) @ self._of_keys
            rows = torch.nn.functional.pad(new, (0, 0, 0, (groups * GROUP - count) * CHUNK))
            chunks = rows.view(len(rows), -1, GROUP, CHUNK, rows.shape[2] // QUAD, QUAD).permute(0, 1, 3, 4, 2, 5)
            self._short[:, first:groups] = (chunks.round() + ZERO).clamp(0, 255).to(torch.uint8)
        self._known = count

    def worth(self, queries: torch.Tensor) -> torch.Tensor:
        """Worth of each chunk to each of the queries ``[H, n, d]``, float32 ``[H, n, chunks]``."""
        heads, n, d = queries.shape
        turned = (queries.float().reshape(len(self._of_queries), -1, d) @ self._of_queries).view(heads, n, -1)
        return best_keys(self._short, self._known, turned)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """As in ``SoughtFields``: ``rank``, ``short``, ``short_head`` and ``turn``."""
        return self._of_queries.shape[2], self._short.data_ptr(), self._short.stride(0), self._of_queries.data_ptr()

    @property
    def known(self) -> int:
        """Keys that it has taken in."""
        return self._known * CHUNK

    @property
    def known_bytes(self) -> int:
        """Bytes of the indexed keys."""
        heads, _, _, quads, _, _ = self._short.shape
        return heads * self._known * CHUNK * quads * QUAD

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self._short.nbytes


def sampled(source: FullCache, layer: int) -> torch.Tensor:
    """Keys of a layer from all over its text, ``[Hkv, m, d]``: at most ``SAMPLE``."""
    return source.every(layer, -(-source.length // SAMPLE))[0]


def _moments(rows: torch.Tensor) -> torch.Tensor:
    """Second moments: ``[H, n, d]`` to ``[H, d, d]``."""
    return rows.mT @ rows / rows.shape[1]
