"""How model families write reasoning and tool calls, and grammars for answers that must be calls.

A family is recognised by marks in its chat template, and described in the language of transformers' response templates,
whose parser reads the messages. A tokenizer's own response template takes precedence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from forerun.models.text.grammar import JSON_STYLE
from forerun.models.text.schemas import SCHEMAS_BY_NAME, SchemaError, usable_schema

Json = dict[str, Any]
Body = Literal["object", "named", "tags", "python", "braces"]
"""The inside of a call: an object; the name followed by JSON or tags; or what ``call_readers`` reads."""
OPEN_KEYWORDS = frozenset(
    {"additionalProperties", "patternProperties", "propertyNames", "anyOf", "oneOf", "allOf", "$ref", "minProperties"}
)
"""Schema keywords that may allow arguments beyond the properties."""
ANNOTATIONS = ("description", "title", "examples", "default")
"""Schema keywords without constraints."""
Thinking = Literal["open", "free", "closed"]
"""Whether a prompt ends inside reasoning, leaves it to the model, or has ended it."""


@dataclass(frozen=True)
class CallFormat:
    """How tool calls are written.

    Attributes:
        marks: all occur in the chat template of such a model.
        field: where a call starts and ends, in transformers' language of response templates; ``body`` is its inside.
        before, after: around a call's arguments; ``{name}`` is the tool's name.
        begin, end: around all calls; ``between`` separates two.
        separator: between name and arguments, if the body is both; around strings, if it has braces.
        noise: marks around calls that are not content.
        id_length: length of call ids that the template accepts; None for any.
        marked: whether a mark identifies a call. Otherwise only an object that names a tool is one.
        bare: whether a message that is only a call's object, without marks, is also a call.
    """

    marks: tuple[str, ...]
    field: Json
    body: Body
    before: str
    after: str
    begin: str = ""
    end: str = ""
    between: str = "\n"
    separator: str = ""
    noise: tuple[str, ...] = ()
    id_length: int | None = None
    marked: bool = True
    bare: bool = False


BARE_CALL = r'(?:\A|(?<=</think>))\s*(?:```(?:json)?\s*)?(?=\{\s*"name"\s*:)'
HERMES = CallFormat(
    ("<tool_call>",),
    {"open_pattern": f"<tool_call>|{BARE_CALL}", "close": "</tool_call>"},
    "object",
    '<tool_call>\n{"name": "{name}", "arguments": ',
    "}\n</tool_call>",
    bare=True,
)
"""Hermes, Qwen 2.5 and 3, and many later models; the default if a template shows no family."""
DEEPSEEK_NOISE = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL_FORMATS = (
    CallFormat(  # Qwen3-Coder, Qwen 3.5
        ("<tool_call>", "<function=", "<parameter="),
        {
            "open_pattern": r"(?:<tool_call>\s*)?<function=",
            "close_pattern": r"</function>|</tool_call>|(?=<tool_call>|<function=)",
        },
        "tags",
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        noise=("</tool_call>",),
    ),
    HERMES,
    CallFormat(  # DeepSeek V3, R1
        ("<｜tool▁calls▁begin｜>", "```json"),
        {
            "open": "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            "close": ["\n```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>"],
        },
        "named",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        DEEPSEEK_NOISE[0],
        DEEPSEEK_NOISE[1],
        separator="\n```json\n",
        noise=DEEPSEEK_NOISE,
    ),
    CallFormat(  # DeepSeek V3.1
        ("<｜tool▁calls▁begin｜>",),
        {"open": "<｜tool▁call▁begin｜>", "close": "<｜tool▁call▁end｜>"},
        "named",
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        DEEPSEEK_NOISE[0],
        DEEPSEEK_NOISE[1],
        "",
        "<｜tool▁sep｜>",
        DEEPSEEK_NOISE,
    ),
    CallFormat(  # Mistral since version 11
        ("[TOOL_CALLS]", "[ARGS]"),
        {"open": "[TOOL_CALLS]", "close_pattern": r"(?=\[TOOL_CALLS\])"},
        "named",
        "[TOOL_CALLS]{name}[ARGS]",
        "",
        between="",
        separator="[ARGS]",
        id_length=9,
    ),
    CallFormat(  # Mistral before
        ("[TOOL_CALLS]",),
        {"open": "[TOOL_CALLS]"},
        "object",
        '{"name": "{name}", "arguments": ',
        "}",
        "[TOOL_CALLS][",
        "]",
        ", ",
        id_length=9,
    ),
    CallFormat(  # gpt-oss
        ("<|channel|>analysis<|message|>", "functions."),
        {
            "open_pattern": r"(?:<\|channel\|>(?:commentary|analysis)|<\|start\|>assistant|\A) to=functions\.",
            "close": "<|call|>",
        },
        "named",
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "<|call|>",
        between="<|start|>assistant",
        separator="<|message|>",
        noise=("<|start|>assistant",),
    ),
    CallFormat(  # LFM2
        ("<|tool_call_start|>",),
        {"open": "<|tool_call_start|>", "close": "<|tool_call_end|>"},
        "python",
        "{name}(",
        ")",
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        ", ",
    ),
    CallFormat(  # Gemma 4
        ("<|tool_call>", "<tool_call|>"),
        {"open": "<|tool_call>", "close": "<tool_call|>"},
        "braces",
        "<|tool_call>call:{name}{",
        "}<tool_call|>",
        between="",
        separator='<|"|>',
    ),
    CallFormat(  # FunctionGemma
        ("<start_function_call>", "<end_function_call>"),
        {"open": "<start_function_call>", "close": "<end_function_call>"},
        "braces",
        "<start_function_call>call:{name}{",
        "}<end_function_call>",
        between="",
        separator="<escape>",
    ),
    CallFormat(  # Llama 3
        ('"parameters"', "<|start_header_id|>"),
        {"open_pattern": r"(?:\A|(?<=</think>))\s*(?:<\|python_tag\|>)?\s*(?=\{)"},
        "object",
        '{"name": "{name}", "parameters": ',
        "}",
        between="; ",
        marked=False,
    ),
)
"""The first format with all marks present applies."""


@dataclass(frozen=True)
class ThinkingFormat:
    """How reasoning is written: its marks, what follows it, and what starts the answer."""

    begin: str
    end: str
    behind: str = ""
    answer: str = ""


THINKING_FORMATS = (
    ThinkingFormat("<think>", "</think>"),
    ThinkingFormat("[THINK]", "[/THINK]"),
    ThinkingFormat("<seed:think>", "</seed:think>"),
    ThinkingFormat("<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"),
)
HARMONY_CONTENT = {
    "open_pattern": r"<\|channel\|>(?:final|commentary)(?: <\|constrain\|>[^<]*)?<\|message\|>",
    "close": ["<|return|>", "<|end|>"],
}


@dataclass(frozen=True)
class MessageFormat:
    """How a model's messages are written.

    Attributes:
        calls: its tool calls; None if only the tokenizer's response template, ``own``, describes them.
        thinking: its reasoning, or None.
        special: the tokenizer's special tokens by text; they are left out of texts.
        added: all added tokens, including special ones.
    """

    calls: CallFormat | None
    thinking: ThinkingFormat | None
    own: Json | None
    special: Mapping[str, int]
    added: Mapping[str, int]

    def response_template(self, with_tools: bool) -> Json | None:
        """Return the response template for transformers' parser, or None if a message is all content."""
        if self.own is not None:
            return self.own
        thinking, calls = self.thinking, self.calls if with_tools else None
        if thinking is None and calls is None:
            return None
        text: Json = {"content_args": {"strip": False}}
        fields: Json = {"content": (HARMONY_CONTENT if thinking and thinking.answer else {}) | text}
        noise = [*((thinking.behind,) if thinking and thinking.behind else ()), *(calls.noise if calls else ())]
        if thinking is not None:
            fields["reasoning_content"] = {"open": thinking.begin, "close": thinking.end, **text}
        if calls is not None:
            fields["tool_calls"] = {**text, **calls.field, "repeats": True}
        if noise:
            fields["noise"] = {"open": noise, "close_pattern": ""}
        return {"start_anchor": "\0", "fields": fields}

    def kept_tokens(self, with_tools: bool) -> frozenset[int]:
        """Return special tokens that are part of a message's text, because they mark its parts."""
        template = self.response_template(with_tools)
        if template is None:
            return frozenset()
        if self.own is not None:
            return frozenset(self.special.values())
        patterns = json.dumps(template, ensure_ascii=False).replace("\\", "")
        return frozenset(token for text, token in self.special.items() if text in patterns)

    def thinking_after(self, prompt: str) -> Thinking:
        """Return the reasoning state in which a message after a prompt starts."""
        end = prompt.rstrip()
        if self.thinking is None or end.endswith(self.thinking.end):
            return "closed"
        return "open" if end.endswith(self.thinking.begin) else "free"

    def grammar(
        self, response_format: Json | None, tools: Sequence[Json], parallel: bool, thinking: Thinking
    ) -> Json | None:
        """Return a response format for a whole message: optional reasoning, and then an answer or calls.

        Without ``response_format``, the answer must be calls, or any text if there are no tools. Calls that are
        optional may have any arguments if the tool's schema cannot be enforced.

        Raises:
            SchemaError: if a tool must be called whose schema cannot be enforced.
        """
        free = response_format is None or response_format["type"] == "text"
        if free and not tools:
            return None
        if not tools and thinking == "closed" and not (self.thinking and self.thinking.answer):
            return response_format
        rules = [] if free or response_format is None else [_answer_rules(response_format)]
        choices = [] if free else [self._lark(self.thinking.answer if self.thinking else "") + " forerun_answer"]
        if tools:
            rules += self._call_rules(tools if free else list(map(_keepable, tools)), parallel)
            choices.append("forerun_calls")
        reasoning, more = self._thinking_rules(thinking)
        return {"type": "grammar", "grammar": "\n".join([f"start: {reasoning} ({' | '.join(choices)})", *more, *rules])}

    def _thinking_rules(self, thinking: Thinking) -> tuple[str, list[str]]:
        if self.thinking is None or thinking == "closed":
            return "", []
        end, behind = self._lark(self.thinking.end), self._lark(self.thinking.behind) or r"/\n{0,2}/"
        if self.thinking.end in self.added:
            rules = [f"forerun_reasoning: FORERUN_ANY {end} {behind}", "FORERUN_ANY: /(?s:.*)/"]
        else:
            rules = [f"forerun_reasoning: forerun_thoughts {behind}", f"forerun_thoughts[suffix={end}]: /(?s:.*)/"]
        if thinking == "open":
            return "forerun_reasoning", rules
        return f"({self._lark(self.thinking.begin)} forerun_reasoning)?", rules

    def _call_rules(self, tools: Sequence[Json], parallel: bool) -> list[str]:
        calls = self.calls
        assert calls is not None
        more = f"({self._lark(calls.between)} forerun_call)*" if parallel else ""
        rules = [
            f"forerun_calls: {self._lark(calls.begin)} forerun_call {more} {self._lark(calls.end)}",
            "forerun_call: " + " | ".join(f"forerun_call_{i}" for i in range(len(tools))),
        ]
        for i, tool in enumerate(tools):
            function = tool["function"]
            before = calls.before.replace("{name}", function["name"])
            arguments, own_rules = self._arguments(calls.body, function, i)
            rules += [f"forerun_call_{i}: {self._lark(before)} {arguments} {self._lark(calls.after)}", *own_rules]
        return rules

    def _arguments(self, body: Body, function: Json, number: int) -> tuple[str, list[str]]:
        schema = usable_schema(dict(function.get("parameters") or {}), f"tool {function['name']}")
        properties = schema.get("properties") or {}
        if body in ("object", "named"):
            closed = {} if schema.keys() & OPEN_KEYWORDS else {"additionalProperties": False}
            return _lark_json({"type": "object", **closed, **schema}), []
        if body != "tags":
            return self._named_arguments(schema, number)
        parts, rules = [], []
        shared = _shared_schemas(schema)
        for place, (name, inner) in enumerate(properties.items()):
            rule = f"forerun_value_{number}_{place}"
            begin, end = f"<parameter={name}>\n", "\n</parameter>\n"
            words = _bare(inner, shared)
            if words is None:
                suffix = json.dumps(end)
                rules.append(f"{rule}[suffix={suffix}]: /(?s:.*)/")
                part = f"{self._lark(begin)} {rule}"
            else:
                part = f"{self._lark(begin)} ({' | '.join(words)}) {self._lark(end)}"
            parts.append(part if name in schema.get("required", ()) else f"({part})?")
        return " ".join(parts), rules

    def _named_arguments(self, schema: Json, number: int) -> tuple[str, list[str]]:
        assert self.calls is not None
        shared, required, mark = _shared_schemas(schema), schema.get("required", ()), self.calls.separator
        rules, first, later = [f"forerun_first_{number}_end: "], "end", "end"
        for place, (name, inner) in reversed([*enumerate((schema.get("properties") or {}).items())]):
            one = f"forerun_one_{number}_{place}"
            words = _bare(inner, shared, self._lark(mark)) if mark else [_lark_json({**shared, **inner})]
            begin = self._lark(f"{name}{':' if mark else '='}")
            if words is None:
                rules.append(f"{one}_text[suffix={self._lark(mark)}]: /(?s:.*)/")
                rules.append(f"{one}: {begin} {self._lark(mark)} {one}_text")
            else:
                rules.append(f"{one}: {begin} ({' | '.join(words)})")
            comma = self._lark("," if mark else ", ")
            rest = "" if later == "end" else f"forerun_later_{number}_{later}"
            skip = "" if name in required else f" | forerun_first_{number}_{first}"
            rules.append(f"forerun_first_{number}_{place}: {one} {rest}{skip}")
            rules.append(f"forerun_later_{number}_{place}: ({comma} {one}){'' if name in required else '?'} {rest}")
            first = later = str(place)
        return f"forerun_first_{number}_{first}", rules

    def _lark(self, text: str) -> str:
        """Write text in Lark. Added tokens are written as numbers, because llguidance treats some of them as special,
        and no text spells those."""
        if not text:
            return ""
        pattern = "|".join(map(re.escape, sorted(self.added, key=len, reverse=True)))
        parts = re.split(f"({pattern})", text) if pattern else [text]
        return " ".join(
            f"<[{self.added[part]}]>" if part in self.added else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )


