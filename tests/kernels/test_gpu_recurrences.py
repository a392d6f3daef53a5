"""Recurrences for GPUs, in Triton's interpreter: the numbers of the CPU's kernels, and the same bits in any pass."""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support.tiny import HYBRIDS, PROMPTS, build
from support.triton_products import interpret_products, interpret_quickly

from forerun.engine.engine import Engine
from forerun.kernels import gpu
from forerun.kernels.recurrent.gated_states import GatedShape, TokenOrder, run_states
from forerun.kernels.recurrent.short_convolution import convolve
from forerun.models.forward.gate import admit

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow

SHAPES = {
    "gated delta rule": GatedShape(2, 4, 12, 40, 1, True, True, 12**-0.5),
    "a gate per channel": GatedShape(2, 2, 8, 8, 8, True, True, 8**-0.5),
    "Mamba-2": GatedShape(1, 3, 16, 20, 1, False, False, 1.0),
}
TREE = np.array([-1, 0, 1, 2, 2, 1, 5, 0, 7, 3, 3, 4, 8])
"""Parents: among them a branch, a sibling whose parent is far back, a leaf, and a parent of three."""
SAVED = {0: 0, 4: 1, 8: 2}
CPU = torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_products(monkeypatch)
    interpret_quickly(monkeypatch)
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)


def inputs(shape: GatedShape, dtype: torch.dtype, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, queries and a state."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, shape.row_width, generator=generator, dtype=dtype)
    gates = shape.key_heads * shape.dim + shape.heads * shape.out_dim
    rows[:, gates : gates + shape.heads * shape.gates].abs_().neg_()  # logarithms of decays
    q = torch.randn(count, shape.key_heads, shape.dim, generator=generator, dtype=dtype)
    return rows, q, torch.randn(shape.heads, shape.dim, shape.out_dim, generator=generator, dtype=dtype)


def run(shape: GatedShape, given: Any, parents: np.ndarray, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and saved states; memory that nothing was written to holds NaN."""
    rows, q, state = given
    saved = torch.full((len(SAVED), shape.heads, shape.dim, shape.out_dim), torch.nan, dtype=q.dtype)
    return run_states(shape, rows, q[first:], state, saved, TokenOrder.of(parents, SAVED, CPU)), saved


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", SHAPES)
def test_outputs_and_states_are_those_of_the_cpu(name, dtype, begins, monkeypatch):
    shape, limits = SHAPES[name], {"atol": 50 * torch.finfo(dtype).eps, "rtol": 50 * torch.finfo(dtype).eps}
    rows, q, state = inputs(shape, dtype, len(TREE))
    given = rows, q, state if begins else None
    right = run(shape, given, TREE, 3)
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    for found, expected in zip(run(shape, given, TREE, 3), right, strict=True):
        torch.testing.assert_close(found, expected, **limits)


@pytest.mark.parametrize("name", SHAPES)
def test_a_nodes_bits_are_those_of_its_path(on_gpu, name):
    shape = SHAPES[name]
    rows, q, state = inputs(shape, torch.float32, len(TREE))
    whole, _ = run(shape, (rows, q, state), TREE)
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[0]] >= 0:
            path.insert(0, int(TREE[path[0]]))
        own = rows[path].contiguous(), q[path].contiguous(), state
        order = TokenOrder.of(np.arange(-1, len(path) - 1), {}, CPU)
        assert torch.equal(run_states(shape, *own, state[None, :0], order)[-1], whole[node])


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_convolutions(dtype, taps, monkeypatch):
    generator, first = torch.Generator().manual_seed(taps), taps - 1
    parents = torch.from_numpy(np.concatenate((np.arange(-1, first - 1), TREE + first)))
    x = torch.randn(len(parents), 300, generator=generator, dtype=dtype)
    weights, bias = torch.randn(taps, 300, generator=generator, dtype=dtype), torch.randn(300, dtype=dtype)
    for offset in (None, bias):
        right = convolve(x, weights, offset, parents, first)
        with monkeypatch.context() as patch:
            patch.setattr(gpu, "runs_on", lambda device: True)
            found = convolve(x, weights, offset, parents, first)
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", ["bamba", "lfm2", "qwen3_5"])
def test_drafts_change_no_bit_of_a_hybrid(on_gpu, name):
    """A model of each recurrence, alone and with another row; the gate compares it with its own forward pass."""
    kind, more = HYBRIDS[name]
    model = build(kind, more | {"max_position_embeddings": 48}, seed=1).float()  # so that the probe is short
    assert admit(model).recurrent
    texts: dict[str, Any] = {}
    for drafter in ("none", "trie"):
        engine = Engine(model, drafter)
        assert engine.exactness.level == "bitwise", engine.exactness.reason
        together = engine.generate([list(prompt) for prompt in PROMPTS[:2]], max_new_tokens=6, eos_token_id=None)
        alone = engine.generate(list(PROMPTS[0]), max_new_tokens=6, eos_token_id=None)
        texts[drafter] = [*(each.tokens.tolist() for each in together.requests), alone.requests[0].tokens.tolist()]
    assert texts["none"] == texts["trie"]
    assert texts["none"][0] == texts["none"][2]
