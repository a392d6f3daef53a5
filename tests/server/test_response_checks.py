"""The checks of a server's answers, by which nonsense is tried, find what is wrong with one."""

from __future__ import annotations

import pytest
from support.malformed_requests import RawRequest
from support.response_checks import RawAnswer, wrong

SHOT = RawRequest("posted", (b"",))
GOOD = b'{"error": {"message": "no", "type": "x", "param": null, "code": null}}'
JSON, STREAM = b"application/json", b"text/event-stream"


@pytest.mark.parametrize(("status", "body", "kind", "fault"), [
    (200, b"{}", JSON, None), (400, GOOD, JSON, None), (500, GOOD, JSON, "status 500"), (503, GOOD, JSON, "status 503"),
    (400, b"Bad Request", JSON, "OpenAI's shape"), (400, b'{"error": {"message": ""}}', JSON, "OpenAI's shape"),
    (200, b"data: {}\n\ndata: [DONE]\n\n", STREAM, None), (200, b"data: {}\n\n", STREAM, "a stream ends with"),
    (200, b'data: {"error": {"type": "server_error"}}\n\n', STREAM, "a stream ends with"),
    (200, b'data: {"type": "response.completed", "code": "failed"}\n\n', STREAM, "a stream ends"),
])  # fmt: skip
def test_a_wrong_answer_is_found(status: int, body: bytes, kind: bytes, fault: str | None) -> None:
    head = b"HTTP/1.1 %d OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (status, kind, len(body))
    found = wrong(SHOT, RawAnswer(head + body, 1.0, True))
    assert found is None if fault is None else fault in str(found)
    assert "it hangs" in str(wrong(SHOT, RawAnswer(head + body, 1.0, False)))
    assert wrong(SHOT, RawAnswer(b"", 1.0, True)) == "no answer"
