"""Split a message into content, reasoning and tool calls while it is generated.

transformers' response parser finds the parts. JSON arguments are passed on as they arrive. An unreadable call stays
content, unless the answer ended inside it; if transformers' parser fails at one, all that follows is content.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from transformers import PreTrainedTokenizerBase

from forerun.models.text.call_formats import CallFormat
from forerun.models.text.call_readers import Calls, read_bare, read_braces, read_python, read_tags
from forerun.models.text.message_formats import MessageFormat, with_types

REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
ARGUMENT_KEYS = ("arguments", "parameters")
LONGEST_MARK = 64
"""Characters before new text in which a mark may begin."""
SEPARATORS = " \n\r\t[];,"
"""Between and around the objects of calls, where no mark ends them."""


@dataclass(frozen=True)
class CallDelta:
    """A new piece of a call; its first one has an id and a name."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass
class MessageDelta:
    """A new piece of a message."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)


class ObjectScanner:
    """A scanner for name and arguments in incomplete objects like ``{"name": "f", "arguments": {...}}``. It calls
    ``begin`` with a name when its arguments start, and ``add`` with their pieces. ``names``: allowed ones."""

    def __init__(
        self, begin: Callable[[str], None], add: Callable[[str], None], names: Collection[str] | None = None
    ) -> None:
        self._begin, self._add, self._names = begin, add, names
        self._depth, self._inside, self._begun, self._escaped = 0, False, False, False
        self._string: str | None = None
        self._word = self._key = self._object = self._early = ""
        self._name: str | None = None
        self.outside = ""
        """Text between and after the objects."""

    def feed(self, text: str) -> None:
        """Read more text; raise ValueError if an object ends that is not a call."""
        arguments = ""
        for character in text:
            if self._depth or character == "{":
                self._object += character
            else:
                self.outside += character
            was_inside = self._inside
            self._read(character)
            if was_inside or self._inside:
                arguments += character
            if self._object and not self._depth:
                self._pass_on(arguments)
                arguments = ""
                self._end()
        self._pass_on(arguments)

    def _read(self, character: str) -> None:
        if self._string is not None:
            self._read_string(character)
        elif character == '"':
            self._string = ""
        elif character == "{" or (character == "[" and self._depth):
            self._depth += 1
            self._inside |= self._depth == 2 and self._key in ARGUMENT_KEYS and character == "{"
        elif character in "}]" and self._depth:
            self._depth -= 1
            self._inside &= self._depth > 1
        elif character == ":" and self._depth == 1:
            self._key = self._word
        elif character == "," and self._depth == 1:
            self._key = ""

    def _read_string(self, character: str) -> None:
        assert self._string is not None
        if character != '"' or self._escaped:
            self._escaped = character == "\\" and not self._escaped
            self._string += character
            return
        self._word, self._string = self._string, None
        if self._depth == 1 and self._key == "name" and self._name is None:
            self._name = str(json.loads(f'"{self._word}"'))
            if self._names is not None and self._name not in self._names:
                raise ValueError("an object that names no tool")

    def _pass_on(self, arguments: str) -> None:
        self._early += arguments
        if self._early and self._name is not None:
            if not self._begun:
                self._begin(self._name)
                self._begun = True
            self._add(self._early)
            self._early = ""

    def _end(self) -> None:
        """Finish an object, whose arguments may have been a string, or missing."""
        whole, begun = self._object, self._begun
        self._object, self._key, self._begun, self._name = "", "", False, None
        if begun:
            return
        value = json.loads(whole)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise ValueError("an object that is no call")
        arguments: Any = next((value[key] for key in ARGUMENT_KEYS if key in value), {})
        self._begin(value["name"])
        self._add(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


class ValueScanner:
    """A scanner for the end of a JSON value that arrives in pieces; a string is replaced by the JSON that it spells."""

    def __init__(self) -> None:
        self._depth, self._inside, self._escaped, self._ended = 0, False, False, False
        self._text: str | None = None

    def feed(self, text: str) -> tuple[str, str]:
        """Split text into the part that belongs to the value, and what follows."""
        inside = ""
        for place, character in enumerate(text):
            if self._ended:
                return inside, text[place:]
            if not self._depth and not self._inside and character == '"' and not inside.strip():
                self._text = ""
            self._step(character)
            if self._text is None:
                inside += character
            else:
                self._text += character
                inside = self._spelled() if self._ended else ""
        return inside, ""

    def _step(self, character: str) -> None:
        if self._inside:
            self._inside = character != '"' or self._escaped
            self._escaped = character == "\\" and not self._escaped
        elif character == '"':
            self._inside = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
        else:
            return
        self._ended = self._depth <= 0 and not self._inside and character in '"}]'

    def _spelled(self) -> str:
        try:
            return str(json.loads(self._text or ""))
        except ValueError:
            return self._text or ""


class MessageParser:
    """A parser of one message in ``form``, by its ``template``; ``parallel``: pass on calls after the first."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        form: MessageFormat,
        template: dict[str, Any],
        prompt: str,
        tools: Sequence[dict[str, Any]] = (),
        parallel: bool = True,
    ) -> None:
        self._parallel, self._tools = parallel, bool(tools)
        self._names = {tool["function"]["name"] for tool in tools}
        begins_thinking = form.own is None and form.thinking is not None and form.thinking_after(prompt) == "open"
        prefix = prompt if form.own is not None else form.thinking.begin if begins_thinking and form.thinking else ""
        self._parser = tokenizer.get_response_parser(template, prefix=prefix, tools=with_types(tools) or None)
        self._format = None if form.own is not None else form.calls
        self._schemas = {
            tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in with_types(tools)
        }
        self.calls = 0
        self._fields: dict[str, Any] = template["fields"]
        marks = [
            pattern for each in self._fields.values() for side in ("open", "close") if (pattern := _mark(each, side))
        ]
        self._marks = re.compile("|".join(f"(?:{mark})" for mark in marks)) if marks else None
        self._delta, self._cut = MessageDelta(), False
        self._text, self._end, self._body_end = "", 0, 0  # end of what was passed on, and of a call's body
        self._readable = True
        self._space, self._has_content = "", False
        self._at_start = begins_thinking
        self._scanner: ObjectScanner | None = None
        self._value: ValueScanner | None = None
        self._inside = self._bare = self._after_arguments = False  # a call, one without marks, and after its arguments
        self._head = ""
        self._calls_before = self._region = 0

    def feed(self, text: str, last: bool = False, cut: bool = False) -> MessageDelta:
        """Return the parts of new text; ``last`` when the message has ended, ``cut`` if at the length limit."""
        self._delta, self._cut = MessageDelta(), False
        for piece in self._pieces(text):
            self._text += piece
            for event in self._events(lambda piece=piece: self._parser.feed(piece)):  # type: ignore[misc]
                self._take(event)
        if last:
            self._cut = cut  # applies to what has not ended yet
            for event in self._events(lambda: self._parser.finalize()[1]):
                self._take(event)
        if not self._readable:
            if cut and self._inside:
                self._space = ""
            else:
                self._add_content(self._text[self._end :])
            self._end = len(self._text)
        if last and not self.calls:
            self._delta.content += self._space
        return self._delta

    def _pieces(self, text: str) -> list[str]:
        """Split new text after each mark: where transformers' parser fails, it keeps the events of the piece before."""
        if self._format is not None or self._marks is None:
            return [text]
        tail = self._text[-LONGEST_MARK:]
        ends = [mark.end() - len(tail) for mark in self._marks.finditer(tail + text)]
        return [text[begin:end] for begin, end in pairwise(sorted({0, len(text), *(end for end in ends if end > 0)}))]

    def _events(self, parse: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
        if not self._readable:
            return []
        try:
            return parse()
        except (ValueError, KeyError, TypeError):  # a region that the tokenizer's own template cannot read
            self._readable = False
            return []

    def _take(self, event: dict[str, Any]) -> None:
        name, kind = event["field"], event["type"]
        self._move_end(name, kind, event.get("text", ""))
        if name == "tool_calls":
            if self._tools:
                self._take_call(event)
        elif kind == "region_chunk" and name in REASONING_FIELDS:
            self._delta.reasoning += event["text"].lstrip("\n") if self._at_start else event["text"]
            self._at_start = False
        elif kind != "region_chunk" and name in REASONING_FIELDS:
            self._at_start = True
        elif kind == "region_chunk" and name == "content":
            self._add_content(event["text"])

    def _move_end(self, name: str, kind: str, text: str) -> None:
        """Track what is passed on: text as it arrives, calls when they have ended."""
        if kind == "region_chunk":
            at = self._text.find(text, max(self._end, self._body_end))
            self._body_end = self._body_end if at < 0 else at + len(text)
            if name != "tool_calls":
                self._end = self._body_end
        elif kind == "region_close":
            self._end = max(self._end, self._body_end)
            pattern = _mark(self._fields.get(name, {}), "close")
            mark = re.compile(rf"\s*(?:{pattern})").match(self._text, self._end) if pattern else None
            self._end = mark.end() if mark else self._end

    def _add_content(self, text: str) -> None:
        """Add content, but hold back trailing space, which is dropped before a call and after reasoning."""
        text = self._space + text
        if self._at_start:
            text = text.lstrip()
        if not text:
            self._space = ""
            return
        if self._at_start and self.calls and self._has_content:
            self._delta.content += "\n"
        self._at_start, self._has_content = False, True
        kept = text.rstrip() if self._tools else text
        self._space = text[len(kept) :]
        self._delta.content += kept

    def _take_call(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind == "region_open":
            self._calls_before, self._head, self._region, self._inside = self.calls, "", self._end, True
            any_name = self._format is None or self._format.marked
            self._scanner = ObjectScanner(self._begin, self._add, None if any_name else self._names)
            self._value, self._bare, self._after_arguments = None, False, False
        elif kind == "region_chunk" and self._format is not None:
            first = not self._head
            self._head += event["text"]
            if first and self._format.bare:
                self._bare = not self._text[self._region :].lstrip().startswith(self._format.marks[0])
            if not self._bare:
                self._read_call(event["text"], self._format)
        elif kind == "region_close":
            self._inside = False
            for name, arguments in self._whole_calls(event["value"]):
                self._take_whole({"name": name, "arguments": arguments})
            if self.calls == self._calls_before and self._is_cut_call():
                self._space = ""
            elif self.calls == self._calls_before:
                self._add_content(self._text[self._region : self._end])
            elif self._format is not None and self._scanner is not None and "close" not in self._format.field:
                self._at_start = True
                self._add_content(self._scanner.outside.strip(SEPARATORS))
            self._at_start |= self.calls > self._calls_before

    def _whole_calls(self, value: Any) -> Calls:
        """Read the calls of a region that has ended; empty if it is unreadable."""
        if self._format is None:
            calls = [_function(call) for call in _listed(value)]
            return [] if None in calls else [(call["name"], call.get("arguments", {})) for call in calls]
        try:
            if self._bare:
                return read_bare(self._head, [*self._names])
            if self._cut:
                return []
            if self._format.body == "tags":
                name, _, rest = self._head.partition(">")
                schema = self._schemas.get(name.strip(), {})
                return [(name.strip(), read_tags(rest, schema.get("properties", {}), schema.get("required", ())))]
            if self._format.body == "python":
                return read_python(self._head)
            return read_braces(self._head) if self._format.body == "braces" else []
        except (ValueError, RecursionError):
            return []

    def _is_cut_call(self) -> bool:
        """Return whether the answer ended inside an unreadable call; without marks, it must name a tool."""
        if self._bare or (self._format is not None and not self._format.marked):
            begun = (rf'\s*\{{\s*"name"\s*:\s*{re.escape(json.dumps(name))}' for name in self._names)
            return self._cut and any(re.match(each, self._head) for each in begun)
        return self._cut

    def _read_call(self, text: str, form: CallFormat) -> None:
        if form.body == "named":
            if self.calls > self._calls_before:
                self._read_arguments(text, form)
                return
            name, separator, arguments = self._head.partition(form.separator)
            if separator:
                self._begin(re.split(r"[\s<\[]", name.strip(), maxsplit=1)[0])
                self._value = ValueScanner()
                self._read_arguments(arguments, form)
        elif form.body == "object" and self._scanner is not None:
            try:
                self._scanner.feed(text)
            except (ValueError, RecursionError):
                self._scanner = None

    def _read_arguments(self, text: str, form: CallFormat) -> None:
        """Add arguments, from a string when it is complete. If no mark ends the call, the rest is content."""
        assert self._value is not None
        inside, following = self._value.feed(text)
        self._add(inside)
        if "close" not in form.field and (self._after_arguments or following.strip()):
            self._at_start |= not self._after_arguments
            self._after_arguments = True
            self._add_content(following)

    def _take_whole(self, function: Any) -> None:
        arguments = function.get("arguments", {})
        self._begin(function["name"].strip())
        self._add(arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))

    def _begin(self, name: str) -> None:
        self.calls += 1
        self._space = ""
        if self._parallel or self.calls == 1:
            number = uuid.uuid4().hex
            length = self._format.id_length if self._format else None
            self._delta.calls.append(
                CallDelta(self.calls - 1, "", number[:length] if length else f"call_{number}", name)
            )

    def _add(self, arguments: str) -> None:
        if arguments and (self._parallel or self.calls == 1):
            self._delta.calls.append(CallDelta(self.calls - 1, arguments))


def _mark(field: dict[str, Any], side: str) -> str:
    """Return a pattern of a field's opening or closing mark, or an empty one."""
    marks = field.get(side, ())
    return str(field.get(f"{side}_pattern") or "|".join(map(re.escape, [marks] if isinstance(marks, str) else marks)))


def _listed(value: Any) -> list[Any]:
    """Return the calls of a region; a template may make one call of several."""
    inner = value.get("function") if isinstance(value, dict) else None
    return inner if isinstance(inner, list) else value if isinstance(value, list) else [value]


def _function(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None
