"""Errors in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, and in Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

ERROR_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
"""OpenAI's error types by status; others are ``invalid_request_error`` below 500, and ``server_error``."""
ANTHROPIC_ADDRESS = "/v1/messages"
ANTHROPIC_ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
"""Anthropic's error types by status; others are ``api_error``."""
CLOSE = {"Connection": "close"}
"""Header of errors after which the connection is not read."""


class ApiError(Exception):
    """An error sent to a client; ``code`` is a fixed word for programs, ``param`` the wrong field."""

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

    @property
    def anthropic_body(self) -> dict[str, Any]:
        kind = ANTHROPIC_ERRORS.get(self.status, "api_error")
        details = {"error_code": self.code}  # where Anthropic's client reads it
        return {"type": "error", "error": {"type": kind, "message": self.message, "details": details}}

    def response(self, path: str = "") -> Response:
        """Make the response in the shape of the API at ``path``, in ASCII, so that no client's characters break it."""
        body = self.anthropic_body if path.startswith(ANTHROPIC_ADDRESS) else self.body
        return Response(json.dumps(body), self.status, self.headers, "application/json")


def invalid(field: str | None, message: str) -> ApiError:
    """Make the error for a wrong value of a field."""
    return ApiError(400, message, "invalid_value", field)
