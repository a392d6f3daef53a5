"""The recipe as data: the shapes of the two models, the stages of their training and the optimizer's settings.

A schedule runs in progress from 0 to 1, the share of the requested steps or minutes. Text comes first; then a short
stage of repeated spans, in which copying appears; then the mix; at last longer rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import LlamaConfig


@dataclass(frozen=True)
class TrainingShape:
    """The dimensions of a Llama model with tied embeddings and heads of 64."""

    layers: int
    hidden: int
    intermediate: int
    vocabulary: int = 4096

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.hidden, intermediate_size=self.intermediate,
            num_hidden_layers=self.layers, num_attention_heads=self.hidden // 64, num_key_value_heads=self.hidden // 64,
            max_position_embeddings=131_072, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """Training up to progress ``until``: ``rows`` rows of ``length`` tokens, whose kinds are drawn by ``mix``. A share
    ``gaps`` has gaps in its positions. Distant keys count up to ``crowd`` times (``crowding.py``); 1 turns that off."""

    name: str
    until: float
    length: int
    rows: int
    mix: Mapping[str, float]
    gaps: float = 0.3
    crowd: float = 1.0


TEXT = {"prose": 0.48, "code": 0.22, "maths": 0.09, "rag": 0.06, "table": 0.05, "quote": 0.05, "needle": 0.05}
MIX = {
    "prose": 0.14, "code": 0.09, "maths": 0.05, "spans": 0.19,
    "rag": 0.17, "table": 0.22, "quote": 0.05, "needle": 0.09,
}  # fmt: skip
LONG = {
    "prose": 0.30, "code": 0.06, "maths": 0.03, "spans": 0.18,
    "rag": 0.12, "table": 0.14, "quote": 0.03, "needle": 0.14,
}  # fmt: skip

STAGES = (
    Stage("text", 0.25, length=256, rows=16, mix=TEXT, gaps=0.5),
    Stage("spans", 0.29, length=512, rows=8, mix={"spans": 1.0}, gaps=0.5),
    Stage("mix", 0.92, length=512, rows=16, mix=MIX, crowd=64),
    Stage("long", 0.97, length=2048, rows=4, mix=LONG, crowd=64),
    Stage("longer", 1.00, length=8192, rows=1, mix=LONG, crowd=16),
)
DRAFT_STAGES = (
    Stage("text", 0.25, length=256, rows=16, mix=TEXT),
    Stage("spans", 0.40, length=512, rows=8, mix={"spans": 1.0}),
    Stage("mix", 1.00, length=512, rows=8, mix=MIX),
)
HYBRID_STAGES = (
    Stage("spans", 0.15, length=256, rows=8, mix={"prose": 0.3, "code": 0.2, "spans": 0.5}),
    Stage("mix", 0.85, length=512, rows=8, mix=MIX),
    Stage("long", 1.00, length=2048, rows=2, mix=LONG, crowd=16),
)
QUICK = (
    Stage("text", 0.5, length=64, rows=2, mix={"prose": 0.5, "table": 0.5}),
    Stage("spans", 1.0, length=64, rows=2, mix={"spans": 1.0}),
)


@dataclass(frozen=True)
class Recipe:
    """How one model is trained; the schedule's length is `minutes` or `steps`, whichever is given."""

    shape: TrainingShape
    stages: tuple[Stage, ...] = STAGES
    minutes: float | None = None
    steps: int | None = None
    seed: int = 0
    muon_rate: float = 0.02
    adam_rate: float = 3e-3
    warm_up: float = 0.01
    decay: float = 0.45
    half: bool = False
    compiled: bool = False
    checkpoint_every: float = 180.0
    log_every: int = 20

    def progress(self, step: int, seconds: float) -> float:
        done = step / self.steps if self.steps is not None else seconds / 60 / (self.minutes or 1)
        return min(1.0, done)

    def stage(self, progress: float) -> Stage:
        return next(stage for stage in self.stages if progress < stage.until or stage.until == 1)

    def rate(self, progress: float) -> float:
        """Return the factor on the learning rates: a linear ramp up, a plateau, a linear decay to 0."""
        return min(1.0, (progress + 1e-3) / self.warm_up, (1 - progress) / self.decay)


TARGET = TrainingShape(layers=4, hidden=256, intermediate=704)
DRAFT = TrainingShape(layers=2, hidden=192, intermediate=512)
TINY = TrainingShape(layers=1, hidden=64, intermediate=96, vocabulary=512)
