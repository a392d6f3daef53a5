"""Keep text of users and tools from being read as a chat template's marks.

Text may contain ``<|im_end|>``, which a tokenizer turns into the token that ends a turn, so a tool's result could start
a user's turn. To encode such places as plain characters, an unused noncharacter is inserted after the first character
of each before the template writes the conversation; the result is cut there and encoded piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from forerun.models.text.call_formats import Json
from forerun.models.text.message_formats import MessageFormat
from forerun.models.text.prompts import text_ids

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode reserves them for internal use."""
WRITTEN_BY_MODELS = ("content", "reasoning_content")
"""Fields of an assistant's turn, where templates look for marks of reasoning and calls."""


class GuardedChat(NamedTuple):
    """A conversation and its tools; ``cut`` is the noncharacter inside of broken marks, or None."""

    messages: list[Json]
    tools: list[Json] | None
    cut: str | None


class ControlTokens:
    """The tokens that steer a model: special ones, and those of its chat template or calls."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, form: MessageFormat) -> None:
        self._tokenizer = tokenizer
        template = f"{tokenizer.chat_template} {form.calls} {form.thinking}"
        added = {
            each.content: each for each in tokenizer.added_tokens_decoder.values() if len(each.content.strip()) > 1
        }
        self._everywhere = [text for text, each in added.items() if each.special or text in template]
        marks = f"{form.calls} {form.thinking}"
        self._special = [text for text, each in added.items() if each.special and text not in marks]
        self._anchor = next((text for text, each in added.items() if not (each.rstrip or each.normalized)), None)

    def guard(self, messages: Sequence[Json], tools: Sequence[Json] | None) -> GuardedChat:
        """Break the marks in a conversation's contents."""
        texts = list(_texts([*messages, *(tools or ())]))
        found = [mark for mark in self._everywhere if any(mark in text for text in texts)]
        if not found:
            return GuardedChat(list(messages), None if tools is None else list(tools), None)
        cut = next(each for each in NONCHARACTERS if not any(each in text for text in texts))
        everywhere = _cutter(found, cut)
        special = _cutter([mark for mark in found if mark in self._special], cut)

        def turn(message: Json) -> Json:
            own = WRITTEN_BY_MODELS if message["role"] == "assistant" else ()
            return {name: _changed(value, special if name in own else everywhere) for name, value in message.items()}

        return GuardedChat(
            list(map(turn, messages)), None if tools is None else [_changed(each, everywhere) for each in tools], cut
        )

    def encode(self, text: str, cut: str | None) -> list[int]:
        """Encode a conversation that the template has written."""
        first, *rest = text.split(cut) if cut else [text]
        return [*self._ids(first), *(token for piece in rest for token in self._after_mark(piece))]

    def _after_mark(self, piece: str) -> list[int]:
        """Encode a piece that does not start the text, where some tokenizers would insert a space."""
        if self._anchor is None:
            return self._ids(piece)
        return self._ids(self._anchor + piece)[len(self._ids(self._anchor)) :]

    def _ids(self, text: str) -> list[int]:
        return text_ids(self._tokenizer, text)


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
        yield from value if isinstance(value, Mapping) else ()


def _cutter(marks: Sequence[str], cut: str) -> Callable[[str], str]:
    """Return a function that inserts ``cut`` after the first character of each mark, even of overlapping ones. (One
    regular expression for all marks would hold the GIL for a whole text: 0.08 seconds for 8 MiB.)"""

    def change(text: str) -> str:
        places = sorted({place + 1 for mark in marks for place in _places(mark, text)})
        return cut.join(text[begin:end] for begin, end in pairwise([0, *places, len(text)]))

    return change


def _places(mark: str, text: str) -> Iterator[int]:
    place = text.find(mark)
    while place >= 0:
        yield place
        place = text.find(mark, place + 1)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(name)): _changed(each, change) for name, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list) else value
