"""Hybrids in GGUF files: read as they are stored they are the model that transformers dequantises, and drafts change
nothing."""

import pytest
import torch
from support.gguf_hybrids import MODELS, built, write
from support.qwen_mtp import mtp_tensors
from transformers import PreTrainedModel

import forerun
from forerun.kernels.runtime import vector_ir
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.loading.load import load
from forerun.models.loading.stored_weights import InputOrder, StoredLinear

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([[3, 20, 30, 41, 7, 12, 20, 30, 41, 8, 9]])).logits


@pytest.mark.parametrize("architecture", MODELS)
def test_a_file_read_as_it_is_stored_is_what_transformers_dequantises(tmp_path, architecture):
    exact = built(architecture)
    file = write(tmp_path / "exact.gguf", architecture, "F32")
    found, _ = load(str(file), "stored")
    torch.testing.assert_close(logits(found), logits(exact), atol=1e-4, rtol=1e-4)
    file = write(tmp_path / "m.gguf", architecture, "Q8_0")
    stored, _ = load(str(file), "stored", activations="float32")
    dequantised, _ = load(str(file), "float32")
    assert not torch.allclose(logits(dequantised), logits(exact), atol=1e-3)
    torch.testing.assert_close(logits(stored), logits(dequantised), atol=5e-4, rtol=1e-4)  # 1.2e-4 on some processors
    assert any(isinstance(module, StoredLinear) for module in stored.modules())
    orders = [module for module in stored.modules() if isinstance(module, InputOrder)]
    assert len(orders) == (0 if architecture == "lfm2" else 3)  # columns of the outputs of each recurrent layer


@pytest.mark.parametrize("architecture", ["lfm2", "qwen35"])
def test_drafts_change_nothing(tmp_path, architecture):
    mtp = mtp_tensors(built(architecture)) if architecture == "qwen35" else None
    file = write(tmp_path / "m.gguf", architecture, "Q4_1", mtp)
    texts, (model, _) = [], load(str(file), "stored")
    for drafter in ("none", "auto", "trie", *(() if mtp is None else ("mtp",))):
        engine = forerun.Engine(model, drafter)
        assert engine.exactness.level == "bitwise", engine.exactness.reason
        assert isinstance(engine.target, CompiledScorer) == (architecture == "lfm2")
        prompts = [[3, 20, 30, 41, 7, 3, 20, 30], [9, 9, 9]]
        texts.append(engine.generate(prompts, max_new_tokens=20, eos_token_id=None).sequences.tolist())
    assert all(text == texts[0] for text in texts)


def test_what_cannot_be_is_refused(tmp_path):
    file = write(tmp_path / "m.gguf", "lfm2", "F32", **{"attention.causal": False})
    for dtype in ("stored", "float32"):
        with pytest.raises(ValueError, match="is not a decoder: its attention is not causal"):
            load(str(file), dtype)
