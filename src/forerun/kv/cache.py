"""The interface of a KV cache for one row and one model, and operations on cached rows."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.pinned import to_device
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows, attend_in_order
from forerun.kernels.runtime.addresses import head_rows
from forerun.kv.recurrent import RecurrentStates

if TYPE_CHECKING:
    from forerun.kv.full_cache import FullCache

READ_BLOCK = 512
ROLLBACK_TOKENS = 64
"""Draft tokens that draft caches can roll back by default: more than usual drafts have."""
MIN_SLACK_TOKENS = 512
"""Minimum tokens kept beyond a window for rolling back: a prompt block, and more than a block of attention, which is
read entirely if a window starts inside it."""


CACHE_OPERATIONS = ("begin_with", "blank", "commit", "prepare", "share", "skip", "sync", "truncate", "verified")
"""Methods that change a cache between passes."""
OperationLog = Callable[["Cache", str, tuple[Any, ...], object], None]
"""Receives a cache, an operation's name, its arguments and its result."""


@dataclass(frozen=True)
class LayerShape:
    """One layer's KV heads, key and value size, bytes per number, and window (see ``AttentionSpec``)."""

    heads: int
    dim: int
    out_dim: int
    width: int
    window: int | None = None

    @property
    def nbytes(self) -> int:
        return self.heads * (self.dim + self.out_dim) * self.width


@dataclass(frozen=True)
class KVShape:
    """A model's keys and values of a token, by layer. Layers that share another's have none."""

    layers: Mapping[int, LayerShape]
    state_bytes: int = 0
    """Maximum bytes of a sequence's recurrent states."""

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    def released(self, tokens: int) -> int:
        """Return the maximum bytes of ``tokens`` tokens if layers release keys outside of their windows."""
        return sum(
            layer.nbytes * (tokens if layer.window is None else min(tokens, most_rows(layer.window)))
            for layer in self.layers.values()
        )


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where compiled kernels read a cache's keys and values, and write those of a block.

    Attributes:
        layers: addresses of the keys and values of each layer that has any, int64 ``[layers, 2]``.
        place: index of the block's first token in this memory. The block sees all tokens before it.
        position: that token's position for the model.
        topk: ``TopkFields`` by layer, int64, with 0 in the fields that depend on the pass; None if queries select no
            chunks.
    """

    layers: IntArray
    strides: tuple[int, int, int, int]
    place: int
    position: int
    topk: IntArray | None = None


class Cache(ABC):
    """Keys and values of one row's committed tokens, and attention over them.

    A forward pass calls ``store`` once per layer, which writes the block's keys and values as a speculative tail, and
    attends to the result. ``commit`` keeps the accepted part; without it, a pass has no effect. A cache with another
    kind of attention overrides ``attend`` instead.
    """

    length: int
    """Committed tokens."""
    source: Cache | None = None
    """The cache that a sparse view reads, if this is one."""
    synced: int = 0
    """Tokens that a view's source had committed at the last ``sync``; later ones are speculative."""

    def log_to(self, log: OperationLog) -> None:
        """Call ``log`` after each outermost of ``CACHE_OPERATIONS``, so that a cache in another process can repeat
        it."""
        under_way = list[str]()
        for name in CACHE_OPERATIONS:
            setattr(self, name, partial(_logged, weakref.ref(self), name, log, under_way))

    @property
    def full(self) -> FullCache | None:
        """This cache, if it holds all tokens in place for passes to read and write layer by layer; else None."""
        return None

    @property
    def ready(self) -> bool:
        """Whether a view's source has enough tokens for the view to work."""
        return True

    @property
    def whole(self) -> bool:
        """Whether a view holds all tokens of its source, so that it saves nothing."""
        return False

    def prepare(self, tokens: int) -> bool:
        """Do part of a view's first ``sync``, in about the time of ``tokens`` tokens' prefill; return whether done."""
        return True

    def sync(self) -> None:  # noqa: B027
        """Drop a view's speculative tokens, and follow its source."""

    def verified(self, rows: Sequence[int], drafted: int, accepted: int) -> None:  # noqa: B027
        """Report that the source has committed a draft of this view; ``rows`` index ``source.queries`` of accepted
        tokens."""

    @property
    def position(self) -> int:
        """The next block's first position for the model, if the cache renumbers tokens."""
        return self.length

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows | None:
        """Write a block's keys and values; arguments as for ``attend``.

        Returns:
            Keys and values that the block attends to, its own last: ``[1, Hkv, m, d]`` and ``[1, Hkv, m, dv]``. The
                layer's window measures distances in them. None if only ``attend`` can compute the attention.
        """
        return None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attend from the block's queries to the committed tokens, and to the block with its tree mask.

        Args:
            q: queries with rotary positions applied, ``[1, H, n, d]``.
            k, v: the block's keys (rotary positions applied) and values, ``[1, Hkv, n, d]``.

        Returns:
            ``[1, H, n, dv]``.
        """
        rows = self.store(layer, q, k, v, block, spec)
        if rows is None:
            raise NotImplementedError(f"{type(self).__name__} has neither store nor attend")
        return attend_in_order(q, [rows], [block], spec)

    def recurrent(self) -> RecurrentStates:
        """Return the states of the row's recurrent layers; raise NotImplementedError without any."""
        raise NotImplementedError(f"a {type(self).__name__} keeps no states of recurrent layers")

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int) -> Addresses | None:
        """Make room for a block of ``count`` tokens, whose keys and values kernels write and attend to.

        ``like`` are any keys, ``[1, Hkv, m, d]``; values have their shape and type. None if only ``attend`` can do it.
        """
        return None

    def next_read(self, goal: int) -> int:
        """Return how many tokens to prefill next on the way to a length of ``goal``, at least 1 until then. A cache may
        first skip tokens that it would evict anyway, which increases ``length``."""
        return goal - self.length

    @abstractmethod
    def commit(self, block: Block, path: Sequence[int]) -> None:
        """Keep the block's pending tokens and the tree nodes of ``path``."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Drop committed tokens from ``length`` on; recurrent layers may drop more."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    def needs(self, shape: KVShape, tokens: int) -> int:
        """Return an upper bound of the bytes for a sequence of ``tokens`` tokens, drafts included."""
        return shape.nbytes * tokens


def _logged(held: weakref.ref[Cache], name: str, log: OperationLog, under_way: list[str], *arguments: Any) -> Any:
    cache = held()
    assert cache is not None
    under_way.append(name)
    try:
        result = getattr(type(cache), name)(cache, *arguments)
    finally:
        under_way.pop()
    if not under_way:
        log(cache, name, arguments, result)
    return result


def append(rows: Rows | None, new: Rows, held: int, capacity: int, first: int = 0) -> Rows:
    """Write ``new`` after the first ``held`` rows; for a new buffer, see ``reserve``."""
    end = held + new[0].shape[2]
    rows = reserve(rows, new, held, end, capacity, first)
    for room, part in zip(rows, new, strict=True):
        room[:, :, held:end] = part
    return rows


def reserve(rows: Rows | None, like: Rows, held: int, end: int, capacity: int, first: int = 0) -> Rows:
    """Return rows with room for ``end`` tokens: these, or a new buffer like ``like`` for ``capacity`` tokens with the
    first ``held``. Rows before ``first`` are not copied."""
    if rows is not None and rows[0].shape[2] >= end:
        return rows
    grown = tuple(t.new_empty(*t.shape[:2], max(capacity, end), *t.shape[3:]) for t in like)
    for old, room in zip(rows or (), grown, strict=bool(rows)):
        room[:, :, first:held] = old[:, :, first:held]
    return grown


def stacked(likes: Iterable[Rows], room: int) -> torch.Tensor | None:
    """Allocate one piece of memory for layers like these, ``[layers, 2, Hkv, room, d]``; None if they differ."""
    rows = list(likes)
    first = rows[0][0]
    if {(*t.shape[:2], t.shape[3]) for both in rows for t in both} != {(1, first.shape[1], first.shape[3])}:
        return None
    return first.new_empty(len(rows), 2, first.shape[1], room, first.shape[3])


def addresses_of(rows: Sequence[Rows], index: int, position: int, topk: IntArray | None = None) -> Addresses | None:
    """Return where kernels find each layer's keys and values; None if strides differ, as after a failed pass."""
    keys, values = rows[0]
    if any(k.stride() != keys.stride() or v.stride() != values.stride() for k, v in rows):
        return None
    found = np.array([[k.data_ptr(), v.data_ptr()] for k, v in rows], np.int64)
    return Addresses(found, (*head_rows(keys)[1:], *head_rows(values)[1:]), index, position, topk)


