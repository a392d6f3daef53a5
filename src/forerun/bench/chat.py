"""Prompts as a model was trained to read them: through its chat template where it has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = Mapping[str, str]
Prompt = str | Sequence[Message]
"""A text, or the messages of a chat, each with ``role`` and ``content``."""


class Encoder:
    """From prompts to token ids.

    A text becomes one user message where the tokenizer has a chat template. The template writes all special tokens
    itself; elsewhere the tokenizer adds its own, unless the text begins with them already.

    Args:
        tokenizer: of the model.
        raw: leave the template out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False) -> None:
        self.tokenizer = tokenizer
        self.raw = raw
        self.chats = bool(tokenizer.chat_template) and not raw

    def __call__(self, prompt: Prompt) -> list[int]:
        """The token ids.

        Raises:
            ValueError: for messages where no template is used or that it refuses, and for a prompt of no tokens.
        """
        text = self._render(prompt)
        begins = self.tokenizer.bos_token
        special = not self.chats and not (begins and text.startswith(begins))
        ids = self._ids(text, special)
        if not ids:
            raise ValueError("the prompt has no tokens")
        return ids

    def count(self, text: str) -> int:
        """Tokens of a text alone."""
        return len(self._ids(text, False))

    def _ids(self, text: str, special: bool) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=special)["input_ids"]]

    def _render(self, prompt: Prompt) -> str:
        if not self.chats and isinstance(prompt, str):
            return prompt
        if not self.chats:
            reason = "--raw turns it off" if self.raw else "this model's tokenizer has none"
            raise ValueError(f"messages need a chat template, and {reason}; give a prompt instead")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt]
        try:
            return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses the messages: {error}") from None
