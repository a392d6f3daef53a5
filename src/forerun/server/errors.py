"""Errors in the shape that OpenAI's clients know: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import Response

TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's type of an error by its status; others are ``invalid_request_error`` below 500, and ``server_error``."""
CLOSE = {"Connection": "close"}
"""A header of errors behind which there is no more to read."""


class ApiError(Exception):
    """What a client is told instead of an answer.

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
        """As JSON."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """For HTTP. It is ASCII, so that no text that a client has sent can break it."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


def of_validation(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's errors about a request, told in full, and how many there are.

    What the client has sent is not repeated but for the names of its fields.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not JSON", "invalid_json")
    if first["loc"] == ("body",) and first["type"] in ("model_attributes_type", "missing"):
        return ApiError(400, "the body must be a JSON object, sent as application/json", "invalid_json")
    param = ".".join(str(part) for part in first["loc"] if part != "body") or None
    more = f" ({len(errors) - 1} more fields are wrong)" if len(errors) > 1 else ""
    code = "unsupported" if first["type"] in ("unsupported", "extra_forbidden") else "invalid_value"
    return ApiError(400, f"{param}: {_told(first)}{more}" if param else f"{_told(first)}{more}", code, param)


def _told(error: Any) -> str:
    if error["type"] == "extra_forbidden":
        return "there is no such field"
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
