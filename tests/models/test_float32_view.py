"""A pass over narrow weights in float32 is the pass of the same weights in float32."""

import copy

import pytest
import torch
from support.tiny import PROMPTS, tiny

from forerun.models.forward.gate import Float32View


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "phi3", "mixtral", "deepseek_v3"])
def test_a_widened_pass_is_that_of_the_weights_in_float32(family):
    narrow = copy.deepcopy(tiny(family)).to(torch.bfloat16)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        right = copy.deepcopy(narrow).float()(ids, use_cache=False).logits
        own = narrow(ids, use_cache=False).logits
        with Float32View():
            wide = narrow(ids, use_cache=False).logits
    assert wide.dtype == torch.float32 and own.dtype == torch.bfloat16
    off = float((own.float() - right).norm() / right.norm())
    assert float((wide - right).norm() / right.norm()) < off / 20
    assert next(narrow.parameters()).dtype == torch.bfloat16
