"""Convert a client's request to a running call: prompts, limits, requests of the engine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from forerun.core.fairness import FairExecutor
from forerun.core.request import Request, Stopping
from forerun.engine.engine import Engine
from forerun.engine.result import ends
from forerun.models.forward.inputs import position_limit
from forerun.models.text.grammar import grammar_source
from forerun.models.text.message_formats import message_format
from forerun.models.text.message_parser import MessageParser
from forerun.models.text.processors import OccurrencePenalties
from forerun.models.text.prompts import has_template
from forerun.models.text.schemas import SchemaError
from forerun.models.text.token_bytes import TokenBytes
from forerun.server.admission import QueueFullError, SchedulerLimits
from forerun.server.answers import AnswerText, Echo, LogprobStreamer
from forerun.server.api_errors import ApiError, invalid
from forerun.server.calls import AnswerRow, Call, LoopDispatcher, refusal
from forerun.server.chat_schema import ChatRequest, GenerationBody
from forerun.server.echo import scoring_prompt
from forerun.server.grammar_pool import GrammarPool
from forerun.server.metrics import Metrics, RequestMeter
from forerun.server.middleware import HeldBytes
from forerun.server.prompt_encoder import EncodedPrompt, PromptEncoder
from forerun.server.scheduler import Scheduler
from forerun.server.schema import CompletionRequest, Extension
from forerun.server.settings import ServerSettings
from forerun.server.tenants import full_namespace

log = logging.getLogger(__name__)
Result = TypeVar("Result")

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default length of a completion. A chat's default is the server's limit."""
LOGPROB_BYTES = 100
"""Size in an answer of a token's log-probability, and of each alternative: usually 90 bytes of JSON."""
ENCODING_TENANTS = 8
"""Number of tenants whose prompts are encoded in turn, one at a time; more tenants take turns by request."""
NO_DRAFTER = "none"


