"""One thread: the models here are so small that a second one only costs. And no clock: engines plan by fixed costs."""

import pytest
import torch

from forerun.costs import CostCurve

torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def fixed_costs():
    """What engines plan by where they would measure."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.engine.measure", lambda scorer: CostCurve.linear(24))
        yield
