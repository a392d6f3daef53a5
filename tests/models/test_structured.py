"""Answers that follow a schema, and log-probabilities: by OpenAI's own client, and by the engine."""

import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.batches import finish_all
from support.bundled import bundled
from support.chat_models import json_schema
from support.live_server import PROMPTS, TEMPLATE, LiveServer, sampled
from support.tiny import small_caches
from transformers import LogitsProcessor, PreTrainedTokenizerBase

from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request, logprob_of
from forerun.core.sampling import Constraint
from forerun.core.tree import DraftTree
from forerun.engine.engine import Engine
from forerun.models.text.grammar import KEPT_GRAMMARS, GrammarError, Grammars, _Walker
from forerun.models.text.schemas import SchemaError
from forerun.models.text.token_bytes import TokenBytes

Json = dict[str, Any]
SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "kind": {"enum": ["alpha", "beta"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "kind", "tags", "count"], "additionalProperties": False,
}  # fmt: skip
PROMPT = "A person as JSON: "
SEEDS = range(3)
CHAT: Json = {"model": "bundled", "messages": [{"role": "user", "content": "Hi"}]}


FORMAT = json_schema(SCHEMA)
ASKED: Json = {"model": "bundled", "prompt": PROMPT, "max_tokens": 80, "extra_body": {"response_format": FORMAT}}
OPTIONS: Json = {"max_new_tokens": 80, "response_format": FORMAT}


def joined(parts: Iterable[list[Any] | None]) -> list[Any]:
    return list(itertools.chain.from_iterable(part or [] for part in parts))


def check(text: str) -> None:
    """A text follows ``SCHEMA``."""
    said = json.loads(text)
    assert list(said) == list(SCHEMA["properties"])
    assert isinstance(said["name"], str) and len(said["name"]) <= 6
    assert said["kind"] in ("alpha", "beta")
    assert len(said["tags"]) <= 2 and all(isinstance(tag, str) and len(tag) <= 4 for tag in said["tags"])
    assert type(said["count"]) is int and 0 <= said["count"] <= 99
    assert text == json.dumps(said, ensure_ascii=False) or "\\" in text


@pytest.fixture(scope="module")
def plain() -> Engine:
    model, tokenizer = bundled()
    tokenizer.chat_template = TEMPLATE
    return Engine(model, "none", tokenizer=tokenizer)


@pytest.fixture(scope="module")
def engine(plain: Engine) -> Engine:
    return Engine(plain.target.model, "trie", tokenizer=plain.tokenizer)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[LiveServer]:
    with LiveServer(engine, max_tokens=128) as built:
        yield built


def test_answers_follow_the_schema_and_are_those_of_plain_decoding(plain, server):
    create = server.client().completions.create
    drafted = accepted = steps = 0
    for options, asked in [({}, {"temperature": 0}), *((sampled(s), {"temperature": 1, "seed": s}) for s in SEEDS)]:
        wanted = plain.generate(PROMPT, **OPTIONS, **options)
        answer = create(**ASKED, **asked)
        check(answer.choices[0].text)
        assert answer.choices[0].text == wanted.text and answer.choices[0].finish_reason == "stop"
        assert answer.usage.completion_tokens == len(wanted.generated[0])
        told = answer.usage.model_dump()["forerun"]
        steps, drafted, accepted = steps + told["steps"], drafted + told["drafted"], accepted + told["accepted"]
        assert wanted.stats[0].steps == len(wanted.generated[0]) > 2 * told["steps"]  # half of a text is certain
    assert accepted > steps


def test_a_stream_and_choices_are_the_same_texts(server):
    create = server.client().completions.create
    whole = create(**ASKED, temperature=1, seed=0, n=3)
    texts = [""] * 3
    for chunk in create(**ASKED, temperature=1, seed=0, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]
    assert len(set(texts)) > 1
    for text in texts:
        check(text)


