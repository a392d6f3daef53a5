"""Compute attention over the caches of a pass's rows: in a fixed order where kernels run, else with torch.

With torch, attention merges two states (output, log-sum-exp): over the prefix without a mask, and over the block with
its ancestor mask. The merge is exact in real numbers (the recurrence of FlashAttention, Dao et al. 2022;
``merge_state`` in FlashInfer), so no mask of block x prefix is built, and nothing is concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from forerun.core import sampling_kernels
from forerun.core.block import Block
from forerun.core.tree import DraftTree, IntArray
from forerun.kernels import gpu
from forerun.kernels.attention.attention_fields import AttendOp
from forerun.kernels.attention.float64_attention import ATTEND_FLOAT64, FLOAT64_KIND
from forerun.kernels.attention.ordered_attention import COMBINE, SCAN
from forerun.kernels.attention.packed_pass import HeadShape, PackedPass, TopkTables
from forerun.kernels.attention.sparse_compilation import compile_sparse
from forerun.kernels.attention.topk_attention import ATTEND_TOPK
from forerun.kernels.attention.topk_rank import PROJECT_QUERIES, RANK_CHUNKS, TOPK_BYTES
from forerun.kernels.linear.ordered_modules import unwatched
from forerun.kernels.runtime import addresses, executor, vector_ir
from forerun.kernels.runtime.addresses import address_of, head_rows
from forerun.kernels.runtime.executor import Operation, Program

CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: FLOAT64_KIND}
TOPK_DTYPES = (torch.float32, torch.bfloat16)
Rows = tuple[torch.Tensor, ...]
"""Keys, values and other tensors that a cache keeps per token, in dimension 2: ``[1, Hkv, m, ...]``."""
Packings = dict[Any, Any]
"""Tables of a pass by what they depend on: a ``PackedPass``, or on a GPU a ``PassDescription``."""


class AttentionState(NamedTuple):
    """Attention over some keys: weighted values, ``[1, H, n, d]``, and the scores' log-sum-exp, ``[1, H, n]``."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's attention parameters."""

    scaling: float
    window: int | None = None  # a query sees keys with ``key position > position - window``
    softcap: float | None = None  # scores become softcap * tanh(score / softcap) (Gemma 2)
    sinks: torch.Tensor | None = field(default=None, compare=False)  # a score per head, ``[H]``, without a value


def attend_in_order(
    q: torch.Tensor,
    rows: Sequence[Rows],
    blocks: Sequence[Block],
    spec: AttentionSpec,
    packings: Packings | None = None,
) -> torch.Tensor:
    """Compute attention of queries over their rows' keys, ``[1, H, n, dv]``. A window counts distances in rows.

    ``q``: of all rows side by side, ``[1, H, n, d]``. ``rows``: each row's keys and values in order, its block's last,
    ``[1, Hkv, m, d]`` and ``[1, Hkv, m, dv]``, in the queries' type, or in bfloat16 if that is float32. ``packings``:
    tables that layers of one pass share; filled here.
    """
    places = tuple(keys.shape[2] - len(block) for (keys, _), block in zip(rows, blocks, strict=True))
    heads = HeadShape(q.shape[1], rows[0][0].shape[1], q.shape[3], rows[0][1].shape[3])
    known = {} if packings is None else packings
    if gpu.runs_on(q.device) and torch.float64 != q.dtype == rows[0][0].dtype:
        return _attend_on_gpu(q, rows, [_placed(*each) for each in zip(blocks, places, strict=True)], spec, known)
    packed = known.get((heads, places))
    if packed is None:
        placed = [_placed(*each) for each in zip(blocks, places, strict=True)]
        packed = known[heads, places] = PackedPass(placed, heads, torch.get_num_threads())
    if takes(q, *rows[0]):
        operations = (SCAN, COMBINE) if fast(*rows[0]) else (ATTEND_FLOAT64,)
        with unwatched():
            return _run(operations, q, rows, packed, spec)
    split = torch.split(q, packed.counts, 2)
    parts = [states_in_order(*each, spec) for each in zip(split, rows, packed.blocks, strict=True)]
    return torch.cat([merge(*states, sinks=spec.sinks) for states in parts], 2)


def _attend_on_gpu(
    q: torch.Tensor, rows: Sequence[Rows], blocks: Sequence[Block], spec: AttentionSpec, known: Packings
) -> torch.Tensor:
    from forerun.kernels.gpu import attend
    from forerun.kernels.gpu.pass_tables import PassDescription, PassTables, scan_programs

    q, *kv = (contiguous_numbers(t) for t in (q, *(t for each in rows for t in each[:2])))
    keys, values = kv[0], kv[1]
    addresses = np.array([t.data_ptr() for t in kv], np.int64).reshape(1, len(rows), 2)
    strides = np.array([t.stride()[1:3] for t in kv], np.int64).reshape(1, len(rows), 4)
    group = q.shape[1] // keys.shape[1]
    programs = scan_programs(q.device, keys.shape[1])
    key = group, programs, *((block.start, len(block)) for block in blocks)
    if key not in known:
        known[key] = PassDescription(blocks, addresses, strides, group, programs)
    places = PassTables.of(known[key].moved(addresses, strides), q.device)
    return attend.attend(0, q, keys.shape[1], places, spec, values.shape[3])


def contiguous_numbers(t: torch.Tensor) -> torch.Tensor:
    """Return heads ``[1, H, n, d]`` with stride 1 in d, copied if necessary."""
    return t if t.stride(3) == 1 else t.contiguous()


def attend_topk(q: torch.Tensor, rows: Rows, block: Block, topk: IntArray, spec: AttentionSpec) -> torch.Tensor:
    """Compute attention of one row's queries ``[1, H, n, d]`` over recent keys and the chunks that each query selects.
    ``rows``: recent keys and values, the block's last; a chunk of finite numbers must follow in memory. ``topk``: the
    fields of a ``TopkFields`` as one row, with 0 in those of the pass."""
    heads = HeadShape(q.shape[1], rows[0].shape[1], q.shape[3], rows[1].shape[3])
    packed = PackedPass([_placed(block, rows[0].shape[2] - len(block))], heads, torch.get_num_threads())
    tables, fields, _memory = _topk_tables(packed, topk)
    operations = (PROJECT_QUERIES, RANK_CHUNKS, ATTEND_TOPK)
    return _run(operations, q, [rows], packed, spec, tables, fields.ctypes.data)


def rank_chunks(q: torch.Tensor, kv_heads: int, topk: IntArray) -> torch.Tensor:
    """Return chunks' worth to queries ``[H, n, d]``, float32 ``[H, n, chunks]``; ``topk`` as in ``attend_topk``."""
    (heads, n, dim), queries = q.shape, q.float().contiguous()
    block = Block(np.zeros(n, np.int64), DraftTree.empty(), 0)
    packed = PackedPass([block], HeadShape(heads, kv_heads, dim, dim), torch.get_num_threads())
    tables, fields, memory = _topk_tables(packed, topk)
    op = AttendOp(
        0, 4, heads, kv_heads, dim, dim, 0, queries.data_ptr(), 4 * dim, 4 * n * dim, 0, 0, 0, 0, 0, 1.0, 0.0,
        fields.ctypes.data,
    )  # fmt: skip
    program = Program([(PROJECT_QUERIES, op), (RANK_CHUNKS, op)])
    program.run_in_scratch(tables.slot_size, **packed.fields(work=tables))
    worth = memory[tables.worth_offset :].view(torch.float32).view(kv_heads, -1, tables.worth_chunks)
    return worth[:, : heads // kv_heads * n, : int(topk[0])].reshape(heads, n, -1)


def _topk_tables(packed: PackedPass, topk: IntArray) -> tuple[TopkTables, IntArray, torch.Tensor]:
    """Fill the tables of one row, whose memory must outlive the pass."""
    tables = TopkTables(packed, [topk[None]])
    memory, fields = torch.empty(tables.states_bytes, dtype=torch.uint8), np.zeros((1, 1, TOPK_BYTES // 8), np.int64)
    tables.fill(fields, memory.data_ptr())
    return tables, fields, memory


def _run(
    operations: Sequence[Operation], q: torch.Tensor, rows: Sequence[Rows], packed: PackedPass, spec: AttentionSpec,
    tables: TopkTables | None = None, topk: int = 0,
) -> torch.Tensor:  # fmt: skip
    keys, values = rows[0]
    (_, heads, n, _), dtype, out_dim, quick = q.shape, keys.dtype, values.shape[3], fast(keys, values)
    queries = q if dtype == torch.float64 else q.float()
    queries = queries if queries.stride(3) == 1 else queries.contiguous()
    kv = np.array([[k.data_ptr(), v.data_ptr()] for k, v in rows], np.int64)
    wide = dtype == torch.float16 or (not quick and dtype == torch.bfloat16)
    out = torch.empty(n, heads * out_dim, dtype=torch.float32 if wide else q.dtype)
    sinks = None if spec.sinks is None else spec.sinks.detach().to(queries.dtype).contiguous()
    number, scale = queries.element_size(), spec.scaling / math.log(2) if quick else spec.scaling
    op = AttendOp(
        CACHE_KINDS[dtype], keys.element_size(), heads, keys.shape[1], keys.shape[3], out_dim, spec.window or 0,
        queries.data_ptr(), queries.stride(2) * number, queries.stride(1) * number, kv.ctypes.data,
        0 if sinks is None else sinks.data_ptr(), out.data_ptr(), out.stride(0) * out.element_size(),
        int(out.dtype == torch.bfloat16), scale, spec.softcap or 0.0, topk,
    )  # fmt: skip
    fields = packed.fields([(*head_rows(k)[1:], *head_rows(v)[1:]) for k, v in rows], tables)
    work, program = tables or packed, Program([(each, op) for each in operations])
    program.run_in_scratch(work.slot_size, work.states_bytes, **fields)
    return out.view(1, n, heads, out_dim).transpose(1, 2).to(q.dtype)


def takes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether kernels compute attention in order for these ``[1, H, n, d]``."""
    alike = q.dtype == k.dtype or (q.dtype, k.dtype) == (torch.float32, torch.bfloat16)
    plain = k.dtype in CACHE_KINDS and alike and (fast(k, v) or k.dtype != torch.float16)
    return plain and q.device.type == "cpu" and vector_ir.fused()


def takes_topk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether ``attend_topk`` supports these tensors: on a CPU, d a multiple of 16."""
    alike = {q.dtype, k.dtype} <= set(TOPK_DTYPES) and q.shape[3] == k.shape[3]
    return alike and addresses.fits(q) and addresses.fits(k, v)


def fast(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the vector kernel supports this type and width; other heads are computed number by number."""
    return k.dtype != torch.float64 and k.shape[3] % 16 == 0 and v.shape[3] % 16 == 0


def _placed(block: Block, place: int) -> Block:
    return block if block.start == place else Block(block.pending, block.tree, place)


def states_in_order(q: torch.Tensor, rows: Rows, block: Block, spec: AttentionSpec) -> list[AttentionState]:
    """Compute a block's attention over its row with torch, as states to merge."""
    (keys, values), held = rows, block.start
    if len(block) == 1:  # one token sees all rows, including its own: no mask, nothing to merge
        first = 0 if spec.window is None else max(0, held + 1 - spec.window)
        return [attend(q, keys[:, :, first:], values[:, :, first:], spec)]
    edge, prefix = _split(block, spec.window)
    k, v = keys[:, :, held:], values[:, :, held:]
    if edge:
        k = torch.cat((keys[:, :, edge.start : edge.stop], k), 2)
        v = torch.cat((values[:, :, edge.start : edge.stop], v), 2)
    local = attend(q, k, v, spec, block.bias(spec.window, edge, q))
    if not prefix:
        return [local]
    seen = slice(prefix.start, prefix.stop)
    return [attend(q, keys[:, :, seen], values[:, :, seen], spec), local]


def _split(block: Block, window: int | None) -> tuple[range, range]:
    """Split committed rows into those that some of the block's tokens see, and those that all see."""
    held = block.start
    if window is None or held + block.deepest < window:
        return range(0), range(held)
    common = min(held, held + block.deepest - window + 1)
    return range(max(0, held - window + 1), common), range(common, held)


Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec, torch.Tensor | None], AttentionState]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None = None
) -> AttentionState:
    """Compute attention of ``q`` ``[1, H, n, d]`` over all of ``k`` with torch, without window and sinks (``merge``).
    Query heads may share a KV head. ``bias`` ``[n, m]`` is added to scores, minus infinity to mask a key; each query
    must see one."""
    heads, n, group = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.to(q.dtype), v.to(q.dtype)
    if group > 1:  # the queries of a group read their shared keys once
        q = q.reshape(1, k.shape[1], group * n, q.shape[3])
        bias = None if bias is None else bias.repeat(group, 1)
    out, lse = BACKENDS[select_backend(q, v, spec)](q, k, v, spec, bias)
    return AttentionState(out.reshape(1, heads, n, v.shape[3]), lse.reshape(1, heads, n))


def merge(*states: AttentionState, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Merge attention over disjoint sets of keys to ``[1, H, n, d]``. Sinks are one more state, without output."""
    out, lse = states[0]
    for i, state in enumerate(states[1:], 2):
        weight = torch.sigmoid(lse - state.lse).unsqueeze(-1)
        out = torch.lerp(state.out.to(weight.dtype), out.to(weight.dtype), weight).to(state.out.dtype)
        lse = torch.logaddexp(lse, state.lse) if i < len(states) or sinks is not None else lse
    if sinks is None:
        return out
    left = torch.sigmoid(lse - sinks.to(lse.dtype).unsqueeze(-1)).unsqueeze(-1)
    return (out * left).to(out.dtype)


def select_backend(q: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> str:
    """Return the name of torch's fastest kernel that can compute this."""
    if spec.softcap is not None or q.shape[-1] != v.shape[-1]:
        return "math"
    if q.device.type == "cuda" and q.dtype != torch.float64:
        return "efficient"
    return "flash_cpu" if q.device.type == "cpu" else "math"


def warm_up(device: torch.device, dtype: torch.dtype, wait: bool = True) -> None:
    """Compile or load what passes and sampling may run, so that no request waits; ``wait`` as in ``compile_sparse``."""
    if device.type == "cpu" and vector_ir.fused():
        address_of(executor.work)
        if dtype in TOPK_DTYPES:
            compile_sparse(wait)
    sampling_kernels.warm_up()


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None
) -> AttentionState:
    """Compute attention by its definition, in at least float32: the reference for tests of other backends."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * spec.scaling
    if spec.softcap is not None:
        scores = torch.tanh(scores / spec.softcap) * spec.softcap
    if bias is not None:
        scores = scores + bias.to(wide)
    lse = scores.logsumexp(-1)
    return AttentionState(((scores - lse.unsqueeze(-1)).exp() @ v.to(wide)).to(q.dtype), lse)


def _flash_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None
) -> AttentionState:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return AttentionState(*kernel(q, k, v, attn_mask=bias, scale=spec.scaling))


def _efficient(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None
) -> AttentionState:
    n, m = q.shape[2], k.shape[2]
    if bias is not None:  # the kernel needs rows aligned to 16 bytes
        padded = bias.new_zeros(n, math.ceil(m / 8) * 8)
        padded[:, :m] = bias
        bias = padded[:, :m].expand(1, q.shape[1], n, m)
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, *_ = kernel(q, k, v, bias, compute_log_sumexp=True, scale=spec.scaling)
    return AttentionState(out, lse[..., :n])


BACKENDS: dict[str, Backend] = {"math": _math, "flash_cpu": _flash_cpu, "efficient": _efficient}
"""A new kernel of torch needs a function, an entry, and a line in ``select_backend``; the parity test covers it."""
