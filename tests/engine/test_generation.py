"""Every option of ``generate`` means what it means in transformers; wrong ones are refused with the reason."""

import copy
import gc
import re
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.mocks import Silent, Told
from support.tiny import EOS, HYBRIDS, PROMPTS, VOCABULARY, OracleDrafter, build, letters, tiny
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Cache,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    QuantizedCache,
    StoppingCriteriaList,
    TextIteratorStreamer,
    TextStreamer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.generation import StopStringCriteria
from transformers.generation.streamers import BaseStreamer

import forerun
from forerun.api import ENGINES, engine_of
from forerun.core.request import Request
from forerun.decoding.row import Row
from forerun.decoding.source import Limit
from forerun.decoding.sources.lookup import Lookup
from forerun.decoding.sources.trie_source import TrieSource
from forerun.models.forward.inputs import check_inputs
from forerun.models.forward.runtime import Runtime, runtime_as_default

MODEL = tiny("llama")
PROMPT = PROMPTS[1]


tokenizer = pytest.fixture(scope="module")(letters)


def by_transformers(prompt: list[int] = PROMPT, **options: Any) -> list[int]:
    ids = torch.tensor([prompt])
    return MODEL.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def oracle(**options: Any) -> OracleDrafter:
    return OracleDrafter([[*PROMPT, *by_transformers(**options)]])


