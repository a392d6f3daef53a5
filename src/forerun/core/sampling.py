"""From logits to a token: greedy, coupled sampling (Gumbel-max), or rejection sampling.

Noise is a pure function: a 64-bit counter hash of (seed, position, salt, token id). So the output for a seed does not
depend on drafter, batch or device. Draft and target sample with equal noise, so they agree where their distributions
are close. Gumbel-max: argmax(log p + g), with Gumbel noise g, is a sample of p.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch

from forerun.core.compiling import COMPILES
from forerun.core.pinned import to_device
from forerun.core.sampling_kernels import BITS, GOLDEN, MIX1, MIX2, best_with_noise, highest

Method = Literal["greedy", "coupled", "rejection"]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""A ``transformers`` logits processor: (ids ``[1, t]``, scores ``[1, V]``) -> scores ``[1, V]``."""


@dataclass(frozen=True)
class InTurn:
    """Processors applied in sequence.

    Attributes:
        rowwise: whether each uses only a row's scores, without reading values from the device, so that many rows ``[n,
            V]`` may be processed at once.
        anywhere: whether the device may differ between calls.
        nameless: whether results do not depend on token ids, so that a few tokens' scores suffice if all others are
            -inf.
        temperature: by which it divides, if it does nothing else.
    """

    parts: tuple[Processor, ...]
    rowwise: bool = False
    anywhere: bool = False
    nameless: bool = False
    temperature: float | None = None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return reduce(lambda so_far, part: part(ids, so_far), self.parts, scores)


@dataclass(frozen=True)
class Remembering:
    """A stateful processor: it must run once per committed token, in order; ``pure``, if any, also runs on drafts."""

    whole: Processor
    pure: Processor | None

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.whole(ids, scores)


@dataclass(frozen=True)
class SpeculativeProcessor:
    """A processor for drafts. If it raises, scores stay unchanged: the output may never contain the draft."""

    processor: Processor

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        try:
            return self.processor(ids, scores)
        except Exception:
            return scores


