"""Keys and values in bfloat16 for models in float32 and with stored weights: half of the memory, and equal bits in
every pass, whatever was drafted."""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import repeated as prompt
from support.compiled_models import MODELS, kept, scored
from support.tiny import ARCHITECTURES, FAMILIES, HYBRIDS, LEARNING, build, tiny
from transformers import PreTrainedModel

from forerun import Engine
from forerun.audit.audit import Plan, audit
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.kernels.attention.attention import AttentionSpec, attend_in_order
from forerun.kernels.runtime import vector_ir
from forerun.kv.kv_tiers import KVMemory, min_device_bytes
from forerun.models.forward import gate
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.forward.exactness import Exactness, probe

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

NEW = 24
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "coupled": {"do_sample": True, "temperature": 0.7, "seed": 5},
}
DRAFTERS = ("trie", "lookup", "auto", "low-rank", "retrieval", "triforce-trie", "streaming", "triforce")
ROUNDING = 2**-8
"""Relative rounding of a number to bfloat16."""
PROMPTS = [prompt(90), prompt(20, 1), prompt(61, 2)]


def engine(model: PreTrainedModel, drafter: str = "none", kv_dtype: str = "bfloat16", **more: Any) -> Engine:
    settings = LongContextConfig(
        model if drafter in ("streaming", "triforce") else None,
        gamma1=2, gamma2=4, cache_budget=24, chunk=4, window=16, paced=False,
    )  # fmt: skip
    return Engine(model, drafter, settings=settings, prune_drafts=False, prefill_block=16, kv_dtype=kv_dtype, **more)


def texts(one: Engine, prompts: list[list[int]], way: str = "greedy") -> list[list[int]]:
    found = one.generate(prompts, max_new_tokens=NEW, eos_token_id=None, **WAYS[way])
    assert one.drafter == "none" or any(sum(stats.drafted) for stats in found.stats)
    return found.generated


@functools.cache
def plain(name: str, way: str) -> list[list[int]]:
    one = engine(kept(name, torch.float32))
    return [texts(one, [each], way)[0] for each in PROMPTS]


@pytest.mark.parametrize("name", MODELS)
def test_every_pass_has_the_same_bits_near_those_of_the_model(name):
    model = kept(name, torch.float32)
    held, own = gate.admit(model, kv_dtype=torch.bfloat16), gate.admit(model)
    assert isinstance(held, CompiledScorer)
    whole, right = scored(held, [300]), scored(own, [300])
    assert torch.equal(scored(held, [1] * 20 + [2, 3, 4, 5, 6, 7, 8, 9, 12, 224]), whole)
    assert probe(held) == Exactness("bitwise")
    assert 1e-4 < (whole - right).norm() / right.norm() < gate.TOLERANCE[torch.bfloat16]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("drafter", "way", "name"), [
    pytest.param(drafter, way, list(MODELS)[(i + j) % len(MODELS)], marks=[pytest.mark.matrix] * ((i + j) % 2))
    for i, drafter in enumerate(DRAFTERS)
    for j, way in enumerate(WAYS)
])  # fmt: skip
def test_drafts_change_no_bit(drafter, way, name):
    one = engine(kept(name, torch.float32), drafter)
    if drafter in LEARNING:
        one.warm([[*PROMPTS[0], *plain(name, way)[0]]])
    assert one.exactness.level == "bitwise"
    assert texts(one, PROMPTS, way) == plain(name, way)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_models_that_run_their_own_code_have_it_too(name):
    """Heads of eight numbers, windows, soft caps, sinks, recurrent layers, and values narrower than keys."""
    model = build(*{**ARCHITECTURES, **FAMILIES, **HYBRIDS}[name], seed=3).float()
    wanted = texts(engine(model), PROMPTS[:2])
    one = engine(model, "lookup")
    assert one.exactness.level == "bitwise" and type(one.target).__name__ == "Scorer"
    assert texts(one, PROMPTS[:2]) == wanted == [texts(one, [each])[0] for each in PROMPTS[:2]]
    assert {shape.width for shape in one.target.kv.layers.values()} == {2}


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_it_takes_half_of_the_memory(name):
    model = kept(name, torch.float32)
    half, whole = engine(model), engine(model, kv_dtype="auto")
    assert 2 * half.target.kv.nbytes == whole.target.kv.nbytes
    caches = [each.prefill(PROMPTS[0], NEW) for each in (half, whole)]
    assert 2 * caches[0].nbytes == caches[1].nbytes > 0
    held, wide = (cache.read(layer, 0, 50) for cache in caches for layer in [0])
    for mine, theirs in zip(held, wide, strict=True):
        assert mine.dtype == torch.bfloat16
        assert torch.equal(mine, theirs.bfloat16())  # in the first layer nothing else differs


