"""The HTTP application: OpenAI's addresses, the page, health, metrics. A whole answer is the fold over its stream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import ASGIApp

import forerun.reference
from forerun import __version__
from forerun.core.request import Request
from forerun.engine.engine import Engine
from forerun.server.admission import SchedulerLimits
from forerun.server.api_errors import ApiError, validation_error
from forerun.server.calls import Call, ClientGoneError
from forerun.server.learned_texts import restore_index
from forerun.server.middleware import OPEN_ADDRESSES, GuardMiddleware
from forerun.server.replies import ChatFormat, CompletionFormat, Reply, ReplyFormat, event, usage_of
from forerun.server.schema import ChatRequest, CompletionRequest
from forerun.server.service import Service
from forerun.server.settings import ServerSettings
from forerun.server.tenants import ApiKeys, TenantNamespaces

log = logging.getLogger(__name__)
STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Keep proxies from collecting a stream."""
CLOSING = ApiError(503, "the server is closing, and has cancelled the request", "closing")
"""For a client whose request was cancelled. One that cancelled it itself does not listen."""
SERVER_FAILED = ApiError(500, "the server failed; its log says more", "failed")
REPLIES: dict[int | str, dict[str, Any]] = {200: {"model": Reply}}

STATIC = Path(__file__).parent / "static"
PAGE_FILES = {
    "/": STATIC / "index.html",
    "/page/page.css": STATIC / "page.css",
    "/page/page.js": STATIC / "page.js",
    "/page/column.js": STATIC / "column.js",
    "/page/stream.js": STATIC / "stream.js",
    "/page/icon.svg": STATIC / "icon.svg",
    "/page/prompts.json": Path(forerun.reference.__file__).parent / "demo.json",
}
"""The page's addresses and files. They need no key, as nothing in them is secret."""
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""A browser loads these files and answers of this server, and nothing that is written into the page."""
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
"""By suffix. The operating system's list may differ, and no browser runs a script of another type."""


def create_app(
    engine: Engine,
    settings: ServerSettings,
    limits: SchedulerLimits,
    on_finished: Callable[[Request], None] | None = None,
) -> FastAPI:
    """An application that serves one engine; its ``state.service`` is the ``Service``.

    It fills the drafter's index first; see ``restore_index``. It starts a thread that decodes, which ends with the
    application.

    Args:
        engine: with a tokenizer.
        settings: names, keys and limits of requests.
        limits: the scheduler's.
        on_finished: see ``Scheduler``.

    Raises:
        ValueError: for a wrong key, or a file that cannot fill the index.
        OSError: if that cannot be read.
    """
    namespaces = TenantNamespaces(settings.namespaces, settings.share)
    saver = restore_index(engine, settings, namespaces, _keys(settings).tenants)
    service = Service(engine, settings, limits, namespaces, on_finished)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if saver is not None:
            saver.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.close)
            if saver is not None:
                await asyncio.to_thread(saver.close)

    app = FastAPI(title="Forerun", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(guarded, settings)
    _add_error_handlers(app)
    _add_generation(app, service)
    _add_models(app, service)
    _add_health(app, service)
    if settings.page:
        for address, file in PAGE_FILES.items():
            app.add_api_route(address, _page_file(file), methods=["GET", "HEAD"], include_in_schema=False)
    return app


def guarded(app: ASGIApp, settings: ServerSettings) -> ASGIApp:
    """An application behind the checks that settings describe."""
    open_addresses = (*OPEN_ADDRESSES, *(PAGE_FILES if settings.page else ()))
    origins = settings.cors_origins
    checked = GuardMiddleware(
        app, _keys(settings), settings.request_bytes, settings.checked_hosts, origins, open_addresses
    )
    if not origins:
        return checked
    return CORSMiddleware(
        checked,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After"],
    )


def _keys(settings: ServerSettings) -> ApiKeys:
    return ApiKeys([key.get_secret_value() for key in settings.api_keys])


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None, responses=REPLIES)
    async def completions(body: CompletionRequest, request: HTTPRequest) -> Response:
        return await _answer(service, body, request, CompletionFormat, len(body.prompts))

    @app.post("/v1/chat/completions", response_model=None, responses=REPLIES)
    async def chat(body: ChatRequest, request: HTTPRequest) -> Response:
        return await _answer(service, body, request, ChatFormat, 1)


async def _answer(
    service: Service, body: CompletionRequest | ChatRequest, request: HTTPRequest, kind: type[ReplyFormat], prompts: int
) -> Response:
    tenant, number = request.scope["state"]["tenant"], request.scope["state"]["request_id"]
    deadline = service.deadline()
    watcher = asyncio.create_task(_disconnected(request))
    try:
        call = await service.call(body, tenant, number)
        watcher.add_done_callback(lambda _: call.cancel())
        await call.start(tenant, deadline)
    except BaseException:
        watcher.cancel()
        raise
    form = kind(body.model, call.number, int(time.time()), body.with_usage)
    if body.stream:
        return StreamingResponse(_events(call, form, watcher, prompts), 200, STREAM_HEADERS, "text/event-stream")
    try:
        deltas = [delta async for delta in call]
    except ClientGoneError:
        return CLOSING.response()
    finally:
        call.cancel()
        watcher.cancel()
    usage = usage_of([row.request for row in call.rows], prompts)
    whole = await asyncio.to_thread(form.fold, deltas, len(call.rows), usage)  # it may be megabytes
    return Response(whole, media_type="application/json")


async def _events(call: Call, form: ReplyFormat, watcher: asyncio.Task[None], prompts: int) -> AsyncIterator[str]:
    """A stream of events; an error ends it."""
    try:
        for begin in form.begin(len(call.rows)):
            yield begin
        async for delta in call:
            yield form.chunk(delta)
        if form.usage:
            yield form.last(usage_of([row.request for row in call.rows], prompts))
        yield "data: [DONE]\n\n"
    except ApiError as error:
        yield event(error.body)
    except ClientGoneError:
        yield event(CLOSING.body)
    except Exception:
        log.exception("call %s failed", call.number)
        yield event(SERVER_FAILED.body)
    finally:
        call.cancel()
        watcher.cancel()


async def _disconnected(request: HTTPRequest) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_models(app: FastAPI, service: Service) -> None:
    name = service.settings.served_name
    model = {"id": name, "object": "model", "created": service.created, "owned_by": "forerun", "forerun": service.offer}

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{given:path}")
    async def one_model(given: str) -> dict[str, Any]:
        if given != name:
            raise ApiError(404, f"there is no model {given!r} here; there is {name!r}", "model_not_found", "model")
        return model


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        if not service.scheduler.ready:
            raise ApiError(503, "the server does not take requests", "not_ready")
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
    async def api_error(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error.errors()).response()

    async def http_error(request: HTTPRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    async def bug(request: HTTPRequest, error: Exception) -> Response:
        response = SERVER_FAILED.response()
        response.headers["x-request-id"] = request.scope["state"]["request_id"]
        return response

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)
