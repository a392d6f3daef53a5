"""Attention as a state (output, log-sum-exp) that merges, and the kernels that compute it.

A node's attention over prefix and tree merges two states: one over the prefix, without a mask, and one over the block
being scored, with its ancestor mask. Merging is exact in real numbers (the recurrence of FlashAttention, Dao et al.
2022; ``merge_state`` in FlashInfer). So no mask of block x prefix is ever built, and nothing is concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from forerun.kernels.attention import few_query, short_key_scan, topk_attention, topk_rank
from forerun.kernels.runtime import executor, vector_ir
from forerun.kernels.runtime.addresses import address_of


class AttentionState(NamedTuple):
    """Attention over some of the keys.

    Attributes:
        out: softmax-weighted values, ``[1, H, n, d]``.
        lse: log-sum-exp of the scaled scores, ``[1, H, n]``.
    """

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """A layer's attention parameters.

    Attributes:
        scaling: factor on query . key.
        window: a query sees keys with ``key position > position - window``; or None.
        softcap: scores become softcap * tanh(score / softcap), or None (Gemma 2).
        sinks: one extra score per head, ``[H]``, that takes softmax weight but has no value; or None (gpt-oss).
    """

    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = field(default=None, compare=False)

    @property
    def plain(self) -> bool:
        """Whether a query sees all keys, and nothing is done to its scores but scaling."""
        return self.window is None and self.softcap is None and self.sinks is None


FEW_QUERIES: dict[int, dict[int, float]] = {4: {256: 2**19}, 2: {1: math.inf, 8: 2**21, 32: 2**24}}
"""When the few-query kernel is faster than torch's on a CPU, as measured (``docs/decisions.md``). By bytes per number,
then by the most queries: the least count of numbers in the keys."""

Backend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionSpec, torch.Tensor | None], AttentionState]


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None = None
) -> AttentionState:
    """Attention of ``q`` over all of ``k``; several query heads may share a KV head.

    Args:
        q: ``[1, H, n, d]``.
        k, v: ``[1, Hkv, m, d]`` and ``[1, Hkv, m, dv]``; H is a multiple of Hkv.
        spec: scaling and soft cap; window and sinks (``merge``) are left to the caller.
        bias: added to the scores, ``[n, m]``; minus infinity masks a key. Every query must see at least one key.
    """
    heads, n, group = q.shape[1], q.shape[2], q.shape[1] // k.shape[1]
    if group > 1:  # the queries of a group read their shared keys once
        q = q.reshape(1, k.shape[1], group * n, q.shape[3])
        bias = None if bias is None else bias.repeat(group, 1)
    out, lse = BACKENDS[select_backend(q, k, v, spec, bias)](q, k, v, spec, bias)
    return AttentionState(out.reshape(1, heads, n, v.shape[3]), lse.reshape(1, heads, n))


def attend_chosen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    worth: torch.Tensor,
    count: int,
    near: topk_attention.Near,
    spec: AttentionSpec,
) -> AttentionState:
    """Attention of each query over the first chunk, the chunks that are worth most to it, and the near keys.

    Args:
        q: ``[1, H, n, d]``.
        k, v: ``[1, Hkv, m * CHUNK_KEYS, d]``.
        worth: each chunk's best product of a key with the query, approximately; float32 ``[H, n, m]``, overwritten. A
            chunk is skipped if its scaled product is more than ``MARGIN_NATS`` below the best.
        count: the most chunks by worth; less than m.
        near: keys and values, ``[1, Hkv, >= r + CHUNK_KEYS, d]``, and r, the number of them that all queries see. The
            rest must be finite.
        spec: the layer's attention parameters; without a window. Sinks are left to the caller.
    """
    if spec.softcap is None and topk_attention.fits(q, k, v):
        return AttentionState(*topk_attention.attend_topk_at_once(q, k, v, worth, count, near, spec.scaling))
    worth[..., 0] = -torch.inf
    heads, n = q.shape[1:3]
    best, chunks = worth.topk(count, -1)
    hidden = best * spec.scaling < best[..., :1] * spec.scaling - topk_attention.MARGIN_NATS
    chunks, hidden = (torch.nn.functional.pad(t, (1, 0)) for t in (chunks, hidden))
    owner = torch.arange(heads, device=q.device).div(heads // k.shape[1], rounding_mode="floor")[:, None, None]
    cut = (t[0].view(t.shape[1], -1, short_key_scan.CHUNK_KEYS, t.shape[3]) for t in (k, v))
    keys, values = (t[owner, chunks].flatten(2, 3).flatten(0, 1) for t in cut)
    bias = torch.where(hidden, -torch.inf, 0.0).repeat_interleave(short_key_scan.CHUNK_KEYS, -1).flatten(0, 1)
    out, lse = _math(q.reshape(heads * n, 1, -1), keys, values, spec, bias.unsqueeze(1))
    far = AttentionState(out.view(1, heads, n, -1), lse.view(1, heads, n))
    if not near[2]:
        return far
    recent = attend(q, near[0][:, :, : near[2]], near[1][:, :, : near[2]], spec)
    return AttentionState(merge(far, recent), torch.logaddexp(far.lse, recent.lse))


def merge(*states: AttentionState, sinks: torch.Tensor | None = None) -> torch.Tensor:
    """Output of attention over the keys of all states, ``[1, H, n, d]``.

    Args:
        states: over disjoint sets of keys, which together are all visible keys.
        sinks: see ``AttentionSpec``: one more state, without output.
    """
    out, lse = states[0]
    for i, state in enumerate(states[1:], 2):
        weight = torch.sigmoid(lse - state.lse).unsqueeze(-1)
        out = torch.lerp(state.out.to(weight.dtype), out.to(weight.dtype), weight).to(state.out.dtype)
        lse = torch.logaddexp(lse, state.lse) if i < len(states) or sinks is not None else lse
    if sinks is None:
        return out
    left = torch.sigmoid(lse - sinks.to(lse.dtype).unsqueeze(-1)).unsqueeze(-1)
    return (out * left).to(out.dtype)


def select_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None
) -> str:
    """Name of the fastest backend that can compute this."""
    if spec.softcap is not None or q.shape[-1] != v.shape[-1]:
        return "math"
    if q.device.type == "cpu":
        ours = bias is None and k.numel() >= _many(q) and few_query.fits(q, k, v)
        return "few_queries" if ours else "flash_cpu"
    if q.device.type == "cuda" and q.dtype != torch.float64:
        return "efficient"
    return "math"


def _many(q: torch.Tensor) -> float:
    """The count of numbers in the keys from which the few-query kernel is faster for these queries."""
    return next((many for few, many in FEW_QUERIES.get(q.element_size(), {}).items() if q.shape[2] <= few), math.inf)


def warm_up(device: torch.device, dtype: torch.dtype) -> None:
    """Compile the kernels that passes on this device with this type may run, or load them from an earlier process."""
    if device.type != "cpu" or not vector_ir.fused():
        return
    address_of(executor.work)
    if dtype in few_query.FEW_QUERY_DTYPES:
        for kernel in (few_query, short_key_scan):
            address_of(kernel.work)
    if dtype in topk_attention.TOPK_DTYPES:
        for operation in (topk_rank.PROJECT_QUERIES, topk_rank.RANK_CHUNKS, topk_attention.ATTEND_TOPK):
            address_of(operation.run, 5)


def _math(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None
) -> AttentionState:
    """Attention by its definition, in at least float32; the reference that other backends are tested against."""
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


def _few_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, bias: torch.Tensor | None
) -> AttentionState:
    """The few-query kernel: without a bias, for tensors that ``few_query.fits``."""
    return AttentionState(*few_query.few_queries(q, k, v, spec.scaling))


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


BACKENDS: dict[str, Backend] = {
    "math": _math,
    "flash_cpu": _flash_cpu,
    "few_queries": _few_queries,
    "efficient": _efficient,
}
"""Kernels by name. A new one needs a function, an entry here, and a line in ``select_backend``; the parity test then
covers it."""
