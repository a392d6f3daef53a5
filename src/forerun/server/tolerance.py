"""Translate requests of many clients into the strict ones of ``schema.py``.

Fields that change the output are applied, or refused by name. ``HINTS`` and unused features (``NEUTRAL``) are ignored.
Pictures, and tools that OpenAI or Anthropic run, are replaced by words or left out, with a note in the answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import Any

from forerun.server.api_errors import ApiError, invalid

Json = dict[str, Any]

MAX_TURNS = 4096
"""Turns of a conversation. Checking and rendering this many costs a tenth of a second."""
MAX_TOOLS = 512
MAX_NOTES = 16
HINTS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prompt_cache_options", "verbosity", "client_metadata", "cache_control", "context_management", "speed",
        "inference_geo", "betas", "billing_policy", "diagnostics", "fallbacks", "fallback_credit_token", "include",
        "max_tool_calls", "priority", "request_id", "cache_salt", "cache_prompt", "id_slot", "timings_per_token",
        "return_progress", "provider", "transforms", "route", "stream_obfuscation",
    }
)  # fmt: skip
"""Fields for other servers. Any value is ignored."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,), "use_beam_search": (False,), "num_beams": (1,), "beam_width": (1,), "length_penalty": (1, 0),
    "early_stopping": (False,), "diversity_penalty": (0,), "echo": (False,), "suffix": ("",),
    "include_stop_str_in_output": (False,), "spaces_between_special_tokens": (True,), "detokenize": (True,),
    "add_special_tokens": (False,), "prompt_logprobs": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "allowed_token_ids": ([],), "bad_words": ([],), "functions": ([],),
    "function_call": ("none", "auto"), "modalities": (["text"],), "documents": ([],), "mm_processor_kwargs": ({},),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "guided_grammar": (), "structured_outputs": (),
    "thread": ({"type": "create"},), "compaction": (), "moderation": (), "chat_template": (), "audio": (),
    "web_search_options": (), "container": (), "mcp_servers": ([],), "previous_response_id": (), "conversation": (),
    "prompt": (), "background": (False,), "truncation": ("disabled", "auto"), "top_logprobs": (0,),
    "logprobs": (False,), "top_a": (0,), "typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "dry_multiplier": (0,),
    "xtc_probability": (0,), "no_repeat_ngram_size": (0,), "min_tokens": (0,), "ignore_eos": (False,), "n": (1,),
    "kv_transfer_params": (), "vllm_xargs": ({},), "logit_bias": ({},), "stop": ([],), "frequency_penalty": (0,),
    "presence_penalty": (0,), "tool_resources": (),
}  # fmt: skip
"""Missing features, and the values besides null that do not request them."""
MESSAGE_HINTS = frozenset(
    {
        "id", "type", "status", "phase", "cache_control", "annotations", "provider_specific_fields", "logprobs",
        "created_at", "thinking_blocks", "stop_reason", "model",
    }
)  # fmt: skip
"""Fields of a turn that the model does not need; ``thinking_blocks`` repeat the reasoning, signed."""
READABLE = {
    "text": "text", "input_text": "text", "output_text": "text", "reasoning_text": "text", "summary_text": "text",
    "refusal": "refusal", "thinking": "thinking", "compaction": "content", "reasoning.text": "text",
    "reasoning.summary": "summary",
}  # fmt: skip
"""Content parts with text, and the field that has it."""
UNREADABLE = {
    "image": "a picture", "image_url": "a picture", "input_image": "a picture", "output_image": "a picture",
    "computer_screenshot": "a screenshot", "input_audio": "a recording", "audio": "a recording",
    "audio_url": "a recording", "video": "a video", "video_url": "a video", "input_video": "a video", "file": "a file",
    "input_file": "a file", "container_upload": "a file", "mcp_tool_listing": "a list of tools",
    "tool_addition": "a change of tools", "tool_removal": "a change of tools",
}  # fmt: skip
"""Content parts that a text model cannot read, in words."""
HIDDEN = ("redacted_thinking", "reasoning.encrypted", "encrypted_content", "fallback")
"""Encrypted parts."""


class Notes(list[str]):
    """Notes on the parts of a request that were left out."""

    def add(self, note: str) -> None:
        if note not in self and len(self) < MAX_NOTES:
            self.append(note)


def requested(given: Mapping[str, Any], known: Collection[str]) -> Json:
    """Return the fields of a request that have an effect; those not ``known`` stay, to be refused."""
    ignored = {name for name in given.keys() - known if name in HINTS or is_neutral(name, given[name])}
    ignored |= {name for name in known if given.get(name) is None}
    return {name: value for name, value in given.items() if name not in ignored}


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a value does not request a missing feature."""
    neutral = [(each, isinstance(each, bool)) for each in NEUTRAL.get(name, ())]  # True equals 1
    return name in NEUTRAL and (value is None or (value, isinstance(value, bool)) in neutral)


def bounded(entries: Any, where: str, most: int) -> Any:
    """Return ``entries``; raise ApiError for a list that is too long."""
    if isinstance(entries, list) and len(entries) > most:
        raise ApiError(400, f"{where}: there are {len(entries):,}; {most:,} are the most", "too_large", where)
    return entries


def content_text(content: Any, where: str, notes: Notes) -> str:
    """Convert content to text; raise ApiError, with its place ``where``, if it is neither text nor known parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, f"{where}: must be text, or a list of parts")
    bounded(content, where, MAX_TURNS)
    texts = [part_text(part, f"{where}.{number}", notes) for number, part in enumerate(content)]
    plain = [part["type"] in READABLE for part in content]
    apart = [place > 0 and not (plain[place] and plain[place - 1]) for place in range(len(texts))]
    return "".join(f"\n{text}" if own and text else text for text, own in zip(texts, apart, strict=True))


