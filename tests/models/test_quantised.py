"""A folder's weights quantised once: the bits of gguf's quantiser, one file, the same text with and without drafts."""

import copy
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.saved_models import change, save, save_model, small_llama, small_tokenizer, weights
from support.tiny import tiny
from transformers import LlamaForCausalLM

from forerun import Engine
from forerun.kernels.runtime import vector_ir
from forerun.models.forward.architecture import dtype_name
from forerun.models.loading.load import QUANTISATIONS, load
from forerun.models.loading.stored_weights import StoredEmbedding, StoredExperts, StoredLinear

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in float32 with widths that are whole blocks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save(small_llama(hidden_size=64, intermediate_size=96, eos_token_id=7), tmp_path / "model")


def files(folder: Path) -> list[Path]:
    return sorted((folder.parent / "cache").rglob("*.gguf*"))


@pytest.mark.parametrize("kind", QUANTISATIONS)
def test_matrices_are_gguf_blocks_and_all_else_is_as_it_was(kind, folder):
    model, _ = load(str(folder), quantize=kind)
    assert dtype_name(model) == "stored" and model.generation_config.eos_token_id == 7
    plain = LlamaForCausalLM.from_pretrained(folder)
    stored = 0
    for name, module in model.named_modules():
        if isinstance(module, StoredLinear | StoredEmbedding):
            weight = plain.get_submodule(name).weight.detach().numpy()
            blocks = gguf.quantize(weight, gguf.GGMLQuantizationType[kind.upper()])
            assert np.array_equal(module.weight.numpy(), blocks)
            stored += 1
    assert stored == 2 * 7 + 2
    assert torch.equal(model.model.norm.weight, plain.model.norm.weight)


def test_drafted_text_is_the_quantised_models_own(folder):
    model, tokenizer = load(str(folder), quantize="q4_0")
    prompt, engines = [3, 4, 5, 3, 4, 5, 3, 4], [Engine(model, name, tokenizer=tokenizer) for name in ("none", "trie")]
    none, trie = (each.generate(prompt, max_new_tokens=40).generated for each in engines)
    assert none == trie and engines[0].exactness.level == "bitwise"


def test_it_is_quantised_once_and_anew_when_the_weights_change(folder, caplog):
    caplog.set_level(logging.INFO, "forerun")
    done = list[tuple[int, int]]()
    load(str(folder), quantize="q8_0", progress=lambda *each: done.append(each))
    (file,) = files(folder)
    assert ", once: 0.00 GB in" in caplog.text and done[0][0] == 0 and done[-1][0] == done[-1][1]
    before = file.stat().st_mtime_ns
    caplog.clear()
    load(str(folder), quantize="q8_0")
    assert files(folder) == [file] and file.stat().st_mtime_ns == before and "quantised" not in caplog.text
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    load(str(folder), quantize="q8_0")
    assert len(files(folder)) == 2


def test_nothing_is_left_where_quantising_fails(folder):
    with pytest.raises(KeyboardInterrupt):
        load(str(folder), quantize="q8_0", progress=Mock(side_effect=[None] * 3 + [KeyboardInterrupt]))
    assert not files(folder) and not list((folder.parent / "cache").rglob("*.tmp"))


@pytest.mark.parametrize(("given", "said"), [
    ({"quantize": "q4_k"}, "allowed are q8_0, q5_1, q5_0, q4_1, q4_0; a file with K-quants"),
    ({"quantize": "q8_0", "dtype": "bfloat16"}, "give only one of them"),
    ({"quantize": "q8_0", "ranks": 2}, "for one process on the CPU"),
])  # fmt: skip
def test_wrong_settings_are_refused_before_anything_is_loaded(given, said, folder):
    with pytest.raises(ValueError, match=said):
        load(str(folder), **given)


def test_rows_that_are_no_whole_blocks_and_a_full_disk_are_refused_by_name(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=5))
        with pytest.raises(ValueError, match="bytes, and 5 are free; set XDG_CACHE_HOME"):
            load(str(folder), quantize="q8_0")
    save_model(folder)
    with pytest.raises(ValueError, match=r"down_proj.weight in .* have 48 numbers, and Q8_0 needs a multiple of 32"):
        load(str(folder), quantize="q8_0")


def test_experts_are_quantised_too(folder):
    config = copy.deepcopy(tiny("mixtral").config)
    config.vocab_size, config.eos_token_id = len(small_tokenizer()), 7
    config.hidden_size, config.intermediate_size, config.head_dim = 64, 96, None
    moe = type(tiny("mixtral"))(config)
    moe.save_pretrained(folder)
    model, _ = load(str(folder), quantize="q8_0")
    assert any(isinstance(module, StoredExperts) for module in model.modules())
    ids = torch.arange(8)[None]
    with torch.no_grad():
        ours, theirs = model(ids).logits, moe.eval()(ids).logits
    assert (ours - theirs).norm() < 0.1 * theirs.norm()  # inputs have eight bits, too


@pytest.mark.parametrize("method", ["bitsandbytes", "torchao", "compressed-tensors"])
def test_other_quantised_checkpoints_are_refused_by_name(method, folder):
    change(folder, quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=f"quantised by {method}, for which there is no exact kernel.* --quantize"):
        load(str(folder))


def test_fp8_is_dequantised(folder):
    pytest.importorskip("accelerate")
    expected, block = {}, 32

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        for name, weight in [*tensors.items()]:
            if "_proj" in name:
                scales = torch.rand(weight.shape[0] // block, weight.shape[1] // block) + 0.5
                tensors[name] = weight.to(torch.float8_e4m3fn)
                tensors[name.replace("weight", "weight_scale_inv")] = scales
                expected[name] = tensors[name].float() * scales.repeat_interleave(block, 0).repeat_interleave(block, 1)

    weights(folder, narrow)
    method = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    change(folder, quantization_config=method)
    model, _ = load(str(folder), "float32")
    for name, weight in expected.items():
        assert torch.equal(model.get_parameter(name), weight)
    assert not hasattr(model.config, "quantization_config")
    assert Engine(model, "trie").generate([3, 4, 5], max_new_tokens=5).generated
