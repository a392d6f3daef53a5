"""What attention kernels read of a pass: its rows, the units of a scan, and an operation's fields."""

from __future__ import annotations

from typing import NamedTuple

from forerun.core.compiling import compiled
from forerun.kernels.runtime.addresses import StructLayout, integers


class RowFields(NamedTuple):
    """One row of the batch."""

    first: int  # index of its first token in the pass
    n: int  # its tokens in the pass
    in_order: int  # number of them in sequence order; the others are tree nodes
    start: int  # committed tokens; the position of its first token
    k_head: int  # bytes between the keys of two heads
    k_row: int  # and of two tokens
    v_head: int
    v_row: int
    states: int  # offset of its states in the buffer of states
    splits: int  # states per tile; 0 if units visit all splits themselves


class UnitFields(NamedTuple):
    """A thread's unit of a scan: a row's split (or ``ALL_SPLITS``), and tiles ``first`` to ``last``."""

    row: int
    split: int
    first: int
    last: int


class AttendOp(NamedTuple):
    """One layer's attention: addresses, strides in bytes, and counts."""

    kind: int  # type of keys and values: 0 float32, 1 bfloat16, 2 float16
    width: int  # their bytes per number
    heads: int
    kv_heads: int
    dim: int
    out_dim: int
    window: int  # as in ``AttentionSpec``, or 0
    q: int  # float32
    q_row: int
    q_head: int
    kv: int  # table with each row's addresses of this layer's keys and values
    sinks: int  # one number per head, in the queries' type, or 0
    out: int  # a token's heads side by side
    out_row: int
    out_kind: int  # 0 float32, 1 bfloat16
    scale: float  # factor on scores, for powers of two (of e in float64)
    softcap: float
    topk: int = 0  # each row's ``TopkFields`` of this layer, if queries select keys


ROW_LAYOUT, UNIT_LAYOUT, ATTEND_LAYOUT = StructLayout(RowFields), StructLayout(UnitFields), StructLayout(AttendOp)
ROW_BYTES, UNIT_BYTES = ROW_LAYOUT.size, UNIT_LAYOUT.size
read_row, read_unit, read_attend = ROW_LAYOUT.reader(), UNIT_LAYOUT.reader(), ATTEND_LAYOUT.reader()
SCALE_OFFSET = 8 * AttendOp._fields.index("scale")


@compiled
def kv_of(op: AttendOp, row: RowFields, number: int, head: int) -> tuple[int, int]:
    """Return the addresses of a KV head's keys and values in row ``number``."""
    addresses = integers(op.kv + 16 * number, 2)
    return addresses[0] + head * row.k_head, addresses[1] + head * row.v_head
