"""Logits processors that remember their calls see each row's text once, in order; criteria of a user come first."""

import itertools
import threading
from typing import Any

import pytest
import torch
from support.tiny import PROMPTS, VOCABULARY, OracleDrafter, by_transformers, small_caches, tiny
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TopPLogitsWarper,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation import EosTokenCriteria, MaxLengthCriteria, StoppingCriteriaList

import forerun
from forerun.decoding.sources.lookup import Lookup
from forerun.models.text.processors import Nucleus, of_row, stateless

MODEL = tiny("llama")
PROMPT = PROMPTS[1]
LENGTH = {"max_new_tokens": 16, "eos_token_id": None}
SETTINGS = small_caches(tiny("llama"))
DRAFTERS = ["none", "lookup", "trie", "auto", "triforce", "triforce-trie", "retrieval", "streaming", "oracle"]


class Counting(LogitsProcessor):
    """Bans tokens by how often it was called, and remembers the ids of each call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += input_ids.tolist()
        scores = scores.clone()
        scores[:, len(self.calls) % 3 :: 3] = -torch.inf
        return scores


def processors(*each: Any) -> LogitsProcessorList:
    return LogitsProcessorList(each)


def drafter_of(name: str, text: list[int]) -> Any:
    return OracleDrafter([[*PROMPT, *text]]) if name == "oracle" else name


def engine_of(name: str, text: list[int] | None = None, **options: Any) -> forerun.Engine:
    """An engine whose oracle knows what comes after the prompt."""
    return forerun.Engine(MODEL, drafter_of(name, text or []), settings=SETTINGS, prefill_block=4, **options)


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("drafter", "how"), [
    *((drafter, "greedy") for drafter in DRAFTERS),
    *itertools.product(DRAFTERS[:-1], ("coupled", "rejection")),
])  # fmt: skip
def test_a_processor_with_a_memory_is_called_once_a_token_in_order(drafter, how):
    """And tokens are those of plain generation, but for rejection sampling."""
    sampled = {"do_sample": True, "seed": 3, "temperature": 0.9, "verification": how}
    options, expected = LENGTH | ({"do_sample": False} if how == "greedy" else sampled), None
    if how == "greedy":
        expected = by_transformers(MODEL, PROMPT, logits_processor=processors(Counting()), **options)
    elif how == "coupled":
        [expected] = engine_of("none").generate(PROMPT, logits_processor=processors(Counting()), **options).generated
    counting = Counting()
    result = engine_of(drafter, expected).generate(PROMPT, logits_processor=processors(counting), **options)
    text = [*PROMPT, *result.generated[0]]
    assert counting.calls == [text[:end] for end in range(len(PROMPT), len(text))]
    assert expected in (None, result.generated[0])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["lookup", "none", "triforce"])
def test_rows_have_copies_of_what_remembers(drafter):
    engine = engine_of(drafter)
    counting = Counting()
    options = {"do_sample": False, **LENGTH}
    result = engine.generate([*PROMPTS], logits_processor=processors(counting), **options)
    for prompt, text in zip(PROMPTS, result.generated, strict=True):
        assert text == by_transformers(MODEL, prompt, logits_processor=processors(Counting()), **options)
    assert counting.calls == []
    ids = torch.tensor([PROMPT] * 2)
    custom = {"custom_generate": forerun.custom_generate, "forerun_drafter": Lookup()}
    twins = MODEL.generate(ids, logits_processor=processors(Counting()), **options, **custom)
    assert twins[:, len(PROMPT) :].tolist() == [result.generated[1]] * 2


class Uncopyable(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


def test_what_cannot_be_copied_serves_one_row_and_is_refused_for_several():
    engine, options = forerun.Engine(MODEL, "lookup"), {"do_sample": False, **LENGTH}
    one = engine.generate(PROMPT, logits_processor=processors(Uncopyable()), **options)
    assert one.generated == [by_transformers(MODEL, PROMPT, logits_processor=processors(Counting()), **options)]

    def even(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.index_fill(1, torch.arange(1, VOCABULARY, 2), -torch.inf)

    for processor, message in (
        (Uncopyable(), r"Uncopyable may remember its calls, .* \(TypeError: .*forerun_stateless = True"),
        (even, r"even may remember its calls, .* \(a copy of it is itself\)"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            engine.generate([PROMPT, PROMPT], logits_processor=processors(processor), **options)
    even.forerun_stateless = True
    rows = engine.generate([PROMPT, PROMPT], logits_processor=processors(even), **options)
    assert rows.generated == [by_transformers(MODEL, PROMPT, logits_processor=processors(even), **options)] * 2


def test_a_declared_processor_acts_on_drafts_and_another_does_not():
    class Rolling(Counting):
        def __init__(self, declared: bool) -> None:
            super().__init__()
            self.forerun_stateless = declared

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            self.calls += input_ids.tolist()
            return scores.roll(1, 1)

    declared, silent = Rolling(True), Rolling(False)
    for each in (declared, silent):
        engine_of("retrieval").generate(PROMPT, logits_processor=processors(each), **LENGTH)
    assert len(silent.calls) == LENGTH["max_new_tokens"] < len(declared.calls)
    assert stateless(declared) and not stateless(silent) and not stateless(Counting())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["lookup", "trie", "triforce"])
def test_a_watermark_that_keeps_a_history_is_that_of_plain_generation(drafter):
    def mark() -> LogitsProcessorList:
        return processors(SynthIDTextWatermarkLogitsProcessor(3, list(range(1, 9)), 64, 4, 8, "cpu"))

    options = {"do_sample": True, "seed": 5, **LENGTH}
    plain = forerun.Engine(MODEL, "none").generate([*PROMPTS], logits_processor=mark(), **options)
    marked = engine_of(drafter).generate([*PROMPTS], logits_processor=mark(), **options)
    assert marked.generated == plain.generated
    for prompt, text in zip(PROMPTS, plain.generated, strict=True):
        alone = forerun.Engine(MODEL, "none").generate(prompt, logits_processor=mark(), **options)
        assert alone.generated == [text]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["lookup", "none", "triforce"])
def test_guidance_by_a_second_pass_is_transformers_own(drafter):
    def guide() -> LogitsProcessorList:
        return processors(UnbatchedClassifierFreeGuidanceLogitsProcessor(1.7, MODEL))

    options = {"do_sample": False, **LENGTH, "max_new_tokens": 12}
    expected = [by_transformers(MODEL, prompt, logits_processor=guide(), **options) for prompt in PROMPTS]
    assert expected[1] != by_transformers(MODEL, PROMPT, **options)
    engine = engine_of(drafter)
    assert engine.generate([*PROMPTS], logits_processor=guide(), **options).generated == expected


def allow(row: int, ids: torch.Tensor) -> list[int]:
    return [(int(ids[-1]) * 3 + row + i) % VOCABULARY for i in range(5)]


@pytest.mark.parametrize("drafter", ["none", "lookup"])
def test_allowed_tokens_are_asked_for_with_the_row_s_number(drafter):
    ids = torch.tensor([PROMPT, PROMPT[::-1], PROMPT])
    options = {"prefix_allowed_tokens_fn": allow, "do_sample": False, **LENGTH}
    expected = MODEL.generate(ids, **options)
    rows = forerun.Engine(MODEL, drafter).generate(ids, **options)
    assert rows.generated == expected[:, len(PROMPT) :].tolist()
    assert rows.generated[0] != rows.generated[2]
    custom = MODEL.generate(ids, custom_generate=forerun.custom_generate, forerun_drafter=drafter, **options)
    assert torch.equal(custom, expected)
    told: list[set[int]] = []
    for generate in (MODEL.generate, forerun.Engine(MODEL, drafter).generate):
        told.append(set())
        asked = {"prefix_allowed_tokens_fn": lambda row, ids: told[-1].add(row) or [1, 2], "do_sample": True}
        generate(torch.tensor([PROMPT, PROMPT]), num_return_sequences=2, **{**options, **asked})
    assert told[0] == told[1] and len(told[0]) > 1


@pytest.mark.parametrize(
    "option", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}, {"repetition_penalty": 1.3}]
)
def test_what_looks_at_prompts_looks_at_the_row_s_own(option):
    ids = torch.tensor([PROMPT, PROMPT[::-1]])
    options = {"do_sample": False, **LENGTH, **option}
    expected = MODEL.generate(ids, **options)
    custom = MODEL.generate(ids, custom_generate=forerun.custom_generate, forerun_drafter="lookup", **options)
    assert torch.equal(custom, expected)


FREE_RUN = by_transformers(MODEL, PROMPT, do_sample=False, max_new_tokens=24, eos_token_id=None)
CRITERIA: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "another end": ({"max_new_tokens": 20}, [EosTokenCriteria(FREE_RUN[5])]),
    "several ends": ({"max_new_tokens": 20}, [EosTokenCriteria([FREE_RUN[7], FREE_RUN[9]])]),
    "an end where there is none": ({"max_new_tokens": 20, "eos_token_id": None}, [EosTokenCriteria(FREE_RUN[3])]),
    "shorter": ({"max_new_tokens": 20, "eos_token_id": None}, [MaxLengthCriteria(len(PROMPT) + 6)]),
    "longer": ({"max_new_tokens": 4, "eos_token_id": None}, [MaxLengthCriteria(len(PROMPT) + 16)]),
    "no longer than the prompt": ({"max_new_tokens": 4, "eos_token_id": None}, [MaxLengthCriteria(3)]),
    "both": ({"max_new_tokens": 4}, [MaxLengthCriteria(len(PROMPT) + 16), EosTokenCriteria(FREE_RUN[11])]),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_criteria_of_a_user_take_the_place_of_those_from_the_options(name):
    options, criteria = CRITERIA[name]
    options = {"do_sample": False, "stopping_criteria": StoppingCriteriaList(criteria), **options}
    expected = by_transformers(MODEL, PROMPT, **options)
    for drafter in ("none", "oracle"):
        engine = forerun.Engine(MODEL, drafter_of(drafter, FREE_RUN))
        assert engine.generate(PROMPT, **options).generated == [expected]
    custom = {"custom_generate": forerun.custom_generate, "forerun_drafter": "lookup"}
    assert by_transformers(MODEL, PROMPT, **options, **custom) == expected


@pytest.mark.parametrize("least", [1, 3])
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_what_transformers_keeps(p, least):
    warper, generator = TopPLogitsWarper(p, min_tokens_to_keep=least), torch.Generator().manual_seed(1)
    for spread in (0.0, 1e-3, 0.5, 3.0, 30.0):
        scores = spread * torch.randn(1, 5000, generator=generator)
        scores[:, torch.rand(5000, generator=generator) < 0.3] = -torch.inf
        found, wanted = Nucleus(warper)(torch.zeros(1, 1), scores), warper(torch.zeros(1, 1), scores)
        if spread:  # where all are alike, which of them are kept is nobody's promise
            assert torch.equal(found, wanted)
        assert abs(int(found.isfinite().sum()) - int(wanted.isfinite().sum())) <= 1


def test_every_row_gets_the_quick_top_p_and_drafts_may_use_it():
    """Scores are of any type: a processor before it may return other floats."""
    warper = TopPLogitsWarper(0.5)
    processor, ids = of_row([warper], MODEL, row=1, rows=2), torch.zeros(1, 1)
    assert processor is not None and stateless(Nucleus(warper))
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        scores = torch.randn(1, 1000, generator=torch.Generator().manual_seed(2)).to(dtype)
        for quick in (processor, Nucleus(warper)):
            assert torch.equal(quick(ids, scores), warper(ids, scores))


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["retrieval", "streaming", "triforce"])
def test_a_processor_that_fails_on_a_draft_fails_no_text(drafter):
    options = {"do_sample": True, "temperature": 2.0, "seed": 5, **LENGTH}
    plain = forerun.Engine(MODEL, "none")
    expected, other = (plain.generate(each, **options).generated[0] for each in (PROMPT, PROMPTS[0]))
    text, failed = [*PROMPT, *expected], []

    def strict(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        (ids,) = input_ids.tolist()
        if ids != text[: len(ids)]:
            failed.append(ids)
            raise ValueError("no token may follow")
        return scores

    strict.forerun_stateless = True
    engine = engine_of(drafter, prune_drafts=False)
    (first,) = engine.requests([PROMPT], logits_processor=processors(strict), **options)
    (second,) = engine.requests([PROMPTS[0]], **options)
    list(engine.run([first, second]))
    assert first.generated.tolist() == expected and failed
    assert second.generated.tolist() == other


@pytest.mark.parametrize("ignored", [3, torch.tensor([3, 0])], ids=["all", "each"])
def test_a_prompt_that_a_penalty_ignores_is_each_row_s_own(ignored):
    ids, scores = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.randn(2, 40)
    whole = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored)
    expected = whole(ids, scores.clone())
    for row in range(2):
        own = of_row([whole], MODEL, row=row, rows=2)
        assert torch.equal(own(ids[row : row + 1], scores[row : row + 1].clone()), expected[row : row + 1])


@pytest.mark.parametrize("kind", [EncoderRepetitionPenaltyLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor])
def test_several_rows_of_a_prompt_look_at_that_prompt(kind):
    prompts, setting = torch.tensor([[1, 2, 3, 1], [4, 5, 6, 4]]), 2.0 if "Penalty" in kind.__name__ else 2
    whole, scores = kind(setting, prompts), torch.randn(1, 40)
    for row in range(4):
        alone, own = kind(setting, prompts[row // 2][None]), of_row([whole], MODEL, row, 4)
        ids = torch.cat((prompts[row // 2], torch.tensor([1 if row < 2 else 4])))[None]
        assert torch.equal(own(ids, scores.clone()), alone(ids, scores.clone()))
