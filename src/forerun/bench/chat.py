"""Prompts as a model was trained to read them: through its chat template where it has one."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from forerun.model.messages import Messages, apply_template, has_template

Prompt = str | Messages
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
        self.chats = has_template(tokenizer) and not raw

    def __call__(self, prompt: Prompt) -> list[int]:
        """The token ids.

        Raises:
            ValueError: for messages where no template is used or that it refuses, and for a prompt of no tokens.
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
        """Tokens of a text alone."""
        return len(self._ids(text, special=False))

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=special)["input_ids"]]
