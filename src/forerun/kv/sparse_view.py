"""Sparse caches over a full one: they see a part of the target's cache, and add speculative tokens to it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from forerun.core.block import Block
from forerun.kv.cache import Cache
from forerun.kv.full_cache import FullCache
from forerun.kv.shared_prefix import Tensors

LOOKED_AT = 32
"""Keys that a view looks at in about the time in which the target reads one token of a long text. It is a rough figure:
it keeps pieces of 8,192 keys where steps read 256 tokens, and was not measured at other values. Who bounds the time of
a step goes by what it measures."""


class View(Cache):
    """A sparse view of one row's full cache, for the same model.

    Tokens committed here are speculative. ``sync`` drops them and takes what the full cache has committed since, so
    that all settled keys come from full attention.

    Args:
        source: the target's cache; read, never changed.
    """

    keepsake: str | None = None
    """The name by which ``made`` is kept with a text; None if nothing is dear enough to be kept."""

    asks = False
    """Whether it chooses by the queries of the source's last pass."""

    copies = False
    """Whether it copies what it chooses. A view that reads the source's own memory in each of its passes is no use over
    an offloaded cache."""

    def __init__(self, source: FullCache) -> None:
        if source.offloaded and not self.copies:
            raise ValueError(
                f"a {type(self).__name__} reads all keys in each of its passes, and some are not on the device; "
                "allowed is one that copies what it chooses: low-rank or retrieval, or a small model of its own"
            )
        self.source = source
        source.views.add(self)
        self.length = 0
        self.settled = 0
        """Tokens that the source had committed at the last ``sync``; later ones are speculative."""

    @property
    def ready(self) -> bool:
        """Whether the source has read enough for this view to work."""
        return bool(self.source.layers)

    @property
    def whole(self) -> bool:
        """Whether the view holds all that the source holds. Reading through it then saves nothing."""
        return False

    def prepare(self, tokens: int) -> bool:
        """Do a piece of what the first ``sync`` needs, in about the time in which the target reads so many tokens.

        Returns:
            Whether all is done.
        """
        return True

    def made(self, length: int) -> Tensors:
        """What it has made of the text's first ``length`` tokens and would be dear to make again, for a later view of
        the same ``keepsake`` over a text that begins so: it finds it by ``source.kept``. Not to be changed."""
        return {}

    @abstractmethod
    def sync(self) -> None:
        """Drop speculative tokens and follow the source."""

    def verified(self, rows: Sequence[int], drafted: int, accepted: int) -> None:
        """Called when the source has verified and committed a draft that was made with this view.

        Args:
            rows: indices of the accepted tokens' queries in ``source.queries``.
            drafted, accepted: number of tokens.
        """

    def commit(self, block: Block, path: Sequence[int]) -> None:
        """See ``Cache.commit``."""
        start = self.length + len(block.pending)
        self._compact(start, path)
        self.length = start + len(path)

    def truncate(self, length: int) -> None:
        """See ``Cache.truncate``; only speculative tokens can be dropped."""
        if not self.settled <= length <= self.length:
            raise ValueError(f"length is {length}; it must be between {self.settled} and {self.length}")
        self.length = length

    @abstractmethod
    def _compact(self, start: int, path: Sequence[int]) -> None:
        """Move the nodes of ``path``, of a tree at position ``start``, side by side; all are speculative."""
