"""Schemas that are expensive to compile, and texts that a schema spells out, cost nobody else anything."""

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.bundled import bundled
from support.chat_models import json_schema

from forerun.models.text import grammar
from forerun.models.text.grammar import GrammarError, Grammars
from forerun.models.text.schemas import SchemaError
from forerun.server import grammar_pool
from forerun.server.api_errors import ApiError
from forerun.server.grammar_pool import GrammarPool

Json = dict[str, Any]


@pytest.fixture
def grammars() -> Grammars:
    tokenizer = bundled()[1]
    return Grammars(tokenizer, len(tokenizer), [])


@pytest.fixture
def pool(grammars: Grammars) -> Iterator[GrammarPool]:
    pool = GrammarPool(grammars)
    yield pool
    pool.close()


def expensive(patterns: int) -> Json:
    """Each pattern doubles the time: 22 need 11 seconds, in 692 characters."""
    return json_schema({"type": "string", "allOf": [{"pattern": f"[a-z]{{{i}}}.*x"} for i in range(1, patterns + 1)]})


def test_a_schema_that_compiles_for_minutes_is_refused_in_seconds_and_its_process_killed(pool, monkeypatch):
    monkeypatch.setattr(grammar_pool, "COMPILE_SECONDS", 1)
    monkeypatch.setattr(grammar_pool, "COMPILE_WALL_SECONDS", 600.0)
    workers, new = list[Any](), grammar_pool._Worker
    monkeypatch.setattr(grammar_pool, "_Worker", lambda grammars: workers.append(new(grammars)) or workers[-1])

    async def ask() -> int:
        attack, turns = asyncio.ensure_future(pool.prepare(expensive(40), "a", "a/x")), 0
        while not attack.done():
            await asyncio.sleep(0.02)
            turns += 1
        with pytest.raises(SchemaError, match="compiling it needs more than 1 seconds or 1024 MiB"):
            await attack
        await pool.prepare(json_schema({"type": "string"}), "b", "b/x")  # another process takes its place
        return turns

    assert asyncio.run(ask()) > 9  # nothing else waits meanwhile
    assert workers[0]._process.returncode == -signal.SIGXCPU  # its time, not its memory


def test_the_end_does_not_wait_for_a_schema(grammars):
    pool = GrammarPool(grammars)

    async def ask() -> int | None:
        attack = asyncio.ensure_future(pool.prepare(expensive(40), "a", "a/x"))
        while not pool._workers:
            await asyncio.sleep(0.01)
        (worker,) = pool._workers
        await asyncio.to_thread(pool.close)
        with pytest.raises(ApiError, match="closing"):
            await attack
        return worker._process.wait()

    assert asyncio.run(ask()) == -signal.SIGKILL  # and not by the end of its time


def test_a_tenant_has_few_places_and_equal_schemas_share_one(pool, grammars, monkeypatch):
    monkeypatch.setattr(grammar_pool, "TENANT_SCHEMAS", 2)
    monkeypatch.setattr(grammars, "of", Mock(wraps=grammars.of))

    async def ask() -> list[Any]:
        one, two, three = (json_schema({"type": "string", "maxLength": length}) for length in (1, 2, 3))
        asking = [("a", one), ("a", one), ("a", two), ("a", three), ("b", three)]
        waiting = [pool.prepare(schema, tenant, f"{tenant}/x") for tenant, schema in asking]
        return await asyncio.gather(*waiting, return_exceptions=True)

    told = asyncio.run(ask())
    assert [type(each) for each in told] == [type(None)] * 3 + [ApiError, type(None)]
    compiled = sorted(asked.args[1] for asked in grammars.of.call_args_list)
    assert told[3].status == 429 and compiled == ["a/x", "a/x", "b/x"]


def test_a_process_that_cannot_be_started_leaves_its_place(pool, monkeypatch):
    schema = json_schema({"type": "string"})
    with monkeypatch.context() as patch:
        patch.setattr(grammar_pool.subprocess, "Popen", Mock(side_effect=OSError("no more processes")))
        for _ in range(grammar_pool.COMPILING_PROCESSES + 1):
            with pytest.raises(OSError, match="no more processes"):
                asyncio.run(pool.prepare(schema, "a", "a/x"))
    asyncio.run(asyncio.wait_for(pool.prepare(schema, "a", "a/x"), 60))


TEXT = r"the schema has a text of .* characters; 2,000 are the most"
REMAINDERS = r"multipleOf has [0-9,]+ remainders in all; 50,000 are the most"
"""They would take minutes to compile."""


