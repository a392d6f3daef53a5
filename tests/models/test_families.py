"""Every family that people run, hybrids too: exact in float64, and in all types the same bits in any company."""

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from support.saved_models import save
from support.tiny import (
    FAMILIES,
    HYBRIDS,
    LAYOUTS,
    LEARNING,
    PROMPTS,
    VOCABULARY,
    OracleDrafter,
    build,
    by_transformers,
    letters,
    small_caches,
    some_were_accepted,
    texts_in_float64,
    tiny,
)
from transformers import PreTrainedModel

import forerun
from forerun.core.block import Block
from forerun.core.long_context import LongContextConfig
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import RECIPES
from forerun.engine import kv_store
from forerun.kernels.attention.attention import AttentionSpec, attend, merge
from forerun.kv import recurrent
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache, LowRankConfig
from forerun.kv.recurrent import SNAPSHOT_TOKENS
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.kv.streaming import StreamingCache
from forerun.kv.view import View
from forerun.models.forward import gate
from forerun.models.forward.compiled_scorer import CompiledScorer
from forerun.models.forward.exactness import Exactness, probe
from forerun.models.forward.gate import Float32View, UnsupportedModelError
from forerun.models.forward.inputs import position_limit
from forerun.models.forward.scorer import Scorer
from forerun.models.loading.load import load

GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
DRAFTERS = (("none", "trie", "low-rank"), ("none", "lookup", "triforce-trie"))
"""Of a family, in turns."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
ALL_DRAFTERS = ("gpt_oss", "deepseek_v3", "deepseek_v2")
"""What caches have to know of: sinks, and keys and values of different width."""
PROGRAM = "lfm2"
"""Its passes are a program of kernels, but in float64."""
RECURRENCES = ("bamba", PROGRAM, "qwen3_5")
"""One family of each recurrence."""
HYBRIDS_WITH_ALL_DRAFTERS = ("qwen3_next", "lfm2_moe", "falcon_h1")
"""Others of these. They differ in their recurrence only, as far as drafting goes."""
ORACLE = "oracle"
SMALL_MODEL = [name for name, recipe in RECIPES.items() if recipe.small]


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    if dtype != torch.float64:
        return copy.deepcopy(model_of(name)).to(dtype)
    which = {**HYBRIDS, **LAYOUTS, **FAMILIES}[name]
    return build(*which, seed=len(which[0]))


@functools.cache
def plain(name: str, tokens: int) -> list[list[int]]:
    return texts_in_float64(model_of(name), max_new_tokens=tokens, **GREEDY)


def engine(model: PreTrainedModel, drafter: Any, warmed: Sequence[list[int]] = ()) -> forerun.Engine:
    """An engine that scores all that is drafted; one that learns from texts knows all but the first."""
    found = forerun.Engine(model, drafter, settings=small_caches(tiny("llama")), prefill_block=4, prune_drafts=False)
    if drafter in LEARNING:
        found.warm(warmed[1:])
    return found


def drafters(name: str) -> Sequence[str]:
    return tuple(RECIPES) if name in ALL_DRAFTERS else DRAFTERS[list(FAMILIES).index(name) % len(DRAFTERS)]


def cells() -> list[Any]:
    """Family, drafter and tokens. ``make test`` takes every twelfth family with one of its drafters, in turns, sparse
    caches of keys and values of different width, and one hybrid of each recurrence."""
    every = [(name, drafter, 24) for name in FAMILIES for drafter in drafters(name)]
    few = [(name, drafters(name)[i // 12 % len(drafters(name))], 24) for i, name in enumerate(FAMILIES) if i % 12 == 0]
    few += [("deepseek_v2", "low-rank", 24), ("deepseek_v2", "triforce-trie", 24)]
    few += [(name, drafter, 24) for name, drafter in zip(RECURRENCES, ("low-rank", "auto", "trie"), strict=True)]
    every += [(name, drafter, 48) for name in HYBRIDS_WITH_ALL_DRAFTERS for drafter in RECIPES]
    every += [(name, "trie", 200) for name in HYBRIDS]
    every += [(name, ORACLE, 200) for name in (*RECURRENCES, *HYBRIDS_WITH_ALL_DRAFTERS)]
    cells = dict.fromkeys((*few, *every))
    return [pytest.param(*cell, marks=[pytest.mark.matrix] * (cell not in few)) for cell in cells]


@pytest.mark.parametrize(("name", "drafter", "tokens"), cells())
def test_output_equals_transformers(name, drafter, tokens):
    """In a batch; of a hybrid, alone too."""
    texts = plain(name, tokens)
    drafting = engine(model_of(name), OracleDrafter(texts) if drafter == ORACLE else drafter, texts)
    batch = drafting.generate([list(prompt) for prompt in PROMPTS], max_new_tokens=tokens, **GREEDY)
    assert [request.tokens.tolist() for request in batch.requests] == texts
    if drafter != "none" and (name in FAMILIES or drafter not in ("lookup", *SMALL_MODEL)):
        some_were_accepted(batch.requests)
    for prompt, text in zip(PROMPTS, texts, strict=True) if name in HYBRIDS else ():
        alone = drafting.generate(list(prompt), max_new_tokens=tokens, **GREEDY)
        assert alone.requests[0].tokens.tolist() == text


FEW_TYPES = {
    *zip(RECURRENCES, (torch.bfloat16, torch.float32, torch.float64), strict=True),
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
    model = model_of(name, dtype)
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
    scorer, text = Scorer(model_of(name)), torch.randint(VOCABULARY, (60,)).numpy()
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


TEXT = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
SIGHT = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16,
    "patch_size": 8,
}  # fmt: skip


PLANES = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
DEPTH = {"depth": 1, "num_heads": 2, "out_hidden_size": 32}
SMALL_SIGHT = {"hidden_size": 16, "intermediate_size": 16, **DEPTH}
WRAPPERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": ({"head_dim": 8}, SIGHT), "Qwen3VL": ({"head_dim": 8, **PLANES}, {**SIGHT, **DEPTH}),
    "Mistral3": ({"head_dim": 8, "model_type": "mistral"}, {**SIGHT, "model_type": "pixtral", "head_dim": 8}),
    "Qwen2_5_VL": (PLANES, SMALL_SIGHT), "Glm4v": (PLANES, SMALL_SIGHT),
    "Llava": ({"model_type": "llama"}, {**SIGHT, "model_type": "clip_vision_model"}),
}  # fmt: skip
"""What a model that sees says of its decoder, beside ``TEXT``, and of its eyes."""


def with_eyes(name: str, **more: Any) -> PreTrainedModel:
    text, sight = WRAPPERS[name]
    config = {"text_config": TEXT | text | more, "vision_config": sight}
    return build(f"{name}ForConditionalGeneration", config, seed=3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", WRAPPERS)
def test_the_decoder_of_a_model_that_sees_writes_as_without_forerun(name):
    model, options = with_eyes(name), {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 5}
    expected = by_transformers(model, PROMPTS[1], **options)
    assert position_limit(model) == 128
    found = forerun.Engine(model, "trie").generate(list(PROMPTS[1]), pad_token_id=0, **options)
    assert found.generated == [expected]


@pytest.mark.parametrize("name", ["Mistral3", "Qwen3VL"])
def test_a_model_that_sees_is_loaded_from_a_folder(name, tmp_path):
    model, tokenizer = load(str(save(with_eyes(name, vocab_size=320), tmp_path)), "float32")
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


def few_of(names: Iterable[str]) -> list[Any]:
    """Names, of which ``make test`` takes the first."""
    first, *others = names
    return [first, *(pytest.param(name, marks=pytest.mark.matrix) for name in others)]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_text_of_a_program_does_not_depend_on_drafts(dtype):
    """Greedy and sampled, alone and in a batch, over sparse caches and with drafts of which some are right."""
    model, prompts = model_of(PROGRAM, dtype), [list(prompt) for prompt in PROMPTS]
    assert type(gate.admit(model)) is CompiledScorer
    none = engine(model, "none")
    for how in (GREEDY, {"do_sample": True, "temperature": 0.8, "seed": 3, "eos_token_id": None}):
        texts = [none.generate(prompt, max_new_tokens=24, **how).requests[0].tokens.tolist() for prompt in prompts]
        for drafter in (OracleDrafter(texts), "trie", "low-rank", "retrieval", "auto"):
            drafting = engine(model, drafter, texts)
            batch = drafting.generate(prompts, max_new_tokens=24, **how)
            assert [request.tokens.tolist() for request in batch.requests] == texts
            if how is GREEDY:
                some_were_accepted(batch.requests)
            assert drafting.generate(prompts[0], max_new_tokens=24, **how).requests[0].tokens.tolist() == texts[0]


def states_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(recurrent, "_parents", lambda block, before: np.arange(-1, before + len(block) - 1))


def paths_that_are_not_read(patch: pytest.MonkeyPatch) -> None:
    own = recurrent.RecurrentStates.commit
    patch.setattr(
        recurrent.RecurrentStates, "commit", lambda states, block, path: own(states, block, [*range(len(path))])
    )


@pytest.mark.parametrize("wrong", [states_of_the_token_before, paths_that_are_not_read])
@pytest.mark.parametrize("name", RECURRENCES)
def test_a_wrong_state_is_noticed(name, wrong, monkeypatch):
    wrong(monkeypatch)
    with pytest.raises(UnsupportedModelError, match="its logits over a draft tree differ from its own"):
        gate.admit(model_of(name))


@pytest.mark.parametrize("name", few_of(RECURRENCES))
def test_a_stop_string_in_a_draft_ends_the_text(name):
    (prompt, text), tokenizer = (PROMPTS[0], plain(name, 24)[0]), letters()
    drafting = forerun.Engine(model_of(name), OracleDrafter([text]), tokenizer=tokenizer)
    written = tokenizer.decode(text[len(prompt) :])
    result = drafting.generate(list(prompt), max_new_tokens=24, stop_strings=[written[9:11]], **GREEDY)
    assert result.finish_reasons == ["stop"]
    assert tokenizer.decode(result.generated[0]) == written[: written.find(written[9:11]) + 2]


BOOK = np.random.default_rng(3).integers(6, VOCABULARY, 150).tolist()
QUESTIONS = ([7, 8, 9], [12, 9])


def answer(one: forerun.Engine, question: list[int]) -> list[int]:
    return list(one.generate([*BOOK, *question], max_new_tokens=6, **GREEDY).generated[0])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)], ids=str)
@pytest.mark.parametrize("name", few_of(dict.fromkeys((*RECURRENCES, *HYBRIDS))))
def test_a_beginning_that_was_read_gives_the_bits_of_reading_it(name, dtype, tmp_path, monkeypatch):
    """In memory, from another row of the batch, and from a folder that another engine has filled."""
    monkeypatch.setattr(kv_store, "MIN_STORED_TOKENS", SNAPSHOT_TOKENS)
    model, options = model_of(name, dtype), {"prefill_block": SNAPSHOT_TOKENS, "prune_drafts": False}
    wanted = [answer(forerun.Engine(model, "none", prune_drafts=False), question) for question in QUESTIONS]
    one = forerun.Engine(model, "trie", prefix_cache=1 << 26, **options)
    assert [answer(one, question) for question in QUESTIONS] == wanted
    assert one.prefixes.hits == 2 * SNAPSHOT_TOKENS
    together = forerun.Engine(model, "trie", **options)
    rows = together.generate([[*BOOK, *question] for question in QUESTIONS], max_new_tokens=6, **GREEDY)
    assert rows.generated == wanted
    writer = forerun.Engine(model, "none", kv_store=tmp_path, **options)
    answer(writer, QUESTIONS[0])
    writer.close()
    reader = forerun.Engine(model, "none", kv_store=tmp_path, **options)
    assert answer(reader, QUESTIONS[1]) == wanted[1]
    assert reader.prefixes.hits == (2 * SNAPSHOT_TOKENS if name != "mamba2" else 0)  # it has no keys to store


@pytest.mark.parametrize("name", few_of(RECURRENCES))
def test_a_cache_that_is_cut_goes_on_as_if_it_were_new(name):
    one = engine(model_of(name), "trie")
    cache = one.prefill(BOOK)
    for question, cut in zip((*QUESTIONS, QUESTIONS[0]), (148, 90, 20), strict=True):
        requests = one.requests([*BOOK[:149], *question], max_new_tokens=6, **GREEDY)
        cache.truncate(min(cut, cache.length))
        list(one.run(requests, caches=[cache]))
        alone = one.generate([*BOOK[:149], *question], max_new_tokens=6, **GREEDY)
        assert requests[0].generated.tolist() == alone.generated[0]


def test_recurrent_layers_where_they_cannot_be_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="kv_memory cannot offload states of recurrent layers"):
        forerun.Engine(model_of("lfm2"), "none", kv_memory=1 << 30)
    with pytest.raises(ValueError, match="draft_model has recurrent layers"):
        forerun.Engine(tiny("llama"), "streaming", settings=LongContextConfig(model_of("lfm2")))