def message_format(tokenizer: PreTrainedTokenizerBase) -> MessageFormat:
    """Find the format of a tokenizer's messages."""
    template = tokenizer.chat_template or ""
    text = template if isinstance(template, str) else json.dumps(template, ensure_ascii=False)
    own = getattr(tokenizer, "response_template", None)
    unknown = HERMES if own is None else None
    words = tokenizer.get_added_vocab() if text else {}
    shown = (each for each in CALL_FORMATS if all(mark in text for mark in each.marks))
    # a template may leave its family's marks to the model, which has tokens for them
    spelled = (each for each in CALL_FORMATS if all(mark in words for mark in each.marks))
    calls = next(chain(shown, spelled), unknown)

    def is_known(thinking: ThinkingFormat) -> bool:
        if thinking.answer:  # its end may be any turn's, as in Phi-3
            return thinking.begin in text
        return thinking.end in text or (thinking.end in words and thinking.begin in words) or thinking.begin in text

    thinking = next((each for each in THINKING_FORMATS if is_known(each)), None)
    tokens = tokenizer.added_tokens_decoder
    added = {each.content: token for token, each in tokens.items() if each.content.strip()}
    special = {each.content: token for token, each in tokens.items() if each.special}
    return MessageFormat(calls, thinking, own, special, added)


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
    """Replace ``developer``, OpenAI's later name of ``system``, for a template without it. Some templates reject a
    second system turn, so a developer's turn right after one is merged into it."""
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
    """Yield a conversation, and variants for templates that reject it: with all system turns first and merged; then
    without a system, and with alternating user and assistant turns."""
    yield list(messages)
    said = "\n\n".join(turn["content"] for turn in messages if turn["role"] == "system")
    others = [turn for turn in messages if turn["role"] != "system"]
    if len(others) < len(messages):
        yield [{"role": "system", "content": said}, *others]
    joined: list[Json] = [{"role": "user", "content": said}] if said else []
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


