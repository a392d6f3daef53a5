"""A conversation with a chat model, in which each turn prefills only what is new."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Unpack

import numpy as np

from forerun.core.request import Request
from forerun.core.tree import IntArray
from forerun.engine.engine import Engine
from forerun.engine.result import Commit
from forerun.kv.full_cache import FullCache
from forerun.models.forward.prefill import Progress
from forerun.models.text.prompts import apply_template, has_template
from forerun.models.text.requests import GenerationOptions


class Conversation:
    """The turns of a user and a model, with a cache that continues from one to the next.

    Every turn applies the chat template to all turns. The cache is kept as far as it agrees, token for token, and only
    the rest is prefilled. Answers equal those after a new prefill of the conversation.

    Args:
        engine: with a tokenizer that has a chat template; else ValueError.
        options: for every answer, as for ``Engine.generate``: ``max_new_tokens``, ``temperature``, ``seed``, ...
    """

    def __init__(self, engine: Engine, system: str | None = None, **options: Unpack[GenerationOptions]) -> None:
        if engine.tokenizer is None:
            raise ValueError("the engine has no tokenizer; a conversation needs one with a chat template")
        if not has_template(engine.tokenizer):
            raise ValueError("the tokenizer has no chat template; it is not a chat model")
        if engine.tiers is not None:
            raise ValueError(
                "a conversation's cache grows, but with kv_memory its size is fixed; leave kv_memory unset"
            )
        self.engine = engine
        self.system = system
        self.options = options
        self._turn: ConversationTurn | None = None
        self.reset()

    def reset(self) -> None:
        """Drop all turns; the engine's drafter keeps what it indexed."""
        self._end_turn()
        self.messages = [] if self.system is None else [_message("system", self.system)]
        self._forget()

    def _forget(self) -> None:
        self._cache, self._version = FullCache(), self.engine.model_version()
        self._cached: IntArray = np.empty(0, np.int64)

    def send(self, text: str, on_prefill: Progress | None = None) -> ConversationTurn:
        """Send a message, ending an unfinished answer; iterate over the returned turn to generate the answer.

        During the prefill, ``on_prefill`` is called with tokens done and to do. ValueError for an empty message, an
        invalid option, a template error, or a conversation that is too long leaves the conversation unchanged.
        """
        self._end_turn()
        if not text:
            raise ValueError("the message is empty")
        messages = [*self.messages, _message("user", text)]
        requests = self.engine.requests(apply_template(messages, self.engine.tokenizer), **self.options)
        if len(requests) != 1:
            raise ValueError(f"num_return_sequences is {len(requests)}; a conversation continues with one answer")
        self._turn = ConversationTurn(self, text, requests[0], on_prefill)
        return self._turn

    def ask(self, text: str) -> str:
        """Send a message and return the complete answer; raise ValueError like ``send``."""
        turn = self.send(text)
        for _ in turn:
            pass
        return turn.text

    def _end_turn(self) -> None:
        if self._turn is not None:
            self._turn.close()
            self._turn = None

    def _keep(self, prompt: IntArray) -> int:
        """Cut the cache to the prefix shared with a prompt, less its last token, and drop another model's; return its
        length."""
        if self._version != self.engine.model_version():
            self._forget()
        most = min(len(prompt) - 1, len(self._cached))
        different = np.flatnonzero(prompt[:most] != self._cached[:most])
        length = int(different[0]) if len(different) else most
        self._cache.truncate(length)
        self._cached = self._cached[: self._cache.length]
        return self._cache.length

    def _answer(self, turn: ConversationTurn, on_prefill: Progress | None) -> Generator[Commit, None, None]:
        request = turn.request
        turn.cached = self._keep(request.prompt)
        try:
            with closing(self.engine.run([request], on_prefill, [self._cache])) as commits:
                yield from commits
        finally:
            self._cached = request.tokens[: self._cache.length].copy()
            if len(request.generated):  # an answer that ended before its first token does not count
                self.messages += [_message("user", turn.message), _message("assistant", turn.text)]


class ConversationTurn:
    """A message and its answer: an iterator over each step's commits; closing it ends the answer. From the first commit
    on, ``cached`` is the number of tokens that needed no prefill."""

    def __init__(self, conversation: Conversation, message: str, request: Request, on_prefill: Progress | None) -> None:
        self.message = message
        self.request = request
        self.cached = 0
        self._tokenizer = conversation.engine.tokenizer
        self._commits = conversation._answer(self, on_prefill)

    def __iter__(self) -> Iterator[Commit]:
        return self

    def __next__(self) -> Commit:
        return next(self._commits)

    def close(self) -> None:
        self._commits.close()

    @property
    def text(self) -> str:
        """The answer so far, without special tokens."""
        assert self._tokenizer is not None
        return str(self._tokenizer.decode(self.request.generated.tolist(), skip_special_tokens=True))

    @property
    def read(self) -> int:
        return self.request.prompt_length - self.cached


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
