"""H2O's cache (Zhang et al. 2023, arXiv 2306.14048): the tokens with the most attention so far, and the recent ones.

Every layer and KV head chooses for itself. A token's attention is the sum of its softmax weights over all committed
queries since it was committed, added up over the query heads of a group. The paper's greedy eviction (Algorithm 1) uses
only these sums, so an evicted token never comes back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.core.block import Block
from forerun.kernels.attention.attention import AttentionSpec, weigh
from forerun.kv.bounded import SLACK, BoundedCache, Extent
from forerun.kv.cache import KVShape, LayerShape
from forerun.kv.kv_rows import Rows


class HeavyHitterCache(BoundedCache):
    """Heavy hitters and recent tokens of one row; keys keep their positions in the text.

    Fused kernels do not return softmax weights, so attention is computed step by step, in at least float32. The weights
    of the last ``slack`` queries are kept one by one, so that they can be rolled back.

    Args:
        heavy: tokens kept for their attention, per layer and KV head.
        recent: most recent tokens, always kept.
        slack: see ``BoundedCache``: the longest draft that can be rolled back. 0 evicts after every commit, as in the
            paper.
    """

    def __init__(self, heavy: int, recent: int, slack: int = SLACK) -> None:
        if heavy < 0:
            raise ValueError(f"heavy is {heavy}; it must be 0 or more")
        if recent < 1:
            raise ValueError(f"recent is {recent}; it must be at least 1")
        super().__init__(0, heavy + recent, slack)
        self.heavy = heavy
        self.recent = recent
        self._tail: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._log: dict[int, list[torch.Tensor]] = {}
        self._log_before: dict[int, list[torch.Tensor]] = {}

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``Cache.attend``."""
        wide = torch.promote_types(q.dtype, torch.float32)
        positions = torch.from_numpy(block.positions).to(q.device)
        drawn = k.new_zeros(k.shape[:3], dtype=wide)
        rows = self._store(layer, k, v, positions.expand(drawn.shape), drawn)
        keys, values, places, _ = (t[:, :, : self._held + len(block)] for t in rows)
        weights = _weights(q.to(wide), keys.to(wide), places, positions, block, spec)
        by_query = weights.sum(2)
        early = self._early(block)
        self._tail[layer] = by_query[:, :, :early].sum(2), by_query[:, :, early:]
        return (weights @ values.to(wide).unsqueeze(2)).reshape(*q.shape[:3], v.shape[3]).to(q.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes reserved in both buffers, and bytes of the weights that are kept one by one."""
        logs = (*self._log.values(), *self._log_before.values())
        return super().nbytes + sum(t.nbytes for log in logs for t in log)

    def needs(self, shape: KVShape, tokens: int) -> int:
        """See ``Cache.needs``; also what the last ``slack`` queries gave to each place, twice."""
        single = sum(layer.heads * max(layer.width, torch.float32.itemsize) for layer in shape.layers.values())
        return super().needs(shape, tokens) + 2 * self.slack * self._places(tokens) * single

    def _place_bytes(self, layer: LayerShape) -> int:
        return layer.nbytes + layer.heads * (torch.int64.itemsize + max(layer.width, torch.float32.itemsize))

    def _early(self, block: Block) -> int:
        """Pending tokens of a long block whose weights need not be kept one by one."""
        return max(0, len(block.pending) - self.slack)

    def _keep(self, block: Block, path: Sequence[int]) -> None:
        m, early = len(block.pending), self._early(block)
        columns, queries = (_kept(count, path) for count in (self._held + m, m - early))
        super()._keep(block, path)
        for layer, (folded, single) in self._tail.items():
            seen, chosen = columns.to(folded.device), queries.to(folded.device)
            log = self._log.setdefault(layer, [])
            log.extend(single.index_select(2, chosen).index_select(3, seen).unbind(2))
            settled = max(0, len(log) - self.slack)
            drawn = self._layers[layer][3][:, :, : self._held]
            _add(drawn, [*log[:settled], folded.index_select(2, seen)])
            del log[:settled]
        self._tail = {}

    def _evict(self) -> None:
        super()._evict()
        self._log, self._log_before = {}, self._log

    def _thin(self, layer: int, rows: Rows) -> Rows:
        keys, values, places, drawn = (t[:, :, : self._held] for t in rows)
        drawn = drawn.clone()
        _add(drawn, self._log[layer])
        older = self._held - self.recent
        ranked = drawn[:, :, :older].argsort(dim=-1, descending=True, stable=True)
        recent = torch.arange(older, self._held, device=drawn.device).expand(*drawn.shape[:2], -1)
        kept = torch.cat((ranked[:, :, : self.heavy].sort(-1).values, recent), 2)
        return (*(_gather(t, kept) for t in (keys, values)), *(t.gather(2, kept) for t in (places, drawn)))

    def _lowest(self, back: Extent | None) -> int:
        return self.length - _size(self._log) if back is None else back.length - _size(self._log_before)

    def _turn_back(self, back: Extent) -> None:
        super()._turn_back(back)
        self._log, self._log_before = self._log_before, {}

    def _cut(self, length: int) -> None:
        left = _size(self._log) - (self.length - length)
        for log in self._log.values():
            del log[max(0, left) :]
        super()._cut(length)


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
    kv_heads, n = keys.shape[1], q.shape[2]
    grouped = q.reshape(1, kv_heads, -1, n, q.shape[3])
    scores = (grouped @ keys.unsqueeze(2).transpose(-1, -2)) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    bias = block.bias(None, range(0), q)
    if bias is not None:
        scores[..., -n:] += bias
    if spec.window is not None:
        far = places[:, :, None, None] <= positions[:, None] - spec.window
        scores = scores.masked_fill(far, -torch.inf)
    return weigh(scores.flatten(1, 2), spec).view(scores.shape)


def _kept(count: int, path: Sequence[int]) -> torch.Tensor:
    """Indices of the first ``count`` rows, and of the tree nodes of ``path`` after them."""
    return torch.tensor([*range(count), *(count + node for node in path)], dtype=torch.long)


def _add(drawn: torch.Tensor, weights: Sequence[torch.Tensor]) -> None:
    """Add each query's weights, ``[1, Hkv, *]``, to the sums; weights of tokens truncated since then are ignored."""
    for each in weights:
        width = min(each.shape[2], drawn.shape[2])
        drawn[:, :, :width] += each[:, :, :width]


def _gather(t: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    return t.gather(2, kept.unsqueeze(3).expand(-1, -1, -1, t.shape[3]))


def _size(log: dict[int, list[torch.Tensor]]) -> int:
    """Number of queries whose weights are kept one by one."""
    return len(next(iter(log.values()), []))
