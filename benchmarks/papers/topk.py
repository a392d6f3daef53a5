"""The oracle that sparse caches are compared with: every query sees the keys with its highest scores.

It scores all keys to find them, so it saves nothing. It shows the best use of a budget (TriForce, table 1).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.decoding.level import CacheFactory
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.cache import KVShape
from forerun.kv.full_cache import FullCache
from forerun.kv.view import View

SPECULATIVE_TOKENS = 64  # tokens on trial that TopKCache.needs counts


def target_cache(settings: LongContextConfig) -> CacheFactory:
    """Return the oracle, of ``LongContextConfig.cache_budget`` tokens."""
    return lambda scorer, source: TopKCache(source, settings.cache_budget)


class TopKCache(View):
    """Over one row's full cache.

    Args:
        source: the target's cache; read, never changed.
        budget: keys that each query of each head sees, besides speculative ones.

    Raises:
        ValueError: for a budget under 1.
    """

    def __init__(self, source: FullCache, budget: int) -> None:
        super().__init__(source)
        if budget < 1:
            raise ValueError(f"budget is {budget}; it must be at least 1")
        self.budget = budget
        self._trial: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def sync(self) -> None:
        self.length = self.synced = self.source.length

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        tried = self.length - self.synced
        if tried:
            k, v = (torch.cat((old[:, :, :tried], new), 2) for old, new in zip(self._trial[layer], (k, v), strict=True))
        self._trial[layer] = near = k, v
        far = self.source.read(layer, 0, self.synced)
        scores = torch.cat([attention_scores(q, keys, spec) for keys, _ in (far, near)], -1)
        bias = block.bias(spec.window, range(self.length), q)
        scores = scores if bias is None else scores + bias
        scores[..., : self.synced] = _best(scores[..., : self.synced], self.budget)
        weights = softmax_weights(scores, spec).to(q.dtype).tensor_split([self.synced], -1)
        return torch.stack([_mix(w, pair[1]) for w, pair in zip(weights, (far, near), strict=True)]).sum(0)

    def _compact(self, start: int, path: Sequence[int]) -> None:
        first = start - self.synced
        places = [*range(first), *(first + node for node in path)]
        self._trial = {layer: (k[:, :, places], v[:, :, places]) for layer, (k, v) in self._trial.items()}

    def needs(self, shape: KVShape, tokens: int) -> int:
        return shape.nbytes * SPECULATIVE_TOKENS

    @property
    def nbytes(self) -> int:
        """Bytes of the speculative tokens."""
        return sum(t.nbytes for rows in self._trial.values() for t in rows)


def softmax_weights(scores: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Return softmax weights ``[1, H, n, m]`` of scores, reduced by what the layer's sinks take."""
    if spec.sinks is None:
        return scores.softmax(-1)
    sinks = spec.sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def attention_scores(q: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Scaled scores ``[1, H, n, m]`` of queries ``[1, H, n, d]`` and keys ``[1, Hkv, m, d]``, in at least float32."""
    grouped = q.reshape(1, keys.shape[1], -1, *q.shape[2:])
    scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)).flatten(1, 2)
    scores = scores.to(torch.promote_types(q.dtype, torch.float32)) * spec.scaling
    return scores if spec.softcap is None else torch.tanh(scores / spec.softcap) * spec.softcap


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Return the scores with all but the ``count`` largest of each row masked."""
    if scores.shape[-1] <= count:
        return scores
    return scores.masked_fill(scores < scores.topk(count, -1).values[..., -1:], -torch.inf)


def _mix(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    grouped = weights.reshape(1, values.shape[1], -1, *weights.shape[2:])
    return (grouped @ values.unsqueeze(2)).flatten(1, 2)
