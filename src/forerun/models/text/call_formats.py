"""The forms in which model families write tool calls and reasoning.

A family is recognised by marks in its chat template, and described in the language of transformers' response templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Json = dict[str, Any]
Body = Literal["object", "named", "tags", "python", "braces"]
"""The inside of a call: an object; the name followed by JSON or tags; or what ``call_readers`` reads."""


@dataclass(frozen=True)
class CallFormat:
    """How tool calls are written."""

    marks: tuple[str, ...]  # all occur in the chat template of such a model
    field: Json  # where a call starts and ends, in transformers' language of response templates
    body: Body  # the inside of a call
    before: str  # before a call's arguments; ``{name}`` is the tool's name
    after: str  # after a call's arguments
    begin: str = ""  # before all calls
    end: str = ""  # after all calls
    between: str = "\n"  # between two calls
    separator: str = ""  # between name and arguments, if the body is both; around strings, if it has braces
    noise: tuple[str, ...] = ()  # marks around calls that are not content
    id_length: int | None = None  # of call ids that the template accepts; None for any
    marked: bool = True  # whether a mark identifies a call; otherwise only an object that names a tool is one
    bare: bool = False  # whether a message that is only a call's object, without marks, is also a call


BARE_CALL = r'(?:\A|(?<=</think>))\s*(?:```(?:json)?\s*)?(?=\{\s*"name"\s*:)'
HERMES = CallFormat(
    ("<tool_call>",),
    {"open_pattern": f"<tool_call>|{BARE_CALL}", "close": "</tool_call>"},
    "object",
    '<tool_call>\n{"name": "{name}", "arguments": ',
    "}\n</tool_call>",
    bare=True,
)
"""Hermes, Qwen 2.5 and 3, and many later models; the default for unrecognised templates."""
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
    following: str = ""
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
