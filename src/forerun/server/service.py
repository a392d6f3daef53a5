"""From a client's request to a running call: prompts, limits, requests of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from forerun.core.fair_lock import FairLock
from forerun.core.request import Request, Stopping
from forerun.engine.engine import Engine
from forerun.models.forward.inputs import position_limit
from forerun.models.text.chat_template import apply_template, has_template, rendered
from forerun.models.text.grammar import SchemaError
from forerun.models.text.prompts import encode
from forerun.models.text.token_bytes import TokenBytes
from forerun.server.admission import SchedulerLimits
from forerun.server.answers import AnswerText, LogprobStreamer, StopStringCriterion
from forerun.server.api_errors import ApiError
from forerun.server.calls import AnswerRow, Call, LoopDispatcher
from forerun.server.grammar_pool import GrammarPool
from forerun.server.metrics import Metrics, RequestMeter
from forerun.server.scheduler import Scheduler
from forerun.server.schema import ChatRequest, CompletionRequest, Extension
from forerun.server.settings import ServerSettings
from forerun.server.tenants import TenantNamespaces

log = logging.getLogger(__name__)

DEFAULT_COMPLETION_TOKENS = 16
"""The longest completion if the request names no limit, as OpenAI has it. A chat's default is the server's limit."""
NO_DRAFTER = "none"
"""The drafter that a request names to get its text without drafts."""
FIRST_LOOK_CHARACTERS = 2
"""Characters for each of the model's positions. The beginning of a longer text is counted before the whole is encoded;
each further look takes twice as much."""
EXCESS_TOKENS = 1.5
"""Tokens of a beginning for each of the model's positions that make the whole too long, wherever it was cut."""


class RequestEncoder:
    """From a request to the token ids of its prompts. Threads may share it; each text is one turn.

    Args:
        tokenizer: one thread at a time uses it, as it may change its own settings while it encodes.
        positions: the model's limit; None for no limit.
    """

    def __init__(self, tokenizer: Any, positions: int | None) -> None:
        self._tokenizer, self._positions = tokenizer, positions
        self._lock = FairLock()

    def __call__(self, body: CompletionRequest | ChatRequest) -> list[list[int]]:
        """Token ids of each prompt.

        Raises:
            ApiError: for a text that is far longer than the model can take.
            ValueError, TypeError: see ``encode`` and ``apply_template``.
        """
        if isinstance(body, CompletionRequest):
            return [self._encode(prompt) for prompt in body.prompts]
        messages = [message.for_template() for message in body.messages]
        with self._lock:
            text = rendered(messages, self._tokenizer, body.template_tools)
        self._check(text)
        with self._lock:
            return [apply_template(messages, self._tokenizer, body.template_tools, text)]

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check(prompt)
        with self._lock:
            return encode(prompt, self._tokenizer)[0]

    def _check(self, text: str) -> None:
        """Refuse a text by its beginning: to encode 8 MiB took 24 seconds and 2 GiB."""
        if self._positions is None:
            return
        characters = FIRST_LOOK_CHARACTERS * self._positions
        while characters < len(text):
            with self._lock:
                tokens = len(encode(text[:characters], self._tokenizer)[0])
            if tokens > EXCESS_TOKENS * self._positions:
                message = f"the prompt has more than {tokens:,} tokens; the model takes {self._positions}"
                raise ApiError(400, message, "context_length_exceeded")
            characters *= 2


