"""Tests of kernels may change the number of threads; each begins with the same."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def own_number_of_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