def test_a_chat_gives_objects_schemas_and_text(plain, server):
    create = server.client().chat.completions.create

    def answer(max_tokens: int = 24, **asked: Any) -> str:
        return create(**CHAT, temperature=0, max_tokens=max_tokens, **asked).choices[0].message.content or ""

    check(answer(80, response_format=FORMAT))
    free = answer(response_format={"type": "text"})
    assert free == answer()
    wanted = plain.generate("user: Hi\nassistant:", max_new_tokens=24, response_format={"type": "json_object"})
    assert answer(response_format={"type": "json_object"}) == wanted.text != free and wanted.text.startswith("{")


def test_a_stop_string_and_a_limit_end_it_early(server):
    create = server.client().completions.create
    whole = create(**ASKED, temperature=0).choices[0].text
    cut = create(**ASKED, temperature=0, stop='", "tags').choices[0]
    assert (cut.text, cut.finish_reason) == (whole[: whole.index('", "tags')], "stop")
    short = create(**{**ASKED, "max_tokens": 6}, temperature=0).choices[0]
    assert short.finish_reason == "length" and whole.startswith(short.text)


@pytest.mark.parametrize("told", [{"type": "grammar"}, {}, "json_object", {"type": "json_schema"}])
def test_a_wrong_format_is_refused_without_a_server_too(engine, told):
    with pytest.raises(SchemaError, match="response_format"):
        engine.requests("Hi", response_format=told)


class AllBut(LogitsProcessor):
    """Leaves one token, after so many of a text."""

    forerun_stateless = True

    def __init__(self, token: int, length: int) -> None:
        self.token, self.length = token, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        only = torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([self.token]), 0.0)
        return scores if input_ids.shape[-1] < self.length else only


@pytest.mark.parametrize("drafter", ["none", "trie", "auto"])
def test_a_text_that_leaves_its_grammar_ends_alone(plain, drafter):
    engine = Engine(plain.target.model, drafter, tokenizer=plain.tokenizer)
    wanted = plain.generate(PROMPT, **OPTIONS).text
    (good,) = engine.requests(PROMPT, **OPTIONS)
    (bad,) = engine.requests(PROMPT, **OPTIONS, logits_processor=[AllBut(300, good.prompt_length + 2)])
    finish_all(engine, [bad, good])
    assert isinstance(bad.error, GrammarError) and "does not allow token 300" in str(bad.error)
    assert good.error is None and plain.tokenizer is not None
    assert plain.tokenizer.decode(good.generated) == wanted


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("name", "options"), [
    ("trie", {}), ("lookup", sampled(1)), ("auto", sampled(1)), ("triforce", sampled(1)), ("triforce-trie", {}),
    ("retrieval", sampled(1)), ("streaming", {}),
])  # fmt: skip
def test_forced_tokens_are_drafted_before_any_drafters_tree(plain, name, options):
    settings = small_caches(plain.target.model, cache_budget=16)
    engine = Engine(plain.target.model, name, settings=settings, tokenizer=plain.tokenizer, prune_drafts=False)
    prompts = [PROMPT, "Once upon a time there was a house. " * 8 + PROMPT]
    wanted = plain.generate(prompts, logprobs=1, **OPTIONS, **options)
    result = engine.generate(prompts, logprobs=1, **OPTIONS, **options)
    assert result.generated == wanted.generated and result.logprobs == wanted.logprobs
    for request, stats in zip(result.requests, result.stats, strict=True):
        certain = _certain(engine, request)
        assert sum(stats.accepted) >= certain - stats.steps > 0  # each step chooses one token itself
        assert stats.steps < len(request.generated) / 2


def _certain(engine: Engine, request: Request) -> int:
    """Tokens of a text that its grammar forces, by masks."""
    constraint, ids = request.sampler.constraint, torch.from_numpy(request.tokens)
    ends, size = range(request.prompt_length, len(request)), engine.target.vocabulary
    return sum(int(_allowed(constraint, ids[:end], size).sum()) == 1 for end in ends)


def _allowed(constraint: Constraint, ids: torch.Tensor, size: int) -> torch.Tensor:
    return constraint.mask(ids, torch.zeros(size)).isfinite()