def _keepable(tool: Json) -> Json:
    """Allow any arguments of a tool if its schema cannot be enforced."""
    try:
        usable_schema(tool["function"].get("parameters"))
        return tool
    except SchemaError:
        return {
            **tool,
            "function": {**tool["function"], "parameters": {"type": "object", "additionalProperties": True}},
        }


def _lark_json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**_constraints(schema), "x-guidance": dict(JSON_STYLE)}, ensure_ascii=False)


def _constraints(schema: Any) -> Any:
    """Drop what only people and models read from a schema, because a request may have dozens of tools."""
    if isinstance(schema, list):
        return [_constraints(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept: Json = {}
    for key, inner in schema.items():
        if key in SCHEMAS_BY_NAME and isinstance(inner, Mapping):
            kept[key] = {name: _constraints(each) for name, each in inner.items()}
        elif key not in ANNOTATIONS:
            kept[key] = inner if key in ("const", "enum") else _constraints(inner)
    return kept


def _shared_schemas(parameters: Mapping[str, Any]) -> Json:
    return {key: parameters[key] for key in ("$defs", "definitions") if isinstance(parameters.get(key), Mapping)}


def _alternatives(schema: Any, shared: Json) -> list[Any]:
    """Expand a schema into its alternatives: follow references, and split unions and lists of types."""
    waiting, found, seen = [schema], [], set[str]()
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, Mapping):
            reference = str(each.get("$ref", ""))
            place, _, name = reference.removeprefix("#/").rpartition("/")
            if name in shared.get(place, {}):
                waiting += [] if reference in seen else [shared[place][name]]
                seen.add(reference)
                continue
            kinds = each.get("type")
            choices = next((each[key] for key in ("anyOf", "oneOf") if kinds is None and each.get(key)), ())
            if isinstance(kinds, list):
                choices = [{**each, "type": kind} for kind in kinds]
            if isinstance(choices, list):
                waiting += choices
                continue
        found.append(each)
    return found


BARE_FORMATS = {
    "date": r"[0-9]{4}-[01][0-9]-[0-3][0-9]",
    "time": r"[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?(Z|[+-][0-2][0-9]:[0-5][0-9])?",
    "date-time": r"[0-9]{4}-[01][0-9]-[0-3][0-9]T[0-2][0-9]:[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
    r"(Z|[+-][0-2][0-9]:[0-5][0-9])?",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
}
"""Formats enforced even without quotes, as regular expressions."""


def _bare(schema: Any, shared: Json, mark: str = "") -> list[str] | None:
    """Return what may stand between tags, in Lark: listed strings, without quotes or between marks, else JSON. None if
    any text may."""
    found: list[str] = []
    for each in _alternatives(schema, shared):
        own = each if isinstance(each, Mapping) else {}
        values = own.get("enum", [own["const"]] if "const" in own else None)
        if isinstance(values, list) and values:
            texts = [(value, mark) if isinstance(value, str) else (json.dumps(value), "") for value in values]
            found += [f"{around} {json.dumps(text, ensure_ascii=False)} {around}" for text, around in texts]
        elif own.get("type") == "string" and own.get("format") in BARE_FORMATS:
            found.append(f"{mark} /{BARE_FORMATS[own['format']]}/ {mark}")
        elif own.get("type") == "string":
            return None
        else:
            found.append(_lark_json({**shared, **own}))
    return found


def with_types(tools: Sequence[Json]) -> list[Json]:
    """Move parameters' types to where transformers looks for them, resolving references."""
    typed = []
    for tool in tools:
        parameters = tool["function"].get("parameters") or {}
        shared, properties = _shared_schemas(parameters), {}
        given = parameters.get("properties")
        for name, schema in given.items() if isinstance(given, Mapping) else ():
            choices = _alternatives(schema, shared)
            properties[name] = choices[0] if len(choices) == 1 else {"anyOf": choices}
        function = {**tool["function"], "parameters": {**parameters, "properties": properties}}
        typed.append({**tool, "function": function})
    return typed


def _answer_rules(response_format: Json) -> str:
    kind = response_format["type"]
    if kind == "grammar":
        kept = r'("(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/)'  # strings, comments and expressions
        return re.sub(kept + r"|\bstart\b", _renamed, str(response_format["grammar"]))
    if kind == "regex":
        pattern = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], response_format["regex"])
        return f"forerun_answer: /{pattern}/"
    schema = {"type": "object"} if kind == "json_object" else usable_schema(response_format["json_schema"]["schema"])
    return f"forerun_answer: {_lark_json(schema)}"


def _renamed(found: re.Match[str]) -> str:
    return found[1] or "forerun_answer"
