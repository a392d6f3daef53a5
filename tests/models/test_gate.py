"""Which models pass, and that the self-test would notice a model that must not."""

import copy
import re
from typing import Any

import pytest
import torch
import transformers
from support.tiny import REFUSED, build, tiny

from forerun.kernels.attention.attention import AttentionSpec
from forerun.kernels.runtime import vector_ir
from forerun.models.forward import architecture, gate, scorer
from forerun.models.forward.compiled_forward import Decoder
from forerun.models.forward.gate import UnsupportedModelError

MORE_REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "whisper": ("WhisperForCausalLM",
        {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16},
        "the decoder of an encoder-decoder"),
    "mistral, a window of one token": ("MistralForCausalLM", {"sliding_window": 1}, "its sliding_window is 1"),
    "llama, a classifier": ("LlamaForSequenceClassification", {}, "language-modelling head"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*REFUSED, *MORE_REFUSED])
def test_unsupported_models_are_refused_with_the_reason(name):
    if name in ("codegen", "gptj") and not transformers.__version__.startswith("5.23."):
        pytest.skip("uses the attention interface since 5.24")
    class_name, config, reason = {**REFUSED, **MORE_REFUSED}[name]
    with pytest.raises(UnsupportedModelError, match=re.escape(reason)):
        gate.admit(build(class_name, config, 3))


def test_training_mode_is_refused():
    model = copy.deepcopy(tiny("llama")).train()
    with pytest.raises(UnsupportedModelError, match="training mode"):
        gate.admit(model)


def broken(model: transformers.PreTrainedModel, passes: bool) -> None:
    """Let the model's last layer fail, in Forerun's passes or outside of them."""

    def fail(*_: Any) -> None:
        if (model.config._attn_implementation == scorer.ATTENTION_NAME) == passes:
            raise NotImplementedError("no such kernel")

    model.lm_head.register_forward_hook(fail)


@pytest.mark.parametrize(
    ("passes", "what"), [(True, "a pass over two packed sequences"), (False, "the model's own forward pass")]
)
def test_what_failed_is_said(passes, what):
    model = copy.deepcopy(tiny("llama"))
    broken(model, passes)
    with pytest.raises(UnsupportedModelError, match=rf"{what} fails \(NotImplementedError: no such kernel\)$"):
        gate.admit(model)


def test_implementations_are_as_they_were_after_a_pass_that_failed():
    model = copy.deepcopy(tiny("mixtral"))
    model.set_experts_implementation("grouped_mm")
    before = (model.config._attn_implementation, model.config._experts_implementation)
    broken(model, True)
    with pytest.raises(UnsupportedModelError):
        gate.admit(model)
    assert (model.config._attn_implementation, model.config._experts_implementation) == before


@pytest.mark.parametrize(("architecture", "wrong_texts", "passes"), [("mixtral", 1, True), ("mixtral", 4, False)])
def test_a_router_may_choose_otherwise_on_some_texts_only(monkeypatch, architecture, wrong_texts, passes):
    monkeypatch.setattr(gate, "_tree_error", lambda scorer, text: 0.2 if text < wrong_texts else 0.0)
    assert (gate._reason_in_numbers(scorer.Scorer(tiny(architecture))) is None) == passes
    assert "0.2" in str(gate._reason_in_numbers(scorer.Scorer(tiny("llama"))))


class RoundingChunks(scorer.Scorer):
    """Off by ``errors`` (relative) where it reads whole chunks and elsewhere."""

    errors = (0.0, 0.0)

    def score(self, blocks: Any, caches: Any) -> list[torch.Tensor]:
        noise = torch.Generator().manual_seed(int(blocks[0].whole_chunk))
        (logits,) = super().score(blocks, caches)
        other = torch.randn(logits.shape, generator=noise, dtype=torch.float64)
        return [logits + other * logits.norm() / other.norm() * self.errors[not blocks[0].whole_chunk]]


@pytest.mark.parametrize(("dtype", "errors", "passes"), [
    (torch.bfloat16, (0.04, 0.04), True),  # of each other they are off by more than 5 %
    (torch.bfloat16, (0.15, 0.04), False), (torch.float32, (0.04, 0.04), False),
])  # fmt: skip
def test_chunks_and_other_passes_round_as_much(dtype, errors, passes):
    read = RoundingChunks(copy.deepcopy(tiny("llama")).to(dtype))
    read.prompt_chunk, read.errors = 8, errors
    reason = gate._reason_in_chunk(read)
    assert (reason is None) == passes, reason


@pytest.mark.parametrize(
    "wrong", [AttentionSpec(0.2), AttentionSpec(8**-0.5, window=3), AttentionSpec(8**-0.5, None, 1)]
)
def test_the_self_test_notices_wrong_attention(monkeypatch, wrong):
    attend = scorer.Pass.attend
    monkeypatch.setattr(scorer.Pass, "attend", lambda self, layer, q, k, v, spec: attend(self, layer, q, k, v, wrong))
    with pytest.raises(UnsupportedModelError, match="differ from its own"):
        gate.admit(tiny("llama"))


@pytest.mark.parametrize(("class_name", "extra"), [
    ("PhimoeForCausalLM", {"sliding_window": 40}),
    ("Qwen2MoeForCausalLM", {"shared_expert_intermediate_size": 16, "use_sliding_window": True, "sliding_window": 40}),
])  # fmt: skip
def test_a_window_that_is_in_the_mask_alone_is_refused(class_name, extra):
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with pytest.raises(UnsupportedModelError, match="has a window of 40 tokens only in its mask"):
        gate.admit(build(class_name, {**experts, **extra}, 0))
    gate.admit(build(class_name, {**experts, **extra, "use_sliding_window": False, "sliding_window": None}, 0))


def test_layers_of_different_sizes_are_no_program():
    model = build("LlamaForCausalLM", {"hidden_size": 64, "intermediate_size": 64}, 0).float()
    assert architecture.known(model) == vector_ir.fused()
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(64, 4096, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(4096, 64, bias=False)
    assert not architecture.known(model)
    assert type(gate.admit(model)) is scorer.Scorer


def test_a_cap_that_a_model_does_not_apply_is_not_applied():
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    model = build("Gemma3ForCausalLM", shape | {"attn_logit_softcapping": 50.0}, 0)
    assert [layer.mixer.spec.softcap for layer in architecture.layers(model)] == [None]
    llama = build("LlamaForCausalLM", shape | {"final_logit_softcapping": 3.0, "logits_scaling": 2.0}, 0).float()
    assert torch.equal(Decoder(llama).finished(torch.ones(2, 3)), torch.ones(2, 3))