@pytest.mark.parametrize("drafter", ["trie", "low-rank"])
def test_offloaded_layers_have_the_same_bits(drafter, tmp_path):
    model = kept("qwen2", torch.float32)
    asked, whole = [prompt(700)], engine(model)
    least = min_device_bytes(whole.target.kv, 700 + NEW + whole.budget)
    away = engine(model, drafter, kv_memory=KVMemory(least, host=100_000, folder=tmp_path))
    assert texts(away, asked) == texts(whole, asked)
    assert away.tiers.dtype == torch.bfloat16 and away.tiers.copy_engine.fetched > 0
    away.close()


def test_a_stored_prompt_is_found_again_and_only_with_this_type(tmp_path):
    model, asked = kept("llama", torch.float32), [prompt(600), [*prompt(600)[:-1], 7]]
    wanted = texts(engine(model), asked)
    for kv_dtype, prefilled in (("bfloat16", True), ("bfloat16", False), ("auto", True)):
        one = engine(model, "trie", kv_dtype, kv_store=tmp_path)
        found = one.generate(asked[0], max_new_tokens=NEW, eos_token_id=None, do_sample=False).requests[0]
        assert (found.cached_tokens == 0) == prefilled
        assert kv_dtype == "auto" or found.generated.tolist() == wanted[0]
        one.close()


def test_prompts_that_share_a_beginning_have_the_same_bits():
    asked = [prompt(90), [*prompt(80), 7, 8, 9]]
    model = kept("qwen3", torch.float32)
    sharing = engine(model, "trie", prefix_cache=1 << 20)
    assert [texts(sharing, [each])[0] for each in asked] == [texts(engine(model), [each])[0] for each in asked]


@pytest.mark.parametrize("dim", [16, 64, 12])
def test_attention_is_that_of_the_rounded_keys_in_double_precision(dim):
    """Twelve numbers are no whole vector, and go by the slow kernel."""
    generator = torch.Generator().manual_seed(dim)
    q, k, v = (torch.randn(1, heads, 300, dim, generator=generator) for heads in (4, 2, 2))
    held, block = (k.bfloat16(), v.bfloat16()), Block(np.zeros(40, np.int64), DraftTree.empty(), 260)
    found = attend_in_order(q[:, :, 260:], [held], [block], AttentionSpec(dim**-0.5))
    assert found.dtype == torch.float32
    wide = [t.double().repeat_interleave(2, 1) for t in held]
    scores = q[:, :, 260:].double() @ wide[0].mT * dim**-0.5
    mask = torch.ones(40, 300, dtype=torch.bool).tril(260)
    exact = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ wide[1]
    assert (found - exact).norm() < ROUNDING * exact.norm()


def test_a_cache_of_the_other_type_is_refused():
    model = kept("llama", torch.float32)
    cache = engine(model, kv_dtype="auto").prefill(PROMPTS[0], NEW)
    one = engine(model)
    (request,) = one.requests([PROMPTS[0]], max_new_tokens=2)
    with pytest.raises(ValueError, match="this cache holds"):
        list(one.run([request], caches=[cache]))


def test_an_audit_knows_the_rounding():
    model = kept("llama", torch.float32)
    report = audit(model, PROMPTS, Plan(drafters=("lookup",), max_new_tokens=NEW, kv_dtype="bfloat16"))
    assert report.exactness.level == "bitwise" and not report.failures


def test_what_cannot_have_it_is_refused_with_the_reason(monkeypatch):
    model = kept("llama", torch.float32)
    for kind in (torch.float64, torch.float16):
        with pytest.raises(ValueError, match=r"and the model is in float(64|16); allowed are float32 and stored"):
            Engine(tiny("llama", kind), kv_dtype="bfloat16")
    with pytest.raises(ValueError, match="kv_dtype is 'int8'; allowed are auto, bfloat16"):
        Engine(model, kv_dtype="int8")
    assert Engine(tiny("llama", torch.bfloat16), "none", kv_dtype="bfloat16").target.kv_dtype is None  # it has it
    with pytest.raises(ValueError, match="the model is on meta, where attention reads keys of the model's type"):
        gate.kv_type(copy.deepcopy(tiny("llama", torch.float32)).to("meta"), "bfloat16")
    monkeypatch.setattr(gate, "unusable", lambda: "no instructions")
    with pytest.raises(ValueError, match="there is no kernel for it here: no instructions"):
        Engine(model, kv_dtype="bfloat16")
