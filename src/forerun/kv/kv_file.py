"""Tensors in a safetensors file that is mapped, not read: a prefix's keys and values, and the state of views.

Any safetensors reader can open it. The data start on a page, so that they can be mapped; each head has room after its
tokens (a hole, without disk space), so that a cache can use the mapping as its memory; and the header has checksums of
every run of bytes written, and of itself. CRC-32 detects damage, at 3.5 GB/s per core. Against tampering, a key selects
HMAC (SHA-256), at some 1 GB/s.
"""

from __future__ import annotations

import hmac
import json
import math
import mmap
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from forerun.kernels.attention.attention import Rows
from forerun.kv.shared_prefix import Kind, Layout, SharedPrefix, Tensors, map_private

SAFETENSORS_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_NAMES.items()}
LAYOUT_VERSION = "1"
"""Version of this layout, in the header's ``forerun``."""
HMAC_DIGITS = 32
"""Hexadecimal digits of an HMAC that are kept: 128 bits."""
WRITE_BYTES = 1 << 24
"""Bytes written and checksummed at a time, while in the processor's cache."""
MAX_HEADER_BYTES = 1 << 26
"""A larger header means damage."""


class DamagedFileError(ValueError):
    """The file is truncated, altered, of another kind, or written with another key."""


class Area(NamedTuple):
    """A tensor, and its shape in the file, with room in dimension 2."""

    name: str
    tensor: torch.Tensor
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.tensor.element_size()

    def runs(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield contiguous rows, with their offset in the area."""
        if list(self.shape) == list(self.tensor.shape):
            yield 0, self.tensor
            return
        heads = self.tensor.flatten(0, 1)
        for head, rows in enumerate(heads):
            yield head * self.nbytes // len(heads), rows


def text_areas(layers: Mapping[int, Rows], capacity: int) -> list[Area]:
    """Return areas for keys and values, ``[1, Hkv, length, d]`` each, with room for a cache of ``capacity`` tokens."""
    room = Layout.of(layers, capacity).capacity
    return [
        Area(f"{layer}.{name}", t, (*t.shape[:2], room, t.shape[3]))
        for layer, rows in layers.items()
        for name, t in zip(("keys", "values"), rows, strict=True)
    ]


def tensor_areas(tensors: Tensors) -> list[Area]:
    """Return areas for any tensors, widest numbers first, so that each is aligned to its width."""
    widest = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    return [Area(name, t, t.shape) for name, t in widest]


def write(file: int, areas: Sequence[Area], metadata: Mapping[str, str], key: bytes | None = None) -> None:
    """Fill an empty file with CPU tensors; the start of the header, written last, marks it as complete.

    ``metadata`` goes into the header. Checksums use ``key``, or CRC-32 without one. Raises OSError, as for a full disk.
    """
    runs = [(begin + at, rows.contiguous()) for begin, _, area in _placed(areas) for at, rows in area.runs()]
    size = sum(area.nbytes for area in areas)
    empty = _header(areas, metadata, [(at, rows.nbytes, _checksum([], key)) for at, rows in runs], key)
    os.ftruncate(file, len(empty) + size)
    sums = [(at, rows.nbytes, _checksum(_put(file, rows, len(empty) + at), key)) for at, rows in runs]
    _put_bytes(file, memoryview(_header(areas, metadata, sums, key)), 0)


def inode_of(file: int) -> tuple[int, int]:
    """Return device and inode number of an open file."""
    found = os.fstat(file)
    return found.st_dev, found.st_ino


def _checksum(pieces: Iterable[bytes | memoryview], key: bytes | None) -> str:
    """Return the hexadecimal checksum of bytes in pieces, whose length depends only on whether there is a key."""
    if key is None:
        total = 0
        for piece in pieces:
            total = zlib.crc32(piece, total)
        return f"{total:08x}"
    code = hmac.new(key, digestmod="sha256")
    for piece in pieces:
        code.update(piece)
    return code.hexdigest()[:HMAC_DIGITS]


def _header(
    areas: Sequence[Area], metadata: Mapping[str, str], runs: Sequence[tuple[int, int, str]], key: bytes | None
) -> bytes:
    """Return the header, whose length does not depend on the checksums."""
    checked = ",".join(f"{at}:{size}:{checksum}" for at, size, checksum in runs)
    own = _checksum([json.dumps([_shapes(areas), {**metadata}, checked]).encode()], key)
    metadata = {"forerun": LAYOUT_VERSION, **metadata, "checked": checked, "header": own}
    text = json.dumps({"__metadata__": metadata, **_shapes(areas)}).encode()
    page = mmap.ALLOCATIONGRANULARITY
    text += b" " * (-(len(text) + 8) % page)
    return len(text).to_bytes(8, "little") + text


def _shapes(areas: Sequence[Area]) -> dict[str, Any]:
    return {
        name: {"dtype": SAFETENSORS_NAMES[t.dtype], "shape": list(shape), "data_offsets": [begin, end]}
        for begin, end, (name, t, shape) in _placed(areas)
    }


def _placed(areas: Sequence[Area]) -> Iterator[tuple[int, int, Area]]:
    end = 0
    for area in areas:
        begin, end = end, end + area.nbytes
        yield begin, end, area


def _put(file: int, rows: torch.Tensor, place: int) -> Iterator[memoryview]:
    data = rows.reshape(-1).view(torch.uint8).numpy().data
    for first in range(0, len(data), WRITE_BYTES):
        piece = data[first : first + WRITE_BYTES]
        yield piece
        _put_bytes(file, piece, place + first)


def _put_bytes(file: int, data: memoryview, place: int) -> None:
    while data:
        count = os.pwrite(file, data, place)
        data, place = data[count:], place + count


class KVFile:
    """An open file made by ``write``, with its key and metadata; it may be removed or renamed meanwhile.

    Raises:
        DamagedFileError: if its header is damaged, or its size differs from the header's.
        OSError: if it cannot be read.
    """

    def __init__(self, path: Path, key: bytes | None = None) -> None:
        self._path, self._key = path, key
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file)
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise DamagedFileError(f"{path} has no header")
        try:
            self._parse(os.pread(self._file, length, 8))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedFileError(f"the header of {path} is damaged ({error})") from None
        self._first, self._size = 8 + length, max(each["data_offsets"][1] for each in self._shapes.values())
        size = os.fstat(self._file).st_size
        if size != self._first + self._size:
            raise DamagedFileError(f"{path} has {size} bytes; there should be {self._first + self._size}")

    def _parse(self, text: bytes) -> None:
        shapes = json.loads(text)
        metadata = shapes.pop("__metadata__")
        mark, checked, own = (metadata.pop(name) for name in ("forerun", "checked", "header"))
        expected = _checksum([json.dumps([shapes, metadata, checked]).encode()], self._key)
        if mark != LAYOUT_VERSION or not hmac.compare_digest(expected, own):
            raise ValueError("its checksum does not match")
        runs = [run.split(":") for run in checked.split(",")]
        self._own: str = own
        self.metadata: dict[str, str] = metadata
        self._shapes: dict[str, Any] = shapes
        self._runs = [(int(place), int(size), checksum) for place, size, checksum in runs]

    @property
    def identity(self) -> tuple[int, int, str]:
        """The file's inode and checksum; inode numbers may be reused."""
        return *inode_of(self._file), self._own

    def verify(self) -> None:
        """Compare all data with their checksums, on torch's threads; raise DamagedFileError if they differ."""
        data = map_private(self._file, self._size, self._first).numpy().data
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            sums = threads.map(lambda run: _checksum([data[run[0] : run[0] + run[1]]], self._key), self._runs)
        if not hmac.compare_digest(",".join(sums), ",".join(checksum for _, _, checksum in self._runs)):
            raise DamagedFileError(f"{self._path} is damaged: a checksum does not match")

    def prefix(self, length: int, read_state: Callable[[str], Tensors | None]) -> SharedPrefix:
        """Return the prefix of ``length`` tokens written by ``text_areas``; ``read_state`` as for ``SharedPrefix``."""
        kinds: dict[int, list[Kind]] = {}
        for name, each in self._shapes.items():
            _, heads, capacity, width = each["shape"]
            kinds.setdefault(int(name.partition(".")[0]), []).append((heads, width, TORCH_DTYPES[each["dtype"]]))
        layout = Layout({layer: tuple(both) for layer, both in kinds.items()}, capacity)
        return SharedPrefix(layout, length, os.dup(self._file), self._first, read_state)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors; writing to them stays in this process."""
        data, found = map_private(self._file, self._size, self._first), {}
        for name, each in self._shapes.items():
            start, end = each["data_offsets"]
            found[name] = data[start:end].view(TORCH_DTYPES[each["dtype"]]).view(each["shape"])
        return found