def test_forced_chains_are_all_accepted(plain):
    """Whatever llguidance says comes next is the only token that its mask allows."""
    grammar, generator = plain.grammars.of(FORMAT), torch.Generator().manual_seed(0)
    chains = 0
    for _ in range(20):
        constraint, ids = grammar.follow(1), torch.tensor([7])
        while not constraint.complete(ids):
            allowed = _allowed(constraint, ids, plain.target.vocabulary)
            if chain := constraint.forced(ids, 64):
                assert int(allowed.sum()) == 1 and bool(allowed[chain[0]])
                chains += 1
            else:
                assert int(allowed.sum()) > 1
            choice = allowed.nonzero()[torch.randint(int(allowed.sum()), (), generator=generator)]
            ids = torch.cat([ids, choice])
    assert chains > 100


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drafter", ["none", "trie"])
@pytest.mark.parametrize("options", [{}, sampled(3), {"repetition_penalty": 1.1}])
def test_where_a_token_is_certain_nothing_is_masked_and_the_text_is_the_same(plain, drafter, options, monkeypatch):
    """Processors may see every token, so with one of them nothing is left out."""
    engine = Engine(plain.target.model, drafter, tokenizer=plain.tokenizer, prune_drafts=False)
    masked, mask = list[int](), _Walker.mask
    monkeypatch.setattr(_Walker, "mask", lambda self, ids, scores: masked.append(len(ids)) or mask(self, ids, scores))
    texts, counts = [], []
    for _ in range(2):
        (request,) = engine.generate(PROMPT, **OPTIONS, **options).requests
        texts.append(request.generated.tolist())
        counts.append(len(set(masked)))
        masked.clear()
        monkeypatch.setattr(_Walker, "certain", lambda self, ids: None)
    assert texts[0] == texts[1]
    forced = _certain(engine, request)
    if request.sampler.processor is not None:
        assert counts[0] == counts[1]
    else:
        assert counts[1] - counts[0] > forced / 2 > 10


def test_a_constraint_depends_on_the_ids_alone(plain):
    size, grammar = plain.target.vocabulary, plain.grammars.of(FORMAT)
    (request,) = plain.generate(PROMPT, **OPTIONS).requests
    ids, start, known = torch.from_numpy(request.tokens.copy()), request.prompt_length, 0
    one = grammar.follow(start)
    for taken in torch.randperm(len(ids) - start, generator=torch.Generator().manual_seed(1)).tolist():
        here = ids[: start + taken]
        allowed = _allowed(grammar.follow(start), here, size)
        if (token := one.certain(here)) is not None:
            known += 1
            assert allowed.nonzero().tolist() == [[token]]
        assert torch.equal(_allowed(one, here, size), allowed)
        wrong = torch.cat([here, torch.tensor([0, 0])])
        with pytest.raises(GrammarError):
            one.complete(wrong)
        assert one.forced(wrong, 8) == [] and not one.on_trial().complete(wrong)
        assert bool(_allowed(one.on_trial(), wrong, size).all())
    assert one.complete(ids) and not one.complete(ids[:-1])
    assert known > 2


def test_the_end_token_ends_what_could_go_on(plain, engine):
    for seed in SEEDS:
        options = {"max_new_tokens": 40, "response_format": json_schema({"type": "integer"}), **sampled(seed)}
        wanted, result = plain.generate("2 + 2 = ", **options), engine.generate("2 + 2 = ", **options)
        assert result.generated == wanted.generated
        int(result.text)
        assert result.finish_reasons[0] in ("eos", "length")


def test_rejection_sampling_keeps_to_the_schema_with_drafts_that_carry_q(plain):
    settings = LongContextConfig(plain.target.model, gamma2=5)
    engine = Engine(plain.target.model, "streaming", settings=settings, tokenizer=plain.tokenizer, prune_drafts=False)
    for seed in SEEDS[:2]:
        check(engine.generate(PROMPT, verification="rejection", **OPTIONS, **sampled(seed)).text)


def test_grammars_are_kept_for_each_namespace_and_not_for_ever(plain):
    grammars = Grammars(plain.tokenizer, plain.target.vocabulary, [])
    assert grammars.of(FORMAT) is grammars.of(FORMAT)
    assert grammars.of(FORMAT, "another") is not grammars.of(FORMAT)
    assert grammars.of({"type": "text"}) is None
    for number in range(KEPT_GRAMMARS + 3):
        grammars.of(json_schema({"const": number}))
    assert len(grammars) == KEPT_GRAMMARS


