"""Weights brought into a GPU's L2 cache while a small kernel runs that reads none.

Between two products stand kernels over a few tokens, which leave the memory idle. Further programs of these kernels ask
for the first of the next product's weights. Hoppers and later have an instruction for it (PTX ISA,
``cp.async.bulk.prefetch.L2``), which asks for some kilobytes and waits for nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PREFETCHED_BYTES = 16 << 20
"""The most weights that one kernel asks for: what an H200 reads in the 4 us that a norm lasts, a third of its L2."""
PREFETCH_PROGRAM_BYTES = tl.constexpr(1 << 17)
"""Bytes that a program asks for: 16 MiB are then work for 128 programs, one for each of an H100's processors."""
PREFETCH_THREADS = tl.constexpr(32)
"""Threads of a program that ask, each for 4 KiB: the unit that copies takes one request after the other."""
PREFETCH_CAPABILITY = (9, 0)
"""The first GPUs that have the instruction."""


class Ahead(NamedTuple):
    """What a kernel asks for.

    Attributes:
        weights: of the next product, or None to ask for nothing.
        bytes: of them.
        programs: that ask.
    """

    weights: torch.Tensor | None
    bytes: int
    programs: int

    @classmethod
    def of(cls, weights: torch.Tensor | None) -> Ahead:
        """What to ask for, given the next product's weights; nothing on other GPUs and in the interpreter."""
        if weights is None or weights.device.type != "cuda" or weights.data_ptr() % 16:
            return cls(None, 0, 0)
        if torch.cuda.get_device_capability(weights.device) < PREFETCH_CAPABILITY:
            return cls(None, 0, 0)
        wanted = min(weights.nbytes, PREFETCHED_BYTES)
        return cls(weights, wanted, triton.cdiv(wanted, PREFETCH_PROGRAM_BYTES.value))

    def start(self, other: torch.Tensor) -> torch.Tensor:
        """The weights; another tensor where there are none, because a kernel must get one."""
        return other if self.weights is None else self.weights


@triton.jit
def prefetch(weights, size, program, THREADS: tl.constexpr):
    """Ask for the ``program``-th piece of ``size`` bytes of weights, in a kernel of so many threads a program."""
    at, count = piece_of(size, program, THREADS)
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0; }",
        "=r,l,r", [weights.to(tl.int64) + at, count], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def piece_of(size, program, THREADS: tl.constexpr):
    """For each thread of a program where its bytes begin and how many they are: multiples of 16, or none."""
    part: tl.constexpr = PREFETCH_PROGRAM_BYTES // PREFETCH_THREADS
    thread = tl.arange(0, THREADS)
    at = program.to(tl.int64) * PREFETCH_PROGRAM_BYTES + thread * part
    count = tl.minimum(tl.maximum(size - at, 0), part) // 16 * 16
    return at, tl.where(thread < PREFETCH_THREADS, count, 0).to(tl.int32)
