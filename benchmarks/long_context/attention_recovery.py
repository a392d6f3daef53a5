"""How sparse a model's attention to a long prompt is, and for how long the keys that matter stay the same.

For every layer and head: the share of attention to the prompt that goes to the top k keys (TriForce, figure 3a); and
the share that goes, while text is generated, to the keys that were on top at the prompt's end (figure 3c).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from benchmarks.long_context.long_bench import Prefilled
from benchmarks.long_context.rows import Row
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer


class Probe(Cache):
    """A wrapper of a full cache that records the attention of each block's last token to the prompt.

    Args:
        full: does the work.
        prompt: number of first tokens whose keys are observed.
        sizes: values of k, ascending.
        budget: keys chosen at the first pass; their share is followed from then on.
    """

    def __init__(self, full: FullCache, prompt: int, sizes: Sequence[int], budget: int) -> None:
        self.full = full
        self.top: dict[int, list[torch.Tensor]] = {}
        """By layer and pass, the top k keys' share of attention, ``[H, len(sizes)]``."""
        self.kept: dict[int, list[torch.Tensor]] = {}
        """By layer and pass, the share of the keys chosen at the first pass, ``[H]``."""
        self._prompt = prompt
        self._sizes = [min(size, prompt) for size in sizes]
        self._budget = min(budget, prompt)
        self._chosen: dict[int, torch.Tensor] = {}

    @property
    def length(self) -> int:  # type: ignore[override]
        """See ``Cache.length``."""
        return self.full.length

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """See ``Cache.attend``."""
        out = self.full.attend(layer, q, k, v, block, spec)
        shares = _shares(q[0, :, -1], self.full.read(layer, 0, self._prompt)[0][0], spec)
        ranked = shares.topk(max(self._sizes), -1).values.cumsum(-1)
        self.top.setdefault(layer, []).append(ranked[:, [size - 1 for size in self._sizes]])
        chosen = self._chosen.setdefault(layer, shares.topk(self._budget, -1).indices)
        self.kept.setdefault(layer, []).append(shares.gather(-1, chosen).sum(-1))
        return out

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``."""
        self.full.commit(block, path)

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``."""
        self.full.truncate(length)

    @property
    def nbytes(self) -> int:
        """Bytes of the full cache."""
        return self.full.nbytes


def _shares(q: torch.Tensor, keys: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Each key's share of the attention of queries ``[H, d]`` to keys ``[Hkv, m, d]``: ``[H, m]``."""
    grouped = q.reshape(keys.shape[0], -1, q.shape[-1]).float()
    scores = (grouped @ keys.float().transpose(-1, -2)).flatten(0, 1) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    return scores.softmax(-1)


@torch.inference_mode()
def watch(target: Scorer, prompt: Prefilled, sizes: Sequence[int], budget: int, new_tokens: int) -> Probe:
    """A probe that has seen the last token of the prompt and the greedy continuation."""
    prompt.rewind()
    probe = Probe(prompt.cache, len(prompt.tokens) - 1, sizes, budget)
    token = prompt.tokens[-1]
    for _ in range(new_tokens + 1):
        block = Block(np.array([token]), DraftTree.empty(), probe.length)
        logits = target.score([block], [probe])[0]
        probe.commit(block, [])
        token = int(logits[0].argmax())
    return probe


def top_rows(probe: Probe, sizes: Sequence[int]) -> list[Row]:
    """The top k keys' share by layer, head and k, averaged over passes."""
    rows = []
    for layer, passes in sorted(probe.top.items()):
        mean = torch.stack(passes).mean(0).tolist()
        rows += [
            {"layer": layer, "head": head, "k": k, "recovered": round(share, 5)}
            for head, shares in enumerate(mean)
            for k, share in zip(sizes, shares, strict=True)
        ]
    return rows


def locality_rows(probe: Probe) -> list[Row]:
    """The share of the keys chosen at the prompt's end, by layer and generated tokens, averaged over heads."""
    return [
        {"layer": layer, "token": token, "recovered": round(float(shares.mean()), 5)}
        for layer, passes in sorted(probe.kept.items())
        for token, shares in enumerate(passes)
    ]