def compact(rows: Rows, start: int, path: Sequence[int]) -> None:
    """Move the nodes of ``path`` together. The tree starts at row ``start``; a chain needs no move."""
    if list(path) == list(range(len(path))):
        return
    chosen = to_device(torch.tensor([start + node for node in path]), rows[0].device)
    for t in rows:
        t[:, :, start : start + len(path)] = t.index_select(2, chosen)


def releases(device: str) -> bool:
    """Return whether parts of memory on this type of device can be released while addresses stay."""
    return device == "cpu" and sys.platform == "linux"


def slack(window: int) -> int:
    """Return the number of tokens kept beyond a window."""
    return max(window, MIN_SLACK_TOKENS)


def most_rows(window: int) -> int:
    """Return a layer's maximum rows: it grows by its slack, then releases as much; a block may come before that."""
    return window + 2 * slack(window) + MIN_SLACK_TOKENS


def release(rows: Rows, first: int, last: int, file: bool) -> None:
    """Return the complete pages of rows ``first`` to before ``last`` to the operating system (``madvise``).

    They stay mapped and read as zeros, so that kernels and indices stay valid. ``file``: whether it is a private file.
    """
    advice = mmap.MADV_REMOVE if file else mmap.MADV_DONTNEED
    for t in rows:
        width = t.element_size()
        for head in range(t.shape[1]):
            start = t.data_ptr() + width * head * t.stride(1)
            begin = _page(start + width * first * t.stride(2) + mmap.PAGESIZE - 1)
            end = _page(start + width * last * t.stride(2))
            if end > begin and _madvise()(begin, end - begin, advice) != 0:
                return  # keep it, as on other systems


def _page(address: int) -> int:
    return address // mmap.PAGESIZE * mmap.PAGESIZE


@cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
