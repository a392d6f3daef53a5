"""What today's clients send: tools, reasoning, grammars, sampling, echo, tokens, and responses."""

import asyncio
import copy
import json
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from support.bundled import bundled
from support.chat_models import QWEN, THINKING, TOOLS
from support.live_server import (
    Json,
    LiveServer,
    PausableEngine,
    error_of,
    events_of,
    serving,
    streamed,
    text_of,
)

from forerun.engine.engine import Engine
from forerun.engine.result import Commit
from forerun.models.text.call_formats import HERMES
from forerun.models.text.message_formats import MessageFormat
from forerun.models.text.message_parser import CallDelta, MessageParser
from forerun.models.text.processors import OccurrencePenalties
from forerun.server import calls
from forerun.server.answers import Delta
from forerun.server.api_errors import ApiError
from forerun.server.calls import AnswerRow
from forerun.server.chat_schema import ChatRequest
from forerun.server.messages_api import MessagesFormat, MessagesRequest
from forerun.server.prompt_encoder import MIDDLE_TOKENS, PromptEncoder
from forerun.server.replies import ChatFormat
from forerun.server.responses_api import ResponsesFormat, ResponsesRequest
from forerun.server.schema import CompletionRequest

pytest.importorskip("llguidance")
MESSAGES: Any = [{"role": "user", "content": "Weather in Rome?"}]
CHAT: Json = {"model": "bundled", "messages": MESSAGES, "temperature": 0, "max_tokens": 100}
PLAIN = {"forerun": {"drafter": "none"}}
ONE: Json = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
FORM = MessageFormat(HERMES, None, None, {}, {})
ADD: Json = {"type": "function", "function": {"name": "add"}}


engine, server = serving(QWEN, drafter="trie", max_tokens=256)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.client()


def test_a_required_call_follows_its_schema_and_costs_few_steps(client):
    answer = client.chat.completions.create(**CHAT, **ONE)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    (call,) = choice.message.tool_calls or ()
    assert call.type == "function" and call.id.startswith("call_")
    required = {tool["function"]["name"]: tool["function"]["parameters"]["required"] for tool in TOOLS}
    assert set(required[call.function.name]) <= set(json.loads(call.function.arguments))
    assert answer.usage.model_dump()["forerun"]["steps"] * 2 < answer.usage.completion_tokens


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
def test_calls_are_the_same_with_drafts_without_and_in_a_stream(client, options):
    fields = {**CHAT, **ONE, "parallel_tool_calls": True, **options}
    whole = client.chat.completions.create(**fields).choices[0]
    plain = client.chat.completions.create(**fields, extra_body=PLAIN).choices[0]
    wanted = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()]
    assert wanted == [(call.function.name, call.function.arguments) for call in plain.message.tool_calls or ()]
    calls: list[list[str]] = []
    finish = None
    for chunk in client.chat.completions.create(**fields, stream=True):
        finish = chunk.choices[0].finish_reason or finish
        for call in chunk.choices[0].delta.tool_calls or ():
            if call.id:
                assert call.index == len(calls) and call.function and call.function.name
                calls.append([call.function.name, ""])
            calls[call.index][1] += call.function.arguments or ""
    assert [tuple(call) for call in calls] == wanted and finish == whole.finish_reason


def test_a_named_tool_is_called_and_without_a_choice_a_model_answers_as_it_likes(client):
    create = client.chat.completions.create
    (call,) = create(**CHAT, tools=TOOLS, tool_choice=ADD).choices[0].message.tool_calls or ()
    assert call.function.name == "add" and "a" in json.loads(call.function.arguments)
    for choice in ({"tool_choice": "auto"}, {}, {"tool_choice": "none"}):
        message = create(**{**CHAT, "max_tokens": 8}, tools=TOOLS, **choice).choices[0].message
        assert message.tool_calls is None and message.content


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_calls_that_were_made_are_texts_for_a_template_that_knows_none(tools):
    """Also where the client offers no tools any more."""
    tokenizer = copy.deepcopy(bundled()[1])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    turns = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "2"}]
    body = ChatRequest.model_validate({"model": "m", "messages": [*MESSAGES, *turns], "tools": tools})
    text = PromptEncoder(tokenizer, None).chat(body).text or ""
    assert 'assistant: <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\n' in text
    assert "user: <tool_response>\n2\n</tool_response>\n" in text
    assert ("# Tools" in text) == (tools is not None)