class Service:
    """One engine for many clients.

    Args:
        engine: decodes; it has a tokenizer.
        settings: the server's.
        limits: the scheduler's.
        namespaces: of all tenants.
        on_finished: see ``Scheduler``.
    """

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        limits: SchedulerLimits,
        namespaces: TenantNamespaces,
        on_finished: Callable[[Request], None] | None = None,
    ) -> None:
        self.engine, self.settings = engine, settings
        self.scheduler = Scheduler(engine, limits, on_finished)
        self.metrics = Metrics(engine, self.scheduler)
        self.created = int(time.time())
        self._namespaces = namespaces
        self._positions = position_limit(engine.target.model)
        self._encode = RequestEncoder(engine.tokenizer, self._positions)
        self._bytes = TokenBytes(engine.tokenizer)
        self._dispatcher: LoopDispatcher | None = None
        self.grammars = GrammarPool(engine.grammars)
        self._prepare_grammars()

    def close(self, patience: float = 0.0) -> None:
        """Take no more requests, and end all others; see ``Scheduler.close``."""
        self.grammars.close()
        self.scheduler.close(patience)

    async def call(self, body: CompletionRequest | ChatRequest, tenant: str, number: str) -> Call:
        """Prepare an answer without holding up the event loop.

        Args:
            body: what is asked.
            tenant: who asks.
            number: names the call.

        Raises:
            ApiError: says what is refused, and why.
        """
        arrived = time.monotonic()
        if body.model != self.settings.served_name:
            message = f"there is no model {body.model!r} here; there is {self.settings.served_name!r}"
            raise ApiError(404, message, "model_not_found", "model")
        namespace = self._namespaces.private(tenant, body.forerun.namespace)
        try:
            await self.grammars.prepare(body.format, tenant, namespace)
            requests = await asyncio.to_thread(self._requests, body, tenant)
        except SchemaError as error:
            raise ApiError(400, str(error), "invalid_value", "response_format") from error
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ApiError(400, str(error), "invalid_value") from error
        rows = [
            AnswerRow(
                request,
                AnswerText(self.engine.tokenizer, request, body.stops),
                RequestMeter(self.metrics, request, arrived),
                None if body.alternatives is None else LogprobStreamer(self._bytes, request),
            )
            for request in requests
        ]
        return Call(self.scheduler, rows, number, self._loop_dispatcher(), body.forerun.trace)

    @property
    def offer(self) -> dict[str, Any]:
        """What a client may ask for beyond OpenAI's API: drafters, the longest draft and answer, chats; and whether
        texts are bit for bit those without drafts."""
        return {
            "drafters": list(dict.fromkeys((self.settings.drafter, NO_DRAFTER))),
            "budget": self.engine.budget,
            "max_tokens": self.settings.max_tokens,
            "chat": has_template(self.engine.tokenizer),
            "exactness": self.engine.exactness.level,
        }

    def deadline(self) -> float | None:
        """The deadline of a call that starts now, by ``time.monotonic``."""
        return None if self.settings.timeout is None else time.monotonic() + self.settings.timeout

    def _loop_dispatcher(self) -> LoopDispatcher:
        """The dispatcher of the running loop; one loop has one."""
        loop = asyncio.get_running_loop()
        if self._dispatcher is None or self._dispatcher.loop is not loop:
            self._dispatcher = LoopDispatcher(loop)
        return self._dispatcher

    def _requests(self, body: CompletionRequest | ChatRequest, tenant: str) -> list[Request]:
        """``n`` requests for each prompt, one prompt after the other."""
        places = self.scheduler.limits.rows + self.scheduler.limits.waiting
        texts = (len(body.prompts) if isinstance(body, CompletionRequest) else 1) * (body.n or 1)
        if texts > places:
            message = f"the prompts and n ask for {texts} texts; this server has places for {places}"
            raise ApiError(400, message, "too_many_texts", "n")
        options: dict[str, Any] = {
            "namespace": self._namespaces.private(tenant, body.forerun.namespace),
            "drafts_from": self._namespaces.drafts_from(tenant, body.forerun.namespace),
            "budget": self._budget(body.forerun),
            "logprobs": body.alternatives,
            "response_format": body.format,
        }
        default = DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionRequest) else self.settings.max_tokens
        requests = []
        for ids in self._encode(body):
            tokens = self._answer_tokens(len(ids), body.token_limit, default)
            for choice in range(body.n or 1):
                sampling = _sampling(body, choice)
                (request,) = self.engine.requests([ids], max_new_tokens=tokens, **options, **sampling)
                requests.append(self._with_stops(request, body.stops))
        self._namespaces.add(tenant, body.forerun.namespace)  # last: a refused request adds no name
        return requests

    def _budget(self, wanted: Extension) -> int | None:
        """The longest draft in tokens; None for the server's."""
        offer = self.offer
        if wanted.drafter not in (None, *offer["drafters"]):
            message = f"forerun.drafter is {wanted.drafter!r}; here there are {', '.join(offer['drafters'])}"
            raise ApiError(400, message, "invalid_value", "forerun.drafter")
        if wanted.budget is not None and wanted.budget > offer["budget"]:
            message = f"forerun.budget is {wanted.budget}; this server drafts {offer['budget']} tokens at most"
            raise ApiError(400, message, "invalid_value", "forerun.budget")
        return 0 if wanted.drafter == NO_DRAFTER else wanted.budget

    def _prepare_grammars(self) -> None:
        """Prepare before the server serves, as no other thread runs meanwhile. If it fails, requests for a grammar get
        the reason."""
        try:
            self.engine.grammars.prepare()
        except (ValueError, ModuleNotFoundError) as error:
            log.warning("no answer can be made to follow a schema: %s", error)

    def _answer_tokens(self, prompt: int, wanted: int | None, default: int) -> int:
        """The longest answer to a prompt, in tokens.

        Args:
            prompt: tokens of the prompt.
            wanted: the request's limit.
            default: where it has none.

        Raises:
            ApiError: for more than the server allows or the model can take.
        """
        if wanted is not None and wanted > self.settings.max_tokens:
            message = f"max_tokens is {wanted}; this server allows {self.settings.max_tokens}"
            raise ApiError(400, message, "max_tokens_exceeded", "max_tokens")
        if self._positions is None:
            return wanted or default
        room, least = self._positions - prompt, wanted or 1
        if room < least:
            message = f"the prompt has {prompt} tokens, the answer up to {least}; the model takes {self._positions}"
            raise ApiError(400, message, "context_length_exceeded")
        return wanted or min(default, room)

    def _with_stops(self, request: Request, stops: list[str]) -> Request:
        if stops:
            criterion = StopStringCriterion(AnswerText(self.engine.tokenizer, request, stops))
            request.stopping = _either(request.stopping, criterion)
        return request


def _sampling(body: CompletionRequest | ChatRequest, choice: int) -> dict[str, Any]:
    """Options for the engine. Choices of one prompt have consecutive seeds, as with ``num_return_sequences``."""
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0:
        return {"do_sample": False}
    seed = None if body.seed is None else body.seed + choice
    top_p = 1.0 if body.top_p is None else body.top_p
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0, "seed": seed}


def _either(first: Stopping | None, second: Stopping) -> Stopping:
    """Stop when either says so; both see every token."""

    def stopping(ids: torch.Tensor) -> bool:
        stopped = second(ids)
        return stopped if first is None else first(ids) or stopped

    return stopping
