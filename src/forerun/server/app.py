"""The HTTP application: OpenAI's and Anthropic's addresses, the page, health, metrics."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import forerun.reference
from forerun import __version__
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.server.admission import SchedulerLimits
from forerun.server.api_errors import ApiError, invalid
from forerun.server.bodies import BodyReader
from forerun.server.calls import Call
from forerun.server.chat_schema import ChatRequest, GenerationBody, TokenizeRequest, TranslatedRequest
from forerun.server.index_files import restore_index
from forerun.server.messages_api import CountTokensRequest, MessagesFormat, MessagesRequest
from forerun.server.middleware import OPEN_ADDRESSES, GuardMiddleware
from forerun.server.prompt_encoder import EncodedPrompt
from forerun.server.replies import ChatFormat, CompletionFormat, ReplyFormat
from forerun.server.responses_api import ResponsesFormat, ResponsesRequest
from forerun.server.schema import CompletionRequest, DetokenizeRequest
from forerun.server.service import Service
from forerun.server.settings import ServerSettings
from forerun.server.tolerance import Notes
from forerun.server.warm_prompts import prefill_prompts, warm_prompts

log = logging.getLogger(__name__)
AnyFormat = ReplyFormat | ResponsesFormat | MessagesFormat
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Keep proxies from buffering a stream."""
PING = ": ping\n\n"
"""A comment that keeps silent streams open."""
PIECE_BYTES = 1 << 16
"""Size of the pieces in which a complete answer is written."""
SWITCH_SECONDS = 0.001
"""Python's thread switch interval. Five handovers beside the check of a body need 3 ms, with Python's 5 ms 17."""
COLLECTION = (10_000, 50, 50)
"""Garbage collector's thresholds. With Python's (700, 10, 10), the largest body causes full collections of 0.06 s."""
SERVER_FAILED = ApiError(500, "the server failed; its log says more", "failed")

STATIC = Path(__file__).parent / "static"
PAGE_FILES = {
    "/": STATIC / "index.html",
    **{f"/page/{name}": STATIC / name for name in ("page.css", "page.js", "column.js", "stream.js", "verdict.js")},
    "/page/icon.svg": STATIC / "icon.svg",
    "/page/prompts.json": Path(forerun.reference.__file__).parent / "demo.json",
}
"""The page's addresses and files, which need no key."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The browser loads only these files and this server's answers."""
PAGE_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".json": "application/json"}
"""By suffix. The operating system's list may differ, and browsers refuse scripts of another type."""


