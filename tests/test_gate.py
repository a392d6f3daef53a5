"""Which models pass, and that the self-test would notice a model that must not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from tiny import ARCHITECTURES, tiny

from forerun.attention import AttentionSpec
from forerun.model import gate, scorer
from forerun.model.gate import UnsupportedModelError


def build(class_name: str, **config: Any) -> transformers.PreTrainedModel:
    model_class = getattr(transformers, class_name)
    return model_class(model_class.config_class(vocab_size=32, **config)).eval()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_supported_architectures_pass(architecture: str) -> None:
    gate.check(tiny(architecture))


@pytest.mark.parametrize(
    ("class_name", "config", "reason"),
    [
        ("BloomForCausalLM", {"hidden_size": 16, "n_layer": 1, "n_head": 2}, "ALiBi"),
        ("MptForCausalLM", {"d_model": 16, "n_heads": 2, "n_layers": 1}, "ALiBi"),
        ("MambaForCausalLM", {"hidden_size": 16, "num_hidden_layers": 1}, "recurrent"),
        (
            "T5ForConditionalGeneration",
            {"d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 16},
            "encoder-decoder",
        ),
        (
            "LlamaForSequenceClassification",
            {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "language-modelling head",
        ),
    ],
)
def test_unsupported_models_are_refused_with_the_reason(class_name: str, config: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        gate.check(build(class_name, **config))


def test_training_mode_is_refused() -> None:
    model = copy.deepcopy(tiny("llama")).train()
    with pytest.raises(UnsupportedModelError, match="training mode"):
        gate.check(model)


def test_a_bidirectional_model_fails_the_self_test() -> None:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    model = build("BertLMHeadModel", initializer_range=0.3, **shape)
    with pytest.raises(UnsupportedModelError):
        gate.check(model)


@pytest.mark.parametrize(
    "wrong", [AttentionSpec(0.2), AttentionSpec(8**-0.5, window=3), AttentionSpec(8**-0.5, None, 1)]
)
def test_the_self_test_notices_wrong_attention(monkeypatch: pytest.MonkeyPatch, wrong: AttentionSpec) -> None:
    attend = scorer.Pass.attend
    monkeypatch.setattr(scorer.Pass, "attend", lambda self, layer, q, k, v, spec: attend(self, layer, q, k, v, wrong))
    with pytest.raises(UnsupportedModelError, match="differ from its own"):
        gate.check(tiny("llama"))


def test_a_model_keeps_its_own_attention_after_a_pass() -> None:
    model = tiny("llama")
    before = model.config._attn_implementation
    gate.check(model)
    assert model.config._attn_implementation == before
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()
