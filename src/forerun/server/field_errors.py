"""Describe the wrong fields of a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from forerun.server.api_errors import ApiError
from forerun.server.tolerance import NEUTRAL

LISTED_FAULTS = 8
"""Maximum faults in one error."""


def validation_error(
    errors: Sequence[Any], names: Callable[[bool], Collection[str]], renamed: Mapping[str, str]
) -> ApiError:
    """Merge pydantic's errors about a request, with ``renamed`` fields; ``param`` and ``code`` are the first one's.

    The message repeats only field names of the client's. For an unknown field it suggests the nearest of ``names``:
    the request's fields, or with True those inside them.
    """
    errors = [{**each, "loc": tuple(renamed.get(str(part), part) for part in each["loc"])} for each in errors]
    first = errors[0]
    code = "unsupported" if first["type"] in ("unsupported", "extra_forbidden") else "invalid_value"
    message = "; ".join(_fault(each, names) for each in errors[:LISTED_FAULTS])
    if len(errors) > LISTED_FAULTS:
        message += f"; and {len(errors) - LISTED_FAULTS} more fields are wrong"
    # a check of several fields has no location, and is named after the one to change
    named = first["type"] if first["type"] in {*names(False), *names(True)} else None
    return ApiError(400, message, code, _field(first) or named)


def _field(error: Any) -> str | None:
    return ".".join(map(str, error["loc"])) or None


def _fault(error: Any, names: Callable[[bool], Collection[str]]) -> str:
    message = str(error["msg"])
    if error["type"] == "extra_forbidden":
        near = get_close_matches(str(error["loc"][-1])[:64], sorted(names(len(error["loc"]) > 1)), 1)
        message = f"there is no such field; did you mean {near[0]}?" if near else "there is no such field"
        if len(error["loc"]) == 1 and error["loc"][0] in NEUTRAL:
            message = "it is not supported; leave it out"
    message = message[:1].lower() + message[1:]
    field = _field(error)
    return f"{field}: {message}" if field else message
