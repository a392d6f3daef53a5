"""H2O's cache (Zhang et al. 2023, arXiv 2306.14048): the tokens with the most attention so far, and the recent ones.

Every layer and KV head chooses for itself. A token's attention is the sum of its softmax weights over all committed
queries since it was committed, added up over the query heads of a group. The paper's greedy eviction (Algorithm 1) uses
only these sums, so an evicted token never comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from benchmarks.papers.topk import attention_scores, softmax_weights
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.decoding.level import CacheFactory
from forerun.decoding.recipes import rollback_tokens
from forerun.kernels.attention.attention import AttentionSpec, Rows
from forerun.kv.cache import READ_BLOCK, Cache, KVShape, append, compact


def target_cache(settings: LongContextConfig) -> CacheFactory:
    """Half of ``LongContextConfig.cache_budget`` for heavy hitters, half for recent tokens, as in H2O's experiments."""
    recent = max(1, settings.cache_budget // 2)
    slack = rollback_tokens(settings)
    return lambda scorer, source: HeavyHitterCache(settings.cache_budget - recent, recent, slack)


@dataclass
class State:
    """What the cache holds.

    Attributes:
        length, held: tokens committed, and those of them that a pass sees.
        rows: by layer keys, values and positions in the text, ``[1, Hkv, >= held, ...]``.
        attention: by layer the sums of softmax weights, ``[1, Hkv, held]``, without those of the queries in ``log``.
        log: by layer the weights of the last ``slack`` queries, ``[1, Hkv, *]`` each, so that they can be taken back.
    """

    length: int = 0
    held: int = 0
    rows: dict[int, Rows] = field(default_factory=dict)
    attention: dict[int, torch.Tensor] = field(default_factory=dict)
    log: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    @property
    def lowest(self) -> int:
        """The shortest length to which it can be truncated, besides 0."""
        return self.length - len(next(iter(self.log.values()), []))

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        tensors = [t for rows in self.rows.values() for t in rows]
        tensors += [t for log in self.log.values() for t in log]
        return sum(t.nbytes for t in (*tensors, *self.attention.values()))


class HeavyHitterCache(Cache):
    """Heavy hitters and recent tokens of one row; keys keep their positions in the text.

    Fused kernels do not return softmax weights, so attention is computed step by step, in at least float32. The state
    before the last eviction is kept: truncating behind the eviction goes back to that state.

    Args:
        heavy: tokens kept for their attention, per layer and KV head.
        recent: most recent tokens, always kept.
        slack: tokens that may be added after an eviction before the next one, and the longest draft that can be taken
            back. 0 evicts after every commit, as in the paper.
    """

    def __init__(self, heavy: int, recent: int, slack: int) -> None:
        for name, value, least in (("heavy", heavy, 0), ("recent", recent, 1), ("slack", slack, 0)):
            if value < least:
                raise ValueError(f"{name} is {value}; it must be at least {least}")
        self.heavy, self.recent, self.slack = heavy, recent, slack
        self.length = 0
        self.state = State()
        self._before: State | None = None
        self._weights: dict[int, torch.Tensor] = {}  # of the last pass by layer, [1, Hkv, n, m]

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        now, wide = self.state, torch.promote_types(q.dtype, torch.float32)
        positions = torch.from_numpy(block.positions).to(q.device)
        capacity = self.heavy + self.recent + self.slack + len(block)
        new = (k, v, positions.expand(k.shape[:3]))
        rows = now.rows[layer] = append(now.rows.get(layer), new, now.held, capacity)
        keys, values, places = (t[:, :, : now.held + len(block)] for t in rows)
        weights = _weights(q.to(wide), keys.to(wide), places, positions, block, spec)
        self._weights[layer] = weights.sum(2)
        return (weights @ values.to(wide).unsqueeze(2)).reshape(*q.shape[:3], v.shape[3]).to(q.dtype)

    def commit(self, block: Block, path: Sequence[int]) -> None:
        now, m = self.state, len(block.pending)
        early = max(0, m - self.slack)  # queries of a long block whose weights need not be kept one by one
        queries = [*range(early, m), *(m + node for node in path)]
        columns = [*range(now.held + m), *(now.held + m + node for node in path)]
        for layer, weights in self._weights.items():
            compact(now.rows[layer], now.held + m, path)
            sums = weights.new_zeros(*weights.shape[:2], len(columns))
            sums[:, :, : now.held] = now.attention.get(layer, 0.0)
            log = [*now.log.get(layer, []), *weights[:, :, queries][..., columns].unbind(2)]
            settled = max(0, len(log) - self.slack)
            summed = [*log[:settled], weights[:, :, :early].sum(2)[:, :, columns]]
            now.attention[layer], now.log[layer] = _with(sums, summed), log[settled:]
        self._weights = {}
        now.held = len(columns)
        self.length = now.length = now.length + m + len(path)
        if now.held > self.heavy + self.recent + self.slack:
            self._evict()

    def _evict(self) -> None:
        before = self._before = self.state
        self.state = State(before.length, self.heavy + self.recent)
        for layer, rows in before.rows.items():
            sums = _with(before.attention[layer], before.log[layer])
            older = before.held - self.recent
            ranked = sums[:, :, :older].argsort(dim=-1, descending=True, stable=True)
            recent = torch.arange(older, before.held, device=sums.device).expand(*sums.shape[:2], -1)
            kept = torch.cat((ranked[:, :, : self.heavy].sort(-1).values, recent), 2)
            keys, values = (t.gather(2, kept.unsqueeze(3).expand(-1, -1, -1, t.shape[3])) for t in rows[:2])
            self.state.rows[layer] = keys, values, rows[2].gather(2, kept)
            self.state.attention[layer], self.state.log[layer] = sums.gather(2, kept), []

    def truncate(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between 0 and {self.length}")
        goes_back = self._before is not None and length < self._before.length
        state = self._before if self._before is not None and goes_back else self.state
        if 0 < length < state.lowest:
            raise ValueError(
                f"length is {length}, and tokens before it are evicted; it must be 0, "
                f"or between {state.lowest} and {self.length} (slack is {self.slack})"
            )
        if goes_back or not length:
            self._before = None
        self.state = state if length else State()
        self._drop(self.length - length if not goes_back else state.length - length)
        self.length = length

    def _drop(self, count: int) -> None:
        """Drop the last ``count`` tokens, which the log has queries of."""
        now = self.state
        if not now.length:
            return
        now.length, now.held = now.length - count, now.held - count
        for layer, log in now.log.items():
            now.attention[layer] = now.attention[layer][:, :, : now.held]
            del log[len(log) - count :]

    @property
    def held(self) -> int:
        """Committed tokens that a pass sees."""
        return self.state.held

    @property
    def nbytes(self) -> int:
        """Bytes of the state, and of the one before the last eviction."""
        return self.state.nbytes + (0 if self._before is None else self._before.nbytes)

    def needs(self, shape: KVShape, tokens: int) -> int:
        places = self.heavy + self.recent + self.slack + min(tokens, READ_BLOCK)
        positions = sum(layer.heads for layer in shape.layers.values()) * torch.int64.itemsize
        sums = sum(layer.heads * max(layer.width, torch.float32.itemsize) for layer in shape.layers.values())
        return 2 * places * (shape.nbytes + positions + sums * (1 + self.slack))


def _with(sums: torch.Tensor, log: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sums with each query's weights, ``[1, Hkv, *]``; those of tokens truncated since then are ignored."""
    sums = sums.clone()
    for weights in log:
        width = min(weights.shape[2], sums.shape[2])
        sums[:, :, :width] += weights[:, :, :width]
    return sums


def _weights(
    q: torch.Tensor,
    keys: torch.Tensor,
    places: torch.Tensor,
    positions: torch.Tensor,
    block: Block,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Softmax weights ``[1, Hkv, H / Hkv, n, m]`` of the block's queries over cached keys and the block's keys.

    Args:
        q: ``[1, H, n, d]``.
        keys: ``[1, Hkv, m, d]``; the last n are the block's.
        places: positions of the keys, ``[1, Hkv, m]``.
        positions: positions of the queries, ``[n]``.
        block: says which of its tokens see each other.
        spec: the layer's attention parameters.
    """
    scores = attention_scores(q, keys, spec).unflatten(1, (keys.shape[1], -1))
    bias = block.bias(None, range(0), q)
    if bias is not None:
        scores[..., -q.shape[2] :] += bias
    if spec.window is not None:
        far = places[:, :, None, None] <= positions[:, None] - spec.window
        scores = scores.masked_fill(far, -torch.inf)
    return softmax_weights(scores.flatten(1, 2), spec).view(scores.shape)
