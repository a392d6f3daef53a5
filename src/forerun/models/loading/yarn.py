"""Extend a model's positions beyond its training with YaRN (Peng et al. 2023, arXiv 2309.00071), by its configuration.

Slow rotations are slowed by the factor, fast ones stay, and attention becomes slightly sharper. Weights do not change,
so quality at such lengths is not guaranteed.
"""

from __future__ import annotations

from transformers import PreTrainedConfig, PreTrainedModel


def stretch_model(model: PreTrainedModel, factor: float) -> None:
    """Rebuild a loaded model's rotary embeddings for sequences ``factor`` times as long."""
    stretch(model.config, factor)
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.__init__(module.config)
            module.to(model.device)


def stretch(config: PreTrainedConfig, factor: float) -> None:
    """Configure a model for sequences ``factor`` (above 1) times as long; raise ValueError if it cannot."""
    if not factor > 1:
        raise ValueError(f"the YaRN factor is {factor:g}; it must be above 1")
    text = config.get_text_config(decoder=True)
    rope, length = getattr(text, "rope_parameters", None) or {}, getattr(text, "max_position_embeddings", None)
    kind = rope.get("rope_type")
    if kind != "default" or length is None:
        found = f"it has rope_type {kind!r}" if kind else "it has none"
        raise ValueError(f"YaRN needs a model with plain rotary positions (rope_type 'default'); {found}")
    text.rope_parameters = dict(rope, rope_type="yarn", factor=factor, original_max_position_embeddings=length)
    text.max_position_embeddings = int(factor * length)
