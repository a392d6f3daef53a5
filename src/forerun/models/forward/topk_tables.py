"""A pass whose queries choose what they see, as the kernels see it (``kernels/sought.py``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from forerun.core.tree import IntArray
from forerun.kernels.attention import topk_rank
from forerun.kernels.attention.short_key_scan import GROUP
from forerun.kernels.attention.topk_rank import RANK_BYTES, SoughtFields
from forerun.kernels.runtime.vector_ir import LINE
from forerun.kv.cache import Addresses
from forerun.models.forward.packing import Packed

FIELDS = len(SoughtFields._fields)
CHUNKS, MOST, RANK, ASKED = (SoughtFields._fields.index(name) for name in ("chunks", "most", "rank", "asked"))


class Choice:
    """What all rows' queries choose among; it stands in for the units of ``Packed``.

    Args:
        packed: the blocks.
        rows: each row's addresses, with ``sought``.

    Attributes:
        units, unit_count: the table of units that rank chunks.
        slot_size: bytes that each thread needs.
        parts_size: bytes for all rows' rounded queries, and for the worth of chunks to them.
    """

    def __init__(self, packed: Packed, rows: Sequence[Addresses]) -> None:
        self._tables: list[IntArray] = [row.sought for row in rows if row.sought is not None]
        self._sizes: list[tuple[int, int, int, int]] = []  # by row: queries, bytes for them, units, bytes of a worth
        heads, ranked, self.slot_size, self.parts_size = packed.heads, [], 0, 0
        for table, row, count in zip(self._tables, rows, packed.counts, strict=True):
            chunks, most, rank = (int(table[0, field]) for field in (CHUNKS, MOST, RANK))
            chooses = most < chunks
            ranked.append(chunks if chooses else 0)
            asked, worth = topk_rank.asked(count, heads.group), 4 * GROUP * math.ceil(ranked[-1] / GROUP)
            queries = heads.kv_heads * asked
            self._sizes.append((asked, _lines(queries * rank), _lines(4 * queries), worth))
            self.parts_size += sum(self._sizes[-1][1:3]) + queries * worth
            self.slot_size = max(self.slot_size, topk_rank.room(chunks, most, row.place + count, heads.dim))
        self.units = topk_rank.rank_units(ranked)
        self.unit_count = len(self.units) // RANK_BYTES
        self._kv_heads = heads.kv_heads

    def fill(self, table: IntArray, memory: int) -> None:
        """Write all layers' and rows' fields, ``[layers, rows, ...]``; of the memory at an address it takes
        ``parts_size`` bytes."""
        for row, (own, (asked, queries, units, worth)) in enumerate(zip(self._tables, self._sizes, strict=True)):
            table[:, row, :ASKED] = own[:, :ASKED]
            place = memory + queries + units
            table[:, row, ASKED:FIELDS] = asked, memory, memory + queries, place, asked * worth, worth
            memory = place + self._kv_heads * asked * worth


def _lines(size: int) -> int:
    return LINE * math.ceil(size / LINE)
