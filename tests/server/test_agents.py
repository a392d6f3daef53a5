"""What agents need of a server: prompts that were read before they came, and what broke the prefix of one."""

import json
import logging
from typing import Any

import numpy as np
import pytest
from support.live_server import Json, LiveServer, bundled_engine, streamed, until
from support.mocks import Silent
from support.tiny import HYBRIDS, build

from forerun.engine.engine import Engine
from forerun.server.admission import SchedulerLimits

SYSTEM = {"role": "system", "content": "You are an agent that works on files. " * 12}
TOOLS = [
    {"type": "function", "function": {"name": f"tool_{n}", "parameters": {"type": "object", "properties": {}}}}
    for n in range(8)
]
ASKED = {"role": "user", "content": "Read the file."}


def chat(**more: Any) -> Json:
    return {"model": "bundled", "messages": [SYSTEM, ASKED], "tools": TOOLS, "max_tokens": 4, "temperature": 0, **more}


def cached(server: LiveServer, body: Json, **more: Any) -> tuple[int, int]:
    usage = server.post(body, "chat/completions", **more).json()["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]


@pytest.mark.parametrize("keys", [(), ("key-of-a", "key-of-b")])
def test_a_prompt_of_a_file_is_read_before_anybody_asks(tmp_path, keys, caplog):
    file = tmp_path / "agent.jsonl"
    rows: list[Json] = [
        {"messages": [SYSTEM, {"role": "user", "content": "?"}], "tools": TOOLS, "temperature": 0.3},
        {"text": "a text to learn"},
        {"messages": [SYSTEM], "namespace": "other"},
        {"messages": [SYSTEM], "logit_bias": {"9999999": 1}},  # the model has no such token
    ]
    file.write_text("\n".join(map(json.dumps, rows)))
    caplog.set_level(logging.INFO)
    engine = bundled_engine(prefix_cache=1 << 26)
    with LiveServer(engine, SchedulerLimits(1 << 30, tenants=max(1, len(keys))), warm=[file], api_keys=keys) as server:
        until(lambda: sum("was prefilled:" in each.message for each in caplog.records) == 2 * max(1, len(keys)))
        for key in keys or ("none",):
            headers = {"Authorization": f"Bearer {key}"}
            hits, tokens = cached(server, chat(), headers=headers)
            assert hits > 0.7 * tokens
            other = {"messages": [SYSTEM, ASKED], "tools": None}
            assert cached(server, chat(**other, forerun={"namespace": "other"}), headers=headers)[0] > 0
            assert cached(server, chat(forerun={"namespace": "third"}), headers=headers)[0] == 0
        until(lambda: any(f"{file}:4 was not prefilled: logit_bias has" in each.message for each in caplog.records))


def prompt_told(server: LiveServer, body: Json) -> Json:
    first, *others = [chunk["forerun"] for chunk in streamed(server, body, "chat/completions") if "forerun" in chunk]
    assert not any("prompt" in each for each in others)
    return dict(first["prompt"])


def test_a_trace_says_what_broke_the_prefix():
    traced = {"forerun": {"trace": True}}
    with LiveServer(bundled_engine(prefix_cache=1 << 26)) as server:
        first = prompt_told(server, chat(**traced))
        assert first["cached"] == 0 and "differs_at" not in first  # there was nothing to leave
        again = prompt_told(server, chat(**traced))
        assert again["cached"] == again["tokens"] - 1 and "differs_at" not in again
        changed = {**SYSTEM, "content": SYSTEM["content"].replace("files. You", "files on Monday. You", 1)}
        broken = prompt_told(server, chat(messages=[changed, ASKED], **traced))
        assert broken["cached"] <= broken["differs_at"] < broken["tokens"]
        assert broken["given"].lstrip().startswith("on Monday. You") and broken["kept"].startswith(". You are an agent")
        longer = [SYSTEM, ASKED, {"role": "assistant", "content": "I did."}, {"role": "user", "content": "More. " * 40}]
        answered = prompt_told(server, chat(messages=longer, **traced))
        assert again["tokens"] <= answered["differs_at"] and answered["given"].lstrip().startswith("I did.")
        mine = chat(messages=[changed, ASKED], forerun={"trace": True, "namespace": "somebody"})
        assert "kept" not in prompt_told(server, mine)  # another namespace's text is nobody else's


def test_a_hybrid_reads_the_end_alone_where_the_end_was_changed():
    rng = np.random.default_rng(1)
    kind, config = HYBRIDS["qwen3_5"]
    text = rng.integers(6, 48, 750)
    turns = [0, 100, 320, 590, 650]
    changed = np.concatenate((text[:625], rng.integers(6, 48, 125)))

    def read(told: list[int]) -> tuple[int, list[int]]:
        model = build(kind, {**config, "max_position_embeddings": 4096}, seed=3).float()
        engine = Engine(model, Silent(), prefix_cache=1 << 28)
        requests = []
        for prompt in (text, changed):
            (request,) = engine.requests([prompt.tolist()], max_new_tokens=4)
            request.turns = told
            with engine.batch() as batch:
                batch.admit(request)
                while request.finish_reason is None:
                    batch.step()
            requests.append(request)
        return requests[1].cached_tokens, requests[1].generated.tolist()

    (with_turns, first), (without, second) = read(turns), read([])
    assert with_turns == 590 // 64 * 64 and without < with_turns
    assert first == second


def test_turns_are_where_a_template_s_marks_stand(monkeypatch):
    engine = bundled_engine("{% for m in messages %}<|endoftext|>{{ m.role }}: {{ m.content }}\n{% endfor %}")
    seen, requests = list[Any](), engine.requests
    monkeypatch.setattr(
        engine, "requests", lambda *given, **more: seen.extend(made := requests(*given, **more)) or made
    )
    with LiveServer(engine) as server:
        cached(server, chat(tools=None))
    (request,) = seen
    marks = [place for place, token in enumerate(request.prompt.tolist()) if token in engine.tokenizer.all_special_ids]
    assert len(marks) == 2 and request.turns == marks
