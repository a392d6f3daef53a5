"""A copy of the target in fewer bits drafts over the target's keys and values: same texts, no prefill, no cache."""

from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import ARCHITECTURES, HYBRIDS, PROMPTS, build, small_caches, some_were_accepted
from torch import nn
from transformers import PreTrainedModel

import forerun
from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.runtime import vector_ir
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache
from forerun.kv.tail import TailView
from forerun.models.forward import gate
from forerun.models.forward.scorer import Scorer
from forerun.models.loading.stored_copy import stored_copy
from forerun.models.loading.stored_weights import StoredEmbedding, StoredLinear

gguf = pytest.importorskip("gguf", reason="the gguf package is not installed: pip install -e '.[real]'")
pytestmark = pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")

COPIED = ("llama", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gpt_neox", "opt", "granite", "olmo2", "lfm2")
WAYS: tuple[dict[str, Any], ...] = (
    {"do_sample": False},
    {"do_sample": True, "temperature": 0.3, "seed": 11},
    {"do_sample": True, "temperature": 0.3, "seed": 11, "verification": "rejection"},
)


def model(name: str, dtype: torch.dtype = torch.float32, **more: int) -> PreTrainedModel:
    class_name, extra = {**ARCHITECTURES, **HYBRIDS}[name]
    whole_blocks = {"ffn_dim": 64} if name == "opt" else {"intermediate_size": 64}
    return build(class_name, extra | whole_blocks | more, seed=len(name)).to(dtype)


def test_matrices_are_blocks_shared_as_before_and_all_else_is_float32():
    target = model("qwen2", torch.bfloat16)
    target.lm_head.weight = target.model.embed_tokens.weight
    before = {name: weight.clone() for name, weight in target.named_parameters()}
    made = stored_copy(target, "q4_0")
    assert made.lm_head.weight is made.model.embed_tokens.weight
    for name, module in made.named_modules():
        if isinstance(module, StoredLinear | StoredEmbedding):
            weight = target.get_submodule(name).weight.detach().float().numpy()
            assert np.array_equal(module.weight.numpy(), gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_0))
        else:
            assert not isinstance(module, nn.Linear)
            assert all(weight.dtype == torch.float32 for weight in module.parameters(recurse=False))
    bias = target.model.layers[0].self_attn.q_proj.bias
    assert torch.equal(made.model.layers[0].self_attn.q_proj.bias, bias.float())
    assert all(torch.equal(weight, before[name]) for name, weight in target.named_parameters())
    assert target.dtype == torch.bfloat16 and made.dtype == torch.float32


@pytest.mark.parametrize(("make", "message"), [
    (lambda: model("llama", torch.float64), "whose type is float64; allowed are float32 and bfloat16"),
    (lambda: stored_copy(model("llama"), "q8_0"), "whose type is stored; allowed"),
    (lambda: model("llama").to("meta"), "it must be on one CPU, in one process; it is on meta"),
    (lambda: build(*ARCHITECTURES["llama"], seed=1).float(), "has 48 columns; allowed are multiples of 32"),
    (lambda: model("mixtral", torch.bfloat16), "it would have .* bytes, and the model has"),
])  # fmt: skip
def test_a_model_without_a_useful_copy_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        stored_copy(make(), "q8_0")


def test_a_format_is_no_small_model_and_no_head():
    settings = small_caches("q8_0")
    for drafter, message in (("triforce", "'q8_0', a format of copies; this"), ("head", "needs a trained head")):
        with pytest.raises(ValueError, match=message):
            forerun.Engine(model("llama"), drafter, settings=settings)
    with pytest.raises(ValueError, match="draft_model is 'q9'; this drafter needs a format: q8_0, "):
        forerun.Engine(model("llama"), "copy", settings=small_caches("q9"))


@pytest.mark.parametrize("scorer_class", [Scorer, gate.admit])
def test_a_tail_is_read_and_moved_as_committed_tokens_are(scorer_class):
    """The target itself, over its cache's tail: logits of the same bits as over its cache, though the memory moves."""
    scorer = scorer_class(model("qwen3"))
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 48, 400)
    tree = DraftTree(tokens[300:305], np.array([-1, 0, 0, 2, -1]))
    caches = FullCache(), FullCache()
    prompt = Block(tokens[:20], DraftTree.empty(), 0)
    for cache in caches:
        scorer.score([prompt], [cache])
        cache.commit(prompt, [])
    tail = TailView(caches[0])
    tail.sync()
    place = 20
    with torch.inference_mode():
        for count in (3, 1, 290, 2):  # the third does not fit into the first memory
            block = Block(tokens[place : place + count], tree, place)
            drafted, expected = (scorer.score([block], [cache])[0] for cache in (tail, caches[1]))
            assert torch.equal(drafted, expected)
            tail.commit(block, [0, 2, 3])
            caches[1].commit(block, [0, 2, 3])
            place += count + 3
    assert caches[0].length == 20 and tail.length == place == caches[1].length
    tail.truncate(22)
    tail.sync()
    assert tail.length == 20 and tail.nbytes == 0


@pytest.mark.one_in(4)
@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("drafter", ["copy", "auto"])
@pytest.mark.parametrize("budget", [10, 1000])
@pytest.mark.parametrize("name", COPIED)
def test_texts_are_the_targets_own(name, budget, drafter, dtype, way):
    """Alone and in a batch; over all keys, and over those that a sparse cache selects."""
    target, options = model(name, dtype), WAYS[way] | {"max_new_tokens": 14, "eos_token_id": None}
    settings = small_caches("q8_0", cache_budget=budget)
    plain = forerun.Engine(target, "none")
    engine = forerun.Engine(target, drafter, settings=settings, prune_drafts=False, prefill_block=4)
    requests = []
    for prompts in ([PROMPTS[1]], PROMPTS):
        found = engine.generate([*prompts], **options)
        if options.get("verification") != "rejection":
            assert found.generated == plain.generate([*prompts], **options).generated
        assert [len(request.generated) for request in found.requests] == [14] * len(prompts)
        requests += found.requests
    if drafter == "copy":
        some_were_accepted(requests)
        assert sum(sum(request.stats.accepted) for request in requests) > sum(len(r.generated) for r in requests) / 4


def test_a_long_sequence_has_a_sparse_cache():
    settings = small_caches("q8_0", cache_budget=200)
    engine = forerun.Engine(model("llama", max_position_embeddings=400), "copy", settings=settings)
    made = list[Any]()
    level = engine.level.planner.chains
    make = level._make
    level._make = lambda scorer, source: made.append(make(scorer, source)) or made[-1]
    for prompt in ([5] * 4, [5, 6, 7] * 100):
        engine.generate(prompt, max_new_tokens=8, eos_token_id=None)
    assert [type(each) for each in made] == [TailView, LowRankCache]
