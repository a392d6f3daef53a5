"""Counts and times of a generation, per step. ``tokens per step`` is the Lookahead paper's effective decoding length
(EDL, definition 1): accepted drafts plus one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Stats:
    """One request's steps and times.

    Attributes:
        drafted, accepted: nodes, per step.
        emitted: tokens committed, per step: ``accepted`` plus one, except in a step that ends the request.
        prefill_seconds: from the start to the first token, including the drafter's prefill.
        propose_seconds, score_seconds, verify_seconds: time after the prefill for drafting, for forward passes, and for
            verifying and committing. Each row of a batch counts the full time of its steps.
        middle: statistics of the level that verifies inside the drafter, whose times are part of ``propose_seconds``.
    """

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    propose_seconds: float = 0.0
    score_seconds: float = 0.0
    verify_seconds: float = 0.0
    middle: Stats | None = None

    def inner(self) -> Stats:
        self.middle = self.middle or Stats()
        return self.middle

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        self.drafted.append(drafted)
        self.accepted.append(accepted)
        self.emitted.append(emitted)

    def add_seconds(self, propose: float, score: float, verify: float) -> None:
        """Add the times of a step."""
        self.propose_seconds += propose
        self.score_seconds += score
        self.verify_seconds += verify

    @property
    def steps(self) -> int:
        """Verifying passes, including the one that ends the prefill."""
        return len(self.emitted)

    @property
    def tokens(self) -> int:
        return sum(self.emitted)

    @property
    def tokens_per_step(self) -> float:
        """Effective decoding length."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def acceptance(self) -> float:
        """Acceptance rate: accepted drafts by drafted tokens."""
        drafted = sum(self.drafted)
        return sum(self.accepted) / drafted if drafted else 0.0

    @property
    def decode_seconds(self) -> float:
        """Time after the first step."""
        return self.propose_seconds + self.score_seconds + self.verify_seconds

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed: tokens after the first step per second."""
        return sum(self.emitted[1:]) / self.decode_seconds if self.decode_seconds else 0.0

    def drafted_mask(self) -> list[bool]:
        """Return for each generated token whether it was an accepted draft."""
        return [
            i < accepted for accepted, emitted in zip(self.accepted, self.emitted, strict=True) for i in range(emitted)
        ]

    def histogram(self) -> dict[int, int]:
        """Return how many steps committed 1, 2, ... tokens."""
        return dict(sorted(Counter(self.emitted).items()))

    def summary(self) -> dict[str, object]:
        """Return everything as plain values, for JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tokens_per_step": round(self.tokens_per_step, 4),
            "drafted": sum(self.drafted),
            "accepted": sum(self.accepted),
            "acceptance": round(self.acceptance, 4),
            "histogram": {str(k): v for k, v in self.histogram().items()},
            "prefill_seconds": round(self.prefill_seconds, 6),
            "propose_seconds": round(self.propose_seconds, 6),
            "score_seconds": round(self.score_seconds, 6),
            "verify_seconds": round(self.verify_seconds, 6),
            "tokens_per_second": round(self.tokens_per_second, 2),
        } | ({} if self.middle is None else {"middle": self.middle.summary()})
