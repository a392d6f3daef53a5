"""Choose each row's token on a GPU: the best logit, or by Gumbel noise, as ``core/sampling.py`` does.

Noise needs only the key of its hash, so a recorded pass can choose sampled tokens. Two logarithms in float64 per token
of the vocabulary are shared among all processors, then a second kernel finds the best of their results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from forerun.core.sampling_kernels import BITS, GOLDEN, MIX1, MIX2

CHOICE_TOKENS = 1024
"""Tokens of the vocabulary per program: 128,000 tokens then occupy 125 programs."""


def choose(logits: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return each row's token, int64 ``[n]``, given logits ``[n, V]`` and noise (``Sampler.noise``): the first of the
    best, 0 if none is above minus infinity."""
    n, size = logits.shape
    blocks = triton.cdiv(size, CHOICE_TOKENS)
    best = logits.new_empty(n, blocks, dtype=torch.float64)
    tokens, chosen = noise.new_empty(n, blocks), noise.new_empty(n)
    _choose[(n, blocks)](
        logits.contiguous(), noise, best, tokens, size, logits.is_cuda, CHOICE_TOKENS, GOLDEN, MIX1, MIX2, BITS,
        enable_fp_fusion=False,
    )  # fmt: skip
    _choose_block[(n,)](best, tokens, chosen, blocks, triton.next_power_of_2(blocks))
    return chosen


@triton.jit
def _choose(
    logits, noise, best, tokens, size, RECIPROCAL: tl.constexpr, CHOICE_TOKENS: tl.constexpr, GOLDEN: tl.constexpr,
    MIX1: tl.constexpr, MIX2: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Find the best token of one block of one row's vocabulary."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * CHOICE_TOKENS + tl.arange(0, CHOICE_TOKENS)
    scores = tl.load(logits + row * size + at, at < size, float("-inf")).to(tl.float32)
    temperature = tl.load(noise + row * 2 + 1)
    noisy = scores.to(tl.float64)
    if temperature != 0:
        divisor = temperature.to(tl.float64, bitcast=True).to(tl.float32)
        if RECIPROCAL:  # as torch divides by a number on CUDA
            scores *= tl.div_rn(1.0, divisor)
        else:
            scores = tl.div_rn(scores, divisor)
        bits = tl.load(noise + row * 2).to(tl.uint64, bitcast=True) + at.to(tl.uint64) * GOLDEN
        bits = (bits ^ (bits >> 30)) * MIX1
        bits = (bits ^ (bits >> 27)) * MIX2
        bits = bits ^ (bits >> 31)
        u = ((bits >> 64 - BITS).to(tl.int64).to(tl.float64) + 0.5) * 2.0**-BITS
        noisy = scores.to(tl.float64) - tl.log(-tl.log(u))
    highest, token = tl.max(tl.where(noisy == noisy, noisy, float("-inf")), 0, return_indices=True)
    place = row * tl.num_programs(1) + block
    tl.store(best + place, highest)
    tl.store(tokens + place, block * CHOICE_TOKENS + token)


@triton.jit
def _choose_block(best, tokens, chosen, blocks, WIDE: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, WIDE)
    _, block = tl.max(tl.load(best + row * blocks + at, at < blocks, float("-inf")), 0, return_indices=True)
    tl.store(chosen + row, tl.load(tokens + row * blocks + block))
