"""The cache of a copy of the target that drafts: the target's own keys and values, and a tail of drafts after them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.block import Block
from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kv.cache import Addresses, KVShape
from forerun.kv.view import View


class TailView(View):
    """Reads all of its source, and writes drafts where the source's next pass writes, which overwrites them.

    So a model with the target's layers drafts without a prefill and without further memory. Both must compute keys and
    values of one shape and type.
    """

    @property
    def whole(self) -> bool:
        return True

    @property
    def _ahead(self) -> int:
        return self.length - self.source.length

    def sync(self) -> None:
        self.length = self.synced = self.source.length

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows:
        keys, values = self.source.append(layer, k, v, self._ahead)
        end = self.length + len(block)
        return keys[:, :, :end], values[:, :, :end]

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int) -> Addresses | None:
        return self.source.addressed(layers, like, count, self._ahead)

    def _compact(self, start: int, path: Sequence[int]) -> None:
        self.source.compact(start, path)

    @property
    def nbytes(self) -> int:
        return 0

    def needs(self, shape: KVShape, tokens: int) -> int:
        return 0