class BanEven(LogitsProcessor):
    """Depends on the prefix: after an even token no even token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids[0, -1] % 2 == 0:
            scores[:, ::2] = -torch.inf
        return scores


FREE_RUN = by_transformers(max_new_tokens=30, eos_token_id=None, do_sample=False)


def stop_after_the_seventh(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
    return ids[:, -1] == FREE_RUN[6]


OPTIONS: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 3}, "max_length": {"max_length": 20}, "default_length": {},
    "min_new_tokens": {"max_new_tokens": 30, "min_new_tokens": 25},
    "min_length": {"max_new_tokens": 30, "min_length": 25},
    "several_eos": {"max_new_tokens": 30, "eos_token_id": [FREE_RUN[9], FREE_RUN[4]]},
    "no_eos": {"max_new_tokens": 30, "eos_token_id": None},
    "repetition_penalty": {"max_new_tokens": 30, "repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"max_new_tokens": 30, "encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"max_new_tokens": 30, "no_repeat_ngram_size": 2},
    "bad_words": {"max_new_tokens": 30, "bad_words_ids": [[FREE_RUN[0]], FREE_RUN[1:3]]},
    "suppress": {"max_new_tokens": 30, "suppress_tokens": FREE_RUN[:2], "begin_suppress_tokens": [FREE_RUN[3]]},
    "sequence_bias": {"max_new_tokens": 30, "sequence_bias": {(FREE_RUN[0],): -9.0}},
    "forced_eos": {"max_new_tokens": 12, "forced_eos_token_id": EOS},
    "length_penalty": {"max_new_tokens": 30, "exponential_decay_length_penalty": (5, 1.2)},
    "processors": {"max_new_tokens": 30, "logits_processor": LogitsProcessorList([BanEven()])},
    "criteria": {"max_new_tokens": 30, "stopping_criteria": StoppingCriteriaList([stop_after_the_seventh])},
    "allowed": {"max_new_tokens": 30, "prefix_allowed_tokens_fn": lambda row, ids: [7, 9, int(ids[-1] + 1) % 48]},
    "config": {"generation_config": GenerationConfig(max_new_tokens=17, repetition_penalty=1.3, eos_token_id=EOS)},
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "drafter"), [
    pytest.param(name, drafter, marks=[pytest.mark.matrix] * ((i + j) % 3 > 0))
    for i, name in enumerate(OPTIONS)
    for j, drafter in enumerate(["oracle", "lookup", "none"])
])  # fmt: skip
def test_greedy_options_mean_what_they_mean_in_transformers(name, drafter):
    options = {"do_sample": False, **OPTIONS[name]} if name != "config" else OPTIONS[name]
    expected = by_transformers(**options)
    engine = forerun.Engine(MODEL, oracle(**options) if drafter == "oracle" else drafter)
    assert engine.generate(PROMPT, **options).generated == [expected]
    given = Lookup() if drafter == "oracle" else drafter
    assert by_transformers(**options, custom_generate=forerun.custom_generate, forerun_drafter=given) == expected


SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6}, "top_k": {"top_k": 5}, "top_p": {"top_p": 0.7}, "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.5}, "epsilon_cutoff": {"epsilon_cutoff": 0.02}, "eta_cutoff": {"eta_cutoff": 0.02},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}  # fmt: skip


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", SAMPLING)
def test_sampled_tokens_follow_the_distribution_that_transformers_samples_from(name):
    ids = torch.tensor([PROMPT])
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 1, **SAMPLING[name]}
    reference = MODEL.generate(ids, output_scores=True, return_dict_in_generate=True, **options)
    p = reference.scores[0][0].double().softmax(-1)
    engine, count = forerun.Engine(MODEL, "none"), 300
    sampler = engine.requests(PROMPT, **options)[0].sampler
    requests = [Request(PROMPT, 1, sampler=replace(sampler, seed=seed)) for seed in range(count)]
    logits = MODEL(ids).logits[0, -1]
    counts = torch.bincount(torch.tensor([request.choose(logits) for request in requests]), minlength=VOCABULARY)
    assert counts[p == 0].sum() == 0
    seen = p > 0
    statistic = float(((counts - count * p)[seen] ** 2 / (count * p)[seen]).sum())
    degrees = int(seen.sum()) - 1
    assert statistic < degrees + 6 * (2 * max(degrees, 1)) ** 0.5 + 6


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SAMPLING)
def test_a_seed_gives_the_same_text_with_any_drafter(name):
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 25, "seed": 3, **SAMPLING[name]}
    plain = forerun.Engine(MODEL, "none").generate(PROMPT, **options)
    assert plain.seeds == [3]
    for drafter in ("lookup", "trie", OracleDrafter([plain.requests[0].tokens])):
        assert forerun.Engine(MODEL, drafter).generate(PROMPT, **options).generated == plain.generated
        assert forerun.generate(MODEL, PROMPT, drafter=drafter, **options).generated == plain.generated


def test_num_return_sequences_are_different_and_reproducible():
    engine = forerun.Engine(MODEL, "lookup")
    options = {"do_sample": True, "max_new_tokens": 12, "num_return_sequences": 3}
    result = engine.generate([PROMPT, PROMPTS[0]], seed=7, **options)
    assert len(result.generated) == 6
    assert len({tuple(text) for text in result.generated[:3]}) == 3
    assert result.seeds == [7, 8, 9, 7, 8, 9]
    single = engine.generate(PROMPT, seed=8, **{**options, "num_return_sequences": 1})
    assert single.generated[0] == result.generated[1]


def test_stop_strings_cut_exactly_where_transformers_does(tokenizer):
    text = tokenizer.decode(FREE_RUN)
    stop = text[6:8]  # inside the run, over two tokens
    options = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False, "stop_strings": [stop]}
    expected = by_transformers(**options, tokenizer=tokenizer)
    engine = forerun.Engine(MODEL, OracleDrafter([[*PROMPT, *FREE_RUN]]), tokenizer=tokenizer)
    result = engine.generate(PROMPT, **options)
    assert result.generated == [expected]
    assert len(expected) < 30
    assert result.finish_reasons == ["stop"]
    config = GenerationConfig(**options)
    assert engine.generate(PROMPT, generation_config=config).generated == [expected]
    assert config.stop_strings == [stop]
    with pytest.raises(ValueError, match="need a tokenizer"):
        forerun.Engine(MODEL, "none").generate(PROMPT, **options)
    with pytest.raises(ValueError, match="contains an empty string"):
        engine.generate(PROMPT, **options | {"stop_strings": [""]})
    whole = by_transformers(generation_config=config, stop_strings=None)
    assert len(whole) > len(expected)
    for nothing in (None, []):  # those of the configuration are off
        assert engine.generate(PROMPT, generation_config=config, stop_strings=nothing).generated == [whole]


@pytest.mark.parametrize("options", [
    {"max_new_tokens": 20}, {"max_new_tokens": 20, "min_new_tokens": 15},
    {"max_new_tokens": 20, "repetition_penalty": 1.5}, {"max_new_tokens": 20, "eos_token_id": FREE_RUN[5]},
])  # fmt: skip
def test_a_padded_batch_gives_transformers_own_tensor(options):
    length = max(len(prompt) for prompt in PROMPTS)
    ids = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in PROMPTS])
    mask = torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in PROMPTS])
    options = options | {"attention_mask": mask, "do_sample": False}
    expected = MODEL.generate(ids, **options)
    custom = {"custom_generate": forerun.custom_generate, "forerun_drafter": "lookup"}
    assert torch.equal(MODEL.generate(ids, **options, **custom), expected)
    output = MODEL.generate(ids, return_dict_in_generate=True, **options, **custom)
    assert torch.equal(output.sequences, expected)
    assert [stats.tokens >= stats.steps for stats in output.stats] == [True] * 3
    rows = forerun.Engine(MODEL, "lookup").generate(ids, **options)
    assert [request.prompt.tolist() for request in rows.requests] == list(PROMPTS)
    assert torch.equal(rows.sequences, expected)


def test_streamers_receive_every_token(tokenizer, capsys):
    engine = forerun.Engine(MODEL, OracleDrafter([[*PROMPT, *FREE_RUN]]), tokenizer=tokenizer)
    options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    engine.generate(PROMPT, streamer=TextStreamer(tokenizer, skip_prompt=True), **options)
    assert capsys.readouterr().out == tokenizer.decode(FREE_RUN[:20]) + "\n"
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=engine.generate, args=(PROMPT,), kwargs={"streamer": streamer, **options})
    thread.start()
    assert "".join(streamer) == tokenizer.decode(FREE_RUN[:20])
    thread.join()
    with pytest.raises(ValueError, match="one sequence; there are 2"):
        engine.generate([PROMPT, PROMPT], streamer=streamer, **options)


def test_stream_yields_what_generate_returns_and_closing_it_ends_the_request():
    closed: list[Row] = []
    engine = forerun.Engine(MODEL, Told(None, closed.append))
    commits = engine.stream(PROMPT, max_new_tokens=20, eos_token_id=None, do_sample=False)
    assert [next(commits).tokens[0] for _ in range(5)] == FREE_RUN[:5]
    assert not closed
    commits.close()
    assert len(closed) == 1


def test_interruption_keeps_what_was_generated():
    class Impatient(Silent):
        def propose(self, rows: Sequence[Row], limits: Sequence[Limit]) -> list[forerun.DraftTree]:
            if len(rows[0].request.generated) == 4:
                raise KeyboardInterrupt
            return super().propose(rows, limits)

    engine = forerun.Engine(MODEL, Impatient(), prune_drafts=False)
    with pytest.raises(forerun.GenerationInterrupted) as caught:
        engine.generate(PROMPT, max_new_tokens=20, eos_token_id=None, do_sample=False)
    assert caught.value.result.generated == [FREE_RUN[:4]]
    assert caught.value.result.finish_reasons == [None]


def test_text_in_and_text_out(tokenizer):
    engine = forerun.Engine(MODEL, "none", tokenizer=tokenizer)
    result = engine.generate("h", max_new_tokens=4, do_sample=False)
    assert result.text == tokenizer.decode(result.generated[0], skip_special_tokens=True)
    encoded = tokenizer("h", return_tensors="pt")
    assert engine.generate(encoded, max_new_tokens=4, do_sample=False).generated == result.generated


@pytest.mark.parametrize(("prompts", "options", "error", "message"), [
    ([], {}, ValueError, "there is no prompt"), ([[]], {}, ValueError, "the prompt is empty"),
    ([3, VOCABULARY], {}, ValueError, f"token id {VOCABULARY} is out of range"),
    ([3, -1], {}, ValueError, "token id -1 is out of range"), ("text", {}, ValueError, "no tokenizer"),
    ([1.5], {}, TypeError, "token ids"), (5, {}, TypeError, "the prompt is 5; it must be text, token ids, messages"),
    (PROMPT, {"max_new_tokens": 127}, ValueError, "exceed the model's 128 positions"),
    (PROMPT, {"max_new_tokens": 0}, ValueError, "max_new_tokens"),
    (PROMPT, {"num_beams": 3}, NotImplementedError, "beam_search"),
    (PROMPT, {"penalty_alpha": 0.6, "top_k": 4}, (NotImplementedError, ValueError), "contrastive|custom_generate"),
    (PROMPT, {"guidance_scale": 1.5}, NotImplementedError, "guidance_scale"),
    (PROMPT, {"output_scores": True, "return_dict_in_generate": True}, NotImplementedError, "output_scores"),
    (PROMPT, {"temperature": -1.0, "do_sample": True}, ValueError, "temperature"),
    (PROMPT, {"top_p": 3.0, "do_sample": True}, ValueError, "top_p"),
    (PROMPT, {"verification": "hope"}, ValueError, "'hope'; allowed are 'coupled' and 'rejection'"),
    (PROMPT, {"max_new_tokens": 4, "unheard_of": 1}, ValueError, "unheard_of"),
    (PROMPT, {"inputs_embeds": torch.zeros(1, 12, 32)}, (NotImplementedError, ValueError), "inputs_embeds"),
    (PROMPT, {"position_ids": torch.arange(3, 15)[None]}, NotImplementedError, "position_ids: .* counts"),
    (PROMPT, {"seed": "x"}, TypeError, "^seed is 'x'; it must be an integer or None"),
    (PROMPT, {"logprobs": "x"}, TypeError, "^logprobs is 'x'; it must be an integer or None"),
    (PROMPT, {"namespace": 3}, TypeError, "^namespace is 3; it must be a text"),
    (PROMPT, {"max_new_tokens": "x"}, TypeError, "^max_new_tokens is 'x'; it must be an integer or None"),
    (PROMPT, {"top_p": "x"}, TypeError, r"^top_p is 'x'; it must be a number or None"),
])  # fmt: skip
def test_bad_input_is_refused_with_the_reason(prompts, options, error, message):
    for generate in (forerun.Engine(MODEL, "none").generate, partial(forerun.generate, MODEL, drafter="none")):
        with pytest.raises(error, match=message):
            generate(prompts, **options)


def test_a_processor_that_asks_for_more_than_there_is_is_refused_as_by_transformers():
    class Asking(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, mood: str) -> torch.Tensor:
            return scores

    options = {"max_new_tokens": 2, "logits_processor": LogitsProcessorList([BanEven(), Asking()])}
    for run in (by_transformers, lambda **given: forerun.generate(tiny("llama"), PROMPT, **given)):
        with pytest.raises(ValueError, match="required parameters"):
            run(**options)


def test_bad_settings_are_refused_with_the_reason(tokenizer):
    with pytest.raises(ValueError, match="drafter is 'magic'; known are none, lookup"):
        forerun.Engine(MODEL, "magic")
    with pytest.raises(ValueError, match="budget is 0; it must be at least 1"):
        forerun.Engine(MODEL, "none", budget=0)
    with pytest.raises(TypeError, match=r"^budget is 'x'; it must be an integer"):
        forerun.generate(MODEL, PROMPT, drafter="none", budget="x")
    for make in (forerun.Engine, partial(forerun.generate, prompts=PROMPT)):
        with pytest.raises(TypeError, match=r"^settings is {}; it must be a forerun.LongContextConfig or None"):
            make(MODEL, drafter="none", settings={})
    large = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({str(i): i for i in range(99)})))
    with pytest.raises(ValueError, match="99 tokens and the model 48: they do not match"):
        forerun.Engine(MODEL, "none", tokenizer=large)
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        _ = forerun.magic


def test_a_failing_step_still_closes_every_request(monkeypatch):
    closed: list[Row] = []
    engine = forerun.Engine(MODEL, Told(None, closed.append))
    monkeypatch.setattr(engine.level.planner, "learn", Mock(side_effect=RuntimeError("the planner failed")))
    with pytest.raises(RuntimeError, match="the planner failed"):
        engine.generate(list(PROMPTS), max_new_tokens=4)
    assert len(closed) == 3


def test_drafts_that_the_vocabulary_lacks_are_harmless():
    drafter = TrieSource()
    drafter.warm("default", [[PROMPT[-1], VOCABULARY + 5, 3], [PROMPT[-1], FREE_RUN[0], VOCABULARY]] * 3)
    result = forerun.Engine(MODEL, drafter).generate(PROMPT, max_new_tokens=10, eos_token_id=None, do_sample=False)
    assert result.generated == [FREE_RUN[:10]]


def test_an_engine_drafts_from_texts_it_was_warmed_with_in_their_namespace_only():
    options = {"max_new_tokens": 20, "eos_token_id": None, "do_sample": False}
    engine = forerun.Engine(MODEL, "trie")
    engine.warm([[*PROMPT, *FREE_RUN]], namespace="a")
    same, other = (engine.generate(PROMPT, namespace=name, **options) for name in ("a", "b"))
    assert same.generated == other.generated
    assert same.stats[0].steps < other.stats[0].steps
    with pytest.raises(ValueError, match="keeps no earlier outputs"):
        forerun.Engine(MODEL, "lookup").warm([PROMPT])


@pytest.mark.parametrize("seed", [5, None])
def test_all_doors_give_the_same_samples_for_a_seed_or_draw_the_same_seeds(seed):
    options = {"do_sample": True, "temperature": 0.8, "top_k": 9, "max_new_tokens": 20, "num_return_sequences": 2}
    options |= {"eos_token_id": None}
    ids, found = torch.tensor([PROMPT] * 2), []
    for door in (
        lambda: forerun.Engine(MODEL, "trie").generate([PROMPT] * 2, seed=seed, **options).generated,
        lambda: forerun.generate(MODEL, ids, seed=seed, **options).generated,
        lambda: MODEL.generate(ids, custom_generate=forerun.custom_generate, forerun_seed=seed, **options)[
            :, len(PROMPT) :
        ].tolist(),
    ):
        torch.manual_seed(5)
        found.append(door())
    assert found[0] == found[1] == found[2]


def test_custom_generate_draws_a_seed_for_every_prompt_from_torch_s_generator():
    ids = torch.tensor([PROMPT] * 3)
    options = {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None, "forerun_drafter": "none"}
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(MODEL.generate(ids, custom_generate=forerun.custom_generate, **options).tolist())
    assert len({*map(tuple, texts[0])}) == 3 and texts[0] == texts[1] != texts[2]


CACHE = "(past_key_values|cache)"
"""What transformers 5.23 calls the model's cache, and 5.24."""


