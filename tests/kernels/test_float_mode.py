"""Denormal numbers are computed alike on every thread, whatever the thread that asks has set."""

from collections.abc import Iterator

import pytest
import torch
from support.linear_ops import layer


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor keeps denormal numbers")
    yield
    torch.set_flush_denormal(False)


def test_a_thread_that_flushes_denormal_numbers_changes_no_sum(flushing):
    x, weight = torch.full((3, 64), 1e-20), torch.full((40, 64), 1e-20)
    found = layer(x, [weight])
    assert float(torch.tensor([1e-20]) * torch.tensor([1e-20])) == 0  # this thread flushes, before and after
    torch.set_flush_denormal(False)
    assert torch.equal(found, layer(x, [weight])) and bool((found > 0).all())
