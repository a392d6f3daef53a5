"""From what a request says to token ids: one text at a time, and no more of a text than it takes to refuse it."""

from __future__ import annotations

from typing import Any

from forerun.core.turns import Turns
from forerun.models.text.chat_template import apply_template, rendered
from forerun.models.text.prompts import encode
from forerun.server.errors import ApiError
from forerun.server.schema import ChatRequest, CompletionRequest

FIRST_LOOK = 2
"""Characters for each of the model's positions; a longer text is looked at in pieces first, each twice the last."""
TOO_MANY = 1.5
"""Times as many tokens as positions in a beginning of a text: then the whole has too many, too, wherever it was cut."""


class Encoder:
    """Encodes for many threads; each text is one turn.

    Args:
        tokenizer: may change its own settings while it encodes, so one thread at a time uses it.
        positions: of the model; None for no limit.
    """

    def __init__(self, tokenizer: Any, positions: int | None) -> None:
        self._tokenizer, self._positions = tokenizer, positions
        self._turn = Turns()

    def __call__(self, asked: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ApiError: for a text that is far longer than the model can take.
            ValueError, TypeError: see ``encode`` and ``apply_template``.
        """
        if isinstance(asked, CompletionRequest):
            return [self._encode(prompt) for prompt in asked.prompts]
        messages = [message.told() for message in asked.messages]
        with self._turn:
            text = rendered(messages, self._tokenizer, asked.shown_tools)
        self._check(text)
        with self._turn:
            return [apply_template(messages, self._tokenizer, asked.shown_tools)]

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check(prompt)
        with self._turn:
            return encode(prompt, self._tokenizer)[0]

    def _check(self, text: str) -> None:
        """Refuse a text by its beginning: 8 MiB took 24 seconds, and 2 GiB."""
        if self._positions is None:
            return
        characters = FIRST_LOOK * self._positions
        while characters < len(text):
            with self._turn:
                tokens = len(encode(text[:characters], self._tokenizer)[0])
            if tokens > TOO_MANY * self._positions:
                told = f"the prompt has more than {tokens:,} tokens; the model takes {self._positions}"
                raise ApiError(400, told, "context_length_exceeded")
            characters *= 2
