"""The compiled search for the best token returns what torch's ``argmax`` returns."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from forerun.core.sampling import highest_of

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, float("inf"), float("-inf"), float("nan")])


@given(arrays(np.float32, st.integers(1, 200), elements=SPECIAL | st.floats(width=32)))
def test_the_best_token_is_the_first_of_equals_or_the_first_nan(scores):
    assert highest_of(torch.from_numpy(scores)) == int(torch.from_numpy(scores).argmax())


def test_other_types_and_strides_have_a_best_token_too():
    scores = torch.randn(3, 70, generator=torch.Generator().manual_seed(0))
    for each in (scores.double()[1], scores.bfloat16()[1], scores.T[5], scores[1, ::2]):
        assert highest_of(each) == int(each.argmax())