def create_app(
    engine: Engine,
    settings: ServerSettings,
    limits: SchedulerLimits,
    on_finished: Callable[[Request], None] | None = None,
) -> FastAPI:
    """Make an application that serves one engine; raise ValueError for a wrong key or a wrong index."""
    tenants = settings.tenant_keys().tenants
    saver = restore_index(engine, settings, tenants)
    service = Service(engine, settings, limits, on_finished)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if saver is not None:
            saver.start()
        prefilling = asyncio.create_task(prefill_prompts(service, warm_prompts(settings.warm), tenants))
        try:
            with short_pauses():
                yield
        finally:
            prefilling.cancel()
            await asyncio.to_thread(service.close)
            if saver is not None:
                await asyncio.to_thread(saver.close)

    app = FastAPI(title="Forerun", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(guarded, settings)
    _add_error_handlers(app)
    bodies = BodyReader(settings.served_name)
    _add_generation(app, service, bodies)
    _add_tokens(app, service, bodies)
    _add_models(app, service)
    _add_health(app, service)
    if settings.page:
        for address, file in PAGE_FILES.items():
            app.add_api_route(address, _page_file(file), include_in_schema=False)
    app.openapi = bodies.description(app)  # type: ignore[method-assign]
    return app


@contextmanager
def short_pauses() -> Iterator[None]:
    """Keep threads and garbage collection from delaying steps, see ``SWITCH_SECONDS`` and ``COLLECTION``."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(*COLLECTION)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)


def guarded(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """Wrap an application in the checks that settings describe."""
    open_addresses = (*OPEN_ADDRESSES, *(PAGE_FILES if settings.page else ()))
    origins = settings.cors_origins
    checked = GuardMiddleware(
        app, settings.tenant_keys(), settings.request_bytes, settings.checked_hosts, origins, open_addresses
    )
    if not origins:
        return checked
    options: Any = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    return CORSMiddleware(checked, origins, **options, expose_headers=["X-Request-Id", "Retry-After"])


def _add_generation(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    def add(
        address: str, model: type[GenerationBody | TranslatedRequest], kind: Callable[[Any, str], AnyFormat]
    ) -> None:
        @app.post(address, response_model=None, openapi_extra=bodies.described(model))
        async def answer(request: HTTPRequest) -> Response:
            body, translated, notes = await bodies.read(request, model)
            with model.own_names():
                return await _answer(service, kind(body, request.state.request_id), translated, notes, request)

    add("/v1/completions", CompletionRequest, CompletionFormat)
    add("/v1/chat/completions", ChatRequest, ChatFormat)
    add("/v1/responses", ResponsesRequest, ResponsesFormat)
    add("/v1/messages", MessagesRequest, MessagesFormat)


async def _answer(
    service: Service, form: AnyFormat, body: GenerationBody, notes: Notes, request: HTTPRequest
) -> Response:
    """Start a call, and return a response that writes its answer without holding the request's body."""
    state = request.scope["state"]
    tenant, deadline = state["tenant"], service.deadline()
    form.note(notes)
    if notes:
        log.info("of the request: %s", "; ".join(notes))
    watcher = asyncio.create_task(disconnected(request.receive))
    try:
        call = await service.call(body, tenant, state["request_id"], state["held"])
        watcher.add_done_callback(lambda _: call.cancel())
        await call.start(tenant, deadline)
    except BaseException:
        watcher.cancel()
        raise
    request.__dict__.pop("_body", None)  # the framework would keep it until the answer ends
    state["held"].release(keep=call.nbytes)
    if body.stream:
        return StreamingResponse(_events(call, form, watcher), 200, STREAM_HEADERS, "text/event-stream")
    return _WholeResponse(call, form, watcher)


class _WholeResponse(Response):
    def __init__(self, call: Call, form: AnyFormat, watcher: asyncio.Task[None]) -> None:
        super().__init__()
        self._call, self._form, self._watcher = call, form, watcher

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async for delta in self._call:
                if delta is not None:
                    self._form.add(delta)
        finally:
            self._call.cancel()
            self._watcher.cancel()
        whole = await asyncio.to_thread(self._form.whole, *self._call.figures())  # may be megabytes
        response = Response(whole, media_type="application/json")
        head = {"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers}
        await send(head)
        for first in range(0, len(response.body), PIECE_BYTES):
            piece = response.body[first : first + PIECE_BYTES]  # it waits until the client has read the previous ones
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _events(call: Call, form: AnyFormat, watcher: asyncio.Task[None]) -> AsyncIterator[str]:
    try:
        for begin in form.begin():
            yield begin
        async for delta in call:
            yield PING if delta is None else form.chunk(delta, call.usage if form.counts else None)
        for end in form.end(*call.figures()):
            yield end
    except ApiError as error:
        yield form.error(error)
    except Exception:
        log.exception("call %s failed", call.number)
        yield form.error(SERVER_FAILED)
    finally:
        call.cancel()
        watcher.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _add_tokens(app: FastAPI, service: Service, bodies: BodyReader) -> None:
    async def of_chat(request: HTTPRequest, body: ChatRequest | TokenizeRequest) -> EncodedPrompt:
        try:
            return await service.in_turn(request.state.tenant, service.encode.chat, body)
        except (ValueError, TypeError) as error:
            raise invalid(None, str(error)) from error

    def add_count(address: str, model: type[TranslatedRequest], more: dict[str, str]) -> None:
        @app.post(address, response_model=None, openapi_extra=bodies.described(model))
        async def count(request: HTTPRequest) -> dict[str, Any]:
            body, chat, _ = await bodies.read(request, model)
            service.check_model(body.model)
            with model.own_names():
                return {**more, "input_tokens": len((await of_chat(request, chat)).ids)}

    add_count("/v1/messages/count_tokens", CountTokensRequest, {})
    add_count("/v1/responses/input_tokens", ResponsesRequest, {"object": "response.input_tokens"})

    @app.post("/tokenize", openapi_extra=bodies.described(TokenizeRequest))
    async def tokenize(request: HTTPRequest) -> dict[str, Any]:
        body, _, _ = await bodies.read(request, TokenizeRequest)
        service.check_model(body.model)
        if body.prompt is None:
            prompt = await of_chat(request, body)
        else:
            given = body.prompt, body.add_special_tokens
            prompt = await service.in_turn(request.state.tenant, service.encode.text, *given)
        words = service.tokenizer.convert_ids_to_tokens(prompt.ids) if body.return_token_strs else None
        count = {"count": len(prompt.ids), "max_model_len": service.positions}
        return {**count, "tokens": prompt.ids, "token_strs": words}

    @app.post("/detokenize", openapi_extra=bodies.described(DetokenizeRequest))
    async def detokenize(request: HTTPRequest) -> dict[str, str]:
        body, _, _ = await bodies.read(request, DetokenizeRequest)
        service.check_model(body.model)
        service.check_tokens("tokens", body.tokens)
        return {"prompt": await service.in_turn(request.state.tenant, service.encode.decode, body.tokens)}


def _add_models(app: FastAPI, service: Service) -> None:
    name = service.settings.served_name
    model = {"id": name, "object": "model", "created": service.created, "owned_by": "forerun", "forerun": service.offer}
    made = datetime.fromtimestamp(service.created, UTC).isoformat()
    model |= {"type": "model", "display_name": name, "created_at": made}  # as Anthropic's

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model], "has_more": False, "first_id": name, "last_id": name}

    @app.get("/v1/models/{given:path}")
    async def one_model(given: str) -> dict[str, Any]:
        service.check_model(given)
        return model


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if not service.scheduler.ready:
            raise ApiError(503, "the server accepts no requests", "not_ready")
        return {"status": "ready"}

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _page_file(file: Path) -> Callable[[], Awaitable[Response]]:
    media_type = MEDIA_TYPES.get(file.suffix, "text/html")

    async def answer() -> Response:
        return FileResponse(file, media_type=media_type, headers=PAGE_HEADERS)

    return answer


def _add_error_handlers(app: FastAPI) -> None:
    async def answer(request: HTTPRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            message = f"there is no {request.method} {request.url.path[:200]} here"
            error = ApiError(error.status_code, message, "unknown_address", headers=error.headers)
        response = (error if isinstance(error, ApiError) else SERVER_FAILED).response(request.url.path)
        response.headers["x-request-id"] = request.scope["state"]["request_id"]
        return response

    for kind in (ApiError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