def part_text(part: Any, where: str, notes: Notes) -> str:
    """Convert one part of content to text; see ``content_text``."""
    kind = str(part.get("type")) if isinstance(part, dict) else ""
    if kind in READABLE:
        text = part.get(READABLE[kind])
        if not isinstance(text, str):
            raise invalid(where, f"{where}: {READABLE[kind]} must be text")
        return text
    if kind in HIDDEN:
        return ""
    if kind in UNREADABLE:
        return left_out(UNREADABLE[kind], str(part.get("filename") or part.get("title") or ""), notes)
    if kind in _SPECIAL_PARTS:
        return _SPECIAL_PARTS[kind](part, where, notes)
    if kind.endswith("_tool_result"):
        return left_out(f"a result of {kind.removesuffix('_tool_result')}", "", notes)
    types = ", ".join((*list(READABLE)[:3], "image", "document", "search_result"))
    raise invalid(where, f"{where}: must be text, or a part of a type that is known, such as {types}")


def left_out(what: str, name: str, notes: Notes) -> str:
    """Return the words that replace a part that a text model cannot read."""
    notes.add(f"{what} was replaced by words: this model reads text")
    return f"[{what}{f', {name},' if name else ''} that cannot be shown here]"


def _document(part: Json, where: str, notes: Notes) -> str:
    source = part.get("source")
    source = source if isinstance(source, dict) else {}
    title = str(part.get("title") or "")
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return "\n".join(filter(None, (title, source["data"])))
    if source.get("type") == "content":
        return "\n".join(filter(None, (title, content_text(source.get("content"), f"{where}.source", notes))))
    return left_out("a document", title, notes)


def _search_result(part: Json, where: str, notes: Notes) -> str:
    text = content_text(part.get("content") or "", where, notes)
    return "\n".join(filter(None, (str(part.get("title") or ""), str(part.get("source") or ""), text)))


def _hosted_call(part: Json, where: str, notes: Notes) -> str:
    given = json.dumps(part.get("input") or part.get("action") or {}, ensure_ascii=False)
    return f"[{part.get('name') or part.get('type')} was called with {given}]"


_SPECIAL_PARTS: dict[str, Callable[[Json, str, Notes], str]] = {
    "document": _document,
    "search_result": _search_result,
    "tool_reference": lambda part, where, notes: f"[the tool {part.get('tool_name', '')}]",
    "server_tool_use": _hosted_call,
    "mcp_tool_use": _hosted_call,
    "mcp_tool_result": lambda part, where, notes: content_text(part.get("content") or "", where, notes),
}


def chat_turns(messages: Any, notes: Notes) -> Any:
    """Convert a chat's turns, with content and reasoning as text; return anything but a list unchanged."""
    if not isinstance(bounded(messages, "messages", MAX_TURNS), list):
        return messages
    return [_turn(each, f"messages.{number}", notes) for number, each in enumerate(messages)]


def _turn(message: Any, where: str, notes: Notes) -> Any:
    if not isinstance(message, dict):
        return message
    turn = {name: value for name, value in message.items() if name not in MESSAGE_HINTS and value is not None}
    details = turn.pop("reasoning_details", None)
    reasoning = turn.pop("reasoning", None) or turn.pop("reasoning_content", None) or details
    if reasoning:
        turn["reasoning_content"] = content_text(reasoning, f"{where}.reasoning", notes)
    refusal = turn.pop("refusal", None) or ""
    if "content" in turn or turn.get("role") == "assistant":
        turn["content"] = content_text(turn.get("content") or refusal, f"{where}.content", notes)
    for name in ("tool_calls", "function_call", "audio"):
        if not turn.get(name):
            turn.pop(name, None)
    if isinstance(calls := bounded(turn.get("tool_calls"), f"{where}.tool_calls", MAX_TOOLS), list):
        turn["tool_calls"] = [_call(each) for each in calls]
    return turn


def _call(call: Any) -> Any:
    """Convert a call of a function, whose arguments may be missing, or of a custom tool."""
    if not isinstance(call, dict):
        return call
    if call.get("type") == "custom" and isinstance(call.get("custom"), dict):
        return function_call(call.get("id"), call["custom"].get("name"), custom_arguments(call["custom"].get("input")))
    function = call.get("function")
    if isinstance(function, dict) and function.get("arguments") is None:
        return {**call, "function": {**function, "arguments": "{}"}}
    return call


def function_call(number: Any, name: Any, arguments: Any) -> Json:
    """Make a call in a chat's form; ``arguments`` is a JSON string."""
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


CUSTOM_FIELD = "input"
"""The one argument of a custom tool as a function."""


def custom_arguments(text: Any) -> str:
    """Convert a custom call's input to a function's arguments."""
    return json.dumps({CUSTOM_FIELD: text if isinstance(text, str) else ""}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """Convert a function's arguments to a custom call's input."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return str(value.get(CUSTOM_FIELD, "")) if isinstance(value, dict) else arguments


def function_tools(tools: Any, function: Callable[[Json], Json | None], notes: Notes) -> Any:
    """Convert tools by ``function``, leaving out those for which it returns None: they run elsewhere."""
    if not isinstance(bounded(tools, "tools", MAX_TOOLS), list):
        return tools
    kept = []
    for number, tool in enumerate(tools):
        made = function(tool) if isinstance(tool, dict) else tool
        if made is not None:
            kept.append(made)
        elif not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
            raise invalid(f"tools.{number}", f"tools.{number}: a tool needs a type")
        else:
            name = str(tool.get("name") or tool.get("server_label") or tool["type"])[:64]
            notes.add(f"tools.{number} ({name!r}, of type {tool['type'][:64]!r}) was left out: it runs elsewhere")
    return kept
