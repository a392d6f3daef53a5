"""Who asks: tenants by their API keys, and the namespaces inside each."""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Sequence

ALL = "default"
"""The only tenant of a server without keys."""

TOGETHER = "shared"
"""Stands where a tenant's name would, in namespaces that all tenants share. No tenant is called so."""

NAME = r"^[A-Za-z0-9._-]{1,64}$"
"""What a namespace may be called."""


class Keys:
    """Knows tenants by their keys, which it does not keep, and never says.

    Args:
        keys: one for each tenant; none lets everybody in, as one tenant.

    Raises:
        ValueError: for an empty key, one that a header cannot carry, or one given twice.
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        for number, key in enumerate(keys, start=1):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ValueError(f"API key {number} is empty, or has characters other than ASCII without spaces")
        if len(set(keys)) < len(keys):
            raise ValueError("an API key is given twice; each tenant has its own")
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def tenants(self) -> list[str]:
        """All of them."""
        return [_name(digest) for digest in self._digests] or [ALL]

    def tenant(self, authorization: bytes | None) -> str | None:
        """The tenant of an ``Authorization`` header; None if nobody has its key.

        It takes as long whichever key is right.
        """
        if not self._digests:
            return ALL
        scheme, _, key = (authorization or b"").partition(b" ")
        given, found = _digest(key.strip()), None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                found = _name(digest)
        return found if scheme.lower() == b"bearer" else None


class Namespaces:
    """The names that each tenant has used, up to so many: each has an index of its own.

    Args:
        limit: names of a tenant, at most.
        share: whether tenants draft from each other's outputs, and learn together: those of one name.
    """

    def __init__(self, limit: int, share: bool = False) -> None:
        self._limit, self._share = limit, share
        self._names: dict[str, set[str]] = {}
        self._lock = threading.Lock()

    def inside(self, tenant: str, name: str) -> str:
        """A name inside a tenant's own."""
        return f"{tenant}/{name}"

    def take(self, tenant: str, name: str) -> None:
        """A tenant uses a name.

        Raises:
            ValueError: if it is new, and the tenant has as many as it may.
        """
        with self._lock:
            names = self._names.setdefault(tenant, set())
            if name not in names and len(names) >= self._limit:
                raise ValueError(f"there are {len(names)} namespaces already, as many as may be; use one of them")
            names.add(name)

    def known(self, place: str, tenants: Sequence[str]) -> None:
        """Outputs are kept in a place (``learning``) from before: whose place it is has used that name."""
        whose, _, name = place.partition("/")
        for tenant in tenants:
            if whose in (tenant, TOGETHER):
                self._names.setdefault(tenant, set()).add(name)

    def learning(self, tenant: str, name: str) -> str:
        """Where outputs under a tenant's name are kept, and drafts come from."""
        return f"{TOGETHER if self._share else tenant}/{name}"


def _name(digest: bytes) -> str:
    return "key-" + digest.hex()[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=b"forerun tenant").digest()
