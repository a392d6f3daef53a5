"""Attention over chosen chunks as one call: for models that do not run as one program."""

from __future__ import annotations

import math

import numpy as np
import torch

from forerun.kernels.attention.ordered_attention import ROW, RowFields
from forerun.kernels.attention.topk_rank import SOUGHT, SOUGHT_OP, SoughtFields, SoughtOp, room
from forerun.kernels.runtime import addresses, executor
from forerun.kernels.runtime.addresses import Room, place
from forerun.kernels.runtime.vector_ir import LINE

KINDS = {torch.float32: 0, torch.bfloat16: 1}

Near = tuple[torch.Tensor, torch.Tensor, int]

_room = Room()


def attend_chosen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, worth: torch.Tensor, count: int, near: Near, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of ``q`` over the first chunk, up to ``count`` chunks by worth to each query, and the near keys.

    For tensors that ``fits`` accepts.

    Args:
        q: ``[1, H, n, d]``.
        k, v: ``[1, Hkv, m, d]``.
        worth: each chunk's best product of a key with the query, float32 ``[H, n, chunks]``; the first chunk's entry is
            overwritten. Of equal chunks the earlier ones are taken; chunks whose scaled product is more than ``MARGIN``
            below the best are skipped.
        count: the most chunks; less than there are.
        near: keys, values, and how many of them all queries see. One more chunk of finite numbers must follow them.
        scaling: factor on the scores.

    Returns:
        The output ``[1, H, n, d]`` and the log-sum-exp ``[1, H, n]``.
    """
    (_, heads, n, dim), kv_heads, kind = q.shape, k.shape[1], KINDS[k.dtype]
    asked, worth, chunks = q.float().transpose(1, 2).contiguous(), worth.contiguous(), worth.shape[2]
    out, lse = asked.new_empty(n, heads, dim), asked.new_empty(1, heads, n)
    rows = bytearray(ROW.size)
    ROW.layout.pack_into(rows, 0, *RowFields(0, n, n, near[2], *place(near[0])[1:], *place(near[1])[1:], 0, 0))
    row = 4 * chunks
    sought = SoughtFields(
        chunks, count, 0, 0, 0, 0, *place(k), *place(v), 0, 0, 0, worth.data_ptr(), heads // kv_heads * n * row, row
    )
    record = np.zeros(SOUGHT.size, np.uint8)
    SOUGHT.layout.pack_into(record.data, 0, *sought)
    kv, owners = np.array([near[0].data_ptr(), near[1].data_ptr()], np.int64), np.zeros(n, np.int64)
    op = SoughtOp(
        executor.DO_CHOOSE, kind, k.element_size(), heads, kv_heads, dim, asked.data_ptr(), 4 * heads * dim, 4 * dim,
        kv.ctypes.data, record.ctypes.data, 0, 0, out.data_ptr(), 4 * heads * dim, 0, lse.data_ptr(),
        scaling / math.log(2),
    )  # fmt: skip
    size = LINE * math.ceil(room(chunks, count, near[2], dim) / LINE)
    slots = _room.claim(size * torch.get_num_threads())
    where = {"rows": int(np.frombuffer(rows, np.uint8).ctypes.data), "owners": owners.ctypes.data}
    executor.Program([(SOUGHT_OP, op)]).run(n=n, **where, slots=slots, slot_size=size)
    return out.transpose(0, 1)[None].to(q.dtype), lse


def fits(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``attend_chosen`` can read these: float32 or bfloat16 on a CPU, in rows of a multiple of 16."""
    return q.dtype in KINDS and addresses.fits(q, k, v)
