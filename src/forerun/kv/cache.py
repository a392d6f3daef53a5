"""The interface of a KV cache, one row of a batch for one model, and what caches do with the rows that they keep."""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from forerun.core.block import Block
from forerun.core.pinned import brought
from forerun.core.tree import IntArray
from forerun.kernels.attention.attention import AttentionSpec, Rows, attend_in_order
from forerun.kernels.runtime.addresses import head_rows
from forerun.kv.recurrent import RecurrentStates

if TYPE_CHECKING:
    from forerun.kv.full_cache import FullCache

READ_BLOCK = 512
"""The most tokens of a prompt that are read in one pass."""
ROLLBACK_TOKENS = 64
"""Tokens on trial that caches of drafts can take back by default: more than the usual draft length."""
MIN_SLACK_TOKENS = 512
"""The least number of tokens behind a window that are kept, so that a text can be taken back by as many. It is one
block of a prompt, and more than a block of attention, which is read whole where a window begins within it."""


CACHE_OPERATIONS = ("begin_with", "blank", "commit", "prepare", "share", "skip", "sync", "truncate", "verified")
"""Methods that change a cache between passes."""
OperationLog = Callable[["Cache", str, tuple[Any, ...], object], None]
"""Called with a cache, the name of an operation, its arguments and its result."""


@dataclass(frozen=True)
class LayerShape:
    """One layer's keys and values of a token.

    Attributes:
        heads: KV heads.
        dim, out_dim: numbers of a head's key, and of its value.
        width: bytes of a number.
        window: as in ``AttentionSpec``.
    """

    heads: int
    dim: int
    out_dim: int
    width: int
    window: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a token's key and value."""
        return self.heads * (self.dim + self.out_dim) * self.width


@dataclass(frozen=True)
class KVShape:
    """A model's keys and values of a token, by layer; layers that share those of another have none."""

    layers: Mapping[int, LayerShape]
    state_bytes: int = 0
    """Maximum bytes of a text's recurrent states."""

    @property
    def nbytes(self) -> int:
        """Bytes of a token's keys and values."""
        return sum(layer.nbytes for layer in self.layers.values())

    def released(self, tokens: int) -> int:
        """Maximum bytes of so many tokens' keys and values, if layers with windows release what they see no more."""
        return sum(
            layer.nbytes * (tokens if layer.window is None else min(tokens, most_rows(layer.window)))
            for layer in self.layers.values()
        )


@dataclass(frozen=True, eq=False)
class Addresses:
    """Where a program of kernels reads a cache's keys and values, and writes those of a block.

    Attributes:
        layers: addresses of the keys and values of each layer that has any, int64 ``[layers, 2]``.
        strides: in bytes: heads and rows of keys, heads and rows of values.
        place: index of the block's first token in this memory. The block sees all tokens before it.
        topk: one row of ``TopkFields`` per layer, int64, with 0 in the fields that depend on the pass. None if the
            queries choose no chunks.
    """

    layers: IntArray
    strides: tuple[int, int, int, int]
    place: int
    topk: IntArray | None = None