def test_what_llguidance_cannot_use_is_named(plain, monkeypatch):
    slow = object.__new__(type("Slow", (PreTrainedTokenizerBase,), {}))
    for tokenizer, message in ((None, "there is none"), (slow, "there is Slow")):
        with pytest.raises(ValueError, match=f"needs a fast tokenizer.*{message}"):
            Grammars(tokenizer, 100, []).of(FORMAT)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install .*\[grammar\]'"):
        Grammars(plain.tokenizer, plain.target.vocabulary, []).of(FORMAT)


def test_logprobs_are_the_models_own_and_the_same_with_drafts(plain, engine):
    for options in ({"do_sample": False}, {**sampled(3), "temperature": 0.7, "top_p": 0.9}):
        options = {"max_new_tokens": 16, "logprobs": 4, **options}
        wanted = plain.generate(PROMPTS, **options)
        engine.generate(PROMPTS, **options)  # so that there is something to draft
        result = engine.generate(PROMPTS, **options)
        assert sum(map(sum, (stats.accepted for stats in result.stats))) > 0
        assert result.generated == wanted.generated and result.logprobs == wanted.logprobs
        for request, found in zip(result.requests, result.logprobs, strict=True):
            assert [each.token for each in found] == request.generated.tolist()
            with torch.no_grad():
                own = plain.target.model(torch.from_numpy(request.tokens)[None]).logits[0]
            own = own[request.prompt_length - 1 : -1].double().log_softmax(-1)
            for row, each in zip(own, found, strict=True):
                assert each.logprob == pytest.approx(float(row[each.token]), abs=1e-4)
                values, ids = row.topk(4)
                assert [logprob for _, logprob in each.top] == pytest.approx(values.tolist(), abs=1e-4)
                assert len({*ids.tolist()} & {token for token, _ in each.top}) >= 3  # but for near ties
    assert plain.generate(PROMPTS[0], max_new_tokens=4).logprobs == [[]]
    with pytest.raises(ValueError, match="logprobs is -1"):
        plain.generate(PROMPTS[0], logprobs=-1)


def test_of_equally_likely_tokens_the_lower_id_comes_first():
    found = logprob_of(torch.tensor([0.0, 2.0, 1.0, 2.0, 1.0, 1.0]), 4, 3)
    assert [token for token, _ in found.top] == [1, 3, 2]
    total = math.log(1 + 2 * math.exp(2) + 3 * math.exp(1))
    assert found.logprob == pytest.approx(1 - total) and found.top[0][1] == pytest.approx(2 - total)
    assert logprob_of(torch.zeros(2), 0, 5).top == ((0, -math.log(2)), (1, -math.log(2)))


