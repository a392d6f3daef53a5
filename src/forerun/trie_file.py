"""Tries on disk: versioned, checksummed, written atomically, and without pickle.

Layout: ``MAGIC``, version (uint32), SHA-256 of the rest, length of the header (uint32), the header (JSON: names and
node counts of the namespaces), then one little-endian int32 ``[3, nodes]`` per namespace, as ``ngrams.dump`` gives it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from forerun.ngrams import Int32Array

MAGIC = b"forerun trie\n"
VERSION = 1
_PREFIX = struct.Struct(f"<{len(MAGIC)}sI32sI")


class TrieFileError(ValueError):
    """The file is no trie of this version, or it is damaged."""


def write(path: str | os.PathLike[str], namespaces: Mapping[str, Int32Array]) -> None:
    """Replace ``path`` as a whole or not at all; others than its owner cannot read it.

    Raises:
        OSError: for example on a full disk; what ``path`` held before is still there.
    """
    path = Path(path)
    header = json.dumps([[name, rows.shape[1]] for name, rows in namespaces.items()]).encode()
    parts = [header, *(rows.astype("<i4").tobytes() for rows in namespaces.values())]
    size = struct.pack("<I", len(header))
    digest = hashlib.sha256(b"".join([size, *parts])).digest()
    try:
        _replace(path, [_PREFIX.pack(MAGIC, VERSION, digest, len(header)), *parts])
    except OSError as error:
        message = f"the trie was not saved ({error.strerror or error}); a file of that name is as it was"
        raise OSError(error.errno, message, str(path)) from error


def _replace(path: Path, parts: list[bytes]) -> None:
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the renaming last through a power cut, where folders can be synchronised."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: str | os.PathLike[str]) -> dict[str, Int32Array]:
    """What ``write`` was given.

    Raises:
        TrieFileError: if the file is truncated, altered, of another version, or something else.
        OSError: if it cannot be read.
    """
    data = Path(path).read_bytes()
    if not data.startswith(MAGIC):
        raise TrieFileError(f"{path} is not a trie file")
    if len(data) < _PREFIX.size:
        raise TrieFileError(f"{path} is truncated")
    _, version, digest, length = _PREFIX.unpack_from(data)
    if version != VERSION:
        raise TrieFileError(f"{path} has version {version}; this program reads version {VERSION}")
    if hashlib.sha256(data[_PREFIX.size - 4 :]).digest() != digest:
        raise TrieFileError(f"{path} is truncated or damaged: its checksum does not match")
    try:
        return _parse(data[_PREFIX.size :], length)
    except (ValueError, TypeError) as error:
        raise TrieFileError(f"{path} has no valid content: {error}") from error


def _parse(body: bytes, length: int) -> dict[str, Int32Array]:
    namespaces: dict[str, Int32Array] = {}
    offset = length
    for name, nodes in json.loads(body[:length]):
        rows = np.frombuffer(body, "<i4", 3 * nodes, offset).reshape(3, nodes)
        namespaces[str(name)] = rows.astype(np.int32)
        offset += rows.nbytes
    if offset != len(body):
        raise ValueError(f"{len(body) - offset} bytes too many")
    return namespaces
