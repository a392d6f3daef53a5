"""Messages of each family are taken apart alike, however their text comes in pieces; grammars allow what is read."""

import json
import random
from typing import Any

import pytest
from support.bundled import allows, bundled
from support.chat_models import TOOLS
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from forerun.models.text.call_formats import CALL_FORMATS, HERMES, THINKING_FORMATS
from forerun.models.text.call_readers import read_braces, read_python, read_tags
from forerun.models.text.conversations import with_known_roles
from forerun.models.text.detokenize import Detokenizer
from forerun.models.text.grammar import Grammars
from forerun.models.text.message_formats import MessageFormat, message_format
from forerun.models.text.message_parser import MessageParser

Calls = list[tuple[str, Any]]
THINK, HARMONY = THINKING_FORMATS[0], THINKING_FORMATS[3]
CODER, DEEPSEEK, DEEPSEEK_31, MISTRAL, OLD_MISTRAL, GPT_OSS = (CALL_FORMATS[i] for i in (0, 2, 3, 4, 5, 6))
LFM2, GEMMA, FUNCTION_GEMMA, LLAMA = CALL_FORMATS[7:]
ROME, ADD = ("get_weather", {"city": "Rome", "days": 3}), ("add", {"a": 1})


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return bundled()[1]


def form_of(calls: Any = HERMES, thinking: Any = None) -> MessageFormat:
    return MessageFormat(calls, thinking, None, {}, {})


def own_form(**calls: Any) -> MessageFormat:
    """A tokenizer's own response template, with calls between ``<c>`` and ``</c>``."""
    calls = {"open": "<c>", "close": "</c>", "repeats": True, "content": "json"} | calls
    fields = {"content": {"content_args": {"strip": False}}, "tool_calls": calls}
    return MessageFormat(None, None, {"start_anchor": "\0", "fields": fields}, {}, {})


def parsed(
    tokenizer: PreTrainedTokenizerBase, form: MessageFormat, text: str, step: int, prompt: str = "", tools: Any = TOOLS,
    parallel: bool = True, cut: bool = False,
) -> tuple[str, str, Calls]:  # fmt: skip
    """Content, reasoning and calls of a text that comes ``step`` characters at a time."""
    template = form.response_template(bool(tools))
    assert template is not None
    parser = MessageParser(tokenizer, form, template, prompt, tools, parallel)
    content = reasoning = ""
    calls: list[list[str]] = []
    pieces = [text[i : i + step] for i in range(0, len(text), step)]
    for place, piece in enumerate([*pieces, ""]):
        delta = parser.feed(piece, place == len(pieces), cut and place == len(pieces))
        content, reasoning = content + delta.content, reasoning + delta.reasoning
        for call in delta.calls:
            if call.id is not None:
                assert call.index == len(calls) and call.name is not None
                calls.append([call.name, ""])
            calls[call.index][1] += call.arguments
    return content, reasoning, [(name, _value(arguments)) for name, arguments in calls]