class Cache(ABC):
    """Keys and values of one row's committed tokens, and attention over them.

    A forward pass calls ``store`` once per layer, which writes the block's keys and values as a speculative tail, and
    attends to what ``store`` returns. ``commit`` then keeps the accepted part of the tail. Without ``commit``, a pass
    has no effect on the cache. A cache whose attention goes otherwise overrides ``attend`` instead of ``store``.
    """

    length: int
    """Committed tokens."""
    source: Cache | None = None
    """The cache that a sparse view reads; None for a cache that reads the text itself."""
    settled: int = 0
    """Tokens of a view that its source had committed at the last ``sync``; later ones are speculative."""
    log: OperationLog | None = None
    """Called after each of ``CACHE_OPERATIONS`` that succeeds, so that a cache in another process can repeat it. An
    operation inside another one is not logged."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in CACHE_OPERATIONS:
            if name in vars(cls):
                setattr(cls, name, _logged(vars(cls)[name]))

    @property
    def full(self) -> FullCache | None:
        """This cache, if it holds all tokens of its sequence, each at its place; None for any other. Passes read and
        write such a cache layer by layer, and leave queries there that sparse views choose by."""
        return None

    @property
    def ready(self) -> bool:
        """Whether a view's source has read enough for the view to work."""
        return True

    @property
    def whole(self) -> bool:
        """Whether a view holds all tokens of its source, so that reading through it saves nothing."""
        return False

    def prepare(self, tokens: int) -> bool:
        """Do a part of the work of a view's first ``sync``, in about the time in which the target reads ``tokens``
        tokens. Returns whether all is done."""
        return True

    def sync(self) -> None:  # noqa: B027
        """Drop a view's speculative tokens, and follow its source."""

    def verified(self, rows: Sequence[int], drafted: int, accepted: int) -> None:  # noqa: B027
        """Tell a view that its source has verified and committed a draft that was made with it.

        Args:
            rows: indices of the accepted tokens' queries in ``source.queries``.
            drafted, accepted: number of tokens.
        """

    def positions(self, block: Block) -> IntArray:
        """The position that the model sees for each token of the block: its place in the text, unless the cache
        renumbers tokens."""
        return block.positions

    def store(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> Rows | None:
        """Write a block's keys and values; arguments as for ``attend``.

        Returns:
            Keys and values that the block attends to, in order, its own last: ``[1, Hkv, m, d]`` and
            ``[1, Hkv, m, dv]``. The layer's window measures distances in them. None if only ``attend`` can compute the
            attention.
        """
        return None

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, spec: AttentionSpec
    ) -> torch.Tensor:
        """Attention of the block's queries over the committed tokens, and over the block itself with its tree mask.

        Args:
            layer: index of the layer.
            q: queries with rotary positions applied, ``[1, H, n, d]``.
            k, v: the block's keys (rotary positions applied) and values, ``[1, Hkv, n, d]``.
            block: ``block.start`` equals ``length``.
            spec: the layer's attention parameters.

        Returns:
            ``[1, H, n, dv]``.
        """
        rows = self.store(layer, q, k, v, block, spec)
        if rows is None:
            raise NotImplementedError(f"{type(self).__name__} has neither store nor attend")
        return attend_in_order(q, [rows], [block], spec)

    def recurrent(self) -> RecurrentStates:
        """States of the row's recurrent layers after ``length`` tokens.

        Raises:
            NotImplementedError: if the cache keeps none.
        """
        raise NotImplementedError(f"a {type(self).__name__} keeps no states of recurrent layers")

    def addressed(self, layers: Sequence[int], like: torch.Tensor, count: int) -> Addresses | None:
        """Room for a block of ``count`` tokens, for kernels that write their keys and values and attend to them.

        Args:
            layers: of the model that have keys and values.
            like: keys of any tokens, ``[1, Hkv, m, d]``; values have the same shape and type.
            count: tokens of the block.

        Returns:
            None if only ``attend`` can compute the attention.
        """
        return None

    def next_read(self, goal: int) -> int:
        """How many tokens to read next on the way to a length of ``goal``.

        A cache may first skip tokens that it would evict anyway; that increases ``length``.

        Returns:
            At least 1 while ``length < goal``: tokens to read, from ``length`` on.
        """
        return goal - self.length

    @abstractmethod
    def commit(self, block: Block, path: Sequence[int]) -> None:
        """Keep the block's pending tokens and the tree nodes of ``path``."""

    @abstractmethod
    def truncate(self, length: int) -> None:
        """Drop the committed tokens from ``length`` on. With recurrent layers more may have to go, if it goes far back;
        see ``RecurrentStates.truncate``."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes held."""

    def needs(self, shape: KVShape, tokens: int) -> int:
        """Upper bound of the bytes it holds for a text of ``tokens`` tokens, known before it holds any.

        Args:
            shape: of the model that it is for.
            tokens: of the text at its longest, drafts included.
        """
        return shape.nbytes * tokens


