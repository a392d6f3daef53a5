"""A view that sees every key of its source, and that no program of kernels has."""

from collections.abc import Sequence

import torch

from forerun.core.block import Block
from forerun.kernels.attention.attention import AttentionSpec, attend
from forerun.kv.view import View


class AllKeysView(View):
    def sync(self) -> None:
        self.length = self.synced = self.source.length

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        keys, values = (
            torch.cat(pair, 2) for pair in zip(self.source.read(layer, 0, self.synced), (k, v), strict=True)
        )
        return attend(q, keys, values, spec, block.bias(spec.window, range(self.length), q)).out

    def _compact(self, start: int, path: Sequence[int]) -> None:
        raise NotImplementedError("nothing is committed in tests")

    @property
    def nbytes(self) -> int:
        return 0
