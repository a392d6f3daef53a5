"""The faces of the engine for people who write Python: typed options, plain errors, and a shared engine per model."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.tiny import tiny
from torch import nn
from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

import forerun
from forerun.api import DEFAULTS, engine_of
from forerun.decoding.recipes import trie_of
from forerun.models.text.requests import UNSUPPORTED_OPTIONS, GenerationOptions
from forerun.reference import bundled


class ListDrafter(forerun.Source):
    """Proposes tokens where trees are wanted."""

    def propose(self, rows: Any, limits: Any) -> Any:
        return [[1, 2]] * len(rows)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(bundled("target"))
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    large = copy.deepcopy(tiny("llama"))
    large.resize_token_embeddings(len(tokenizer))
    return large.eval()


@pytest.mark.parametrize(("model", "drafter", "message"), [
    ("runs/real", "none", r"model is 'runs/real'; it must be a loaded model.*from_pretrained\('runs/real'"),
    (5, "none", "model is a int; it must be a transformers decoder"),
    (tiny("llama"), [1, 2], "drafter is a list; it must be a name, or derive"),
    (tiny("llama"), ListDrafter, r"drafter is the class ListDrafter; it must be an object, such as ListDrafter\(\)"),
    (tiny("llama"), None, "drafter is a NoneType"),
])  # fmt: skip
def test_what_is_no_model_and_no_drafter_is_refused(model, drafter, message):
    with pytest.raises(TypeError, match=message):
        forerun.Engine(model, drafter)
    if not isinstance(drafter, str):
        with pytest.raises(TypeError, match=message):
            forerun.Engine(model, "none").set_drafter(drafter)


@pytest.mark.parametrize("prune", [True, False])
def test_a_drafter_that_returns_lists_of_tokens_is_refused(prune):
    engine = forerun.Engine(tiny("llama"), ListDrafter(), prune_drafts=prune)
    with pytest.raises(TypeError, match=r"ListDrafter.propose returned \[\[1, 2\]\]; it must be one DraftTree"):
        engine.generate([1, 2, 3], max_new_tokens=4)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("max_tokens", "max_new_tokens"), ("temprature", "temperature"), ("stop", "stop_strings"), ("qqq", None)],
)
def test_an_unknown_option_is_refused_with_the_nearest_name(name, meant):
    with pytest.raises(ValueError, match=f"{name} is not an option of generate") as caught:
        forerun.Engine(tiny("llama"), "none").generate([1, 2], **{name: 3})
    assert (f"did you mean {meant}?" in str(caught.value)) is (meant is not None)


UNTYPED = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight assistant_lookbehind cache_config
    cache_implementation compile_config constraints continuous_batching_config decoder_start_token_id disable_compile
    diversity_penalty dola_layers early_stopping force_words_ids guidance_scale is_assistant length_penalty low_memory
    max_cache_len max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups num_beams
    penalty_alpha prefill_chunk_size prompt_lookup_num_tokens speculation_type target_lookbehind transformers_version
    use_cache use_mtp
"""
"""Options of transformers that are refused, or say how it computes and not what."""


def test_options_have_types_for_everything_that_transformers_takes_and_forerun_supports():
    config = set(vars(GenerationConfig())) - {*UNSUPPORTED_OPTIONS, "_from_model_config"}
    own = {"seed", "verification", "namespace", "drafts_from", "logprobs", "response_format", "attention_mask"}
    inputs = {"generation_config", "logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "prediction"}
    typed = set(GenerationOptions.__annotations__)
    assert typed - own - inputs <= config
    assert config - typed == {*UNTYPED.split()}


def test_generate_takes_and_passes_on_all_that_an_engine_takes(monkeypatch):
    parameters = signature(forerun.Engine).parameters
    assert {*signature(forerun.Engine.generate).parameters} - {"self", "options"} <= {
        *signature(forerun.generate).parameters
    }
    given = {name: name for name in [*parameters][1:] if name not in ("drafter", "tokenizer", "_runtime")}
    passed: dict[str, Any] = {}
    monkeypatch.setattr("forerun.api.engine_of", lambda model, drafter, **told: passed.update(told) or Mock())
    forerun.generate(tiny("llama"), [1], **given)
    assert passed == given | {"kv_store": Path("kv_store")}


def test_calls_share_an_engine_unless_an_argument_of_it_differs(model):
    first = engine_of(model, "trie", budget=DEFAULTS["budget"])
    assert engine_of(model, "trie") is first
    assert engine_of(model, "trie", prefix_cache=1 << 20) is not first


def test_two_threads_with_two_tokenizers_get_texts_of_their_own(model, tokenizer):
    other = copy.deepcopy(tokenizer)
    decode = other.decode
    other.decode = lambda *given, **options: decode(*given, **options).upper()
    expected = forerun.Engine(model, "none", tokenizer=tokenizer).generate("def add", max_new_tokens=8).text
    texts: dict[int, list[str]] = {0: [], 1: []}
    together = threading.Barrier(2)

    def call(thread: int, own: Any) -> None:
        for _ in range(5):
            together.wait()
            texts[thread].append(forerun.generate(model, "def add", tokenizer=own, max_new_tokens=8).text)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2), (tokenizer, other)))
    assert texts == {0: [expected] * 5, 1: [expected.upper()] * 5}
    assert engine_of(model, "auto").tokenizer is None
    with pytest.raises(ValueError, match="there is no tokenizer"):
        forerun.generate(model, "def add", max_new_tokens=8)


