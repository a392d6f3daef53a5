"""Speed of model sizes without their weights: real kernels, random weights and keys, and a given acceptance rate.

Only the choice of tokens is simulated. The target's token at a position is a hash; each lower level chooses the token
of the level above with the given probability. All contestants yield plain decoding's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.long_context.long_bench import Prefilled, RequestMaker, Tokens
from forerun.core.block import Block
from forerun.core.pinned import to_device
from forerun.core.request import Request
from forerun.core.sampling import Salt, Sampler, uniform
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.kv.full_cache import FullCache
from forerun.models.forward.scorer import Scorer

READ = 4096  # tokens whose keys and values are made at once


@torch.inference_mode()
def random_prompt(
    scorer: Scorer, length: int, room: int, vocabulary: int, seed: int = 0, cache: FullCache | None = None
) -> Prefilled:
    """Return random tokens below ``vocabulary``, with random keys and values as after a prefill; in ``cache``, if
    given."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (length,), generator=generator)
    sample, kept = FullCache(1), scorer.queries_from
    scorer.keep_queries(0)
    block = Block(tokens[:1].numpy(), DraftTree.empty(), 0)
    scorer.score([block], [sample])
    sample.commit(block, [])
    scorer.queries_from = kept
    cache = cache or FullCache(length + room)
    layers = list(sample.layers)
    cache.addressed(layers, sample.read(layers[0], 0, 1)[0], 0)  # all layers' memory in one piece, as passes want it

    def rows(layer: int, count: int) -> Any:
        like = sample.read(layer, 0, 1)
        return tuple(torch.randn(*t.shape[:2], count, t.shape[3], dtype=t.dtype, device=t.device) for t in like)

    most = max(READ, length // 8) if cache.offloaded else READ  # each part of an offloaded one brings all before it in
    while cache.length < length - 1:  # in parts: all at once would take twice the memory
        count = min(most, length - 1 - cache.length)
        cache.extend({layer: rows(layer, count) for layer in sample.layers})
    cache.specs = sample.specs
    return Prefilled(tokens.tolist(), cache, queries=sample.queries)


@dataclass(frozen=True)
class SimulatedSampler(Sampler):
    """Chooses by a hash of the position; each level below the target (0) agrees with the one above at the rate
    ``agreement``."""

    agreement: Sequence[float] = ()
    vocabulary: int = 2
    level: int = 0

    divisor = None  # no pass can choose

    def choose(self, scores: torch.Tensor, position: int, salt: Salt = Salt.TARGET) -> int:
        token = int(uniform(self.seed, position, Salt.TARGET) * self.vocabulary)
        for level, agreement in enumerate(self.agreement[: self.level], 1):
            token += uniform(self.seed + level, position, Salt.ACCEPT) >= agreement
        return token % self.vocabulary

    def choices(self, scores: torch.Tensor, positions: Sequence[int], salt: Salt = Salt.TARGET) -> torch.Tensor:
        tokens = [self.choose(scores[:1], position, salt) for position in positions]
        return to_device(torch.tensor(tokens), scores.device)

    def chances(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the agreement with the level above: random weights know nothing of it."""
        return torch.full(tokens.shape, self.agreement[self.level - 1], dtype=torch.float64, device=tokens.device)

    def scores_of_rows(self, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits

    def inner(self) -> Sampler:
        return replace(self, level=self.level + 1)


def simulated(acceptance: float, small_acceptance: float, new_tokens: int, vocabulary: int) -> RequestMaker:
    """Make requests; the target accepts drafts over a sparse cache at the rate ``acceptance``, and the level above
    accepts the small model's at ``small_acceptance``. All levels share ``vocabulary``."""
    for name, value in (("acceptance", acceptance), ("small_acceptance", small_acceptance)):
        if not 0 <= value <= 1:
            raise ValueError(f"{name} is {value}; it must be between 0 and 1")

    def make(engine: Engine, tokens: Tokens, contestant: str) -> Request:
        levels = (small_acceptance,) if contestant == "streaming" else (acceptance, small_acceptance)
        sampler = SimulatedSampler("coupled", len(tokens) << 8, agreement=levels, vocabulary=vocabulary)
        return Request(tokens, new_tokens, sampler=sampler)

    return make
