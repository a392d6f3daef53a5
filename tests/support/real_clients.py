"""Clients that nobody here wrote, against a running server: each row of the table in docs/results/clients.md.

    forerun serve --model FOLDER --port 20500
    uv pip install openai openai-agents langchain-openai litellm anthropic instructor pydantic-ai-slim[openai,anthropic]
    python tests/support/real_clients.py --url http://127.0.0.1:20500/v1

A row whose client is not installed is skipped, and says so. The status is the number of rows that failed. Answers may
be nonsense: the bundled model will do, as calls are forced by the request.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

Row = Callable[[str, str], None]
ROWS: list[tuple[str, str, Row]] = []
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]


class Age(BaseModel):
    """An age."""

    age: int = Field(ge=0, le=120)


def row(client: str, what: str) -> Callable[[Row], Row]:
    """Name a row of the table; ``client`` is the module that it needs."""

    def add(function: Row) -> Row:
        ROWS.append((client, what, function))
        return function

    return add


def refused(ask: Callable[[], Any], kind: Any) -> Any:
    """The error of a request that is to have one."""
    try:
        ask()
    except kind as error:
        return error
    raise AssertionError("nothing was refused")


def openai_client(url: str) -> Any:
    """OpenAI's own client."""
    import openai

    return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


@row("openai", "structured output by a schema (parse)")
def _structured(url: str, model: str) -> None:
    class Person(Age):
        name: str = Field(max_length=8)

    answer = openai_client(url).chat.completions.parse(model=model, messages=MESSAGES, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


@row("openai", "tools in a stream")
def _streamed_tools(url: str, model: str) -> None:
    with openai_client(url).chat.completions.stream(
        model=model, messages=MESSAGES, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments)


@row("openai", "store, metadata, reasoning_effort and other hints; penalties, logit_bias, top_k, min_p")
def _hints(url: str, model: str) -> None:
    assert openai_client(url).chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=8, parallel_tool_calls=True, store=False, metadata={"a": "b"},
        user="u", reasoning_effort="low", safety_identifier="s", prompt_cache_key="k", service_tier="auto",
        verbosity="low", frequency_penalty=0.5, presence_penalty=0.5, logit_bias={"5": -100},
        extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1},
    ).choices  # fmt: skip


@row("openai", "regex and grammar as response_format")
def _grammars(url: str, model: str) -> None:
    for form in ({"type": "regex", "regex": "(yes|no)!"}, {"type": "grammar", "grammar": 'start: ("yes" | "no") "!"'}):
        answer = openai_client(url).chat.completions.create(
            model=model, messages=MESSAGES, extra_body={"response_format": form}
        )
        assert answer.choices[0].message.content in ("yes!", "no!")


