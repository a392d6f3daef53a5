"""Rewrite conversations for chat templates that lack a role, a second system turn, or tools."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from transformers import PreTrainedTokenizerBase

from forerun.models.text.call_formats import Json

TOOLS_PROMPT = """# Tools

You may call functions. Their descriptions are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and arguments within <tool_call></tool_call>:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer's chat template shows tools to the model."""
    return "tools" in str(getattr(tokenizer, "chat_template", ""))


def with_known_roles(messages: Sequence[Json], tokenizer: PreTrainedTokenizerBase) -> list[Json]:
    """Turn ``developer`` into ``system`` for a template without it, merging it into a system turn right before."""
    if "developer" in str(getattr(tokenizer, "chat_template", "")):
        return list(messages)
    turns: list[Json] = []
    for message in messages:
        if message["role"] != "developer":
            turns.append(message)
        elif turns and turns[-1]["role"] == "system":
            turns[-1] = {**turns[-1], "content": f"{turns[-1]['content']}\n\n{message['content']}"}
        else:
            turns.append({**message, "role": "system"})
    return turns


def arrangements(messages: Sequence[Json]) -> Iterator[list[Json]]:
    """Yield a conversation, and variants for templates that reject it: system turns first and merged; then no system,
    and alternating user and assistant turns."""
    yield list(messages)
    system_text = "\n\n".join(turn["content"] for turn in messages if turn["role"] == "system")
    others = [turn for turn in messages if turn["role"] != "system"]
    if len(others) < len(messages):
        yield [{"role": "system", "content": system_text}, *others]
    joined: list[Json] = [{"role": "user", "content": system_text}] if system_text else []
    for turn in others:
        plain = turn.keys() == {"role", "content"} == (joined[-1].keys() if joined else None)
        if joined and plain and turn["role"] == joined[-1]["role"]:
            joined[-1] = {**turn, "content": f"{joined[-1]['content']}\n\n{turn['content']}"}
        else:
            joined.append(turn)
    yield joined


def with_tools_as_text(messages: Sequence[Json], tools: Sequence[Json]) -> list[Json]:
    """Rewrite a conversation for a template without tools: tools, calls and results become text in Hermes' form."""
    if not tools:  # any more
        return list(map(_as_text, messages))
    prompt = TOOLS_PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    rest = list(messages)
    if rest and rest[0]["role"] == "system":
        prompt = f"{rest.pop(0)['content']}\n\n{prompt}"
    return [{"role": "system", "content": prompt}, *map(_as_text, rest)]


def _as_text(message: Json) -> Json:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    if not calls:
        return message
    parts = [message["content"]] if message["content"] else []
    parts += [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": "\n".join(parts)}
