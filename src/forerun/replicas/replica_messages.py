"""What goes between the front and the replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

Header = tuple[bytes, bytes]


@dataclass(frozen=True)
class Asked:
    """A client's request.

    Attributes:
        method, path, query, headers, body: as in HTTP.
        tenant: whose it is; what routes it has seen the key.
        beginnings: by which it is routed; see ``digests``.
    """

    method: str
    path: str
    query: bytes
    headers: Sequence[Header]
    body: bytes
    tenant: str | None = None
    beginnings: Sequence[bytes] = field(default=(), repr=False)


class Start(NamedTuple):
    """The head of an answer, and which replica gives it."""

    status: int
    headers: Sequence[Header]
    replica: str