def _value(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


HERMES_CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
)
MESSAGES: dict[str, Any] = {  # calls, text, its content, its calls; and where there is: thinking, reasoning, prompt
    "hermes": (HERMES, f"Sure.\n{HERMES_CALLS}", "Sure.", [ROME, ADD]),
    "hermes, a text behind the calls": (HERMES, f"Sure.\n{HERMES_CALLS}\nNow I wait for  both.\n",
        "Sure.\nNow I wait for  both.", [ROME, ADD]),
    "reasoning, then calls": (HERMES, f"<think>\nHm.\n</think>\n\n{HERMES_CALLS}", "", [ROME, ADD], THINK, "Hm.\n"),
    "reasoning that the prompt began": (HERMES, "Hm.\n</think>\n\nYes <b>\n",
        "Yes <b>\n", [], THINK, "Hm.\n", "\n<think>\n"),
    "no call in the marks": (HERMES, "<tool_call>\nno\n</tool_call> x", "<tool_call>\nno\n</tool_call> x", []),
    "arguments before the name": (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [ADD]),
    "arguments as text": (HERMES, r'<tool_call>{"name": "add", "arguments": "{\"a\": 1}"}</tool_call>', "", [ADD]),
    "no arguments": (HERMES, '<tool_call>{"name": "add"}</tool_call>', "", [("add", {})]),
    "braces in texts": (HERMES,
        r'<tool_call>{"name": "add", "arguments": {"a": "}\"{", "b": [1, {"x": []}]}}</tool_call>',
        "", [("add", {"a": '}"{', "b": [1, {"x": []}]})]),
    "cut in the arguments": (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    "cut before the name": (HERMES, 'So <tool_call>{"na', 'So <tool_call>{"na', []),
    "coder": (CODER,
        "ok\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "ok", [ROME, ADD]),
    "deepseek": (DEEPSEEK,
        "<think>Hm.</think>So<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        '{"city": "Rome", "days": 3}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n'
        '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "So", [ROME, ADD], THINK, "Hm."),
    "deepseek 3.1": (DEEPSEEK_31, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Rome", "days": 3}<｜tool▁call▁end｜>'
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", [ROME, ADD]),
    "mistral": (MISTRAL,
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome", "days": 3}[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}',
        "", [ROME, ADD]),
    "old mistral": (OLD_MISTRAL, '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}, '
        '{"name": "add", "arguments": {"a": 1}}]', "", [ROME, ADD]),
    "gpt-oss": (GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        '<|constrain|>json<|message|>{"city": "Rome", "days": 3}<|call|>', "", [ROME], HARMONY, "Hm."),
    "gpt-oss, as its template writes calls": (GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary json"
        '<|message|>{"city": "Rome", "days": 3}<|call|>', "", [ROME], HARMONY, "Hm."),
    "gpt-oss, a call at once": (GPT_OSS,
        ' to=functions.add<|channel|>commentary <|constrain|>json<|message|>{"a": 1}<|call|>', "", [ADD], HARMONY, ""),
    "gpt-oss, a text of functions": (GPT_OSS, "<|channel|>final<|message|>Set to=functions.add and <|end|>",
        "Set to=functions.add and ", [], HARMONY, ""),
    "gpt-oss, an answer": (GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Hello",
        "Hello", [], HARMONY, "Hm."),
    "coder, without marks around": (CODER, "<function=add>\n<parameter=a>\n1\n</function>\nand so", "and so", [ADD]),
    "coder, ends that are missing": (CODER,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n<parameter=days>\n3\n</parameter>\n</tool_call>",
        "", [ROME]),
    "coder, a call behind one without an end": (CODER,
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<tool_call>\n<function=add>\n<parameter=a>\n2\n"
        "</parameter>\n</function>\n</tool_call>", "", [ADD, ("add", {"a": 2})]),
    "bare": (HERMES, '{"name": "add", "arguments": {"a": 1}}', "", [ADD]),
    "bare, with spaces": (HERMES, '\n{\n "name": "add",\n "arguments": {"a": 1}\n}\n', "", [ADD]),
    "bare, in a fence": (HERMES, '```json\n{"name": "add", "arguments": {"a": 1}}\n```', "", [ADD]),
    "bare, two": (HERMES,
        '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n{"name": "add", "arguments": {"a": 1}}',
        "", [ROME, ADD]),
    "bare, after reasoning": (HERMES, '<think>Hm.</think>\n\n{"name": "add", "arguments": {"a": 1}}',
        "", [ADD], THINK, "Hm."),
    "bare, of no tool": (HERMES, '{"name": "Bob", "arguments": {"a": 1}}',
        '{"name": "Bob", "arguments": {"a": 1}}', []),
    "bare, with more": (HERMES, '{"name": "add", "arguments": {"a": 1}} is the call',
        '{"name": "add", "arguments": {"a": 1}} is the call', []),
    "an object that is no call": (HERMES, '{"name": "add", "age": 3}', '{"name": "add", "age": 3}', []),
    "an object behind a text": (HERMES, 'So: {"name": "add", "arguments": {}}',
        'So: {"name": "add", "arguments": {}}', []),
    "lfm2": (LFM2, '<|tool_call_start|>[get_weather(city="Rome", days=3), add(a=1)]<|tool_call_end|>Wait.',
        "Wait.", [ROME, ADD]),
    "lfm2, python's and json's words": (LFM2,
        "<|tool_call_start|>[f(a=None, b=true, c=[1, -2.5], d={'x': ('y',)})]<|tool_call_end|>",
        "", [("f", {"a": None, "b": True, "c": [1, -2.5], "d": {"x": ["y"]}})]),
    "lfm2, no call": (LFM2, "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>",
        "<|tool_call_start|>[__import__('os').system('x')]<|tool_call_end|>", []),
    "gemma": (GEMMA,
        'So<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3}<tool_call|><|tool_call>call:add{a:1}<tool_call|>',
        "So", [ROME, ADD]),
    "gemma, nested": (GEMMA, '<|tool_call>call:f{a:{b:[1,<|"|>x, }y<|"|>],c:null},d:true,e:{}}<tool_call|>',
        "", [("f", {"a": {"b": [1, "x, }y"], "c": None}, "d": True, "e": {}})]),
    "functiongemma": (FUNCTION_GEMMA,
        "<start_function_call>call:get_weather{city:<escape>Rome<escape>,days:3}<end_function_call>", "", [ROME]),
    "mistral, a text behind the call": (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1} Wait.', "Wait.", [ADD]),
    "old mistral, a text behind the calls": (OLD_MISTRAL,
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}] Wait, [so].', "Wait, [so].", [ADD]),
    "deepseek 3.1, arguments as a text of JSON": (DEEPSEEK_31,
        '<｜tool▁call▁begin｜>add<｜tool▁sep｜>"{\\"a\\": 1}"<｜tool▁call▁end｜>', "", [ADD]),
    "llama": (LLAMA,
        '{"name": "get_weather", "parameters": {"city": "Rome", "days": 3}}; {"name": "add", "parameters": {"a": 1}}',
        "", [ROME, ADD]),
    "llama's tag": (LLAMA, '<|python_tag|>{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
    "llama, an object in a text": (LLAMA, 'Say {"name": "x"}.', 'Say {"name": "x"}.', []),
    "llama, an object that names no tool": (LLAMA, '{"name": "Bob", "parameters": {"a": 1}}',
        '{"name": "Bob", "parameters": {"a": 1}}', []),
    "llama, an object with a name": (LLAMA, '{"age": 3, "name": "Bob"}', '{"age": 3, "name": "Bob"}', []),
    "llama, another object": (LLAMA, '{"not": "a call"}', '{"not": "a call"}', []),
}  # fmt: skip


@pytest.mark.parametrize("step", [1, 3, 7, 10_000])
@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_is_taken_apart(tokenizer, name, step):
    form, text, content, calls, *more = MESSAGES[name]
    thinking, reasoning, prompt = (*more, *(None, "", "")[len(more) :])
    assert parsed(tokenizer, form_of(form, thinking), text, step, prompt) == (content, reasoning, calls)


CUT = {
    "in the name": (form_of(), 'Sure.\n<tool_call>\n{"name": "get_w', ("Sure.", [])),
    "before the arguments": (form_of(), '<tool_call>\n{"name": "get_weather", "argu', ("", [])),
    "in the arguments": (form_of(), '<tool_call>\n{"name": "add", "arguments": {"a": 1', ("", [("add", '{"a": 1')])),
    "a bare one": (form_of(), '{"name": "add", "arguments": {"a": 1', ("", [])),
    "an object of no tool": (form_of(), '{"name": "Bob", "argu', ('{"name": "Bob", "argu', [])),
    "between tags": (form_of(CODER), "ok\n<tool_call>\n<function=add>\n<param", ("ok", [])),
    "in python": (form_of(LFM2), "<|tool_call_start|>[add(a=", ("", [])),
    "in braces": (form_of(GEMMA), "<|tool_call>call:add{a:", ("", [])),
    "a name and a part of the arguments": (form_of(MISTRAL), '[TOOL_CALLS]add[ARGS]{"a"', ("", [("add", '{"a"')])),
    "of an own template": (own_form(), 'Hi <c>{"name": "add", "argu', ("Hi", [])),
}


@pytest.mark.parametrize("step", [1, 5, 1000])
@pytest.mark.parametrize("name", CUT)
def test_a_call_that_is_cut_leaves_no_marks_in_the_content(tokenizer, name, step):
    form, text, (content, calls) = CUT[name]
    assert parsed(tokenizer, form, text, step, cut=True) == (content, "", calls)


TYPES: Any = {
    "properties": {
        "when": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}, "count": {"type": "integer"},
        "kind": {"enum": [1, 2, "x"]}, "words": {"type": "array"}, "note": {"type": "string"},
        "flag": {"type": "boolean"}},
    "required": ["when"],
}  # fmt: skip


def test_values_between_tags_have_the_types_of_the_schema():
    def read(**given: str) -> Any:
        body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in given.items())
        return read_tags(body, TYPES["properties"], TYPES["required"])

    found = read(when="2026-11-29", count="3", kind="2", words="['a', None]", note="None", flag="False")
    assert found == dict(when="2026-11-29", count=3, kind=2, words=["a", None], note="None", flag=False)  # noqa: C408
    assert read(when="None", count="None", kind="x", words="null", flag="") == {"when": None, "kind": "x"}
    assert read(count="3.0", words="no list") == {"count": 3, "words": "no list"}


@pytest.mark.parametrize("text", ["f(" * 500, "[" * 5000, "f(a=1, b)", "f(**x)", "1", "f(a=g())", "f(a=b)"])
def test_what_is_no_call_in_python_is_none(text):
    with pytest.raises(ValueError, match="Python"):
        read_python(text)


@pytest.mark.parametrize(
    "text", ["call:f{a", "call:f{a:}", "call:f{a:1} x", 'call:f{a:<|"|>x}', "call:f{" + "a:{" * 5000]
)
def test_what_is_no_call_in_braces_is_none(text):
    assert read_braces("f") == [("f", {})]
    with pytest.raises((ValueError, RecursionError)):
        read_braces(text)


@pytest.mark.parametrize("parameters", [None, {}, {"type": "object"}, {"type": "object", "properties": {}}], ids=str)
def test_a_tool_without_properties_is_called_without_arguments(tokenizer, parameters):
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    grammar = form_of().grammar(None, tools, False, "closed")
    for arguments, allowed in (("{}", True), ('{"a": 1}', False)):
        text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
        assert allows(tokenizer, grammar, text) == allowed


def test_arguments_come_while_they_are_written(tokenizer):
    parser = MessageParser(tokenizer, form_of(), form_of().response_template(True), "", TOOLS)
    assert not parser.feed('<tool_call>{"name": "add", "argum').calls
    name, first = parser.feed('ents": {"a": ').calls
    assert (name.name, first.arguments, first.index) == ("add", '{"a": ', 0)
    assert [call.arguments for call in parser.feed("12, ").calls] == ["12, "]


def test_without_parallel_calls_only_the_first_is_passed_on(tokenizer):
    assert parsed(tokenizer, form_of(), HERMES_CALLS, 5, parallel=False) == ("", "", [ROME])


def test_a_tokenizers_own_response_template_is_used(tokenizer):
    own = {
        "start_anchor": "<bot>",
        "fields": {"thinking": {"open": "<t>", "close": "</t>"},
            "tool_calls": {"open": "<c>", "close": "</c>", "repeats": True, "content": "json"},
            "content": {"close": "<end>"}},
    }  # fmt: skip
    form = MessageFormat(None, None, own, {}, {})
    text = 'Hm</t>Hi <c>{"function": {"name": "add", "arguments": {"a": 1}}}</c><end>'
    assert parsed(tokenizer, form, text, 4, "<t>old</t><bot><t>") == ("Hi", "Hm", [ADD])
    broken = parsed(tokenizer, form, "Hi <c>{</c> more", 4, "<bot>")
    assert broken[0].startswith("Hi") and broken[2] == []


@pytest.mark.parametrize("step", [1, 3, 1000])
def test_what_is_no_call_stays_in_the_content_of_an_own_template(tokenizer, step):
    form = own_form(transform={"type": "function", "function": "{content}"})
    one = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}'
    other = '{"name": "add", "arguments": {"a": 1}}'
    assert parsed(tokenizer, form, f"<c>{one}</c><c>{other}</c>", step) == ("", "", [ROME, ADD])
    assert parsed(tokenizer, form, f"<c>[{one}, {other}]</c>", step) == ("", "", [ROME, ADD])
    for none in ('{"foo": 1}', '"add"', "3", "[]", f"[{one}, 3]"):
        assert parsed(tokenizer, form, f"Hi <c>{none}</c>", step) == (f"Hi <c>{none}</c>", "", [])


TAGGED: Any = {
    "$defs": {"Unit": {"enum": ["C", "F"], "type": "string"}, "Place": {"type": "object"}},
    "properties": {"city": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "note": {"type": ["string", "null"]},
        "unit": {"$ref": "#/$defs/Unit"}, "kind": {"const": "short"},
        "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]}, "place": {"$ref": "#/$defs/Place"},
        "other": {"anyOf": [{"$ref": "#/$defs/Unit"}, {"type": "null"}]}},
    "required": ["city", "note", "unit", "kind", "days", "place", "other"],
    "type": "object",
}  # fmt: skip


@pytest.mark.parametrize("missing", [False, True])
def test_values_between_tags_have_no_quotes_where_a_schema_allows_texts(tokenizer, missing):
    form = form_of(CODER)
    tools = [{"type": "function", "function": {"name": "f", "parameters": TAGGED}}]
    values = {"city": "Rome", "note": "so", "unit": "F", "kind": "short", "days": 3, "place": {"a": 1}, "other": "C"}
    if missing:
        values |= dict.fromkeys(("city", "note", "days", "other"))
    written = "".join(
        f"<parameter={key}>\n{value if isinstance(value, str) else json.dumps(value)}\n</parameter>\n"
        for key, value in values.items()
    )
    text = f"<tool_call>\n<function=f>\n{written}</function>\n</tool_call>"
    grammar = form.grammar(None, tools, True, "closed")
    for said, allowed in ((text, True), (text.replace("\nF\n", '\n"F"\n'), False), (text.replace("short", "x"), False)):
        assert allows(tokenizer, grammar, said) == allowed
    assert parsed(tokenizer, form, text, 5, tools=tools)[2] == [("f", values)]


@pytest.mark.parametrize("step", [1, 3, 7, 40])
def test_no_text_is_lost_where_the_parser_fails_at_a_call(tokenizer, step):
    form, bad = own_form(), '<c>{"name": "add", "argu</c> and more text'
    assert parsed(tokenizer, form, f"Well, {bad}", step) == (f"Well, {bad}", "", [])
    good = '<c>{"name": "add", "arguments": {"a": 1}}</c>'
    assert parsed(tokenizer, form, f"Well, {good} {bad}", step) == (f"Well,\n{bad}", "", [ADD])
    assert parsed(tokenizer, form, '<c>{"name": "ad', step) == ('<c>{"name": "ad', "", [])


def test_families_are_known_by_their_templates(tokenizer):
    def of(template: str) -> MessageFormat:
        tokenizer.chat_template = template
        try:
            return message_format(tokenizer)
        finally:
            tokenizer.chat_template = None

    for form in CALL_FORMATS:
        assert of(" ".join(form.marks)).calls is form
    assert of("plain").calls is HERMES and of("plain").thinking is None
    assert of("{% set x = '</think>' %}").thinking is THINK
    assert of("<|channel|> <|end|> <|channel|>analysis<|message|>").thinking is HARMONY
    assert of("<|user|>{{ m.content }}<|end|><|assistant|>").thinking is None  # Phi-3
    harmony = "<|channel|>analysis<|message|> {{ '<|start|>assistant to=' }}{{ 'functions.' + call.name }}"
    assert (of(harmony).calls, of(harmony).thinking) == (GPT_OSS, HARMONY)


WRITTEN = {  # reasoning before calls, and what of it the prompt has
    "free": ("<think>so</think>\n\n", ""), "open": ("so</think>", "<think>"), "closed": ("", "</think>"),
}  # fmt: skip


@pytest.mark.parametrize("thinking", WRITTEN)
@pytest.mark.parametrize("calls", CALL_FORMATS, ids=lambda each: each.before[:24])
def test_a_grammar_allows_the_calls_that_are_read(tokenizer, calls, thinking):
    form, (begin, prompt) = form_of(calls, THINK), WRITTEN[thinking]
    grammar = form.grammar(None, TOOLS, True, thinking)
    for count in (1, 2):
        text = begin + calls.begin + calls.between.join(_written(calls)[:count]) + calls.end
        assert allows(tokenizer, grammar, text), text
        assert parsed(tokenizer, form, text, 3, prompt)[2] == [ROME, ADD][:count]
    assert not allows(tokenizer, grammar, begin + "Hello")


def _written(calls: Any) -> list[str]:
    """Both calls as a family writes them."""

    def body(arguments: dict[str, Any]) -> str:
        if calls.body == "tags":
            return "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
        if calls.body == "python":
            return ", ".join(f"{key}={json.dumps(value)}" for key, value in arguments.items())
        if calls.body == "braces":
            return ",".join(
                f"{key}:{json.dumps(value).replace(chr(34), calls.separator)}" for key, value in arguments.items()
            )
        return json.dumps(arguments)

    return [calls.before.replace("{name}", name) + body(arguments) + calls.after for name, arguments in (ROME, ADD)]


SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
GRAMMAR = '// a/b, from "here\nstart: "x" other // a / start\nother: /y/'
ANSWERS: list[tuple[str, Any]] = [
    ("{}", {"type": "json_object"}), ("7", SCHEMA), ("a/b", {"type": "regex", "regex": "a/b|c"}),
    ("xy", {"type": "grammar", "grammar": GRAMMAR}),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response_format"), ANSWERS)
def test_an_answer_by_a_schema_comes_after_the_reasoning(tokenizer, answer, response_format):
    form = form_of(HERMES, THINK)
    for thinking, begin in (("free", "<think>\n7\n</think>\n\n"), ("free", ""), ("open", "7</think>")):
        assert allows(tokenizer, form.grammar(response_format, [], True, thinking), begin + answer)
    assert form.grammar(response_format, [], True, "closed") == response_format


def test_a_schema_keeps_what_it_forbids_alone(tokenizer):
    properties = {"title": {"type": "string", "description": "x" * 500}, "n": {"enum": ["description"], "default": 1}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"title": "F", "properties": properties}}}
    text = form_of().grammar(None, [tool], True, "closed")["grammar"]
    assert "xxx" not in text and '"title": {"type": "string"}' in text and '"enum": ["description"]}' in text