def _logged(operation: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, with a call of ``Cache.log`` after it."""

    @functools.wraps(operation)
    def run(self: Cache, *arguments: Any) -> Any:
        log = self.log
        if log is None:
            return operation(self, *arguments)
        self.log = None
        try:
            result = operation(self, *arguments)
        finally:
            self.log = log
        log(self, operation.__name__, arguments, result)
        return result

    return run


def append(rows: Rows | None, new: Rows, held: int, capacity: int, first: int = 0) -> Rows:
    """Write ``new`` after the first ``held`` rows; if they do not fit, move to a buffer for ``capacity`` tokens; see
    ``reserve``."""
    end = held + new[0].shape[2]
    rows = reserve(rows, new, held, end, capacity, first)
    for room, part in zip(rows, new, strict=True):
        room[:, :, held:end] = part
    return rows


def reserve(rows: Rows | None, like: Rows, held: int, end: int, capacity: int, first: int = 0) -> Rows:
    """Rows with room for ``end`` tokens: these, or their first ``held`` in a new buffer for ``capacity`` tokens, whose
    shape is otherwise that of ``like``. Rows before ``first`` are not copied: nobody reads them."""
    if rows is not None and rows[0].shape[2] >= end:
        return rows
    grown = tuple(t.new_empty(*t.shape[:2], max(capacity, end), *t.shape[3:]) for t in like)
    for old, room in zip(rows or (), grown, strict=bool(rows)):
        room[:, :, first:held] = old[:, :, first:held]
    return grown


def stacked(likes: Iterable[Rows], room: int) -> torch.Tensor | None:
    """Memory in one piece for the rows of layers that are alike, ``[layers, 2, Hkv, room, d]``; None if they are not.

    Args:
        likes: keys and values of any tokens of each layer.
        room: tokens.
    """
    rows = list(likes)
    first = rows[0][0]
    if {(*t.shape[:2], t.shape[3]) for both in rows for t in both} != {(1, first.shape[1], first.shape[3])}:
        return None
    return first.new_empty(len(rows), 2, first.shape[1], room, first.shape[3])


def addresses_of(rows: Sequence[Rows], index: int, topk: IntArray | None = None) -> Addresses | None:
    """Where a program finds each layer's keys and values; see ``Addresses``. None if the layers' strides differ, as a
    pass that failed half-way may leave them."""
    keys, values = rows[0]
    if any(k.stride() != keys.stride() or v.stride() != values.stride() for k, v in rows):
        return None
    found = np.array([[k.data_ptr(), v.data_ptr()] for k, v in rows], np.int64)
    return Addresses(found, (*head_rows(keys)[1:], *head_rows(values)[1:]), index, topk)


def compact(rows: Rows, start: int, path: Sequence[int]) -> None:
    """Move the nodes of ``path`` side by side. The tree starts at row ``start``; a chain needs no move."""
    if list(path) == list(range(len(path))):
        return
    chosen = brought(torch.tensor([start + node for node in path]), rows[0].device)
    for t in rows:
        t[:, :, start : start + len(path)] = t.index_select(2, chosen)


def releases(device: str) -> bool:
    """Whether memory on this type of device can be given back in parts, while its addresses stay."""
    return device == "cpu" and sys.platform == "linux"


def slack(window: int) -> int:
    """Tokens behind a window that are kept: as many as it sees."""
    return max(window, MIN_SLACK_TOKENS)


def most_rows(window: int) -> int:
    """The most rows of a layer with this window that are kept: it grows by its slack before it releases as much, and a
    block of a prompt may come just then."""
    return window + 2 * slack(window) + MIN_SLACK_TOKENS


def release(rows: Rows, first: int, last: int, file: bool) -> None:
    """Give the whole pages of rows ``first`` to ``last`` (not included) back to the operating system (``madvise``).

    A layer with a sliding window sees the last tokens only. What lies before them stays a part of the cache's memory,
    so that no kernel and no index has to know. Read again, it would be zeros.

    Args:
        rows: keys ``[1, Hkv, m, d]`` and values, in memory of this process.
        first, last: numbers of rows.
        file: whether the memory is that of a file that nobody else reads.
    """
    advice = mmap.MADV_REMOVE if file else mmap.MADV_DONTNEED
    for t in rows:
        width = t.element_size()
        for head in range(t.shape[1]):
            start = t.data_ptr() + width * head * t.stride(1)
            begin = _page(start + width * first * t.stride(2) + mmap.PAGESIZE - 1)
            end = _page(start + width * last * t.stride(2))
            if end > begin and _madvise()(begin, end - begin, advice) != 0:
                return  # then it is kept, as elsewhere


def _page(address: int) -> int:
    """Where the page of an address begins."""
    return address // mmap.PAGESIZE * mmap.PAGESIZE


@functools.cache
def _madvise() -> Callable[[int, int, int], int]:
    found = ctypes.CDLL(None, use_errno=True).madvise
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found