class Quantised(QuantizedCache):
    """Without the package that it would need."""

    def __init__(self) -> None:
        Cache.__init__(self, layers=[])


def test_custom_generate_names_the_inputs_that_it_cannot_take():
    ids = torch.tensor([PROMPT])
    embedded = MODEL.get_input_embeddings()(ids)
    filled = DynamicCache()
    filled.update(torch.zeros(1, 1, 11, 4), torch.zeros(1, 1, 11, 4), 0)
    natural = torch.arange(len(PROMPT))[None]
    for given, message in (
        ({"inputs_embeds": embedded}, "^inputs_embeds: Forerun passes only token ids"),
        ({"inputs": ids, "position_ids": natural + 1}, "^position_ids: Forerun counts"),
        ({"inputs": ids, "past_key_values": filled}, f"^{CACHE} holds 11 tokens"),
        ({"inputs": ids, "past_key_values": Quantised()}, f"^{CACHE} is a QuantizedCache"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            MODEL.generate(**given, max_new_tokens=2, custom_generate=forerun.custom_generate, forerun_drafter="none")
    options = {"max_new_tokens": 5, "do_sample": False}
    custom = {"custom_generate": forerun.custom_generate, "forerun_drafter": "none"}
    assert by_transformers(position_ids=natural, **custom, **options) == by_transformers(**options)


def test_caches_are_checked_under_any_name():
    for model, message in ((MODEL, "^kept holds 12 tokens"), (build(*HYBRIDS["mamba2"], seed=1), "^kept holds states")):
        ids = torch.tensor([PROMPT])
        (cache,) = (each for each in model(ids, use_cache=True).values() if isinstance(each, Cache))
        with pytest.raises(NotImplementedError, match=message):
            check_inputs(ids, {"kept": cache})
        check_inputs(ids, {"kept": type(cache)(config=model.config)})


def test_padding_without_a_mask_is_no_text_as_in_transformers():
    ids = torch.tensor([[0, 0, *PROMPT], [7, 9, *PROMPT]])
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": 5}
    own, engine = MODEL.generate(ids, **options), forerun.Engine(MODEL, "none")
    result = engine.generate(ids, **options)
    for row, new in zip(own[:, ids.shape[1] :].tolist(), result.generated, strict=True):
        assert row[: len(new)] == new and set(row[len(new) :]) <= {0}
    assert result.requests[0].prompt.tolist() == PROMPT and result.requests[1].prompt_length == len(PROMPT) + 2
    for given in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": None}):
        assert engine.generate(given, **options).generated == result.generated
    marked = engine.generate({"input_ids": ids, "attention_mask": None}, attention_mask=torch.ones_like(ids), **options)
    assert marked.requests[0].prompt_length == len(PROMPT) + 2
    both = engine.generate(ids, **options | {"eos_token_id": 0})  # then it may be an end within the text
    assert both.requests[0].prompt_length == len(PROMPT) + 2
    config = GenerationConfig(pad_token_id=9, max_new_tokens=3, do_sample=False)
    assert engine.generate([[1, 2], [1]], generation_config=config).sequences[1, 0] == 9


def test_what_a_processor_gives_beside_ids_is_refused():
    ids, engine = torch.tensor([PROMPT]), forerun.Engine(MODEL, "none")
    mask = torch.ones_like(ids)
    for name in ("pixel_values", "position_ids", "token_type_ids"):
        with pytest.raises(NotImplementedError, match=f"^the prompt has {name}: Forerun passes only input_ids"):
            engine.generate({"input_ids": ids, "attention_mask": mask, name: mask}, max_new_tokens=2)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * mask, "pixel_values": None}
    assert engine.generate(given, max_new_tokens=2).generated == engine.generate(ids, max_new_tokens=2).generated
    with pytest.raises(NotImplementedError, match=r"^assistant_model is not supported"):
        engine.generate(PROMPT, max_new_tokens=2, assistant_model=MODEL)
    with pytest.raises(NotImplementedError, match=r"^cache_implementation='paged' is not supported"):
        engine.generate(PROMPT, max_new_tokens=2, cache_implementation="paged")
    with pytest.raises(NotImplementedError, match=r"^streamer is not supported"):
        next(engine.stream(PROMPT, max_new_tokens=2, streamer=TextStreamer(None)))


@pytest.mark.parametrize(("name", "door"), [
    ("forerun_streamer", forerun.custom_generate), ("streamer", forerun.custom_generate),
    ("streamer", lambda *given, **options: forerun.custom_generate(*given, **options)),
])  # fmt: skip
def test_a_streamer_of_custom_generate_gets_the_prompt_first(name, door):
    ids, theirs, ours = torch.tensor([PROMPT]), Mock(spec=BaseStreamer), Mock(spec=BaseStreamer)
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    MODEL.generate(ids, streamer=theirs, **options)
    MODEL.generate(ids, custom_generate=door, **{name: ours}, **options)
    told, wanted = ([call.args[0].flatten().tolist() for call in one.put.call_args_list] for one in (ours, theirs))
    assert told == wanted and len(told) == 6 and ours.end.called


def byte_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """One token a byte, of the bytes in a text."""
    spelled = sorted({bytes_to_unicode()[byte] for byte in text.encode()})
    backend = Tokenizer(models.BPE({each: i for i, each in enumerate(spelled)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_texts_of_a_stream_never_split_a_character(drafter):
    text = "\u4f60\u597d w\u00f6rld \U0001f642" * 2
    tokenizer = byte_tokenizer(text)
    ids = tokenizer(text)["input_ids"]
    engine = forerun.Engine(MODEL, drafter, tokenizer=tokenizer)
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": len(ids)}
    options["prefix_allowed_tokens_fn"] = lambda _, so_far: [ids[len(so_far) - len(ids)]]
    written = [*engine.stream(ids, **options)]
    assert [token for commit in written for token in commit.tokens] == ids
    assert "".join(commit.text or "" for commit in written) == text
    assert any(commit.text == "" for commit in written) or drafter == "lookup"
    options["max_new_tokens"] = len(ids) - 1  # the last character is cut off: its bytes come out at the end
    (*_, last) = engine.stream(ids, **options)
    assert (last.text or "").endswith("\N{REPLACEMENT CHARACTER}")
    assert next(iter(forerun.Engine(MODEL, "none").stream(PROMPT, max_new_tokens=2))).text is None


def test_a_result_is_short_in_print(tokenizer):
    engine = forerun.Engine(MODEL, "none", tokenizer=tokenizer)
    options: dict[str, Any] = {"max_new_tokens": 100, "do_sample": False, "eos_token_id": None}
    one, two = engine.generate(PROMPT, **options), engine.generate([PROMPT, PROMPT], **options)
    assert re.fullmatch(r"GenerationResult\('\w{79}…', 100 tokens, 1.0 tokens per step, \d+\.\d\d s\)", repr(one))
    assert re.fullmatch(r"GenerationResult\(2 sequences, 200 tokens, 1.0 tokens per step, .*\)", repr(two))


def test_a_user_s_stop_strings_take_the_place_of_the_options(tokenizer):
    text = tokenizer.decode(FREE_RUN)
    early, late = (StopStringCriteria(tokenizer, [text[at : at + 2]]) for at in (2, 8))
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None, "do_sample": False}
    engine = forerun.Engine(MODEL, "none", tokenizer=tokenizer)
    for own, other in ((late, text[2:4]), (early, text[8:10])):
        expected = by_transformers(stopping_criteria=[own], stop_strings=[other], tokenizer=tokenizer, **options)
        found = engine.generate(PROMPT, stopping_criteria=[own], stop_strings=[other], **options)
        assert found.generated == [expected]


@pytest.mark.parametrize("name", ["pixel_values", "token_type_ids", "input_features"])
def test_what_a_model_reads_beside_text_is_refused_by_name(name):
    ids, prepare = torch.tensor([PROMPT]), lambda model, input_ids, **given: {"input_ids": input_ids, **given}
    prepared = MODEL.generate(ids, max_new_tokens=2, custom_generate=prepare)
    with pytest.raises(NotImplementedError, match=rf"^{name}: Forerun passes only token ids"):
        forerun.custom_generate(MODEL, **prepared, **{name: torch.zeros(1)})


@runtime_as_default(Runtime())
def test_engines_beside_a_model_are_few_and_go_when_the_model_does():
    """With a runtime of its own: what the session's runtime has probed, it keeps."""
    model = copy.deepcopy(MODEL)
    options = {"max_new_tokens": 2, "do_sample": False}
    first = weakref.ref(engine_of(model, "none", budget=8))
    drafters = [weakref.ref(engine_of(model, Silent(), budget=8).level) for _ in range(ENGINES - 1)]
    forerun.generate(model, PROMPT, drafter="none", budget=8, **options)
    drafters += [weakref.ref(engine_of(model, Silent(), budget=8).level) for _ in range(2)]
    gc.collect()
    assert [each() is None for each in drafters] == [True] * 2 + [False] * (ENGINES - 1)
    assert first() is engine_of(model, "none", budget=8)
    assert copy.deepcopy(model)._forerun_engines == {}
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None and first() is None
