"""Prompts in the form that a model was trained on: through its chat template, if it has one."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from forerun.models.text.chat_template import Messages, apply_template, has_template

Prompt = str | Messages
"""A text, or the messages of a chat, each with ``role`` and ``content``."""


class Encoder:
    """From prompts to token ids.

    If the tokenizer has a chat template, a text becomes one user message, and the template writes all special tokens.
    Otherwise the tokenizer adds its own, unless the text already begins with them.

    Args:
        tokenizer: of the model.
        raw: leave the template out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, raw: bool = False) -> None:
        self.tokenizer = tokenizer
        self.raw = raw
        self.chats = has_template(tokenizer) and not raw

    def __call__(self, prompt: Prompt) -> list[int]:
        """The token ids.

        Raises:
            ValueError: for messages without a template or refused by it, and for a prompt of no tokens.
        """
        if self.chats:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            return apply_template(messages, self.tokenizer)
        if not isinstance(prompt, str):
            reason = "--raw turns it off" if self.raw else "this model's tokenizer has none"
            raise ValueError(f"messages need a chat template, and {reason}; give a prompt instead")
        begins = self.tokenizer.bos_token
        ids = self._ids(prompt, special=not (begins and prompt.startswith(begins)))
        if not ids:
            raise ValueError("the prompt has no tokens")
        return ids

    def count(self, text: str) -> int:
        """Number of tokens of a text, without template and special tokens."""
        return len(self._ids(text, special=False))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=special)["input_ids"]]
