"""From what a client asks to a running call: prompts, limits, requests of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from typing import Any

import torch

from forerun.core.request import Request, Stopping
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit
from forerun.models.text.chat_template import has_template
from forerun.models.text.grammar import SchemaError
from forerun.models.text.token_bytes import TokenBytes
from forerun.server.answers import StopWatch, Writer
from forerun.server.calls import Call, Row
from forerun.server.encoder import Encoder
from forerun.server.errors import ApiError
from forerun.server.keys import Namespaces
from forerun.server.limits import Limits
from forerun.server.metrics import Meter, Metrics
from forerun.server.post import Post
from forerun.server.scheduler import Scheduler
from forerun.server.schema import ChatRequest, CompletionRequest, Extension
from forerun.server.settings import ServerSettings
from forerun.server.token_logprobs import LogprobStreamer

log = logging.getLogger(__name__)

DEFAULT_TOKENS = 16
"""Tokens of a completion whose request names no number, as OpenAI has it. A chat's answer may be as long as may be."""

NO_DRAFTER = "none"
"""The drafter that a request names to get its text without drafts."""


class Service:
    """One engine for many clients.

    Args:
        engine: decodes; it has a tokenizer.
        settings: what is taken on.
        limits: of the scheduler.
        namespaces: of all tenants.
    """

    def __init__(self, engine: Engine, settings: ServerSettings, limits: Limits, namespaces: Namespaces) -> None:
        self.engine, self.settings = engine, settings
        self.scheduler = Scheduler(engine, limits)
        self.metrics = Metrics(engine, self.scheduler)
        self.created = int(time.time())
        self._namespaces = namespaces
        self._positions = position_limit(engine.target.model)
        self._encode = Encoder(engine.tokenizer, self._positions)
        self._bytes = TokenBytes(engine.tokenizer)
        self._to_loop: Post | None = None
        self._prepare_grammars()

    async def call(self, asked: CompletionRequest | ChatRequest, tenant: str) -> Call:
        """Start answering. Nothing of it holds up the event loop.

        Raises:
            ApiError: says what is refused, and why.
        """
        arrived = time.monotonic()
        if asked.model != self.settings.served_name:
            told = f"there is no model {asked.model!r} here; there is {self.settings.served_name!r}"
            raise ApiError(404, told, "model_not_found", "model")
        try:
            requests = await asyncio.to_thread(self._requests, asked, tenant)
        except SchemaError as error:
            raise ApiError(400, str(error), "invalid_value", "response_format") from error
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ApiError(400, str(error), "invalid_value") from error
        rows = [
            Row(
                request,
                Writer(self.engine.tokenizer, request, asked.stops),
                Meter(self.metrics, request, arrived),
                None if asked.likeliest is None else LogprobStreamer(self._bytes, request),
            )
            for request in requests
        ]
        return Call(self.scheduler, rows, uuid.uuid4().hex, self._post(), asked.forerun.trace)

    @property
    def offer(self) -> dict[str, Any]:
        """What a client may ask for beyond OpenAI's API: drafters, tokens of a draft and of an answer, chats; and
        whether texts are bit for bit those without drafts."""
        return {
            "drafters": list(dict.fromkeys((self.settings.drafter, NO_DRAFTER))),
            "budget": self.engine.budget,
            "max_tokens": self.settings.max_tokens,
            "chat": has_template(self.engine.tokenizer),
            "exactness": self.engine.exactness.level,
        }

    def _post(self) -> Post:
        """What brings news to the event loop that asks; one loop has one."""
        loop = asyncio.get_running_loop()
        if self._to_loop is None or self._to_loop.loop is not loop:
            self._to_loop = Post(loop)
        return self._to_loop

    def deadline(self) -> float | None:
        """When a call that starts now is over, by ``time.monotonic``."""
        return None if self.settings.timeout is None else time.monotonic() + self.settings.timeout

    def _requests(self, asked: CompletionRequest | ChatRequest, tenant: str) -> list[Request]:
        """``n`` requests for each prompt, one prompt after the other."""
        most = self.scheduler.limits.rows + self.scheduler.limits.waiting
        texts = (len(asked.prompts) if isinstance(asked, CompletionRequest) else 1) * (asked.n or 1)
        if texts > most:
            told = f"the prompts and n ask for {texts} texts; this server has places for {most}"
            raise ApiError(400, told, "too_many_texts", "n")
        budget = self._budget(asked.forerun)
        prompts = self._encode(asked)
        namespace = self._namespaces.inside(tenant, asked.forerun.namespace)
        default = DEFAULT_TOKENS if isinstance(asked, CompletionRequest) else self.settings.max_tokens
        built = []
        for ids in prompts:
            tokens = self._tokens(len(ids), asked.limit, default)
            for choice in range(asked.n or 1):
                options = {
                    "namespace": namespace,
                    "drafts_from": self._namespaces.learning(tenant, asked.forerun.namespace),
                    "budget": budget,
                    "logprobs": asked.likeliest,
                    "response_format": asked.format,
                    **_sampling(asked, choice),
                }
                (request,) = self.engine.requests([ids], max_new_tokens=tokens, **options)
                built.append(self._stopping(request, asked.stops))
        self._namespaces.take(tenant, asked.forerun.namespace)  # last: what is refused takes no name
        return built

    def _budget(self, wanted: Extension) -> int | None:
        """Tokens of a draft, at most; None for as many as the server's."""
        offer = self.offer
        if wanted.drafter not in (None, *offer["drafters"]):
            told = f"forerun.drafter is {wanted.drafter!r}; here there are {', '.join(offer['drafters'])}"
            raise ApiError(400, told, "invalid_value", "forerun.drafter")
        if wanted.budget is not None and wanted.budget > offer["budget"]:
            told = f"forerun.budget is {wanted.budget}; this server drafts {offer['budget']} tokens at most"
            raise ApiError(400, told, "invalid_value", "forerun.budget")
        return 0 if wanted.drafter == NO_DRAFTER else wanted.budget

    def _prepare_grammars(self) -> None:
        """Now, because no other thread would run meanwhile. Who asks for a grammar that cannot be had is told why."""
        try:
            self.engine.grammars.prepare()
        except (ValueError, ModuleNotFoundError) as error:
            log.warning("no answer can be made to follow a schema: %s", error)

    def _tokens(self, prompt: int, asked: int | None, default: int) -> int:
        """Tokens that an answer to a prompt of so many may have.

        Raises:
            ApiError: for more than the server allows or the model can take.
        """
        if asked is not None and asked > self.settings.max_tokens:
            told = f"max_tokens is {asked}; this server allows {self.settings.max_tokens}"
            raise ApiError(400, told, "max_tokens_exceeded", "max_tokens")
        if self._positions is None:
            return asked or default
        room = self._positions - prompt
        if room < (asked or 1):
            told = f"the prompt has {prompt} tokens, the answer up to {asked or 1}; the model takes {self._positions}"
            raise ApiError(400, told, "context_length_exceeded")
        return asked or min(default, room)

    def _stopping(self, request: Request, stops: list[str]) -> Request:
        if stops:
            request.stopping = _both(request.stopping, StopWatch(Writer(self.engine.tokenizer, request, stops)))
        return request


def _sampling(asked: CompletionRequest | ChatRequest, choice: int) -> dict[str, Any]:
    """Options for the engine. Choices of one prompt have consecutive seeds, as with ``num_return_sequences``."""
    temperature = 1.0 if asked.temperature is None else asked.temperature
    if temperature == 0:
        return {"do_sample": False}
    seed = None if asked.seed is None else asked.seed + choice
    top_p = 1.0 if asked.top_p is None else asked.top_p
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0, "seed": seed}


def _both(first: Stopping | None, second: Stopping) -> Stopping:
    """Stop when either says so; both hear every token."""

    def stopping(ids: torch.Tensor) -> bool:
        stopped = second(ids)
        return stopped if first is None else first(ids) or stopped

    return stopping
