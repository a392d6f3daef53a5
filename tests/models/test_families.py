"""Every family that people run: exact in float64, and the same bits whatever shares a pass in all types."""

import copy
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.saved_models import small_tokenizer
from support.tiny import (
    FAMILIES,
    HYBRIDS,
    LAYOUTS,
    LEARNING,
    PROMPTS,
    VOCABULARY,
    build,
    by_transformers,
    small_caches,
    some_were_accepted,
    texts_in_float64,
    tiny,
)
from transformers import PreTrainedModel

import forerun
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import RECIPES
from forerun.kernels.attention.attention import AttentionSpec, attend, merge
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import StreamingCache
from forerun.kv.view import View
from forerun.models.forward import gate
from forerun.models.forward.exactness import Exactness, probe
from forerun.models.forward.gate import Float32View
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.scorer import Scorer
from forerun.models.loading.load import load

WHOLE = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
FEW = (("none", "trie", "low-rank"), ("none", "lookup", "triforce-trie"))
"""Drafters of a family, in turns."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ALL_DRAFTERS = ("gpt_oss", "deepseek_v3", "deepseek_v2")
"""What caches have to know of: sinks, and keys and values of different width."""


@functools.cache
def family(name: str) -> PreTrainedModel:
    which = {**HYBRIDS, **LAYOUTS, **FAMILIES}[name]
    return build(*which, seed=len(which[0]))


@functools.cache
def plain(name: str) -> list[list[int]]:
    return texts_in_float64(family(name), **WHOLE)


def drafters(name: str) -> Sequence[str]:
    return tuple(RECIPES) if name in ALL_DRAFTERS else FEW[list(FAMILIES).index(name) % len(FEW)]


def cells() -> list[Any]:
    """Every drafter of every family; ``make test`` takes every ninth family with one of its drafters, in turns, and
    sparse caches of keys and values of different width."""
    every = [(name, drafter) for name in FAMILIES for drafter in drafters(name)]
    few = {(name, drafters(name)[i // 9 % len(drafters(name))]) for i, name in enumerate(FAMILIES) if i % 9 == 0}
    few |= {("deepseek_v2", "low-rank"), ("deepseek_v2", "triforce-trie")}
    return [pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in few)) for cell in every]


@pytest.mark.parametrize(("name", "drafter"), cells())
def test_output_equals_transformers(name, drafter):
    settings = small_caches(tiny("llama"))
    engine = forerun.Engine(family(name), drafter, settings=settings, prefill_block=4, prune_drafts=False)
    if drafter in LEARNING:
        engine.warm(plain(name)[1:])
    batch = engine.generate([list(prompt) for prompt in PROMPTS], **WHOLE)
    assert [request.tokens.tolist() for request in batch.requests] == plain(name)
    if drafter != "none":
        some_were_accepted(batch.requests)


FEW_TYPES = {
    *zip(("bamba", "lfm2", "qwen3_5"), (torch.bfloat16, torch.float32, torch.float64), strict=True),
    ("glm, partial and interleaved", torch.float32), ("phi, partial", torch.bfloat16),
}  # fmt: skip
"""Of each recurrence and of layouts of positions; of others one family in 14 has a type in turns."""


def types() -> list[Any]:
    """Every type of every family, layout of positions and hybrid, of which ``make test`` takes few."""
    few = {*FEW_TYPES, *((name, DTYPES[i % 3]) for i, name in enumerate(FAMILIES) if i % 14 == 0)}
    cells = itertools.product({**FAMILIES, **LAYOUTS, **HYBRIDS}, DTYPES)
    return [pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in few)) for cell in cells]


@pytest.mark.parametrize(("name", "dtype"), types(), ids=str)
def test_a_token_has_the_same_bits_whatever_shares_its_pass(name, dtype):
    model = copy.deepcopy(family(name)).to(dtype)
    assert probe(gate.admit(model), position_limit(model)) == Exactness("bitwise")


def test_attention_with_a_sink_is_softmax_with_one_more_score():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, heads, 6, 8).double() for heads in (4, 2, 2))
    sinks = torch.randn(4).double()
    spec = AttentionSpec(8**-0.5, sinks=sinks)
    scores = q @ k.repeat_interleave(2, 1).mT * spec.scaling
    weights = torch.cat((scores, sinks.view(1, 4, 1, 1).expand(1, 4, 6, 1)), -1).softmax(-1)[..., :-1]
    expected = weights @ v.repeat_interleave(2, 1)
    parts = [attend(q, k[:, :, cut], v[:, :, cut], spec) for cut in (slice(0, 2), slice(2, 6))]
    for states in ([attend(q, k, v, spec)], parts):
        torch.testing.assert_close(merge(*states, sinks=sinks), expected)


CACHES: dict[str, Callable[[FullCache], Cache]] = {
    "streaming": lambda source: StreamingCache(80, 4),
    "retrieval": lambda source: RetrievalCache(source, RetrievalConfig(80)),
    "low rank": lambda source: LowRankCache(source, LowRankConfig(80)),
}


@torch.inference_mode()
@pytest.mark.parametrize("name", ALL_DRAFTERS)
@pytest.mark.parametrize("cache", CACHES)
def test_a_cache_that_holds_the_text_gives_what_the_full_cache_gives(name, cache):
    scorer, text = Scorer(family(name)), torch.randint(VOCABULARY, (60,)).numpy()
    source = FullCache()
    other = CACHES[cache](source)
    for each in [source] if isinstance(other, View) else [source, other]:
        first = Block(text, DraftTree.empty(), 0)
        scorer.score([first], [each])
        each.commit(first, [])
    if isinstance(other, View):
        other.sync()
    for tree in (DraftTree.empty(), DraftTree.from_branches([[3, 4, 5], [3, 7], [9]], 16)):
        found = [scorer.score([Block(text[:1], tree, each.length)], [each])[0] for each in (other, source)]
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


WRAPPERS: dict[str, Callable[[Any, Any], Any]] = {
    "Gemma3": lambda text, sight: {"text_config": {**text, "head_dim": 8}, "vision_config": sight},
    "Mistral3": lambda text, sight: {
        "text_config": {**text, "head_dim": 8, "model_type": "mistral"},
        "vision_config": {**sight, "model_type": "pixtral", "head_dim": 8},
    },
    "Qwen3VL": lambda text, sight: {
        "text_config": {**text, "head_dim": 8, "rope_parameters": PLANES},
        "vision_config": {**sight, "depth": 1, "num_heads": 2, "out_hidden_size": 32},
    },
    "Qwen2_5_VL": lambda text, sight: {
        "text_config": {**text, "rope_parameters": PLANES},
        "vision_config": SMALL_SIGHT,
    },
    "Glm4v": lambda text, sight: {"text_config": {**text, "rope_parameters": PLANES}, "vision_config": SMALL_SIGHT},
    "Llava": lambda text, sight: {
        "text_config": {**text, "model_type": "llama"},
        "vision_config": {**sight, "model_type": "clip_vision_model"},
    },
}
PLANES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
SMALL_SIGHT = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}


TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
SIGHT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_decoder_of_a_model_that_sees_writes_as_without_forerun(name):
    model = build(f"{name}ForConditionalGeneration", WRAPPERS[name](TEXT, SIGHT), seed=3)
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 5}
    expected = by_transformers(model, PROMPTS[1], **options)
    assert position_limit(model) == 128
    found = forerun.Engine(model, "trie").generate(list(PROMPTS[1]), pad_token_id=0, **options)
    assert found.generated == [expected]


@pytest.mark.parametrize("name", ["Mistral3", "Qwen3VL"])
def test_a_model_that_sees_is_loaded_from_a_folder(name, tmp_path):
    text, sight = TEXT | {"vocab_size": 320}, SIGHT
    build(f"{name}ForConditionalGeneration", WRAPPERS[name](text, sight), seed=3).save_pretrained(tmp_path)
    small_tokenizer().save_pretrained(tmp_path)
    model, tokenizer = load(str(tmp_path), "float32")
    assert type(model).__name__ == f"{name}ForConditionalGeneration"
    none, trie = (forerun.Engine(model, drafter, tokenizer=tokenizer) for drafter in ("none", "trie"))
    assert trie.generate("again and", max_new_tokens=12).text == none.generate("again and", max_new_tokens=12).text


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "mixtral", "deepseek_v3"])
def test_a_widened_pass_is_that_of_the_weights_in_float32(family):
    narrow = copy.deepcopy(tiny(family)).to(torch.bfloat16)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        right = copy.deepcopy(narrow).float()(ids, use_cache=False).logits
        own = narrow(ids, use_cache=False).logits
        with Float32View():
            wide = narrow(ids, use_cache=False).logits
    assert wide.dtype == torch.float32 and own.dtype == torch.bfloat16
    off = float((own.float() - right).norm() / right.norm())
    assert float((wide - right).norm() / right.norm()) < off / 20
    assert next(narrow.parameters()).dtype == torch.bfloat16


def test_a_model_is_traced_whole_beside_forerun():
    model = build("LlamaForCausalLM", {"num_hidden_layers": 1}, seed=0)
    ids = torch.tensor([[7, 3, 9, 2]])
    with torch.no_grad():
        before = model(input_ids=ids, use_cache=False).logits
    text = forerun.Engine(model, "trie").generate(ids, max_new_tokens=4, eos_token_id=None).generated
    torch._dynamo.reset()
    whole = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(whole(input_ids=ids, use_cache=False).logits, before)
    assert text[0][0] == before[0, -1].argmax()
