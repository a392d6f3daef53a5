"""Errors in the shape that OpenAI's clients know: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from starlette.responses import Response

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's type of an error by its status; others are ``invalid_request_error`` below 500, and ``server_error``."""
CLOSE = {"Connection": "close"}
"""A header of errors after which nothing more is read."""
LISTED_FAULTS = 8
"""Faults of one request that the error names in full."""


class ApiError(Exception):
    """An error that a client gets instead of an answer.

    Args:
        status: of HTTP.
        message: says what is wrong, and what to do.
        code: a fixed word for programs.
        param: the field that is wrong.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        kind = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """For HTTP. It is ASCII, so no text that a client has sent can break it."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def validation_error(errors: Sequence[Any], fields: Collection[str] = ()) -> ApiError:
    """All of pydantic's errors about a request in one; ``param`` and ``code`` are the first one's.

    It repeats nothing that the client has sent but the names of its fields. An unknown one is told the nearest of
    ``fields``.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", "invalid_json")
    if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "missing"):
        return ApiError(400, "the body must be a JSON object, sent as application/json", "invalid_json")
    code = "unsupported" if first["type"] in ("unsupported", "extra_forbidden") else "invalid_value"
    message = "; ".join(_fault(each, fields) for each in errors[:LISTED_FAULTS])
    if len(errors) > LISTED_FAULTS:
        message += f"; and {len(errors) - LISTED_FAULTS} more fields are wrong"
    # a check of several fields has no place, and is named for the one to change
    return ApiError(400, message, code, _field(first) or (first["type"] if first["type"] in fields else None))


def _field(error: Any) -> str | None:
    return ".".join(str(part) for part in error["loc"] if part != "body") or None


def _fault(error: Any, fields: Collection[str]) -> str:
    message = str(error["msg"])
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(error["loc"][-1])[:64], sorted(fields), 1)
        message = f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
    message = message[:1].lower() + message[1:]
    field = _field(error)
    return f"{field}: {message}" if field else message
