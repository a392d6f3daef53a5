"""Keeps what users and tools write from being read as a chat template's own marks.

A text may spell ``<|im_end|>``. A tokenizer makes of it the token that ends a turn, so a tool's result could begin a
turn of the user. Here such a place in a content is encoded as the characters that it is. The text stays the same: its
tokens are other ones.

A noncharacter that the conversation does not have is put behind the first character of each such place, before the
template writes the conversation. The template's own marks are whole. Where the noncharacter comes, the text is cut, and
its pieces are encoded one by one; none of them has a whole mark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from forerun.models.text.message_formats import Json, MessageFormat

NONCHARACTERS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode keeps them for the inside of programs."""
WRITTEN_BY_MODELS = ("content", "reasoning_content")
"""Fields of an assistant's turn, where templates look for marks of reasoning and calls."""


class GuardedChat(NamedTuple):
    """A conversation and its tools; ``cut`` stands inside of what only looks like a mark. None if nothing does."""

    messages: list[Json]
    tools: list[Json] | None
    cut: str | None


class ControlTokens:
    """The tokens that steer a model: special ones, and those that its chat template or its calls are made of.

    Args:
        tokenizer: of the model.
        form: how its messages are written.
    """

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
        """A conversation whose contents have no marks."""
        given = [*messages, *(tools or ())]
        found = [mark for mark in self._everywhere if any(mark in text for each in given for text in _texts(each))]
        if not found:
            return GuardedChat(list(messages), None if tools is None else list(tools), None)
        cut = next(each for each in NONCHARACTERS if not any(each in text for one in given for text in _texts(one)))
        everywhere = _cutter(found, cut)
        special = _cutter([mark for mark in found if mark in self._special], cut)

        def turn(message: Json) -> Json:
            own = WRITTEN_BY_MODELS if message["role"] == "assistant" else ()
            return {name: _changed(value, special if name in own else everywhere) for name, value in message.items()}

        return GuardedChat(
            list(map(turn, messages)), None if tools is None else [_changed(each, everywhere) for each in tools], cut
        )

    def encode(self, text: str, cut: str | None) -> list[int]:
        """Token ids of a conversation as the template has written it."""
        first, *rest = text.split(cut) if cut else [text]
        return [*self._ids(first), *(token for piece in rest for token in self._after_mark(piece))]

    def _after_mark(self, piece: str) -> list[int]:
        """Token ids of a piece that does not begin the text, where some tokenizers would put a space."""
        if self._anchor is None:
            return self._ids(piece)
        return self._ids(self._anchor + piece)[len(self._ids(self._anchor)) :]

    def _ids(self, text: str) -> list[int]:
        return [int(token) for token in self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]


def _texts(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
        yield from value if isinstance(value, Mapping) else ()


def _cutter(marks: Sequence[str], cut: str) -> Callable[[str], str]:
    """Puts ``cut`` behind the first character of each mark, also of one that begins inside of another."""
    if not marks:
        return lambda text: text
    place = re.compile(f"(?s)(?=({'|'.join(map(re.escape, marks))}))(.)")
    return lambda text: place.sub(lambda found: found[2] + cut, text)


def _changed(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value whose texts are changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(name)): _changed(each, change) for name, each in value.items()}
    return [_changed(each, change) for each in value] if isinstance(value, list) else value