def test_a_template_without_developers_gets_a_system():
    tokenizer = bundled()[1]
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    roles = ("system", "developer", "user", "developer", "developer")
    messages = [{"role": role, "content": str(place)} for place, role in enumerate(roles)]
    turns = [(turn["role"], turn["content"]) for turn in with_known_roles(messages, tokenizer)]
    assert turns == [("system", "0\n\n1"), ("user", "2"), ("system", "3\n\n4")]
    tokenizer.chat_template += "{# developer #}"
    assert with_known_roles(messages, tokenizer) == messages


@pytest.mark.parametrize("special", [True, False])
def test_marks_that_are_tokens_are_written_by_their_numbers(special):
    """llguidance would force such a token for the letters of a mark, and then not take it."""
    pytest.importorskip("llguidance")
    tokenizer = bundled()[1]
    marks = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    tokenizer.add_tokens([AddedToken(mark, special=special) for mark in marks], special_tokens=special)
    tokenizer.chat_template = "<tool_call> <think> </think>"
    form = message_format(tokenizer)
    assert form.calls is HERMES and form.thinking is THINK and set(marks) <= set(form.added)
    assert form.kept_tokens(True) == (frozenset(tokenizer.convert_tokens_to_ids(marks)) if special else frozenset())
    for thinking, begin in (("free", "<think>so</think>"), ("open", "so</think>"), ("closed", "")):
        response_format = form.grammar(None, TOOLS, True, thinking)
        assert allows(tokenizer, response_format, begin + HERMES_CALLS)
        matcher = Grammars(tokenizer, len(tokenizer), []).of(response_format).matcher.deep_copy()
        first, *_ = tokenizer.convert_ids_to_tokens(matcher.compute_ff_tokens()) or ["free"]
        assert first == ("<tool_call>" if thinking == "closed" else "free")


@pytest.mark.parametrize(
    "text", ["\N{REPLACEMENT CHARACTER}" * 300, "\u4f60\u597d \N{REPLACEMENT CHARACTER} w\u00f6rld \U0001f642" * 20]
)
def test_a_run_of_replacement_characters_is_given_out_character_by_character(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer, pieces, silent = Detokenizer(tokenizer, [5, 6]), list[str](), [0]
    for token in ids:
        new = [piece.text for piece in detokenizer.add(int(token), False)]
        pieces += new
        silent.append(0 if new else silent[-1] + 1)
    assert max(silent) <= 3  # a character has four bytes
    assert "".join(pieces) == text


def test_bytes_that_are_no_text_read_as_in_the_whole(tokenizer):
    choose = random.Random(0)
    ids = [choose.randrange(len(tokenizer)) for _ in range(2000)]
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [piece.text for token in ids for piece in detokenizer.add(token, False)]
    pieces += [piece.text for piece in detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