@row("openai", "responses: text, a stream, a call, a schema (parse)")
def _responses(url: str, model: str) -> None:
    client = openai_client(url)
    flat: Any = [{"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True}]
    assert client.responses.create(model=model, input="Hi", max_output_tokens=5).output_text
    with client.responses.stream(
        model=model, input=MESSAGES, tools=flat, tool_choice="required", parallel_tool_calls=False
    ) as s:
        kinds = [event.type for event in s]
        call = s.get_final_response().output[0]
    assert "response.function_call_arguments.delta" in kinds and json.loads(call.arguments)
    assert client.responses.parse(model=model, input="Hi", text_format=Age).output_parsed.age >= 0


def _agent(model: Any) -> Any:
    from agents import Agent, ModelSettings, function_tool

    calls: list[tuple[str, int]] = []

    @function_tool(is_enabled=lambda *_: not calls)  # the bundled model would call it for ever
    def get_weather(city: str, days: int) -> str:
        """The weather of a city."""
        calls.append((city, days))
        return "sunny"

    how = ModelSettings(tool_choice="required", parallel_tool_calls=False, max_tokens=100, temperature=0)
    tools: Any = [get_weather]
    return Agent("a", instructions="Help.", model=model, tools=tools, model_settings=how, output_type=Age), calls


def _run_agent(url: str, model: str, responses: bool, stream: bool = False) -> None:
    """An agent calls its tool, and then answers: it asks without a required call the second time."""
    import openai
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    agent, calls = _agent(kind(model=model, openai_client=client))

    async def run() -> Any:
        async with client:
            if not stream:
                return await Runner.run(agent, "Weather in Rome?", max_turns=3)
            running = Runner.run_streamed(agent, "Weather in Rome?", max_turns=3)
            async for _ in running.stream_events():
                pass
            return running

    ended = asyncio.run(run())
    assert calls and ended.final_output.age in range(121)


for way, responses in (("chat completions", False), ("responses, its default", True)):
    row("agents", f"an agent's loop with a tool, by {way}")(partial(_run_agent, responses=responses))
    row("agents", f"an agent's loop in a stream, by {way}")(partial(_run_agent, responses=responses, stream=True))


def langchain_model(url: str, model: str, **more: Any) -> Any:
    """LangChain's model of OpenAI."""
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, api_key="none", model=model, max_retries=0, timeout=120, max_tokens=200, **more)


@row("langchain_openai", "bind_tools, whole and in a stream")
def _langchain_tools(url: str, model: str) -> None:
    bound = langchain_model(url, model).bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert bound.invoke("Weather?").tool_calls[0]["name"] == "get_weather"
    whole = None
    for chunk in bound.stream("Weather?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and set(whole.tool_calls[0]["args"]) == {"city", "days"}


@row("langchain_openai", "structured output by a function, and by a schema")
def _langchain_structured(url: str, model: str) -> None:
    for method in ("function_calling", "json_schema"):
        answer = langchain_model(url, model).with_structured_output(Age, method=method).invoke("How old?")
        assert isinstance(answer, Age), method


@row("langchain_openai", "by responses")
def _langchain_responses(url: str, model: str) -> None:
    assert langchain_model(url, model, use_responses_api=True).invoke("Hi").text


@row("litellm", "chat with vLLM's sampling names, a stream, tools")
def _litellm_chat(url: str, model: str) -> None:
    import litellm

    litellm.telemetry = False
    for provider in ("openai", "hosted_vllm"):
        options: Any = {"messages": MESSAGES, "api_base": url, "api_key": "none", "timeout": 120}
        ask = partial(litellm.completion, f"{provider}/{model}", **options)
        answer = ask(max_tokens=8, extra_body={"top_k": 10, "min_p": 0.1, "repetition_penalty": 1.1})
        assert answer.choices[0].message.content
        chunks = ask(max_tokens=8, temperature=0, stream=True)
        assert any(chunk.choices[0].delta.content for chunk in chunks)
        answer = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
        assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)


def anthropic_client(url: str) -> Any:
    """Anthropic's own client."""
    import anthropic

    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)