@pytest.mark.parametrize(("said", "schema"), [
    (TEXT, {"const": "x" * 3_000}), (TEXT, {"enum": ["a", "x" * 3_000]}),
    (TEXT, {"type": "string", "pattern": "^a{60000}$"}), (TEXT, {"type": "string", "pattern": "^(a{100}){100}$"}),
    (TEXT, {"type": "array", "items": {"const": 7}, "minItems": 20_000}),
    (TEXT, {"type": "object", "properties": {"x" * 3_000: {"type": "null"}}}),
    *((REMAINDERS, {"type": "number", "multipleOf": divisor}) for divisor in (9_999_991, 1e6, 49_999.5)),
])  # fmt: skip
def test_long_texts_and_divisors_of_a_schema_are_refused(grammars, said, schema):
    nested = {"type": "object", "properties": {"a": [{"type": "integer"}], "b": schema}, "required": ["a", "b"]}
    for each in (schema, nested):
        with pytest.raises(SchemaError, match=said):
            grammars.of(json_schema(each))


def test_a_property_may_be_called_like_a_keyword_and_a_divisor_may_be_small(grammars):
    long = {"type": "object", "properties": {f"field_{n}": {"type": "string"} for n in range(99)}}
    schema = {"type": "object", "properties": {"const": long, "enum": {"type": "null"}, "pattern": {"const": 1}}}
    assert grammars.of(json_schema(schema)) and grammars.of(json_schema({"type": "number", "multipleOf": 0.25}))


def test_a_run_that_turns_out_long_ends_the_text(grammars, monkeypatch):
    monkeypatch.setattr(grammar, "MAX_FORCED_TOKENS", 50)
    made = grammars.of(json_schema({"const": "x" * 300}))
    walker = made.follow(0)
    ids, scores = torch.empty(0, dtype=torch.int64), torch.zeros(4096)
    with pytest.raises(GrammarError, match="forces more than 50 tokens in a row"):
        walker.mask(ids, scores)
    assert torch.equal(walker.on_trial().mask(ids, scores), scores)


def test_a_forced_token_needs_no_mask(grammars):
    """The masks of a run are those of a matcher that works each one out."""

    schema = {
        "type": "object",
        "properties": {"it's a": {"const": "don't know, \u4f60\u597d " * 9}, "n": {"type": "integer"}},
        "required": ["it's a", "n"],
    }
    made = grammars.of(json_schema(schema))
    counting = Mock(wraps=made.matcher.deep_copy())
    counting.deep_copy.return_value = counting
    walker = grammar.Grammar(counting).follow(0)
    ids, scores = torch.empty(0, dtype=torch.int64), torch.arange(4096.0)
    run = walker.forced(ids, 1000)
    assert len(run) > 60
    for place in range(len(run)):
        alone = made.follow(0).mask(ids, scores)
        assert torch.equal(walker.mask(ids, scores), alone) and int(alone.argmax()) == run[place]
        assert walker.forced(ids, 3) == run[place : place + 3] and not walker.complete(ids)
        ids = torch.cat([ids, torch.tensor(run[place : place + 1])])
    assert counting.compute_bitmask.call_count + counting.compute_ff_tokens.call_count == 1
    assert torch.isfinite(walker.mask(ids, scores)).sum() > 1  # the number is free


def test_drafts_do_without_masks_when_the_time_of_their_step_is_over(grammars, monkeypatch):
    made = grammars.of(json_schema({"type": "string"}))
    walker = made.follow(0)
    trial, ids, scores = walker.on_trial(), torch.empty(0, dtype=torch.int64), torch.zeros(4096)
    monkeypatch.setattr(grammar, "MAX_TRIAL_SECONDS", -1.0)
    assert torch.equal(trial.mask(ids, scores), scores)
    monkeypatch.setattr(grammar, "MAX_TRIAL_SECONDS", 10.0)
    assert not torch.equal(trial.mask(ids, scores), scores) and not walker.complete(ids)


@pytest.mark.skipif(os.name != "posix", reason="limits of memory are POSIX's")
def test_a_wrong_schema_has_its_own_reason_and_one_that_takes_too_much_memory_is_refused(pool, monkeypatch):
    with pytest.raises(SchemaError, match="cannot be used"):
        asyncio.run(pool.prepare(json_schema({"type": "string", "pattern": "["}), "a", "a/x"))
    monkeypatch.setattr(grammar_pool, "COMPILE_BYTES", 1 << 20)
    with pytest.raises(SchemaError, match="compiling it needs more than"):
        asyncio.run(pool.prepare(expensive(16), "a", "a/x"))
