"""Prefetch weights into a GPU's L2 cache during small kernels that read none.

Kernels between two products leave the memory idle, so extra programs of them request the first of the next product's
weights. Since Hopper an instruction (PTX ISA, ``cp.async.bulk.prefetch.L2``) requests kilobytes without waiting.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PREFETCHED_BYTES = 16 << 20
"""Maximum bytes per kernel: what an H200 reads in the 4 us of a norm, a third of its L2."""
PREFETCH_PROGRAM_BYTES = tl.constexpr(1 << 17)
"""Bytes per program: 16 MiB then occupy 128 programs, one for each of an H100's processors."""
PREFETCH_THREADS = tl.constexpr(32)
"""Threads per program that request 4 KiB each: the copy unit processes requests one by one."""
PREFETCH_CAPABILITY = (9, 0)


class Ahead(NamedTuple):
    """What a kernel prefetches: ``bytes`` of the next product's weights, by ``programs`` programs."""

    weights: torch.Tensor
    bytes: int
    programs: int

    @property
    def arguments(self) -> tuple[torch.Tensor, int, bool]:
        """What kernels need: weights, bytes, and whether there are any."""
        return self.weights, self.bytes, self.programs > 0

    @classmethod
    def of(cls, weights: torch.Tensor | None, other: torch.Tensor) -> Ahead:
        """Prefetch these weights; nothing on other GPUs and in the interpreter, with ``other`` as the pointer."""
        if weights is None or weights.device.type != "cuda" or weights.data_ptr() % 16:
            return cls(other, 0, 0)
        if torch.cuda.get_device_capability(weights.device) < PREFETCH_CAPABILITY:
            return cls(other, 0, 0)
        wanted = min(weights.nbytes, PREFETCHED_BYTES)
        return cls(weights, wanted, triton.cdiv(wanted, PREFETCH_PROGRAM_BYTES.value))


@triton.jit
def prefetch(weights, size, program, THREADS: tl.constexpr):
    """Request the ``program``-th piece of ``size`` bytes of weights."""
    at, count = piece_of(size, program, THREADS)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [weights.to(tl.int64) + at, count], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def piece_of(size, program, THREADS: tl.constexpr):
    """Return offset and size of each thread's bytes, in multiples of 16."""
    part: tl.constexpr = PREFETCH_PROGRAM_BYTES // PREFETCH_THREADS
    thread = tl.arange(0, THREADS)
    at = program.to(tl.int64) * PREFETCH_PROGRAM_BYTES + thread * part
    count = tl.minimum(tl.maximum(size - at, 0), part) // 16 * 16
    return at, tl.where(thread < PREFETCH_THREADS, count, 0).to(tl.int32)