class Service:
    """One engine, with a tokenizer, for many clients; for ``on_finished``, see ``Scheduler``."""

    def __init__(
        self,
        engine: Engine,
        settings: ServerSettings,
        limits: SchedulerLimits,
        on_finished: Callable[[Request], None] | None = None,
    ) -> None:
        assert engine.tokenizer is not None
        self.engine, self.settings, self.tokenizer = engine, settings, engine.tokenizer
        self.scheduler = Scheduler(engine, limits, on_finished)
        self.metrics = Metrics(engine, self.scheduler)
        self.created = int(time.time())
        self.positions = position_limit(engine.target.model)
        self.encode = PromptEncoder(self.tokenizer, self.positions)
        self._encoding = FairExecutor(ENCODING_TENANTS, "forerun-encode")
        self.form = message_format(self.tokenizer)
        self._bytes = TokenBytes(self.tokenizer)
        self._special = frozenset(getattr(self.tokenizer, "added_tokens_decoder", ()))  # around a template's messages
        self._ends = frozenset(ends(engine.target.model.generation_config))
        self._dispatcher: LoopDispatcher | None = None
        self.grammars = GrammarPool(engine.grammars)
        try:
            engine.grammars.prepare()  # while no other thread runs
        except (ValueError, ModuleNotFoundError) as error:  # requests for a grammar get the reason
            log.warning("no answer can be made to follow a schema: %s", error)

    def close(self, patience: float = 0.0) -> None:
        self.grammars.close()
        self.scheduler.close(patience)

    async def call(self, body: GenerationBody, tenant: str, number: str, held: HeldBytes) -> Call:
        """Prepare an answer; raise ApiError for a wrong request. ``held`` then includes its log-probabilities."""
        arrived = time.monotonic()
        self.check_model(body.model)
        self._check_cheap(body)
        nbytes = _hold_logprobs(held, body, body.answers * self._most_tokens(body))
        try:
            await asyncio.to_thread(self.scheduler.check_places, tenant, body.answers)
        except (QueueFullError, RuntimeError) as error:
            raise refusal(error) from error
        try:
            prompts = await self.in_turn(tenant, self.encode, body)
            if _scores_prompt(body):
                nbytes += _hold_logprobs(held, body, sum(len(prompt.ids) for prompt in prompts) * (body.n or 1))
            response_format = await asyncio.to_thread(self._response_format, body, prompts[0].text or "")
            await self.grammars.prepare(response_format, tenant, full_namespace(tenant, body.forerun.namespace))
            requests = await asyncio.to_thread(self._requests, body, tenant, prompts, response_format)
        except SchemaError as error:
            raise invalid("response_format" if body.format is not None else "tools", str(error)) from error
        except (ValueError, TypeError, NotImplementedError) as error:
            raise invalid(None, str(error)) from error
        each_prompt = [prompt for prompt in prompts for _ in range(body.n or 1)]
        rows = [self._row(body, *pair, arrived) for pair in zip(requests, each_prompt, strict=True)]
        shared = self.settings.share and requests[0].drafts
        options = (len(prompts), self.engine.budget, body.forerun.trace, shared, nbytes)
        if self._dispatcher is None or self._dispatcher.loop is not asyncio.get_running_loop():
            self._dispatcher = LoopDispatcher(asyncio.get_running_loop())
        return Call(self.scheduler, rows, number, self._dispatcher, *options)

    async def in_turn(self, tenant: str, job: Callable[..., Result], *given: Any) -> Result:
        """Run a job in a thread, one per tenant at a time, so that no tenant waits for all of another's."""
        return await asyncio.wrap_future(self._encoding.submit(tenant, partial(job, *given)))

    def check_model(self, name: str | None) -> None:
        """Raise ApiError for another model's name."""
        if name not in (None, self.settings.served_name):
            message = f"there is no model {name!r} here; there is {self.settings.served_name!r}"
            raise ApiError(404, message, "model_not_found", "model")

    def check_tokens(self, field: str, tokens: Iterable[int]) -> None:
        """Raise ApiError for a token that the model does not have."""
        words = self.engine.target.vocabulary
        if (largest := max(tokens, default=0)) >= words:
            raise invalid(field, f"{field} has {largest}; this model has tokens from 0 to {words - 1}")

    def _row(self, body: GenerationBody, request: Request, prompt: EncodedPrompt, arrived: float) -> AnswerRow:
        echo = None
        if isinstance(body, CompletionRequest) and body.echo:
            text = self.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text
            echo = Echo(text, len(prompt.ids) - 1 if _scores_prompt(body) else 0, body.max_tokens != 0)
        parser, keep = None, frozenset[int]()
        hidden = frozenset(body.stop_token_ids)
        if isinstance(body, ChatRequest):
            tools = body.template_tools or []
            template = self.form.response_template(bool(tools))
            if template is not None:
                keep = self.form.kept_tokens(bool(tools))
                parser = MessageParser(self.tokenizer, self.form, template, prompt.text or "", tools, body.parallel)
        logprobs = None
        if body.alternatives is not None:
            logprobs = LogprobStreamer(self._bytes, request, self._ends_of(body), echo, prompt.ids if echo else ())
        if not body.skip_special_tokens:
            hidden = self._ends_of(body) - keep
            keep |= frozenset(self.form.special.values())
        answer = AnswerText(self.tokenizer, prompt.ids, body.stops, keep, echo, hidden)
        meter = RequestMeter(self.metrics, request, arrived)
        decode = partial(self.tokenizer.decode, clean_up_tokenization_spaces=False) if body.forerun.trace else None
        return AnswerRow(request, answer, meter, logprobs, parser, decode=decode)

    def _response_format(self, body: GenerationBody, prompt: str) -> dict[str, Any] | None:
        """Return the format of the complete output, including reasoning and calls."""
        wanted = body.format
        if not isinstance(body, ChatRequest):
            return wanted
        if wanted is not None:
            grammar_source(wanted)  # refuse one that is too large before further checks
        thinking, required = self.form.thinking_after(prompt), body.required_tools
        if required and self.form.calls is None:
            message = "tool_choice must be auto or none: this model's format of calls is unknown"
            raise ApiError(400, message, "unsupported", "tool_choice")
        if required:
            return self.form.grammar(None, required, body.parallel, thinking)
        known = self.form.calls is not None and wanted is not None and wanted["type"] != "text"
        return self.form.grammar(wanted, body.template_tools or [] if known else [], body.parallel, thinking)

    @property
    def offer(self) -> dict[str, Any]:
        """Describe the values of Forerun's fields, and the exactness of outputs."""
        return {
            "drafters": list(dict.fromkeys((self.settings.drafter, NO_DRAFTER))),
            "budget": self.engine.budget,
            "max_tokens": self.settings.max_tokens,
            "chat": has_template(self.tokenizer),
            "exactness": self.engine.exactness.level,
        }

    def deadline(self) -> float | None:
        """Return the deadline, by ``time.monotonic``, of a call that starts now."""
        return None if self.settings.timeout is None else time.monotonic() + self.settings.timeout

    def _check_cheap(self, body: GenerationBody) -> None:
        places = self.scheduler.limits.rows + self.scheduler.limits.waiting
        if body.answers > places:
            message = f"the prompts and n need {body.answers} answers; this server has places for {places}"
            raise ApiError(400, message, "too_many_texts", "n")
        self.check_tokens("logit_bias", map(int, body.logit_bias or ()))
        self.check_tokens("stop_token_ids", body.stop_token_ids)
        if not body.clamps and body.token_limit is not None and body.token_limit > self.settings.max_tokens:
            message = f"{body.limit_name} is {body.token_limit}; this server allows {self.settings.max_tokens}"
            raise ApiError(400, message, "max_tokens_exceeded", body.limit_name)
        if body.min_tokens > (most := self._most_tokens(body)):
            raise invalid("min_tokens", f"min_tokens is {body.min_tokens}; the answer has {most} at most")
        self._budget(body.forerun)

    def _most_tokens(self, body: GenerationBody) -> int:
        if body.token_limit is None:
            return DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionRequest) else self.settings.max_tokens
        return min(body.token_limit, self.settings.max_tokens) if body.clamps else body.token_limit

    def _requests(
        self,
        body: GenerationBody,
        tenant: str,
        prompts: Sequence[EncodedPrompt],
        response_format: dict[str, Any] | None,
    ) -> list[Request]:
        """Make ``n`` requests per prompt, ordered by prompt."""
        name, scored = body.forerun.namespace, _scores_prompt(body)
        options: dict[str, Any] = {
            "namespace": full_namespace(tenant, name),
            "drafts_from": full_namespace(tenant, name, self.settings.share and not scored),
            "budget": self._budget(body.forerun),
            "logprobs": body.alternatives,
            "response_format": response_format,
        }
        if body.prediction is not None and body.prediction.content:
            options["prediction"] = self.encode.text(body.prediction.content, False, "prediction").ids
        if body.min_tokens:
            options["min_new_tokens"] = body.min_tokens
        if body.stop_token_ids:
            options["eos_token_id"] = sorted(self._ends_of(body))
        requests = []
        for ids, _ in prompts:
            tokens = self._answer_tokens(body, len(ids))
            read, new = (ids[:1], max(1, len(ids) - 1 + tokens)) if scored else (ids, tokens)
            for choice in range(body.n or 1):
                sampling = _sampling(body, choice, len(ids))
                (request,) = self.engine.requests([read], max_new_tokens=new, **options, **sampling)
                if body.ignore_eos:
                    request.eos_token_ids = self._ends_of(body)
                request.wants_prefix_break = body.forerun.trace
                request.turns = [place for place, token in enumerate(read) if token in self._special]
                if body.stops:
                    answer = AnswerText(self.tokenizer, ids, body.stops)
                    request.stopping = _stopping_at_string(answer, request.stopping)
                requests.append(scoring_prompt(request, ids, tokens) if scored else request)
        return requests

    def _ends_of(self, body: GenerationBody) -> frozenset[int]:
        return frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else self._ends)

    def _budget(self, wanted: Extension) -> int | None:
        """Return the maximum draft length; None for the server's."""
        offer = self.offer
        if wanted.drafter not in (None, *offer["drafters"]):
            has = ", ".join(offer["drafters"])
            raise invalid("forerun.drafter", f"forerun.drafter is {wanted.drafter!r}; this server has {has}")
        if wanted.budget is not None and wanted.budget > (most := offer["budget"]):
            message = f"forerun.budget is {wanted.budget}; this server drafts {most} tokens at most"
            raise invalid("forerun.budget", message)
        return 0 if wanted.drafter == NO_DRAFTER else wanted.budget

    def _answer_tokens(self, body: GenerationBody, prompt: int) -> int:
        """Return the maximum answer length after ``prompt`` tokens; raise ApiError if there is no room."""
        most, fits = self._most_tokens(body), body.clamps or body.token_limit is None
        if self.positions is None:
            return most
        room, least = self.positions - prompt, 1 if fits else most
        if room < least:
            message = f"the prompt has {prompt} tokens, the answer up to {least}; the model takes {self.positions}"
            field = "messages" if isinstance(body, ChatRequest) else "prompt"
            raise ApiError(400, message, "context_length_exceeded", field)
        return min(most, room) if fits else most


