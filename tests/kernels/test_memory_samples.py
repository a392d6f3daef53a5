"""Checksums by samples: which changes of a tensor they see, and that no memory but the tensor's own is read."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from forerun.kernels.runtime.memory_samples import (
    READ_WHOLE_BYTES,
    SAMPLED_BYTES,
    SAMPLED_PIECES,
    address_table,
    checksum,
    sample_of,
)

SHAPES = [(3,), (9,), (1,), (2048,), (4096,), (100_000,), (300, 576), (576, 300), (8, 50_000), (4, 96, 64), (70_000, 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.uint8]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).abs().add(1).to(dtype)


def both(t: torch.Tensor) -> tuple[int, int]:
    """As on a CPU, and as on other devices."""
    return checksum((), address_table([t])), checksum([t])


def sees(t: torch.Tensor, change: Callable[[torch.Tensor], object]) -> bool:
    before, kept = both(t), t.clone()
    change(t)
    after = both(t)
    t.copy_(kept)
    assert both(t) == before
    assert (after[0] != before[0]) == (after[1] != before[1])
    return after != before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_are_within_the_tensor_from_its_first_to_its_last_number(shape, dtype):
    t = tensor(shape, dtype)
    offset, size, step, count = sample_of(t)
    assert (offset, size) == (0, t.nbytes)
    if size > READ_WHOLE_BYTES:
        assert count == SAMPLED_PIECES
        assert size / 8 > size - (count - 2) * step >= 2 * SAMPLED_BYTES  # before the last one, which ends with it
    else:
        assert (count - 1) * step < size <= count * step


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_change_of_all_numbers_is_seen(shape, dtype):
    t = tensor(shape, dtype)
    assert sees(t, lambda t: t.mul_(2))
    assert sees(t, lambda t: t.neg_())
    assert sees(t, lambda t: t.zero_())
    assert not sees(t, lambda t: t.mul_(1))


def test_of_a_small_tensor_every_number_is_seen():
    t = tensor((READ_WHOLE_BYTES // 8 - 3,), torch.float64)
    for number in (*range(0, len(t), 37), len(t) - 1):
        t[number] = -t[number]
        assert sees(t, lambda t, at=number: t[at].neg_())


def test_every_column_of_a_large_matrix_is_seen_and_many_rows_together():
    t = tensor((4096, 576))
    for column in range(0, 576, 7):
        assert sees(t, lambda t, at=column: t[:, at].mul_(2))
    for row in range(0, 4096 - 512, 301):
        assert sees(t, lambda t, at=row: t[at : at + 512].mul_(2))
    assert not all(sees(t, lambda t, at=row: t[at].mul_(2)) for row in range(64))


@pytest.mark.parametrize(
    "view", [lambda t: t.t(), lambda t: t[10:200], lambda t: t[:, 64:128], lambda t: t[7:9, 5:9], lambda t: t[:, :0]]
)
def test_views_are_read_where_they_lie(view):
    whole = tensor((300, 576))
    part = view(whole)
    before = both(part)
    part.mul_(2)
    assert (both(part) != before) == (part.numel() > 0)


def test_tensors_are_told_apart_by_their_order():
    a, b = tensor((100,)), tensor((100,)) * 2
    for sums in (lambda *t: checksum((), address_table(t)), lambda *t: checksum(t)):
        assert sums(a, b) != sums(b, a)
        assert sums(a, b) == sums(a.clone(), b.clone())
    assert checksum([], address_table([])) == checksum((), np.zeros((0, 4), np.int64))