def test_a_calls_tokenizer_goes_before_the_engines(model, tokenizer):
    other = copy.deepcopy(tokenizer)
    other.decode = lambda *given, **options: "other"
    engine = forerun.Engine(model, "none", tokenizer=tokenizer)
    assert engine.generate("def", tokenizer=other, max_new_tokens=4).text == "other"
    assert engine.generate("def", max_new_tokens=4).text != "other"
    assert engine.tokenizer is tokenizer


def test_a_trie_is_saved_and_loaded_by_its_engine(model, tokenizer, tmp_path):
    engine = forerun.Engine(model, "trie", tokenizer=tokenizer)
    engine.warm(["one two three four five six"])
    engine.save_trie(tmp_path / "trie")
    other = forerun.Engine(model, "trie", tokenizer=tokenizer)
    other.load_trie(str(tmp_path / "trie"))
    ours, theirs = (trie_of(each.level).snapshot("default")[0] for each in (engine, other))
    assert len(ours) == 1 and [text.tolist() for text in ours] == [text.tolist() for text in theirs]
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        forerun.Engine(model, "trie").save_trie(tmp_path / "trie")
    with pytest.raises(ValueError, match="it has no trie"):
        forerun.Engine(model, "none", tokenizer=tokenizer).load_trie(tmp_path / "trie")


def test_an_engine_says_what_it_is():
    engine = forerun.Engine(tiny("llama"), "none")
    assert repr(engine) == (
        f"Engine(LlamaForCausalLM, {tiny('llama').num_parameters():,} parameters, float64 on cpu, drafter=none, "
        "budget=64, exactness='bitwise')"
    )


def test_requests_and_origins_are_exported():
    engine = forerun.Engine(tiny("llama"), "none")
    request = forerun.Request([1, 2, 3], 4)
    assert [token for commit in engine.run([request]) for token in commit.tokens] == request.generated.tolist()
    assert forerun.Origin.TARGET.word == "target"


class Adapted(nn.Module):
    """A layer with two adapters, as peft has them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.active, self.scaling = inner, ["a"], {"a": 1.0, "b": -300.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scaling[self.active[0]]


def test_keys_that_are_kept_in_memory_go_when_another_adapter_is_used():
    model, prompt, seen = copy.deepcopy(tiny("llama")), [1 + i % 7 * 3 for i in range(100)], list[Any]()
    mlp = model.model.layers[0].mlp
    mlp.down_proj = Adapted(mlp.down_proj)
    options: dict[str, Any] = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    engine = forerun.Engine(model, "none", prefix_cache=1 << 26)
    for adapter in "ab":
        mlp.down_proj.active[0] = adapter
        result = engine.generate(prompt, **options)
        assert not result.requests[0].cached_tokens
        assert result.generated == forerun.Engine(model, "none").generate(prompt, **options).generated
        seen.append(result.generated)
        assert engine.generate(prompt, **options).requests[0].cached_tokens
    assert seen[0] != seen[1]


def test_a_store_that_could_not_be_renewed_is_not_asked(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun.engine.kv_store.MIN_STORED_TOKENS", 64)
    model, prompt = copy.deepcopy(tiny("llama")), [1 + i % 7 * 3 for i in range(100)]
    engine = forerun.Engine(model, "none", kv_store=tmp_path)
    engine.generate(prompt, max_new_tokens=2)
    engine.flush()
    for weight in model.parameters():
        weight.data.mul_(-1.3)
    hook = model.model.layers[0].register_forward_hook(lambda module, given, out: out)
    for _ in range(2):
        with pytest.raises(ValueError, match="keys and values of this model cannot be stored on disk"):
            engine.generate(prompt, max_new_tokens=2)
    hook.remove()
    result = engine.generate(prompt, max_new_tokens=2)
    assert not result.requests[0].cached_tokens
    assert result.generated == forerun.Engine(model, "none").generate(prompt, max_new_tokens=2).generated


def test_a_vocabulary_that_grew_is_the_model_s():
    model = copy.deepcopy(tiny("llama")).float()
    engine = forerun.Engine(model, "none")
    rows = engine.target.vocabulary
    engine.generate([1, 2, 3], max_new_tokens=2)
    model.resize_token_embeddings(rows + 5)
    assert engine.target.vocabulary == rows + 5
    assert len(engine.generate([1, rows + 4, 3], max_new_tokens=2, eos_token_id=None).generated[0]) == 2