@pytest.fixture(scope="module")
def thinker(engine: Engine) -> Iterator[LiveServer]:
    tokenizer = bundled()[1]
    tokenizer.chat_template = THINKING
    with LiveServer(Engine(engine.target.model, "trie", tokenizer=tokenizer), drafter="trie") as built:
        yield built


def test_reasoning_is_apart_from_the_content(thinker):
    create = thinker.client().chat.completions.create
    fields = {**CHAT, "max_tokens": 24}
    message = create(**fields).choices[0].message
    assert message.content == "" and message.model_dump()["reasoning_content"]
    text = ""
    for chunk in create(**fields, stream=True):
        text += chunk.choices[0].delta.model_dump().get("reasoning_content") or ""
        assert not chunk.choices[0].delta.content
    assert text == message.model_dump()["reasoning_content"]


def test_a_grammar_begins_after_the_reasoning(thinker):
    """The bundled model ends its reasoning because nothing but the end's first byte is likely enough."""
    bias = {str(token): 100 for token in thinker.app.state.service.tokenizer("</think>")["input_ids"]}
    seen = 0
    for seed in range(2):
        fields: Json = {**CHAT, "temperature": 1, "max_tokens": 50, "seed": seed, "logit_bias": bias, **ONE}
        answers = [thinker.post({**fields, **more}, "chat/completions").json()["choices"][0] for more in ({}, PLAIN)]
        messages = [answer["message"] for answer in answers]
        for message in messages:
            for call in message.get("tool_calls", ()):
                call.pop("id")
        assert messages[0] == messages[1]
        assert not (messages[0].get("reasoning_content") or "").lstrip().startswith("<tool_call>")
        seen += "tool_calls" in messages[0]
    assert seen


@pytest.mark.parametrize(("response_format", "matches"), [
    ({"type": "regex", "regex": "(yes|no)/[0-9]{3}"}, "(yes|no)/[0-9]{3}"),
    ({"type": "grammar", "grammar": 'start: "a" b b?\nb: "x" | "y" /[0-9]/'}, "a(x|y[0-9]){1,2}"),
])  # fmt: skip
def test_a_regex_and_a_grammar_are_kept_to(server, response_format, matches):
    for options in WAYS:
        fields: Json = {"prompt": "Say", "max_tokens": 30, "response_format": response_format, **options}
        texts = [text_of(server.post({**fields, **more})) for more in ({}, PLAIN)]
        assert texts[0] == texts[1] and re.fullmatch(matches, texts[0])


SAMPLING: list[Json] = [
    {"top_k": 5}, {"top_k": -1}, {"min_p": 0.1}, {"repetition_penalty": 1.3}, {"frequency_penalty": 1.5},
    {"presence_penalty": -1.0}, {"logit_bias": {"199": -100, "16": 5}},
    {"frequency_penalty": 0.7, "presence_penalty": 0.3, "top_k": 20, "min_p": 0.02, "logit_bias": {"199": 1.5}},
]  # fmt: skip