def _hold_logprobs(held: HeldBytes, body: GenerationBody, tokens: int) -> int:
    nbytes = 0 if body.alternatives is None else tokens * (1 + body.alternatives) * LOGPROB_BYTES
    held.acquire(nbytes, "bytes of log-probabilities")
    return nbytes


def _scores_prompt(body: GenerationBody) -> bool:
    echoes = isinstance(body, CompletionRequest) and bool(body.echo)
    return echoes and (body.logprobs is not None or body.max_tokens == 0)


def _sampling(body: GenerationBody, choice: int, start: int) -> dict[str, Any]:
    """Return sampling options; choices of one prompt have consecutive seeds, as with ``num_return_sequences``."""
    options: dict[str, Any] = {}
    if body.repetition_penalty is not None:
        options["repetition_penalty"] = body.repetition_penalty
    if body.logit_bias:
        options["sequence_bias"] = [[[int(token)], float(bias)] for token, bias in body.logit_bias.items()]
    if body.frequency_penalty or body.presence_penalty:
        penalties = OccurrencePenalties(start, body.frequency_penalty or 0.0, body.presence_penalty or 0.0)
        options["logits_processor"] = [penalties]
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0:
        return {"do_sample": False, **options}
    if body.min_p is not None:
        options["min_p"] = body.min_p
    seed = None if body.seed is None else body.seed + choice
    top_p, top_k = 1.0 if body.top_p is None else body.top_p, max(0, body.top_k or 0)
    return {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed, **options}


def _stopping_at_string(answer: AnswerText, other: Stopping | None) -> Stopping:
    """Stop at the token that completes a stop string of an otherwise unused ``answer``, or when ``other`` stops."""

    def stopping(ids: torch.Tensor) -> bool:
        answer.add([int(ids[0, -1])])
        stopped = answer.stop_string is not None
        return stopped if other is None else other(ids) or stopped  # both see every token

    return stopping
