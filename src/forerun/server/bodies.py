"""Parse and check request bodies, one per tenant at a time, without blocking streams."""

from __future__ import annotations

import asyncio
import functools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np
from fastapi import FastAPI
from fastapi import Request as HTTPRequest
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from pydantic_core import from_json

from forerun.core.fairness import FairExecutor
from forerun.core.json_counts import count_json
from forerun.server.api_errors import ApiError, invalid
from forerun.server.chat_schema import TranslatedRequest
from forerun.server.schema import StrictModel
from forerun.server.tolerance import Notes

Model = TypeVar("Model", bound=StrictModel)

SMALL_BYTES = 1 << 14
"""Bodies up to this size are parsed at once: a thread would cost more."""
TEXT_BYTES = 80
"""Bytes of the largest body per allowed string, object or array: 104,857 in 8 MiB, which block Python for 0.02 s."""
NUMBER_BYTES = 32
"""Bytes of the largest body per allowed number, such as a prompt's tokens: 262,144 in 8 MiB."""
LEAST_PARTS = 10_000
"""Parts that a body may always have."""
NO_OBJECT = (400, "the body must be a JSON object, sent as application/json", "invalid_json")
HALF_PAIR = re.compile("[\ud800-\udfff]")
PARSING_TENANTS = 2
_REFERENCE = "#/components/schemas/{model}"


def check_parts(body: bytes, largest: int) -> None:
    """Raise an ApiError (413) for a body of too many parts, before any is created."""
    if len(body) < LEAST_PARTS:
        return
    counts = count_json(body)
    for what, count, each in (
        ("strings, objects and arrays", counts.strings + counts.containers, TEXT_BYTES),
        ("numbers", counts.others, NUMBER_BYTES),
    ):
        most = max(LEAST_PARTS, largest // each)
        if count > most:
            raise ApiError(413, f"the body has {count:,} {what}; this server takes {most:,}", "too_many_parts")


class BodyReader:
    """A reader of request bodies. Requests without a model get ``served_name``."""

    def __init__(self, served_name: str) -> None:
        self._served_name = served_name
        self._executor = FairExecutor(PARSING_TENANTS, "forerun-bodies")
        self._models: dict[type[StrictModel], None] = {}

    def described(self, model: type[StrictModel]) -> dict[str, Any]:
        """Refer to a body's schema, in an address's OpenAPI description."""
        self._models[model] = None
        schema = {"$ref": _REFERENCE.format(model=model.__name__)}
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}

    def description(self, app: FastAPI) -> Callable[[], dict[str, Any]]:
        """Make an application's ``openapi``, with the bodies' schemas, which the framework does not know."""

        def openapi() -> dict[str, Any]:
            if app.openapi_schema is None:
                app.openapi_schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
                models: Any = [(each, "validation") for each in self._models]
                schemas: Any = models_json_schema(models, ref_template=_REFERENCE)[1]
                app.openapi_schema.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
            return app.openapi_schema

        return openapi

    async def read(self, request: HTTPRequest, model: type[Model]) -> tuple[Model, Any, Notes]:
        """Return a request's body, its translation into a chat (or the body), and notes on what was ignored."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(*NO_OBJECT)
        body = await request.body()
        job = functools.partial(parsed, body, model, self._served_name)
        if len(body) <= SMALL_BYTES:
            return job()
        return await asyncio.wrap_future(self._executor.submit(request.state.tenant, job))


def parsed(body: bytes, model: type[Model], served_name: str) -> tuple[Model, Any, Notes]:
    """Parse a body; see ``BodyReader.read``."""
    try:
        given = _value(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not JSON", "invalid_json") from None
    if not isinstance(given, dict):
        raise ApiError(*NO_OBJECT)
    _check_characters(body, given)
    if given.get("model") is None and "model" in model.model_fields:
        given["model"] = served_name
    notes = Notes()
    form = model.checked(given, notes)
    return form, form.chat(notes) if isinstance(form, TranslatedRequest) else form, notes


def _value(body: bytes) -> Any:
    """Parse UTF-8 JSON; without escapes, up to eight times as fast as Python's parser, which holds Python's lock for 6
    ms for 8 MiB of text. Python's may accept what this one refuses (deeper nesting)."""
    if b"\\" not in body:
        with suppress(ValueError):
            return from_json(body)
    return json.loads(body.decode("utf-8-sig"))  # strict: of bytes, Python accepts encoded surrogates, and UTF-16


def _check_characters(body: bytes, given: Any) -> None:
    """Refuse half of a surrogate pair, which JSON can spell and no tokenizer can encode."""
    spelled = np.frombuffer(body, np.uint8)  # searched by NumPy, which releases Python's lock
    if not ((spelled[:-2] == ord("\\")) & (spelled[1:-1] == ord("u")) & (spelled[2:] | 32 == ord("d"))).any():
        return
    try:
        wrong = next((path for path, text in _strings(given, "") if HALF_PAIR.search(text)), None)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", "invalid_json") from None
    if wrong is not None:
        raise invalid(wrong or None, f"{wrong or 'a field'}: must be valid text; it has half of a surrogate pair")


def _strings(value: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield each string in a JSON value with its path; a field's name has its object's path."""
    if isinstance(value, str):
        yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        if isinstance(name, str):
            yield path, name
        yield from _strings(each, f"{path}.{name}" if path else str(name))
