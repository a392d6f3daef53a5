"""GPTQ's and AWQ's folders: the numbers that their own programs multiply by, by a reference that packs bit by bit."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from support.saved_models import change, save, small_llama, small_tokenizer, weights
from support.tiny import tiny
from transformers import LlamaForCausalLM

from forerun import Engine
from forerun.models.loading.load import load

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""The integer in each place of an AWQ word, from the lowest bits."""


def packed(integers: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along the last axis, integer by integer, in Python's own numbers."""
    count = 32 // bits

    def word(integers: list[int]) -> int:
        found = sum(integers[i] << bits * place for place, i in enumerate(places or range(count)))
        return found - (1 << 32) if found >> 31 else found

    rows = [[word(row[i : i + count]) for i in range(0, len(row), count)] for row in integers.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def one(rows: int, columns: int, group: int, bits: int, form: str, rng, act_order: bool = False):
    """A matrix ``[rows, columns]`` of a checkpoint in float64, and its tensors."""
    groups, q = -(-columns // group), rng.integers(0, 1 << bits, (rows, columns))
    zeros = rng.integers(form == "gptq", 1 << bits, (rows, groups))
    scales = (rng.uniform(0.01, 0.05, (rows, groups)) * 8 / (1 << bits)).astype(np.float16)
    owner = np.arange(columns) // group
    if act_order:
        owner = rng.permutation(owner)
    weight = (q - zeros[:, owner]) * scales.astype(np.float64)[:, owner]
    if form == "awq":
        tensors = {"qweight": packed(q.T, bits, AWQ_PLACES), "qzeros": packed(zeros.T, bits, AWQ_PLACES)}
    else:
        tensors = {"qweight": packed(q, bits).t().contiguous(), "qzeros": packed(zeros.T - (form == "gptq"), bits)}
        tensors["g_idx"] = torch.from_numpy(owner.astype(np.int32))
    return weight, tensors | {"scales": torch.from_numpy(scales.T.copy())}


def state(folder: Path, form: str, **more: object) -> None:
    method = {"quant_method": "gptq", "checkpoint_format": form, "sym": False, "bits": 4, "group_size": 32}
    if form == "awq":
        method = {"quant_method": "awq", "version": "gemm", "zero_point": True, "bits": 4, "group_size": 32}
    change(folder, quantization_config=method | more)


def write(folder: Path, model: LlamaForCausalLM, form: str, bits: int, group: int, act_order: bool = False):
    """Write a model's projections packed; return their weights."""
    rng, expected = np.random.default_rng(5), {}
    save(model.to(torch.float16), folder)

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [each for each in tensors if "_proj" in each or ".experts." in each]:
            owner, (rows, columns) = name.removesuffix(".weight"), tensors.pop(name).shape
            size = columns if group == -1 else group
            expected[name], parts = one(rows, columns, size, bits, form, rng, act_order)
            tensors |= {f"{owner}.{part}": tensor for part, tensor in parts.items()}

    weights(folder, pack)
    state(folder, form, bits=bits, group_size=group)
    return expected


def small() -> LlamaForCausalLM:
    return small_llama(hidden_size=64, intermediate_size=96, eos_token_id=7)


def numbers(model: LlamaForCausalLM, name: str) -> np.ndarray:
    weight = model.get_parameter(name).detach()
    assert weight.is_contiguous()
    return weight.double().numpy()


CASES = [("gptq", 4, 32, True), ("gptq", 8, 32, False), ("gptq", 2, -1, False), ("gptq_v2", 4, 16, True),
         ("awq", 4, 32, False), ("awq", 4, -1, False)]  # fmt: skip


@pytest.mark.parametrize(("form", "bits", "group", "act_order"), CASES)
def test_weights_are_exact_in_float32_and_the_programs_own_in_float16(form, bits, group, act_order, tmp_path):
    expected = write(tmp_path, small(), form, bits, group, act_order)
    exact, _ = load(str(tmp_path), "float32")
    own, _ = load(str(tmp_path))
    assert len(expected) == 14 and own.dtype == torch.float16
    for name, weight in expected.items():
        assert np.array_equal(numbers(exact, name), weight)
        assert np.array_equal(numbers(own, name), weight.astype(np.float16))


def test_the_model_is_like_any_other(tmp_path):
    expected = write(tmp_path, small(), "gptq", 4, 32)
    model, tokenizer = load(str(tmp_path), "float32")
    assert not hasattr(model.config, "quantization_config") and model.name_or_path == str(tmp_path)
    assert model.generation_config.eos_token_id == 7
    plain = LlamaForCausalLM(model.config)
    plain.load_state_dict(model.state_dict() | {name: torch.from_numpy(each) for name, each in expected.items()})
    ids = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, plain(ids).logits)
    prompt = [3, 4, 5, 3, 4, 5, 3, 4]
    none, trie = (Engine(model, name, tokenizer=tokenizer) for name in ("none", "trie"))
    assert trie.generate(prompt, max_new_tokens=20).generated == none.generate(prompt, max_new_tokens=20).generated


def test_experts_are_dequantised_too(tmp_path):
    model = tiny("mixtral")
    config = copy.deepcopy(model.config)
    config.vocab_size, config.eos_token_id = len(small_tokenizer()), 7
    expected = write(tmp_path, type(model)(config), "awq", 4, 16)
    experts, inner = load(str(tmp_path), "float32")[0].model.layers[0].mlp.experts, config.intermediate_size
    for part, name, rows in (("w1", "gate_up_proj", slice(None, inner)), ("w2", "down_proj", slice(None))):
        (weight,) = (each for key, each in expected.items() if f"layers.0.block_sparse_moe.experts.1.{part}" in key)
        assert np.array_equal(getattr(experts, name)[1, rows].detach().double().numpy(), weight)


def test_it_can_be_quantised_again(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write(tmp_path / "model", small(), "awq", 4, 32)
    model, _ = load(str(tmp_path / "model"), quantize="q8_0")
    assert Engine(model, "none").generate([3, 4, 5], max_new_tokens=3).generated


UP = "model.layers.1.mlp.up_proj."


def without(part):
    return lambda tensors: tensors.pop(UP + part)


def changed(part, change):
    return lambda tensors: tensors.update({UP + part: change(tensors[UP + part]).contiguous()})


def with_bias(bias):
    return lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.bias": bias})


@pytest.mark.parametrize(("edit", "said"), [
    (without("qzeros"), r"up_proj.qzeros is missing"),
    (without("scales"), r"up_proj.scales is missing"),
    (without("qweight"), r"up_proj.qweight is missing"),
    (changed("qzeros", lambda t: t[:, :-1]), r"up_proj.qzeros has the shape \[2, 11\], and the .* for \[2, 12\]"),
    (changed("scales", lambda t: t[:, :-8]), r"up_proj.qweight has the shape \[8, 96\], and the .* for \[8, 88\]"),
    (changed("g_idx", lambda t: t + 1), r"up_proj.g_idx has values from 1 to 2, and there are 2 groups"),
    (changed("g_idx", lambda t: t[1:]), r"up_proj.g_idx has the shape \[63\], and the .* for \[64\]"),
    (changed("qweight", lambda t: t.long()), r"up_proj.qweight has the type I64; it must be I32"),
    (changed("qzeros", lambda t: t | 15), r"up_proj.qzeros has zero points that .* as 0 and others as 16"),
    (with_bias(torch.ones(96)), r"no place for .*.bias"),
])  # fmt: skip
def test_what_is_missing_or_does_not_fit_is_named(edit, said, tmp_path):
    write(tmp_path, small(), "gptq", 4, 32)
    weights(tmp_path, edit)
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path), "float32")


def test_biases_of_zeros_that_the_model_lacks_are_left_out(tmp_path):
    write(tmp_path, small(), "gptq", 4, 32)
    weights(tmp_path, with_bias(torch.zeros(96)))
    assert load(str(tmp_path), "float32")[0].model.layers[0].mlp.up_proj.bias is None


def test_groups_are_of_consecutive_inputs_where_none_are_named(tmp_path):
    expected = write(tmp_path, small(), "gptq", 4, 32)
    weights(tmp_path, lambda tensors: [tensors.pop(name) for name in [*tensors] if name.endswith("g_idx")])
    model, _ = load(str(tmp_path), "float32")
    assert all(np.array_equal(numbers(model, name), each) for name, each in expected.items())
    state(tmp_path, "gptq", group_size=48)
    with pytest.raises(ValueError, match=r"down_proj.scales has 3 groups, and 96 inputs in groups of 48"):
        load(str(tmp_path), "float32")


@pytest.mark.parametrize(("form", "more", "said"), [
    ("gptq", {"bits": 3}, "gptq with bits 3; supported is 2 or 4 or 8"),
    ("gptq", {"checkpoint_format": "marlin"}, "gptq with checkpoint_format 'marlin'; supported is gptq or gptq_v2"),
    ("gptq", {"dynamic": {"-:lm_head": {}}}, "with dynamic .* supported is a single number of bits"),
    ("gptq", {"group_size": 0}, "group_size 0; it must be positive or -1"),
    ("awq", {"version": "gemv"}, "awq with version 'gemv'; supported is awq or gemm"),
    ("awq", {"bits": 8}, "awq with bits 8; supported is 4"),
])  # fmt: skip
def test_other_variants_are_refused_by_name(form, more, said, tmp_path):
    write(tmp_path, small(), form, 4, 32)
    state(tmp_path, form, **more)
    with pytest.raises(ValueError, match=said):
        load(str(tmp_path), "float32")
