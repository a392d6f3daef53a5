"""A model's pass as one program: the model's own logits, the same bits however a text is cut, and what it notices."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from support.compiled_models import DTYPES, EVERY, TEXT, build, kept, scored
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.runtime import vector_ir
from forerun.kv.full_cache import SAMPLED_QUERIES, FullCache
from forerun.kv.retrieval import RetrievalCache, RetrievalConfig
from forerun.models.forward import architecture, compiled_forward
from forerun.models.forward.architecture import known
from forerun.models.forward.compiled_scorer import CompiledScorer, fastest_scorer
from forerun.models.forward.exactness import Exactness, probe
from forerun.models.forward.fingerprint import unknowable_code
from forerun.models.forward.gate import admit
from forerun.models.forward.scorer import Scorer

pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

NEAR = {torch.float32: 1e-5, torch.bfloat16: 0.15}


def own(model: PreTrainedModel, count: int) -> torch.Tensor:
    """The model's own logits."""
    with torch.inference_mode():
        return model(torch.from_numpy(TEXT[None, :count])).logits[0]


def program(name: str = "llama", dtype: torch.dtype = torch.float32) -> Scorer:
    return fastest_scorer(Scorer(kept(name, dtype)))


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float(((found.double() - exact.double()).norm(dim=-1) / exact.double().norm(dim=-1)).max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_near_the_models_own_logits(name, dtype):
    scorer = program(name, dtype)
    assert isinstance(scorer, CompiledScorer)
    assert isinstance(admit(kept(name, dtype)), CompiledScorer)
    exact = own(copy.deepcopy(kept(name, dtype)).float(), 300)
    found, torch_own = scored(scorer, [300]), own(kept(name, dtype), 300)
    assert error(found, exact) < NEAR[dtype]
    assert error(found, exact) < 1.2 * error(torch_own, exact) + 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_the_same_bits_however_a_text_is_cut(name, dtype):
    scorer = program(name, dtype)
    whole = scored(scorer, [300])
    for sizes in ([1] * 60 + [240], [2, 3, 5, 8, 13, 16, 17, 32, 33, 64, 107], [255, 1, 44], [256, 44], [299, 1]):
        assert torch.equal(scored(scorer, sizes), whole)
    assert probe(scorer) == Exactness("bitwise")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", EVERY)
def test_the_same_bits_in_trees_and_ragged_batches(name, dtype):
    scorer = program(name, dtype)
    whole, starts, caches, blocks = scored(scorer, [400]), (0, 31, 40, 255, 300), [], []
    with torch.inference_mode():
        for i, start in enumerate(starts):
            caches.append(FullCache())
            if start:
                scored(scorer, [start], caches[-1])
            right = TEXT[start + 1 : start + 13].tolist()
            branches = [[1, 2, 3], [*right[:4], 3, 3], right, [9]][: 3 + i % 2]
            blocks.append(Block(TEXT[start : start + 1], DraftTree.from_branches(branches, 30), start))
        logits = scorer.score(blocks, caches)
    for start, block, found in zip(starts, blocks, logits, strict=True):
        node, places, tree = -1, [0], block.tree
        for token in TEXT[start + 1 : start + 13]:
            node = next(i for i, p in enumerate(tree.parents) if p == node and tree.tokens[i] == token)
            places.append(node + 1)
        assert torch.equal(found[places], whole[start : start + 13])


@pytest.mark.parametrize(("name", "value"), [
    ("num_threads", 2), ("num_threads", 3), ("default_dtype", torch.float64), ("default_dtype", torch.bfloat16),
], ids=str)  # fmt: skip
def test_threads_and_another_default_type_change_nothing(name, value):
    whole, change = scored(program("qwen3", torch.bfloat16), [100]), getattr(torch, f"set_{name}")
    before = getattr(torch, f"get_{name}")()
    change(value)
    try:
        assert torch.equal(scored(program("qwen3", torch.bfloat16), [1, 7, 92]), whole)
    finally:
        change(before)


def test_several_threads_may_score_at_once():
    scorer = program()
    expected = [scored(scorer, [size, 60 - size]) for size in range(1, 9)]
    with ThreadPoolExecutor(4) as callers:
        for _ in range(5):
            found = callers.map(lambda size: scored(scorer, [size, 60 - size]), range(1, 9))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_cache_and_the_table_of_angles_grow(monkeypatch):
    whole = scored(program("mistral"), [600], FullCache(1000))
    monkeypatch.setattr(compiled_forward, "ANGLES_GROWTH", 1)
    assert torch.equal(scored(program("mistral"), [3] * 200, FullCache(10)), whole)


def test_queries_are_those_of_their_pass():
    model = kept("llama", torch.float32)
    scorers, caches = [Scorer(model), fastest_scorer(Scorer(model))], [FullCache(), FullCache()]
    views = [RetrievalCache(cache, RetrievalConfig()) for cache in caches]  # which choose by them
    assert all(view.uses_queries for view in views)
    for scorer, cache in zip(scorers, caches, strict=True):
        scorer.keep_queries(0)
        scored(scorer, [7, 5], cache)
        first = {layer: q.clone() for layer, q in cache.queries.items()}
        held = dict(cache.queries)
        scored(scorer, [9], FullCache())
        assert all(torch.equal(held[layer], first[layer]) for layer in first)
    for layer in range(3):
        assert torch.allclose(caches[0].queries[layer], caches[1].queries[layer], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("pending", [100, 300])
def test_of_a_long_block_queries_are_kept_up_to_its_last_token_and_of_all_the_tree(pending):
    model, tree = kept("llama", torch.float32), DraftTree.chain(TEXT[300:303])
    for scorer in (Scorer(model), fastest_scorer(Scorer(model))):
        scorer.keep_queries(0)
        found = []
        for first in (0, pending - 1):  # the block at once, and its last token and tree in a pass of their own
            cache = FullCache()
            view = RetrievalCache(cache, RetrievalConfig())
            assert view.uses_queries
            if first:
                scored(scorer, [first], cache)
            with torch.inference_mode():
                scorer.score([Block(TEXT[first:pending], tree, first)], [cache])
            found.append(cache.queries[1])
        at_once, apart = found
        assert (at_once.shape[2], apart.shape[2]) == (min(pending, SAMPLED_QUERIES) + 3, 4)
        assert torch.allclose(at_once[:, :, -4:], apart, rtol=1e-4, atol=1e-4)


def test_queries_that_nobody_chooses_by_are_not_copied():
    """But for those of a text that is read, and of more tokens than any pass had: of these a sample is kept."""
    scorer, cache = program(), FullCache()
    scorer.keep_queries(0)
    for count, length, copied in ((7, 7, True), (5, 7, False), (7, 7, True), (9, 9, True), (1, 9, False)):
        scored(scorer, [count], cache)
        assert bool(cache.queries) == copied
        assert cache.sample[0].shape[2] == length
    with torch.inference_mode():
        scorer.score([Block(TEXT[29:31], DraftTree.empty(), 29)], [cache])
    assert cache.queries[0].shape[2] == 2


def test_queries_of_texts_that_stay_short_are_not_kept():
    """In one batch; a text that has room to become long keeps them from the beginning."""
    scorer = program()
    scorer.keep_queries(600)
    short, roomy, grows = FullCache(18), FullCache(600), FullCache()
    caches = [short, roomy, grows]
    with torch.inference_mode():
        for first, last in ((0, 10), (10, 14)):
            blocks = [Block(TEXT[first:last], DraftTree.empty(), first)] * 3
            scorer.score(blocks, caches)
            for cache, block in zip(caches, blocks, strict=True):
                cache.commit(block, [])
        assert [bool(cache.sample) for cache in caches] == [False, True, False]
        scorer.score([Block(TEXT[14:600], DraftTree.empty(), 14)], [grows])
    assert grows.sample


def test_tokens_that_there_are_not_are_refused():
    scorer = program()
    for token in (75, -1, 2**40):
        with pytest.raises(IndexError, match=str(token)):
            scorer.score([Block(np.array([3, token]), DraftTree.empty(), 0)], [FullCache()])


CHANGES = {
    "in place": lambda model: model.model.layers[1].mlp.up_proj.weight.data.mul_(1.5),
    "of one weight": lambda model: setattr(model.model.layers[2].self_attn.q_proj.weight, "data",
                                           model.model.layers[2].self_attn.q_proj.weight.data * 2),
    "of a parameter": lambda model: setattr(model.model.norm, "weight", nn.Parameter(model.model.norm.weight * 2)),
    "of the head": lambda model: model.set_output_embeddings(
        nn.Linear(96, 75, bias=False, dtype=model.dtype).requires_grad_(False)),
    "of a layer": lambda model: setattr(model.model.layers[0], "mlp", copy.deepcopy(model.model.layers[1].mlp)),
    "of all weights": lambda model: model.load_state_dict(
        {name: weight * 1.1 for name, weight in model.state_dict().items()}),
    "of all weights, exchanged": lambda model: model.load_state_dict(
        {name: weight * 1.1 for name, weight in model.state_dict().items()}, assign=True),
    "of the type": lambda model: model.bfloat16(),
    "of the type, to one without a program": lambda model: model.double(),
    "by a hook before": lambda model: model.model.layers[1].mlp.register_forward_pre_hook(lambda _, x: (x[0] * 2,)),
    "by a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2),
    "by a hook on all modules": lambda model: register_module_forward_hook(
        lambda module, args, out: out * 2 if module is model.model.layers[0].mlp else None),
    "of a forward": lambda model: setattr(model.model.layers[1].mlp, "forward", lambda x: x * 0.5),
}  # fmt: skip
NO_PROGRAM = ("of the type, to one without a program", "of a forward")


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen_at_the_next_look(change):
    """And a hook that goes lets the program come back."""
    model, hooked = build(), change.startswith("by a hook")
    scorer = fastest_scorer(Scorer(model))
    before = scored(scorer, [20])
    done = CHANGES[change](model)
    scorer.refresh()
    try:
        after, exact = scored(scorer, [20]), own(model, 20)
        assert error(after, exact) < NEAR.get(model.dtype, 1e-5)
        assert error(after, before) > 1e-3 or "type" in change
        assert isinstance(fastest_scorer(Scorer(model)), CompiledScorer) != (hooked or change in NO_PROGRAM)
        assert torch.equal(scored(scorer, [1, 19]), after)
    finally:
        if hooked:
            done.remove()
    scorer.refresh()
    assert torch.equal(scored(scorer, [20]), before if hooked else after)


def each(part: str, name: str, value: Any) -> Callable[[PreTrainedModel], Any]:
    """Sets an attribute of a part of each layer."""

    def change(model: PreTrainedModel) -> None:
        for layer in architecture.decoder_of(model).layers:
            setattr(layer.get_submodule(part), name, value)

    return change


def times(path: str, factor: float = 1.5) -> Callable[[PreTrainedModel], Any]:
    """Multiplies a weight in a way that torch does not count."""
    return lambda model: model.get_parameter(path).data.mul_(factor)


FIRST = "model.layers.0"
COPIES: dict[str, tuple[str, Callable[[PreTrainedModel], Any]]] = {
    "matrices": ("llama", times(f"{FIRST}.mlp.up_proj.weight")),
    "a matrix that holds several": ("phi3", times(f"{FIRST}.self_attn.qkv_proj.weight")),
    "biases": ("llama", times(f"{FIRST}.self_attn.q_proj.bias", 5.0)),
    "norms": ("llama", times(f"{FIRST}.input_layernorm.weight")),
    "norms of heads": ("qwen3", times(f"{FIRST}.self_attn.q_norm.weight")),
    "an embedding that is the head, too": ("qwen3", times("model.embed_tokens.weight")),
    "angles": ("llama", lambda model: model.model.rotary_emb.inv_freq.data.mul_(1.5)),
    "the angles' factor": ("llama", lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.1)),
    "angles of a kind": ("gemma3_text", lambda model: model.model.rotary_emb.sliding_attention_inv_freq.data.mul_(2)),
    "norms' epsilon": ("llama", each("input_layernorm", "variance_epsilon", 0.5)),
    "norms' epsilon, by another name": ("gemma2", each("input_layernorm", "eps", 0.5)),
    "the embedding's factor": ("gemma3_text", lambda model: model.model.embed_tokens.embed_scale.data.mul_(1.5)),
    "an embedding's multiplier": ("granite", lambda model: setattr(model.model, "embedding_multiplier", 7.0)),
    "the residual stream's multiplier": ("granite", each("", "residual_multiplier", 0.9)),
    "the scores' factor": ("llama", each("self_attn", "scaling", 0.3)),
    "the scores' cap": ("gemma2", each("self_attn", "attn_logit_softcapping", 0.1)),
    "layers without positions": ("smollm3", each("self_attn", "use_rope", False)),
}
"""What a program has of a model, as a copy or by its address: a model, and a change that torch does not count."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("copied", COPIES)
def test_what_a_program_has_of_a_model_follows(copied, dtype):
    name, change = COPIES[copied]
    model = build(name, dtype)
    scorer = fastest_scorer(Scorer(model))
    before, version = scored(scorer, [60]), scorer.refresh()
    change(model)
    assert scorer.refresh() > version
    after = scored(scorer, [60])
    assert torch.equal(after, scored(fastest_scorer(Scorer(copy.deepcopy(model))), [60]))
    assert error(after, own(copy.deepcopy(model).float(), 60)) < NEAR[dtype]
    assert error(after, before) > 0.02
    assert isinstance(scorer, CompiledScorer)
    assert scorer.refresh() == version + 1


def test_a_program_is_written_again_only_if_it_holds_something_old():
    model = build()
    scorer = fastest_scorer(Scorer(model))
    assert isinstance(scorer, CompiledScorer)
    decoder = scorer._decoder
    for copied, same in (("matrices", True), ("norms", True), ("angles", False)):
        COPIES[copied][1](model)
        scorer.refresh()
        assert (scorer._decoder is decoder) == same


SETTINGS: dict[str, tuple[str, str, Any]] = {
    "layers that run": ("llama", "num_hidden_layers", 2), "soft cap": ("gemma2", "final_logit_softcapping", 0.7),
    "layers that run, with images": ("gemma3, with images", "num_hidden_layers", 2),
    "divisor of logits": ("granite", "logits_scaling", 7.0), "window": ("mistral", "sliding_window", 5),
    "read once": ("llama", "rms_norm_eps", 0.5),
    "rotary positions, read once": ("llama", "rope_parameters", {"rope_type": "default", "rope_theta": 7.0}),
    "attention": ("llama", "_attn_implementation", "eager"),
    "a window that a Llama does not have, not read": ("llama", "sliding_window", 5),
}  # fmt: skip
"""Changes of a configuration: a model, a key and its new value."""


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_change_of_the_configuration_counts_as_far_as_the_model_reads_it(setting):
    name, key, value = SETTINGS[setting]
    model = build(name)
    scorer, before = fastest_scorer(Scorer(model)), own(model, 60)
    assert error(scored(scorer, [60]), before) < 1e-5
    setattr(model.config.get_text_config(decoder=True), key, value)
    scorer.refresh()
    after = own(model, 60)
    assert error(scored(scorer, [60]), after) < 1e-5
    assert (error(after, before) > 0.1) == (not setting.endswith(("read once", "attention", "not read")))
    assert isinstance(fastest_scorer(Scorer(model)), CompiledScorer) == ("layers" not in setting)


def test_hooks_that_transformers_leaves_behind_do_not_matter():
    """They stay on a model that was once asked for hidden states."""
    model = build()
    scorer = fastest_scorer(Scorer(model))
    before = scored(scorer, [20])
    version = scorer.refresh()
    model(torch.tensor([[1, 2]]), output_hidden_states=True)
    assert scorer.refresh() == version
    assert any(module._forward_hooks for module in model.modules())
    assert torch.equal(scored(scorer, [20]), before)
    assert isinstance(fastest_scorer(Scorer(model)), CompiledScorer)
    assert unknowable_code(model) is None


class _OwnMLP(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.up_proj(x))


@pytest.mark.parametrize("strange", [
    lambda model: model.double(), lambda model: model.half(), lambda model: model.model.norm.double(),
    lambda model: setattr(model.model.layers[1], "mlp", _OwnMLP(model.model.layers[1].mlp)),
    lambda model: setattr(model.config, "hidden_act", "relu"),
    lambda model: setattr(model.config, "model_type", "something"),
    lambda model: setattr(model.model.rotary_emb, "rope_type", "dynamic"),
    lambda model: model.lm_head.register_parameter("bias", nn.Parameter(torch.zeros(75))),
    lambda model: setattr(model.lm_head.weight, "data", model.lm_head.weight.data.t().contiguous().t()),
])  # fmt: skip
def test_what_is_not_known_is_left_to_the_model(strange):
    model = build()
    assert known(model)
    strange(model)
    assert not known(model)
    assert type(fastest_scorer(Scorer(model))) is Scorer


def test_the_embeddings_factor_is_rounded_as_the_model_does():
    model = build("gemma3_text", torch.bfloat16)
    scale: Any = model.model.embed_tokens
    scale.embed_scale.fill_(25.298221)
    assert architecture.embedding_factor(model.model, scale) == 25.25


def test_without_fused_multiply_and_add_there_is_no_program(monkeypatch):
    monkeypatch.setattr(architecture, "fused", lambda: False)
    assert type(program()) is Scorer
