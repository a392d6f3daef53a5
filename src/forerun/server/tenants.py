"""Tenants, identified by their API keys, and the namespaces inside each."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

ONLY_TENANT = "default"
"""The tenant of a server without keys."""
SHARED_TENANT = "shared"
"""Replaces a tenant's name in namespaces that all tenants share."""
NAMESPACE_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"


class ApiKeys:
    """Digests of the tenants' keys and of an admin key; raises ValueError for an empty, repeated or invalid key."""

    def __init__(self, keys: Sequence[str] = (), admin: str | None = None) -> None:
        every = [*keys, *([] if admin is None else [admin])]
        for number, key in enumerate(every, start=1):
            if not key or not all("!" <= character <= "~" for character in key):
                raise ValueError(f"API key {number} is empty, or has characters other than ASCII without spaces")
        if len(set(every)) < len(every):
            raise ValueError("an API key is given twice; each tenant has its own")
        self._digests = [_digest(key.encode()) for key in keys]
        self._admin = None if admin is None else _digest(admin.encode())

    @property
    def tenants(self) -> list[str]:
        """The names of all tenants."""
        return [_tenant_name(digest) for digest in self._digests] or [ONLY_TENANT]

    def tenant(self, authorization: bytes | None) -> str | None:
        """Return the tenant of an ``Authorization`` header, or None, in constant time for all keys."""
        if not self._digests:
            return ONLY_TENANT
        given, tenant = _given(authorization), None
        for digest in self._digests:
            if hmac.compare_digest(digest, given):
                tenant = _tenant_name(digest)
        return tenant

    def admits(self, authorization: bytes | None) -> bool:
        """Return whether an ``Authorization`` header has the admin key; without any keys, always."""
        if self._admin is None:
            return not self._digests
        return hmac.compare_digest(self._admin, _given(authorization))


def full_namespace(tenant: str, name: str, share: bool = False) -> str:
    """Return the engine's name of a tenant's namespace; with ``share``, of one for all tenants."""
    return f"{SHARED_TENANT if share else tenant}/{name}"


def _tenant_name(digest: bytes) -> str:
    return "key-" + digest.hex()[:16]


def _given(authorization: bytes | None) -> bytes:
    scheme, _, key = (authorization or b"").partition(b" ")
    return _digest(key.strip()) if scheme.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.blake2b(key, digest_size=32, person=b"forerun tenant").digest()
