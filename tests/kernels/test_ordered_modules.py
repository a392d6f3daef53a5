"""What a model computes outside of its attention has the same bits wherever a token lies in a pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.tiny import ARCHITECTURES, FAMILIES, HYBRIDS, PROMPTS, build
from torch.nn import functional
from transformers import AutoModelForCausalLM

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels.linear import linear, ordered_modules
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.full_cache import FullCache
from forerun.models.forward.gate import lay_out
from forerun.models.forward.recurrent_layers import adapt
from forerun.models.forward.scorer import Scorer

FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": lambda x: x.sigmoid(), "silu": functional.silu, "gelu": functional.gelu,
    "gelu, tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "softplus": functional.softplus, "mish": functional.mish, "elu": functional.elu,
}  # fmt: skip
TYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> None:
    torch.set_num_threads(request.param)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.usefixtures("threads")
def test_activations_round_alike_wherever_a_number_lies(name, dtype):
    x = (3 * torch.randn(1801, 37, generator=torch.Generator().manual_seed(1))).to(dtype)
    with Ordered():
        whole = FUNCTIONS[name](x)
        for first, last in ((0, 1), (1, 3), (5, 100), (7, 1000), (800, 1801)):
            assert torch.equal(FUNCTIONS[name](x[first:last].clone()), whole[first:last])
        assert torch.equal(FUNCTIONS[name](x[:, 3:20]), whole[:, 3:20])
    torch.testing.assert_close(whole, FUNCTIONS[name](x))


@pytest.mark.parametrize("threads", [1, 2, 3, 5, 16, 63])
def test_numbers_are_filled_up_to_whole_vectors_for_every_thread(monkeypatch, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for count in (1, 63, 64, 65, 32768, 32769, 65537, 98305, 1000003):
        size = ordered_modules._padded_size(count)
        shares = min(threads, -(-size // ordered_modules.THREAD_GRAIN))
        assert count <= size < count + 2 * 64 * threads * shares
        assert size % (64 * shares) == size % (64 * threads) == 0


def test_products_of_complex_numbers_round_alike_wherever_they_lie():
    torch.manual_seed(0)
    a, b = (torch.randn(1, 4, 40, 3, dtype=torch.complex64) for _ in range(2))
    with Ordered():
        whole = a * b
        for first, last in ((0, 1), (1, 4), (5, 18)):
            assert torch.equal(a[:, :, first:last].clone() * b[:, :, first:last].clone(), whole[:, :, first:last])
    torch.testing.assert_close(whole, a * b)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_a_token_times_a_matrix_does_not_depend_on_the_other_tokens(turned, dtype):
    torch.manual_seed(0)
    x, weight = torch.randn(20, 40).to(dtype), torch.randn(40, 24).to(dtype)
    weight = weight.t().contiguous().t() if turned else weight
    with Ordered():
        whole = x @ weight
        assert all(torch.equal(x[i : i + 1].matmul(weight), whole[i : i + 1]) for i in range(20))
        assert (x[:0] @ weight).shape == (0, 24)
    torch.testing.assert_close(whole, x @ weight, rtol=2e-2, atol=2e-1 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_a_model_generates_and_is_saved_as_before_its_weights_are_laid_out(name, tmp_path):
    """Of these, matrices lie the other way round."""
    model, ids = build(*{**ARCHITECTURES, **FAMILIES}[name], seed=1).float(), torch.tensor([PROMPTS[1]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    before = model.generate(ids, **options)
    lay_out(model)
    moved = [value for value in model.state_dict().values() if value.dim() > 1 and not value.is_contiguous()]
    assert len(moved) == (8 if name == "gpt2" else 4)
    assert all(value.stride(-2) == 1 for value in moved)
    places = [value.data_ptr() for value in moved]
    lay_out(model)
    assert [value.data_ptr() for value in model.state_dict().values() if not value.is_contiguous()] == places
    assert torch.equal(model.generate(ids, **options), before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(loaded.state_dict()[key], value) for key, value in weights.items())
    assert torch.equal(loaded.generate(ids, **options), before)


@pytest.mark.parametrize("name", ["gemma2", "lfm2"])
def test_what_sums_in_order_by_itself_is_not_looked_at(name, monkeypatch):
    """Kernels take addresses of tensors; a look at each such call takes microseconds."""
    looked = set[object]()

    class Recorded(Ordered):
        def __torch_function__(self, func: object, *call: Any, **more: Any) -> Any:
            looked.add(func)
            return super().__torch_function__(func, *call, **more)

    model = build(*{**ARCHITECTURES, **HYBRIDS}[name], seed=1).float()
    scorer, block = Scorer(model), Block(np.arange(5), DraftTree.empty(), 0)
    adapt(model)
    monkeypatch.setattr(ordered_modules, "Ordered", Recorded)
    with torch.inference_mode():
        scorer.score([block], [scorer.adopt(FullCache())])
    assert functional.linear in looked
    assert torch.Tensor.data_ptr not in looked


def test_a_matrix_that_is_copied_for_each_call_leaves_no_program_behind():
    x, weight = torch.randn(3, 32), torch.randn(40, 64)[:, ::2]  # its columns do not lie together
    kept: dict[object, object] = linear._local.__dict__.setdefault("programs", {})
    before = set(kept)
    with Ordered():
        copies = [torch.matmul(x, weight.t()) for _ in range(5)]
    assert set(kept) == before
    with Ordered():
        assert torch.equal(copies[0], torch.matmul(x, weight.contiguous().t()))
