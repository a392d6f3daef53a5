"""Forerun's own fields of a request: who drafts, how much, and a stream that says so."""

import json
from typing import Any

import pytest
from support.live_server import Json, serving, streamed

from forerun.server.admission import SchedulerLimits

NEW = 40
PROMPT = "one two three four five six\n" * 4


# on a busy machine a slow first draft could use up what drafts may lose
HOW = {"budget": 16, "prefix_cache": 1 << 24, "prune_drafts": False}
engine, server = serving(None, engine=HOW, drafter="trie")


def asked(**forerun: Any) -> Json:
    return {"model": "bundled", "prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "forerun": forerun}


@pytest.mark.parametrize("stop", [None, " five six\n"])
def test_a_traced_stream_says_who_drafted_each_token_of_its_text(engine, server, stop):
    body = {**asked(trace=True, namespace="traced"), "prompt": PROMPT + "one €", "stop": stop}
    whole = server.post({**body, "forerun": {}}).json()
    assert not any("forerun" in chunk for chunk in streamed(server, {**body, "forerun": {}}))
    steps = [chunk for chunk in streamed(server, body) if "forerun" in chunk]
    for chunk in steps:
        said = chunk["forerun"]
        assert chunk["choices"][0]["text"] == "".join(token["text"] for token in said["tokens"])
        assert said["accepted"] <= said["drafted"] and said["seconds"] > 0
        sources = [token["source"] for token in said["tokens"]]
        accepted, own = sources[: said["accepted"]], sources[said["accepted"] :]
        assert set(own) <= {"target"} and set(accepted) <= {"text", "earlier", "recycled"} and len(own) <= 1
    (request,) = engine.requests([body["prompt"]], max_new_tokens=NEW)
    again = streamed(server, body)
    assert "".join(chunk["choices"][0]["text"] for chunk in again) == whole["choices"][0]["text"]
    assert sum(len(chunk["forerun"]["tokens"]) for chunk in steps) == whole["usage"]["completion_tokens"]
    # what was said before is copied; whether the first answer copies anything depends on the processor's rounding
    assert any(chunk["forerun"]["accepted"] for chunk in again if "forerun" in chunk), (steps, again)
    assert request.prompt_length == whole["usage"]["prompt_tokens"]


def test_where_answers_are_shared_nothing_is_told_of_drafts(engine, serve):
    one = serve(engine, SchedulerLimits(1 << 30), drafter="trie", share=True)
    body = {**asked(trace=True), "stream_options": {"include_usage": True}}
    chunks = streamed(one, body)
    for said in (chunk["forerun"] for chunk in chunks if "forerun" in chunk):
        assert said["drafted"] is said["accepted"] is None
        assert {token["source"] for token in said["tokens"]} == {None}
    assert "forerun" not in chunks[-1]["usage"] and "metrics" not in chunks[-1]
    body["forerun"]["drafter"] = "none"  # it is drafted from nothing
    assert streamed(one, body)[-1]["usage"]["forerun"]["drafted"] == 0


def test_padded_chunks_have_one_of_a_few_sizes(server):
    plain = {**asked(), "stream": True}
    padded = {**plain, "stream_options": {"include_obfuscation": True}}
    texts = [server.post(body).text.split("\n\n")[:-2] for body in (plain, padded)]
    assert len({len(each) for each in texts[0]}) > 1
    assert {(len(each) - len("data: ")) % 256 for each in texts[1]} == {0}
    pieces = [[json.loads(each[6:])["choices"] for each in text] for text in texts]
    assert "".join(each[0]["text"] for each in pieces[0]) == "".join(each[0]["text"] for each in pieces[1])


@pytest.mark.parametrize("chosen", [{"drafter": "none"}, {"budget": 0}, {"drafter": "none", "budget": 9}])
def test_without_drafts_each_step_gives_one_token_of_the_same_text(server, chosen):
    told = server.post(asked(**chosen)).json()
    assert told["usage"]["forerun"]["drafted"] == 0 and told["usage"]["forerun"]["steps"] == NEW
    assert told["choices"] == server.post(asked()).json()["choices"]


def test_a_budget_bounds_drafts_and_changes_no_text(server):
    steps = [chunk["forerun"] for chunk in streamed(server, asked(trace=True, budget=2)) if "forerun" in chunk]
    assert max(step["drafted"] for step in steps) == 2
    served = server.post(asked(drafter="trie", budget=2)).json()
    assert served["choices"] == server.post(asked()).json()["choices"]


def test_the_model_says_what_a_client_may_ask_for(server):
    (model,) = server.http.get("/v1/models").json()["data"]
    assert model["forerun"] == {
        "drafters": ["trie", "none"], "budget": 16, "max_tokens": 4096, "chat": False, "exactness": "bitwise"
    }  # fmt: skip
