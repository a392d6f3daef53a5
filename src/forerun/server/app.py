"""The HTTP face: OpenAI's addresses, health, metrics. An answer is a stream, or the fold over it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from forerun import __version__
from forerun.engine.engine import Engine
from forerun.server.calls import Call, ClientGoneError
from forerun.server.errors import ApiError, of_validation
from forerun.server.gate import OPEN, Gate
from forerun.server.keeping import keep
from forerun.server.keys import Keys, Namespaces
from forerun.server.limits import Limits
from forerun.server.page import FILES, add_page
from forerun.server.replies import ChatForm, Form, Reply, TextForm, event, usage_of
from forerun.server.schema import Asked, ChatRequest, CompletionRequest
from forerun.server.service import Service
from forerun.server.settings import ServerSettings

log = logging.getLogger(__name__)
STREAM = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers that keep what lies between from collecting a stream."""
CANCELLED = ApiError(503, "the server is closing, and has cancelled the request", "closing")
"""What a client is told that did not cancel by itself; one that did does not listen."""
FAILED = ApiError(500, "the server failed; its log says more", "failed")
REPLIES: dict[int | str, dict[str, Any]] = {200: {"model": Reply}}


def create_app(engine: Engine, settings: ServerSettings, limits: Limits) -> FastAPI:
    """An application that serves one engine; its ``state.service`` is the ``Service``.

    It fills the drafter's index first; see ``keep``. It starts a thread that decodes, which ends with the application.

    Args:
        engine: with a tokenizer.
        settings: names, keys and limits of requests.
        limits: of the scheduler.

    Raises:
        ValueError: for a wrong key, or what cannot fill the index.
        OSError: if that cannot be read.
    """
    keys = Keys([key.get_secret_value() for key in settings.api_keys])
    namespaces = Namespaces(settings.namespaces, settings.share)
    keeper = keep(engine, settings, namespaces, keys.tenants)
    service = Service(engine, settings, limits, namespaces)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if keeper is not None:
            keeper.start()
        try:
            yield
        finally:
            await asyncio.to_thread(service.scheduler.close)
            if keeper is not None:
                await asyncio.to_thread(keeper.close)

    app = FastAPI(title="Forerun", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    pages = FILES if settings.page else {}
    app.add_middleware(Gate, keys=keys, limit=settings.request_bytes, free=(*OPEN, *pages))
    _tell_errors(app)
    _add_answers(app, service)
    _add_models(app, service)
    _add_health(app, service)
    if settings.page:
        add_page(app)
    return app


def _add_answers(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", response_model=None, responses=REPLIES)
    async def completions(asked: CompletionRequest, request: Request) -> Response:
        return await _answer(service, asked, request, TextForm, len(asked.prompts))

    @app.post("/v1/chat/completions", response_model=None, responses=REPLIES)
    async def chat(asked: ChatRequest, request: Request) -> Response:
        return await _answer(service, asked, request, ChatForm, 1)


async def _answer(
    service: Service, asked: CompletionRequest | ChatRequest, request: Request, kind: type[Form], prompts: int
) -> Response:
    tenant: str = request.scope["state"]["tenant"]
    deadline = service.deadline()
    watching = asyncio.create_task(_gone(request))
    try:
        call = await service.call(asked, tenant)
        watching.add_done_callback(lambda _: call.cancel())
        await call.start(tenant, deadline)
    except BaseException:
        watching.cancel()
        raise
    form = kind(asked.model, call.number, int(time.time()), _usage_wanted(asked))
    if asked.stream:
        return StreamingResponse(_events(call, form, watching, prompts), 200, STREAM, "text/event-stream")
    try:
        deltas = [delta async for delta in call]
    except ClientGoneError:
        return CANCELLED.response()
    finally:
        call.cancel()
        watching.cancel()
    usage = usage_of([row.request for row in call.rows], prompts)
    body = await asyncio.to_thread(form.fold, deltas, len(call.rows), usage)  # it may be megabytes
    return Response(body, media_type="application/json")


async def _events(call: Call, form: Form, watching: asyncio.Task[None], prompts: int) -> AsyncIterator[str]:
    """A stream of events; an error is the last one, if there is one."""
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
        yield event(CANCELLED.body)
    except Exception:
        log.exception("call %s failed", call.number)
        yield event(FAILED.body)
    finally:
        call.cancel()
        watching.cancel()


async def _gone(request: Request) -> None:
    """Returns when a client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _usage_wanted(asked: Asked) -> bool:
    return asked.stream_options is not None and asked.stream_options.include_usage


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


def _tell_errors(app: FastAPI) -> None:
    async def api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return of_validation(error.errors()).response()

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return ApiError(error.status_code, str(error.detail), headers=error.headers).response()

    async def bug(request: Request, error: Exception) -> Response:
        return FAILED.response()

    app.add_exception_handler(ApiError, api_error)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(Exception, bug)
