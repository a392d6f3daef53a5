"""Encode a request's prompts as token ids."""

from __future__ import annotations

from typing import Any, NamedTuple

from forerun.core.fairness import FairLock, background
from forerun.models.text.call_formats import Json
from forerun.models.text.control_tokens import ControlTokens
from forerun.models.text.conversations import arrangements, knows_tools, with_known_roles, with_tools_as_text
from forerun.models.text.message_formats import message_format
from forerun.models.text.prompts import (
    TemplateError,
    apply_template,
    compiled_tokenizer,
    encode,
    encodes_messages,
    has_template,
    rendered,
    text_ids,
)
from forerun.server.api_errors import ApiError
from forerun.server.chat_schema import ChatRequest, GenerationBody, TokenizeRequest

UNCOUNTED_CHARACTERS = 2
"""Characters per position of the model up to which a prompt is encoded at once; a longer one is counted first."""
PIECE_CHARACTERS = 1 << 15
"""Characters counted at a time, in some hundredths of a second."""
EXCESS_TOKENS = 1.5
"""Tokens per position of the model in a prefix that prove a prompt too long, wherever it was cut."""
MIDDLE_TOKENS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens before prefix, suffix and the middle to generate: of Qwen, StarCoder, SantaCoder, DeepSeek and Code Llama."""


class EncodedPrompt(NamedTuple):
    """A prompt's token ids, and its characters, if known."""

    ids: list[int]
    text: str | None = None


class PromptEncoder:
    """An encoder of prompts for several threads, which use the tokenizer in turn: encoding may change its settings."""

    def __init__(self, tokenizer: Any, positions: int | None) -> None:
        self._tokenizer, self._positions = tokenizer, positions
        self._lock, self._background = FairLock(), background("forerun-tokens")
        self._counter = compiled_tokenizer(tokenizer)
        self._controls = ControlTokens(tokenizer, message_format(tokenizer)) if has_template(tokenizer) else None

    def __call__(self, body: GenerationBody) -> list[EncodedPrompt]:
        """Encode all prompts; raise ApiError if one is far too long, and as ``encode`` and ``apply_template`` do."""
        if isinstance(body, ChatRequest):
            return [self._cut(self.chat(body), body)]
        if body.suffix is not None:
            return [self._around(prompt, body.suffix) for prompt in body.prompts]
        return [self._cut(self.text(prompt, body.add_special_tokens), body) for prompt in body.prompts]

    def text(self, prompt: str | list[int], special: bool = True, what: str = "prompt") -> EncodedPrompt:
        """Encode one prompt, with the tokenizer's special tokens if ``special``; name it ``what`` in errors."""
        if not isinstance(prompt, str):
            return EncodedPrompt(encode(prompt, self._tokenizer)[0])
        self._check(prompt, what)
        with self._lock:
            return EncodedPrompt(
                encode(prompt, self._tokenizer)[0] if special else text_ids(self._tokenizer, prompt), prompt
            )

    def chat(self, body: ChatRequest | TokenizeRequest) -> EncodedPrompt:
        messages = with_known_roles([message.for_template() for message in body.messages or ()], self._tokenizer)
        tools, controls = body.template_tools, self._controls
        if controls is not None and encodes_messages(self._tokenizer):
            controls = None
        cut = None
        if controls is not None:
            messages, tools, cut = controls.guard(messages, tools)
        if not knows_tools(self._tokenizer):
            messages, tools = with_tools_as_text(messages, tools or ()), None
        turns, text = self._written(messages, tools, body)
        self._check(text, field="messages")
        with self._lock:
            if controls is not None:
                return EncodedPrompt(controls.encode(text, cut), text.replace(cut, "") if cut else text)
            ids = apply_template(turns, self._tokenizer, tools, body.template_options, body.continued)
            return EncodedPrompt(ids, text)

    def _written(
        self, messages: list[Json], tools: list[Json] | None, body: ChatRequest | TokenizeRequest
    ) -> tuple[list[Json], str]:
        """Render the first arrangement of a conversation that the template accepts and keeps whole."""
        written: list[tuple[list[Json], str]] = []
        refusal: TemplateError | None = None
        for turns in arrangements(messages):
            try:
                with self._lock:
                    text = rendered(turns, self._tokenizer, tools, body.template_options, body.continued)
            except TemplateError as error:
                refusal = refusal or error
                continue
            written.append((turns, text))
            if all(turn["content"].strip() in text for turn in turns if turn["role"] == "system"):
                return turns, text
        if refusal is not None and not written:
            raise refusal
        return written[0]

    def decode(self, tokens: list[int]) -> str:
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        with self._lock:
            if backend is None:
                return str(self._tokenizer.decode(tokens, clean_up_tokenization_spaces=False))
            # unlike ``decode``, it releases Python's lock: 0.06 seconds for 262,144 tokens
            return str(backend.decode_batch([tokens], skip_special_tokens=False)[0])

    def _around(self, prefix: str | list[int], suffix: str) -> EncodedPrompt:
        """Make a prompt for the text between ``prefix`` and ``suffix``."""
        known = self._tokenizer.get_vocab()
        marks = next((each for each in MIDDLE_TOKENS if all(mark in known for mark in each)), None)
        if marks is None:
            message = "suffix is for models with tokens for it, such as <|fim_middle|>; this model has none"
            raise ApiError(400, message, "unsupported", "suffix")
        if isinstance(prefix, str):
            self._check(prefix)
        self._check(suffix, "suffix")
        before, between, end = (known[mark] for mark in marks)
        with self._lock:
            first = [token for token in self._tokenizer("")["input_ids"] if token == self._tokenizer.bos_token_id]
            texts = [text_ids(self._tokenizer, each) if isinstance(each, str) else each for each in (prefix, suffix)]
        return EncodedPrompt([*first, before, *texts[0], between, *texts[1], end])

    def _count(self, text: str) -> int:
        if self._counter is None:
            with self._lock:
                return len(text_ids(self._tokenizer, text))
        return len(self._counter.encode_batch_fast([text], add_special_tokens=False)[0])

    def _cut(self, prompt: EncodedPrompt, body: GenerationBody) -> EncodedPrompt:
        """Keep the end of a prompt that is longer than requested; -1 is the model's limit."""
        most = self._positions if body.truncate_prompt_tokens == -1 else body.truncate_prompt_tokens
        if most is None or len(prompt.ids) <= most:
            return prompt
        return EncodedPrompt(prompt.ids[-most or len(prompt.ids) :])

    def _check(self, text: str, what: str = "prompt", field: str | None = None) -> None:
        """Refuse a prompt whose prefix has too many tokens, counted in pieces by a copy of the tokenizer, so that
        others do not wait; encoding all of 8 MiB cost 24 seconds and 2 GiB."""
        if self._positions is None or len(text) <= (uncounted := UNCOUNTED_CHARACTERS * self._positions):
            return
        tokens, size = 0, min(uncounted, PIECE_CHARACTERS)
        for first in range(0, len(text), size):
            tokens += self._background.submit(self._count, text[first : first + size]).result()
            if tokens > EXCESS_TOKENS * self._positions:
                message = f"the {what} has more than {tokens:,} tokens; the model takes {self._positions}"
                raise ApiError(400, message, "context_length_exceeded", field or what)