@row("anthropic", "messages, whole and in a stream, stop sequences, counted tokens")
def _messages(url: str, model: str) -> None:
    client = anthropic_client(url)
    system = [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    fields: Any = {"model": model, "messages": MESSAGES, "system": system}
    greedy: Any = {**fields, "max_tokens": 16, "extra_body": {"temperature": 0}}  # the client has no such argument
    whole = client.messages.create(**greedy)
    with client.messages.stream(**greedy) as stream:
        text = "".join(stream.text_stream)
    assert text == whole.content[0].text and whole.stop_reason == "max_tokens"
    stop = text[len(text) // 2 :][:4]
    ended = client.messages.create(**greedy, stop_sequences=[stop])
    assert (ended.stop_reason, ended.stop_sequence) == ("stop_sequence", stop)
    assert client.messages.count_tokens(**fields).input_tokens > 0


@row("anthropic", "a tool's call, whole and in a stream, and its result")
def _messages_tools(url: str, model: str) -> None:
    client = anthropic_client(url)
    tools: Any = [{"name": "get_weather", "description": "Of a city.", "input_schema": PARAMETERS}]
    choice: Any = {"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}
    fields: Any = {"model": model, "tools": tools, "max_tokens": 200}
    whole = client.messages.create(**fields, messages=MESSAGES, tool_choice=choice)
    with client.messages.stream(**fields, messages=MESSAGES, tool_choice=choice) as stream:
        streamed = stream.get_final_message()
    for answer in (whole, streamed):
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        assert answer.stop_reason == "tool_use" and set(call.input) == {"city", "days"}
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    turns = [*MESSAGES, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(**{**fields, "max_tokens": 8}, messages=turns).content


@row("anthropic", "errors by their types")
def _messages_errors(url: str, model: str) -> None:
    import anthropic

    create = partial(anthropic_client(url).messages.create, messages=MESSAGES)
    assert refused(lambda: create(model=model, max_tokens=0), anthropic.BadRequestError).message
    assert refused(lambda: create(model="another", max_tokens=1), anthropic.NotFoundError).message


@row("anthropic", "messages.parse by a schema, and an answer as long as fits")
def _messages_parse(url: str, model: str) -> None:
    class Round(BaseModel):
        age: Literal[20, 30]  # the client does not send bounds of numbers

    client = anthropic_client(url)
    parsed = client.messages.parse(model=model, messages=MESSAGES, max_tokens=32_000, output_format=Round)
    assert isinstance(parsed.parsed_output, Round)


@row("anthropic", "a loop with a tool (beta.messages.tool_runner)")
def _tool_runner(url: str, model: str) -> None:
    import anthropic

    calls: list[str] = []

    @anthropic.beta_tool
    def clock() -> str:
        """The time."""
        calls.append("clock")
        return "noon"

    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    fields: Any = {"messages": MESSAGES, "tools": [clock], "tool_choice": choice, "max_tokens": 100}
    runner = anthropic_client(url).beta.messages.tool_runner(model=model, max_iterations=2, **fields)
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2 and calls


@row("anthropic", "what agents send: cached parts, pictures, results of searches, hosted tools, thinking")
def _messages_agents(url: str, model: str) -> None:
    cached = {"type": "ephemeral"}
    hosted: Any = {"type": "web_search_20250305", "name": "web_search"}
    own: Any = {"name": "get_weather", "input_schema": PARAMETERS, "cache_control": cached}
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [picture], "cache_control": cached}
    call = {"type": "tool_use", "id": "t", "name": "get_weather", "input": {"city": "Rome", "days": 1}}
    hidden = {"type": "redacted_thinking", "data": "x"}
    turns: Any = [*MESSAGES, {"role": "assistant", "content": [hidden, call]}, {"role": "user", "content": [result]}]
    answer = anthropic_client(url).beta.messages.create(
        model=model, max_tokens=8, messages=turns, tools=[own, hosted], betas=["context-management-2025-06-27"],
        context_management={"edits": []}, thinking={"type": "enabled", "budget_tokens": 1024}, mcp_servers=[],
        output_config={"effort": "low"},
    )  # fmt: skip
    assert answer.content and len(answer.model_dump()["warnings"]) == 2


@row("openai", "what Codex sends: a custom tool, hosted ones, their items, efforts")
def _responses_agents(url: str, model: str) -> None:
    create = openai_client(url).responses.create
    tools: Any = [{"type": "custom", "name": "apply_patch"}, {"type": "web_search"}, {"type": "local_shell"}]
    parts = [{"type": "input_text", "text": "And?"}, {"type": "input_image", "image_url": "x"}]
    items: Any = [
        *MESSAGES,
        {"type": "custom_tool_call", "call_id": "c", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "shell_call", "call_id": "s", "action": {"commands": ["ls"]}},
        {"type": "shell_call_output", "call_id": "s", "output": [{"stdout": "a", "stderr": "", "outcome": {}}]},
        {"role": "user", "content": parts},
    ]
    fields: Any = {"model": model, "input": items, "tools": tools, "max_output_tokens": 60}
    fields |= {"reasoning": {"effort": "xhigh", "summary": "auto"}, "include": ["reasoning.encrypted_content"]}
    assert create(**fields).metadata
    (call,) = create(**fields, tool_choice={"type": "custom", "name": "apply_patch"}).output
    assert call.type == "custom_tool_call" and isinstance(call.input, str)


@row("openai", "histories with reasoning, no content and a last turn to go on with; what load tools ask")
def _histories(url: str, model: str) -> None:
    client = openai_client(url)
    turns: Any = [*MESSAGES, {"role": "assistant", "content": None, "reasoning": "Hm."}, *MESSAGES]
    asked: Any = {"model": model, "max_tokens": 4, "extra_body": {"ignore_eos": True, "min_tokens": 4, "best_of": 1}}
    answer = client.chat.completions.create(messages=turns, **asked)
    assert answer.usage.completion_tokens == 4
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None
    turns.append({"role": "assistant", "content": "It is"})
    assert client.chat.completions.create(messages=turns, **asked).choices[0].message.content


@row("openai", "three turns with a tool, whose calls and results are sent back")
def _three_turns(url: str, model: str) -> None:
    client = openai_client(url)
    flat: Any = [{"type": "function", **TOOLS[0]["function"]}]
    turns, items = list(MESSAGES), list(MESSAGES)
    for choice in ("required", "required", "auto"):
        options: Any = {"model": model, "tool_choice": choice, "parallel_tool_calls": False}
        chat = client.chat.completions.create(messages=turns, tools=TOOLS, max_tokens=100, **options)
        calls = chat.choices[0].message.tool_calls or []
        turns += [chat.choices[0].message, *({"role": "tool", "tool_call_id": c.id, "content": "20"} for c in calls)]
        answer = client.responses.create(input=items, tools=flat, max_output_tokens=100, **options)
        made = [item.call_id for item in answer.output if item.type == "function_call"]
        items += [*answer.output, *({"type": "function_call_output", "call_id": c, "output": "20"} for c in made)]
        assert choice == "auto" or (calls and made)


@row("openai", "streams that are left early, counted tokens, models, and addresses that are not there")
def _left_early(url: str, model: str) -> None:
    import openai

    client = openai_client(url)
    fields: Any = {"model": model, "stream": True}
    for stream in (
        client.chat.completions.create(messages=MESSAGES, max_tokens=400, **fields),
        client.responses.create(input="Hi", max_output_tokens=400, **fields),
        client.completions.create(prompt="Hi", max_tokens=400, **fields),
    ):
        next(iter(stream))
        stream.close()
    assert client.responses.input_tokens.count(model=model, input="Hi").input_tokens > 0
    assert [each.id for each in client.models.list()] == [model]
    for missing in (lambda: client.embeddings.create(model=model, input="Hi"), lambda: client.responses.retrieve("r")):
        assert refused(missing, openai.NotFoundError).code == "unknown_address"


@row("anthropic", "models")
def _anthropic_models(url: str, model: str) -> None:
    (listed,) = anthropic_client(url).models.list()
    assert (listed.id, listed.type, listed.display_name) == (model, "model", model) and listed.created_at


@row("pydantic_ai", "output by a tool and by a schema, whole and in a stream, over all three APIs")
def _pydantic_ai(url: str, model: str) -> None:
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    async def ask() -> None:
        openai_api: Any = OpenAIProvider(base_url=url, api_key="none")
        anthropic_api: Any = AnthropicProvider(base_url=url.removesuffix("/v1"), api_key="none")
        for kind, api, outputs in (
            (OpenAIChatModel, openai_api, (ToolOutput(Age), NativeOutput(Age))),
            (OpenAIResponsesModel, openai_api, (ToolOutput(Age), NativeOutput(Age))),
            (AnthropicModel, anthropic_api, (ToolOutput(Age),)),  # its other one is for models that it knows by name
        ):
            for output in outputs:
                agent: Any = Agent(kind(model, provider=api), output_type=output, model_settings={"max_tokens": 200})
                first = await agent.run("How old?")
                async with agent.run_stream("And you?", message_history=first.all_messages()) as stream:
                    assert isinstance(first.output, Age) and isinstance(await stream.get_output(), Age)

    asyncio.run(ask())


@row("lm_eval", "log-likelihoods and answers, by completions and by chats")
def _lm_eval(url: str, model: str) -> None:
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

    target = str(Path(__file__).parents[2] / "src/forerun/reference/weights/target")  # its tokenizer
    options: Any = {"model": model, "max_retries": 1}
    texts: Any = LocalCompletionsAPI(base_url=f"{url}/completions", tokenizer=target, seed=1, **options)
    chats: Any = LocalChatCompletion(base_url=f"{url}/chat/completions", **options)
    ((logprob, _),) = texts.loglikelihood([Instance("loglikelihood", {}, ("The sky is", " blue"), 0)])
    assert logprob < 0
    more = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    for each, prompt in ((texts, "The sky is"), (chats, chats.apply_chat_template(MESSAGES))):
        (answer,) = each.generate_until([Instance("generate_until", {}, (prompt, more), 0)])
        assert isinstance(answer, str)


@row("instructor", "structured output by a tool")
def _instructor(url: str, model: str) -> None:
    import instructor

    client = instructor.from_openai(openai_client(url), mode=instructor.Mode.TOOLS)
    assert client.chat.completions.create(model=model, messages=MESSAGES, response_model=Age, max_retries=0)


def run(url: str, model: str, only: str | None = None) -> int:
    """Go through the table; returns how many rows failed."""
    failed = 0
    for client, what, function in ROWS:
        if only not in (None, client):
            continue
        if importlib.util.find_spec(client) is None:
            print(f"skipped  {client}: {what} ({client} is not installed)")
            continue
        try:
            function(url, model)
            print(f"works    {client}: {what}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED   {client}: {what}\n{traceback.format_exc()}", flush=True)
    return failed


if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose agents.py is not the client of that name
    os.environ.setdefault("OPENAI_API_KEY", "none")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks a machine elsewhere for prices
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--only", help="rows of this client alone")
    options = parser.parse_args()
    sys.exit(run(options.url, options.model, options.only))