WAYS = ({"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2})
SAMPLED: list[Json] = [{"prompt": "A list: a, b, a, b, a,", "max_tokens": 24, **options} for options in WAYS]


@pytest.fixture(scope="module")
def unchanged(server: LiveServer) -> list[str]:
    """What is answered to ``SAMPLED`` with the usual sampling."""
    return [text_of(server.post(body)) for body in SAMPLED]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("change", SAMPLING, ids=lambda each: "-".join(each))
def test_sampling_is_exact_with_drafts(server, unchanged, change):
    changed = False
    for body, text in zip(SAMPLED, unchanged, strict=True):
        texts = [text_of(server.post({**body, **change, **more})) for more in ({}, {}, PLAIN)]
        assert texts[0] == texts[1] == texts[2]
        changed |= texts[0] != text
    assert changed or change == {"top_k": -1}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafter", ["lookup", "auto", "retrieval", "trie"])
def test_penalties_and_biases_are_exact_with_every_drafter(engine, drafter):
    model, prompt = engine.target.model, "A list: a, b, a, b, a,"
    start = len(engine.tokenizer(prompt)["input_ids"])
    one = Engine(model, drafter, tokenizer=engine.tokenizer)
    runs: Any = (one, {}), (one, {}), (engine, {"budget": 0})
    for seed in (None, 1):
        sampling: Json = {"do_sample": seed is not None, "seed": seed}
        sampling |= {"max_new_tokens": 24, "sequence_bias": [[[199], 1.5], [[16], -2.0]]}
        processors = {"logits_processor": [OccurrencePenalties(start, 0.7, 0.3)]}
        texts = {each.generate(prompt, **sampling, **processors, **more).text for each, more in runs}
        assert len(texts) == 1


def test_penalties_are_openais():
    scores, ids = torch.zeros(1, 5), torch.tensor([[4, 4, 1, 2, 2]])
    assert OccurrencePenalties(2, 0.5, 0.25)(ids, scores).tolist() == [[0, -0.75, -1.25, 0, 0]]
    assert scores.eq(0).all()


def test_echo_scores_a_prompt_as_the_model_does(engine, client):
    tokenizer: Any = engine.tokenizer
    prompt = "x = 1\n<|endoftext|>" + "def add(a, b):\n    return a + b\n\n" * 5
    ids = tokenizer(prompt)["input_ids"]
    with torch.inference_mode():
        logits = engine.target.model(torch.tensor([ids])).logits[0].double()
    wanted = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    fields: Json = {"model": "bundled", "prompt": prompt, "temperature": 0, "logprobs": 2}
    answer = client.completions.create(**fields, max_tokens=4, echo=True)
    (choice,) = answer.choices
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert max(choice.logprobs.top_logprobs[1].values()) >= choice.logprobs.token_logprobs[1]
    own = torch.tensor(choice.logprobs.token_logprobs[1 : len(ids)])
    torch.testing.assert_close(own.double(), wanted, atol=1e-4, rtol=1e-4)
    assert len(choice.logprobs.tokens or ()) == len(ids) + 4 == len(choice.logprobs.text_offset or ())
    assert "".join((choice.logprobs.tokens or [])[: len(ids)]) == prompt
    for start, token in zip(choice.logprobs.text_offset or (), choice.logprobs.tokens or (), strict=True):
        assert choice.text[start : start + len(token)] == token
    plain = client.completions.create(**fields, max_tokens=4)
    assert choice.text == prompt + plain.choices[0].text
    assert choice.logprobs.token_logprobs[len(ids) :] == plain.choices[0].logprobs.token_logprobs
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 4)


def test_echo_takes_no_answer_a_stream_and_token_ids(client):
    none = client.completions.create(model="bundled", prompt=["def f", "x"], max_tokens=0, logprobs=0, echo=True)
    assert [choice.text for choice in none.choices] == ["def f", "x"]
    assert none.usage.completion_tokens == 0
    fields: Json = {"model": "bundled", "prompt": [260, 371, 79], "max_tokens": 5, "temperature": 0, "echo": True}
    whole = client.completions.create(**fields).choices[0].text
    assert whole.startswith("hello") and whole != "hello"
    assert "".join(chunk.choices[0].text for chunk in client.completions.create(**fields, stream=True)) == whole


def test_a_suffix_is_put_between_the_tokenizers_own_marks(server):
    class Tokenizer:
        bos_token_id = 1

        def get_vocab(self) -> dict[str, int]:
            return {mark: 100 + place for place, mark in enumerate(MIDDLE_TOKENS[0])}

        def __call__(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> Json:
            return {"input_ids": [1] * add_special_tokens + [ord(letter) for letter in text]}

    body = CompletionRequest(model="x", prompt=["ab", "c"], suffix="d")
    first, second = PromptEncoder(Tokenizer(), None)(body)
    assert first.ids == [1, 100, 97, 98, 101, 100, 102] and second.ids == [1, 100, 99, 101, 100, 102]
    assert "this model has none" in error_of(server.post({"model": "bundled", "prompt": "a", "suffix": "b"}))["message"]
    with pytest.raises(ApiError, match="more than"):
        PromptEncoder(Tokenizer(), 4)(CompletionRequest(model="x", prompt="a", suffix="d" * 100))


def test_tokens_and_text_go_both_ways(engine, server):
    tokenizer: Any = engine.tokenizer
    reply = server.http.post("/tokenize", json={"prompt": "héllo wörld", "return_token_strs": True}).json()
    assert reply["tokens"] == tokenizer("héllo wörld")["input_ids"] and reply["count"] == len(reply["tokens"])
    assert reply["token_strs"] == tokenizer.convert_ids_to_tokens(reply["tokens"])
    assert server.http.post("/detokenize", json={"tokens": reply["tokens"]}).json() == {"prompt": "héllo wörld"}
    for wrong in ({}, {"prompt": "x", "messages": MESSAGES}, {"prompt": "x", "model": 3}):
        error_of(server.http.post("/tokenize", json=wrong))
    assert "9999" in error_of(server.http.post("/detokenize", json={"tokens": [9999]}))["message"]
    error_of(server.http.post("/tokenize", json={"prompt": "x", "model": "other"}), 404)


RESPONSE: Json = {"model": "bundled", "temperature": 0, "max_output_tokens": 100}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def test_a_response_is_the_chats_answer(client):
    chat = client.chat.completions.create(**{**CHAT, "max_tokens": 12}).choices[0].message.content
    short = {**RESPONSE, "max_output_tokens": 12}
    response = client.responses.create(**short, input="Weather in Rome?", store=False, metadata={"a": "b"})
    assert response.output_text == chat
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    parts: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Weather in Rome?"}]}]
    assert client.responses.create(**short, input=parts).output_text == chat
    assert response.usage.output_tokens == 12


def test_a_response_streams_text_and_calls(client):
    asked = {**RESPONSE, "input": MESSAGES, "tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False}
    whole: Any = client.responses.create(**asked)
    (call,) = whole.output
    assert whole.status == "completed" and call.type == "function_call" and json.loads(call.arguments)
    with client.responses.stream(**asked) as stream:
        events = [*stream]
        final: Any = stream.get_final_response()
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    assert (final.output[0].name, final.output[0].arguments) == (call.name, call.arguments)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert "response.function_call_arguments.done" in kinds and "response.output_item.done" in kinds
    short: Any = {**RESPONSE, "max_output_tokens": 12, "input": "Weather in Rome?"}
    pieces = [each for each in client.responses.create(**short, stream=True) if each.type.endswith("output_text.delta")]
    assert "".join(each.delta for each in pieces) == client.responses.create(**short).output_text


def test_a_response_takes_the_items_of_an_earlier_one(client):
    items: Any = [
        {"role": "developer", "content": "Be short."},
        {"type": "message", "role": "user", "content": "Add."},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
    ]
    digit = {"type": "integer", "maximum": 9, "minimum": 0}
    schema: Any = {"type": "json_schema", "name": "n", "schema": digit, "strict": True}
    response = client.responses.create(**RESPONSE, input=items, text={"format": schema}, instructions="Count.")
    assert int(response.output_text) in range(10)


def test_a_chunk_has_one_piece_of_each_call():
    """Clients take a second one for a call of its own."""
    form = ChatFormat(ChatRequest.model_validate({**CHAT, "stream": True}), "1")
    pieces = [CallDelta(0, "", "c0", "f"), CallDelta(0, '{"a": '), CallDelta(0, "1}"), CallDelta(1, "", "c1", "g")]
    events = form.chunk(Delta(0, "Well", "tool_calls", calls=pieces)).strip().split("\n\n")
    begun, rest = (json.loads(event.removeprefix("data: "))["choices"][0] for event in events)
    first, second = begun["delta"]["tool_calls"]
    assert first == {"index": 0, "id": "c0", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert (second["index"], second["id"]) == (1, "c1") and begun["delta"]["content"] == "Well"
    assert rest["delta"] == {"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}
    assert (begun["finish_reason"], rest["finish_reason"]) == (None, "tool_calls")


def test_reasoning_and_the_answer_behind_it_are_one_turn():
    hm, two = ({"type": kind, "text": said} for kind, said in (("reasoning_text", "Hm."), ("output_text", "Two.")))
    thought: Json = {"type": "reasoning", "summary": [], "content": [hm]}
    answer: Json = {"type": "message", "role": "assistant", "content": [two]}
    question: Json = {"role": "user", "content": "And 2 + 2?"}
    call: Json = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    body = ResponsesRequest.model_validate({**RESPONSE, "input": [question, thought, answer, call, answer, question]})
    turns = [message.for_template() for message in body.chat().messages]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "assistant", "user"]
    assert (turns[1]["reasoning_content"], turns[1]["content"]) == ("Hm.", "Two.")
    assert turns[1]["tool_calls"][0]["function"]["name"] == "add" and turns[2]["content"] == "Two."


def test_a_silent_stream_gets_pings(engine, monkeypatch):
    monkeypatch.setattr(calls, "PING_SECONDS", 0.05)
    held: Any = PausableEngine(engine)
    held.gate.clear()
    body = {"model": "bundled", "prompt": "x", "max_tokens": 2, "stream": True}
    with LiveServer(held) as one, one.http.stream("POST", "/v1/completions", json=body) as answer:
        pings = 0
        for line in answer.iter_lines():
            pings += line == ": ping"
            if pings == 3:
                held.gate.set()
            if line == "data: [DONE]":
                break
    assert pings >= 3


def test_a_stream_is_not_silent_while_the_model_writes_what_is_held_back(monkeypatch):
    monkeypatch.setattr(calls, "PING_SECONDS", 0.05)
    held: Any = SimpleNamespace(answer=SimpleNamespace(add=lambda tokens: ["x"] * len(tokens)), step=lambda *given: [])

    async def pings() -> int:
        found, call = 0, calls.Call(None, [held], "1", calls.LoopDispatcher(asyncio.get_running_loop()))

        async def write() -> None:
            for _ in range(60):
                call._events.put_nowait((0, Commit(None, [1], 0)))
                await asyncio.sleep(0.005)
            call._events.put_nowait((0, "cancelled"))

        writing = asyncio.create_task(write())
        with pytest.raises(calls.ClientGoneError):
            async for delta in call:
                assert delta is None
                found += 1
        await writing
        return found

    assert asyncio.run(pings()) >= 3


def test_a_prediction_saves_steps_and_changes_nothing(client):
    fields: Json = {"model": "bundled", "messages": MESSAGES, "max_tokens": 40, "temperature": 1}

    def steps(seed: int, **more: Any) -> tuple[str | None, int]:
        extra = {"forerun": {"namespace": f"p{seed}-{len(more)}"}}
        answer = client.chat.completions.create(**fields, seed=seed, extra_body=extra, **more)
        return answer.choices[0].message.content, answer.usage.model_dump()["forerun"]["steps"]

    saved = 0
    for seed in range(2):
        text, alone = steps(seed)
        for content in (text, [{"type": "text", "text": text}]):
            predicted, fewer = steps(seed, prediction={"type": "content", "content": content})
            assert predicted == text
            saved += alone - fewer
    assert saved > 0


def test_drafts_are_told_in_vllms_words(server):
    body = {"model": "bundled", "prompt": "a, b, a, b, a, b, a,", "max_tokens": 40, "temperature": 0}
    reply = [server.post(body).json() for _ in range(2)][1]
    figures, own = reply["metrics"]["speculative_decoding"], reply["usage"]["forerun"]
    assert figures["num_draft_tokens"] == own["drafted"] and figures["num_accepted_draft_tokens"] == own["accepted"] > 0
    details = reply["usage"]["completion_tokens_details"]  # and in OpenAI's
    assert details["reasoning_tokens"] == 0
    assert details["accepted_prediction_tokens"] == own["accepted"]
    assert details["rejected_prediction_tokens"] == own["drafted"] - own["accepted"]
    histogram = figures["acceptance_histogram"]
    assert sum(histogram) == figures["num_spec_steps"] <= own["steps"]
    assert sum(place * count for place, count in enumerate(histogram)) == own["accepted"]
    last = streamed(server, {**body, "stream_options": {"include_usage": True}})[-1]
    assert set(last["metrics"]["speculative_decoding"]) == set(figures)
    server.wait_idle()


USAGE = {
    "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}  # fmt: skip
HI = {"model": "bundled", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 24, "temperature": 0}


def messages(**more: Any) -> Json:
    return {**HI, **more}


def test_a_message_is_the_chats_answer(server):
    chat = server.post(messages(), "chat/completions").json()
    whole = server.post(messages(), "messages").json()
    (block,) = whole["content"]
    assert (block["type"], block["text"]) == ("text", chat["choices"][0]["message"]["content"])
    assert (whole["type"], whole["role"], whole["stop_reason"]) == ("message", "assistant", "max_tokens")
    usage = whole["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    events = events_of(server.post(messages(stream=True), "messages").text)
    kinds = [each["type"] for each in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    texts = [each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]
    assert "".join(texts) == whole["content"][0]["text"]


def test_a_message_says_which_stop_string_ended_it_and_how_many_tokens_a_request_has(server):
    text = server.post(messages(), "messages").json()["content"][0]["text"]
    stop = text[len(text) // 2 :][:3]
    asked = messages(stop_sequences=["\u2603", stop])
    whole = server.post(asked, "messages").json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", stop)
    assert whole["content"][0]["text"] == text.partition(stop)[0]
    events = events_of(server.post({**asked, "stream": True}, "messages").text)
    (delta,) = [each["delta"] for each in events if each["type"] == "message_delta"]
    assert delta == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    del asked["max_tokens"]
    usage = whole["usage"]
    counted = server.post(asked, "messages/count_tokens").json()
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}
    assert server.post({**asked, "model": "another"}, "messages/count_tokens").status_code == 404


def test_a_message_calls_a_tool_and_takes_its_result(server):
    schema = {"properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tool = {"name": "weather", "description": "Of a city.", "input_schema": schema}
    asked = messages(tools=[tool], tool_choice={"type": "tool", "name": "weather"}, max_tokens=200)
    whole = server.post(asked, "messages").json()
    (call,) = [block for block in whole["content"] if block["type"] == "tool_use"]
    assert (call["name"], call["input"], whole["stop_reason"]) == ("weather", {"city": "Paris"}, "tool_use")
    events = events_of(server.post({**asked, "stream": True}, "messages").text)
    pieces = [each["delta"].get("partial_json", "") for each in events if each["type"] == "content_block_delta"]
    assert json.loads("".join(pieces)) == {"city": "Paris"}
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "Rain"}]}
    turns = [*asked["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    chat = MessagesRequest(**messages(messages=turns, system="Be short.", tools=[tool])).chat()
    assert [turn.role for turn in chat.messages] == ["system", "user", "assistant", "tool"]
    assert chat.messages[2].for_template()["tool_calls"][0]["function"]["arguments"] == {"city": "Paris"}
    assert server.post(messages(messages=turns, tools=[tool]), "messages").status_code == 200


def test_a_step_that_ends_a_call_and_goes_on_with_text_keeps_them_apart():
    response = ResponsesFormat(ResponsesRequest(model="m", input="x"), "1")
    message = MessagesFormat(MessagesRequest(**messages()), "1")
    for form in (response, message):
        form.add(Delta(0, "", calls=[CallDelta(0, '{"a": ', "c0", "f")]))
        form.add(Delta(0, "after", "stop", calls=[CallDelta(0, "1}")]))
    call, text = json.loads(response.whole(USAGE, {}))["output"]
    assert (call["arguments"], text["content"][0]["text"]) == ('{"a": 1}', "after")
    call, text = json.loads(message.whole(USAGE, {}))["content"]
    assert (call["input"], text["text"]) == ({"a": 1}, "after")


def test_blocks_come_in_the_models_order_however_steps_end():
    tokenizer = bundled()[1]
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"First. {call}\nNow I wait. {call} Done."
    found = []
    for tokens in (1, 7, 1000):
        parser = MessageParser(tokenizer, FORM, FORM.response_template(True) or {}, "", TOOLS, True)
        row: Any = AnswerRow(*[None] * 3, parser=parser)
        form = MessagesFormat(MessagesRequest(**messages()), "1")
        for first in range(0, len(text), tokens):
            for delta in row.step(0, list(text[first : first + tokens])):
                form.add(delta)
        form.add(Delta(0, "", "stop"))
        found.append([block.get("text", block.get("input")) for block in json.loads(form.whole(USAGE, {}))["content"]])
    assert found == [["First.", {"a": 1}, "\nNow I wait.", {"a": 1}, "\nDone."]] * 3


@pytest.mark.parametrize("padded", [False, True])
def test_new_text_of_a_padded_response_has_one_of_a_few_sizes(padded):
    options = {"stream_options": {"include_obfuscation": padded}}
    form = ResponsesFormat(ResponsesRequest.model_validate({"model": "m", "input": "x", **options}), "1")
    events = [form.chunk(Delta(0, text)) for text in ("a", "four", "and more")]
    grown = [one.rpartition("data: ")[2].strip() for one in events]
    assert [json.loads(one)["delta"] for one in grown] == ["a", "four", "and more"]
    assert (len({len(one) for one in grown}) == 1) == padded
    assert all(len(one) % 256 == 0 for one in grown) == padded