def test_completions_tell_logprobs(engine, server):
    create = server.client().completions.create
    asked: Json = {"model": "bundled", "prompt": PROMPTS[1], "max_tokens": 24, "temperature": 1, "seed": 5}
    choice = create(**asked, logprobs=2).choices[0]
    found = engine.generate(PROMPTS[1], max_new_tokens=24, logprobs=2, **sampled(5)).logprobs[0]
    told = choice.logprobs
    assert told.tokens and told.token_logprobs and told.top_logprobs and told.text_offset
    assert "".join(told.tokens) == choice.text
    assert told.token_logprobs == [each.logprob for each in found]
    for start, token, top, own in zip(told.text_offset, told.tokens, told.top_logprobs, found, strict=True):
        assert choice.text[start : start + len(token)] == token
        assert 2 <= len(top) <= 3 and top[token] == own.logprob
    chunks = [chunk.choices[0] for chunk in create(**asked, logprobs=2, stream=True)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert joined(part.tokens for part in parts) == told.tokens
    assert joined(part.token_logprobs for part in parts) == told.token_logprobs
    assert joined(part.text_offset for part in parts) == told.text_offset
    assert create(**asked, logprobs=0).choices[0].logprobs.top_logprobs == [
        {token: logprob} for token, logprob in zip(told.tokens, told.token_logprobs, strict=True)
    ]
    assert create(**asked).choices[0].logprobs is None


def test_chats_tell_logprobs(server):
    create = server.client().chat.completions.create
    asked: Json = CHAT | {"max_tokens": 16, "seed": 2, "n": 2, "logprobs": True}
    answer = create(**asked, top_logprobs=3)
    for choice in answer.choices:
        assert choice.logprobs.content is not None
        said = b"".join(bytes(each.bytes or []) for each in choice.logprobs.content)
        assert said.decode(errors="replace") == choice.message.content
        assert all(len(each.top_logprobs) == 3 and each.logprob < 0 for each in choice.logprobs.content)
    content: list[list[Json]] = [[], []]
    for chunk in create(**asked, top_logprobs=3, stream=True):
        if (told := chunk.choices[0].logprobs) is not None:
            content[chunk.choices[0].index] += [each.model_dump() for each in told.content or []]
    assert content == [[each.model_dump() for each in choice.logprobs.content] for choice in answer.choices]
    bare = create(**asked).choices[0].logprobs
    assert [each.top_logprobs for each in bare.content or []] == [[]] * 16


def test_a_stop_string_leaves_out_what_is_not_sent(server):
    create = server.client().completions.create
    asked: Json = {"model": "bundled", "prompt": PROMPTS[1], "max_tokens": 40, "temperature": 0, "logprobs": 1}
    whole = create(**asked).choices[0]
    assert whole.logprobs.tokens is not None
    stop = whole.logprobs.tokens[6][1:] + whole.logprobs.tokens[7]  # begins inside a token
    cut = create(**asked, stop=stop).choices[0]
    assert cut.logprobs.tokens == whole.logprobs.tokens[:7]
    assert whole.text.startswith(cut.text) and cut.finish_reason == "stop"
    chunks = [chunk.choices[0].logprobs for chunk in create(**asked, stop=stop, stream=True)]
    assert joined(chunk.tokens for chunk in chunks if chunk) == cut.logprobs.tokens


def test_parts_of_characters_are_told_as_bytes(plain, server):
    body = {"model": "bundled", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 0}
    told = server.post({**body, "response_format": json_schema({"const": "é😀"})}).json()["choices"][0]
    assert json.loads(told["text"]) == "é😀"
    tokens, said = told["logprobs"]["tokens"], b""
    for token in tokens:
        part = token.startswith("bytes:")
        said += bytes.fromhex(token[6:].replace("\\x", "")) if part else token.encode()
    assert said.decode() == told["text"]
    assert any(token.startswith("bytes:\\x") for token in tokens)
    assert told["logprobs"]["text_offset"][-1] < len(told["text"])


def test_the_bytes_of_tokens(plain):
    tokenizer = plain.tokenizer
    spell, text = TokenBytes(tokenizer), 'naïve "😀"\n\tdef f(x): ſ'
    assert b"".join(map(spell, tokenizer(text)["input_ids"])).decode() == text
    assert spell(tokenizer.eos_token_id) == tokenizer.eos_token.encode() and spell.skipped(tokenizer.eos_token_id)
    assert spell(10**6) == b"" and spell.skipped(10**6)


def test_a_tree_hangs_under_what_is_certain_and_comes_back():
    tree = DraftTree(np.array([4, 5, 6]), np.array([-1, 0, -1]), q=torch.full((3, 8), 0.125))
    whole = tree.under([1, 2])
    assert whole.tokens.tolist() == [1, 2, 4, 5, 6] and whole.parents.tolist() == [-1, 0, 1, 2, 1]
    assert whole.q[:2].argmax(-1).tolist() == [1, 2] and whole.q.sum(-1).tolist() == [1.0] * 5
    back = whole.behind(2)
    assert back.tokens.tolist() == [4, 5, 6] and back.parents.tolist() == [-1, 0, -1]
    assert tree.under([]) is tree and DraftTree.empty().under([3]).tokens.tolist() == [3]
