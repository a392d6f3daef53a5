"""The checks of a server's answers, by which nonsense is tried, find what is wrong with one."""

from __future__ import annotations

import pytest
from support.malformed_requests import RawRequest
from support.response_checks import RawAnswer, wrong

SHOT = RawRequest("posted", (b"",))
GOOD = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'


def answer(status: int, body: bytes = b"", kind: bytes = b"application/json", complete: bool = True) -> RawAnswer:
    head = b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
    return RawAnswer(head + body, 1.0, complete)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (answer(200, b"{}"), None),
        (answer(400, GOOD), None),
        (answer(500, GOOD), "status 500"),
        (answer(503, GOOD), "status 503"),
        (answer(200, b"{}", complete=False), "it hangs"),
        (RawAnswer(b"", 1.0, True), "no answer"),
        (answer(400, b"Bad Request"), "OpenAI's shape"),
        (answer(400, b'{"error": {"message": ""}}'), "OpenAI's shape"),
        (answer(200, b"data: {}\n\ndata: [DONE]\n\n", b"text/event-stream"), None),
        (answer(200, b"data: {}\n\n", b"text/event-stream"), "a stream ends with"),
        (answer(200, b'data: {"error": {"type": "server_error"}}\n\n', b"text/event-stream"), "a stream ends with"),
        (
            answer(200, b'data: {"type": "response.completed", "code": "failed"}\n\n', b"text/event-stream"),
            "a stream ends",
        ),
    ],
)
def test_a_wrong_answer_is_found(given: RawAnswer, fault: str | None) -> None:
    found = wrong(SHOT, given)
    assert found is None if fault is None else fault in str(found)