class Constraint(Protocol):
    """Tokens that may follow a sequence: the sampler's interface to a grammar.

    Results depend on the ids alone, so sequences may come in any order: drafts, branches of a tree, forks. Ids are
    those of ``Request``: padding, prompt and generated tokens, int64 ``[t]``.
    """

    def mask(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return new scores ``[V]``, -inf for forbidden tokens; raise RuntimeError if all are, or the ids already."""
        ...

    def forced(self, ids: torch.Tensor, most: int) -> list[int]:
        """Return up to ``most`` tokens that must follow, as far as known; never raise."""
        ...

    def certain(self, ids: torch.Tensor) -> int | None:
        """Return the only token that may follow, if known without work; else None. Never raise."""
        ...

    def complete(self, ids: torch.Tensor) -> bool:
        """Return whether the sequence is complete, so that nothing may follow; raise RuntimeError for forbidden ids."""
        ...

    def on_trial(self) -> Constraint:
        """Return a constraint for drafts, which allows all tokens where this one would raise."""
        ...


class Salt(enum.IntEnum):
    """A term of the hash that makes noise for different purposes independent."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


@dataclass(frozen=True)
class Sampler:
    """How a row's next token is chosen.

    Attributes:
        method: ``greedy`` chooses the best score; ``coupled`` the best with Gumbel noise, so that one walk verifies any
            tree; ``rejection`` chooses like ``coupled``, but verifies a chain with ``q`` by Leviathan's test.
        processor: runs on a node's logits, with the ids that lead to the node.
        temperature: by which the processor divides scores; only drafts use it, to weigh the noise.
    """

    method: Method = "greedy"
    seed: int = 0
    processor: Processor | None = None
    constraint: Constraint | None = None
    temperature: float = 1.0
    salt: Salt = Salt.TARGET

    def __post_init__(self) -> None:
        if self.method not in ("greedy", "coupled", "rejection"):
            raise ValueError(f"method is {self.method!r}; allowed are 'greedy', 'coupled' and 'rejection'")

    @cached_property
    def takes_best(self) -> bool:
        """Whether the choice is the argmax of the raw logits."""
        return self.method == "greedy" and self.processor is None and self.constraint is None

    @cached_property
    def divisor(self) -> float | None:
        """By what a choice divides logits before it adds noise; 0 for the argmax of logits, None if it does more."""
        if self.takes_best:
            return 0.0
        if self.method == "greedy" or self.constraint is not None:
            return None
        if self.processor is None:
            return 1.0
        return self.processor.temperature if isinstance(self.processor, InTurn) else None

    @property
    def rowwise(self) -> bool:
        """Whether choices depend only on logits and position, so that many rows can be chosen at once."""
        return self.constraint is None and (
            self.processor is None or (isinstance(self.processor, InTurn) and self.processor.rowwise)
        )

    @property
    def nameless(self) -> bool:
        """Whether logits ``[n, D]`` of a few tokens suffice, if all others are minus infinity."""
        return self.constraint is None and (
            self.processor is None or (isinstance(self.processor, InTurn) and self.processor.nameless)
        )

    @property
    def anywhere(self) -> bool:
        """Whether it may choose from logits copied to the CPU, if the model is on another device."""
        return self.processor is None or (isinstance(self.processor, InTurn) and self.processor.anywhere)

    def scores(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return processed scores ``[V]`` in float32, as in ``transformers``, from logits ``[V]`` after ids ``[t]``."""
        scores = logits.to(torch.float32, copy=self.processor is not None)
        if self.constraint is not None:
            scores = self.constraint.mask(ids, scores)
        if self.processor is None:
            return scores
        return self.processor(to_device(ids[None], scores.device), scores[None])[0]

    def scores_of_rows(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ``scores`` of many rows ``[n, V]``; for ``rowwise`` samplers."""
        scores = logits.to(torch.float32, copy=self.processor is not None)
        if self.processor is None:
            return scores
        return self.processor(torch.empty((len(scores), 0), dtype=torch.int64, device=scores.device), scores)

    def choose(self, scores: torch.Tensor, position: int, salt: Salt | None = None) -> int:
        if self.method == "greedy":
            return highest_of(scores)
        return _sample(scores, self.seed, position, self.salt if salt is None else salt)

    def choices(self, scores: torch.Tensor, positions: Sequence[int], salt: Salt | None = None) -> torch.Tensor:
        """Choose for rows of scores ``[n, V]``, each at its position; int64 ``[n]``, on the scores' device."""
        if self.method == "greedy":
            return scores.argmax(-1)
        return highest_of_rows(scores, self.seed, positions, self.salt if salt is None else salt)

    def noise(self, positions: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Return what a pass needs to sample tokens at these positions, ``[n, 2]``: a key of the hash (see
        ``_gumbel_of_rows``), and the bits of the temperature in float64. None if ``divisor`` is 0 or None."""
        if not self.divisor:
            return None
        keys = {position: _signed(_key(self.seed, position, self.salt)) for position in positions}
        bits = int(np.float64(self.divisor).view(np.int64))
        return np.array([(keys[position], bits) for position in positions], np.int64)

    def chances(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the probability of tokens ``[n]`` by raw logits ``[n, V]``; float64 ``[n]``, on their device."""
        return logits.softmax(-1).gather(-1, tokens[:, None])[:, 0].double()

    def inner(self) -> Sampler:
        """Return a drafter's sampler, with a stateless processor and the same noise, except under rejection sampling,
        whose test needs drafts independent of its noise."""
        seed = mixed(self.seed & MASK64) if self.method == "rejection" else self.seed
        processor = self.processor.pure if isinstance(self.processor, Remembering) else self.processor
        known = isinstance(processor, InTurn) and (processor.rowwise or processor.anywhere)
        if not (processor is None or known or isinstance(processor, SpeculativeProcessor)):
            processor = SpeculativeProcessor(processor)
        constraint = None if self.constraint is None else self.constraint.on_trial()
        return replace(self, seed=seed, processor=processor, constraint=constraint)

    def draft_salt(self) -> Salt:
        """Return the salt of drafts."""
        return Salt.DRAFT if self.method == "rejection" else Salt.TARGET


def best_of(logits: torch.Tensor) -> int:
    """Return the best token of logits ``[V]``, compared in float32 at most, as transformers does."""
    return highest_of(logits.float() if logits.dtype == torch.float64 else logits)


def highest_of(scores: torch.Tensor) -> int:
    """Return the token with the highest score ``[V]``."""
    if COMPILES and scores.is_cpu and scores.dtype == torch.float32:
        return highest(scores.detach().contiguous().numpy())
    return int(scores.argmax())


def _sample(scores: torch.Tensor, seed: int, position: int, salt: Salt) -> int:
    if COMPILES and scores.device.type == "cpu" and scores.dtype == torch.float32:
        return best_with_noise(scores.detach().contiguous().numpy(), _key(seed, position, salt))
    return int(highest_of_rows(scores[None], seed, [position], salt))


def highest_of_rows(scores: torch.Tensor, seed: int, positions: Sequence[int], salt: Salt) -> torch.Tensor:
    """Return the best token of rows ``[n, V]`` with noise, int64 ``[n]``, on their device; 0 if none is possible."""
    best = (scores.double() + _gumbel_of_rows(seed, positions, scores.shape[-1], salt, scores.device)).max(-1)
    return best.indices.where(best.values > -torch.inf, 0)


MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int, salt: Salt) -> float:
    """Return a uniform number in (0, 1)."""
    return ((mixed(_key(seed, position, salt)) >> 64 - BITS) + 0.5) * 2.0**-BITS


def gumbel(seed: int, position: int, size: int, salt: Salt, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return standard Gumbel noise for token ids 0..size-1, float64 ``[size]``; entries do not depend on ``size``."""
    return _gumbel_of_rows(seed, [position], size, salt, device)[0]


def _gumbel_of_rows(
    seed: int, positions: Sequence[int], size: int, salt: Salt, device: torch.device | str
) -> torch.Tensor:
    """Return ``gumbel`` at each position, ``[n, size]``, without waiting for the device."""
    distinct, rows = np.unique(positions, return_inverse=True)
    keys = torch.tensor([_signed(_key(seed, position, salt)) for position in distinct.tolist()])
    bits = torch.arange(size, dtype=torch.int64, device=device).mul_(_signed(GOLDEN)) + to_device(keys, device)[:, None]
    for shift, factor in ((30, MIX1), (27, MIX2)):
        bits.bitwise_xor_(_shift_right(bits, shift)).mul_(_signed(factor))
    bits.bitwise_xor_(_shift_right(bits, 31))
    u = _shift_right(bits, 64 - BITS).double().add_(0.5).mul_(2.0**-BITS)
    return u.log_().neg_().log_().neg_().index_select(0, to_device(torch.from_numpy(rows), device))


def draw(probability: torch.Tensor, seed: int, position: int, salt: Salt) -> int:
    """Sample from an unnormalised distribution ``[V]``."""
    return _sample(probability.double().log(), seed, position, salt)


def _key(seed: int, position: int, salt: Salt) -> int:
    return mixed(mixed(seed & MASK64) + (position << 3 | int(salt)))


def mixed(value: int) -> int:
    """Apply one round of splitmix64."""
    value = (value + GOLDEN) & MASK64
    value = ((value ^ value >> 30) * MIX1) & MASK64
    value = ((value ^ value >> 27) * MIX2) & MASK64
    return value ^ value >> 31


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift logically; torch's shift keeps the sign."""
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)
