"""Products, means and scans for GPUs, in Triton's interpreter; and that all GPU kernels compile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from support.triton_products import interpret_products

from forerun.kernels import gpu
from forerun.kernels.attention import topk_rank
from forerun.kernels.gpu import linear
from forerun.kernels.linear.ordered_modules import Ordered

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_products(monkeypatch)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [40, 1100])
def test_a_product_is_right_and_its_bits_do_not_depend_on_others(dtype: torch.dtype, columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    x = torch.randn(2, 40, columns, generator=generator).to(dtype)
    weight, bias = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((70, columns), (70,)))
    whole = linear.product(x, weight, bias)
    right = x.double() @ weight.double().T + bias.double()
    assert (whole.double() - right).abs().max() <= right.abs().max() * 4 * torch.finfo(dtype).eps
    for n in (1, 7, 33, 40):
        assert torch.equal(linear.product(x[:1, :n], weight, bias), whole[:1, :n])
    assert torch.equal(linear.product(x.flatten(0, 1)[:64], weight, bias), whole.flatten(0, 1)[:64])
    turned = weight.t().contiguous().t()
    assert torch.equal(linear.product(x, turned, bias), whole)


@pytest.mark.parametrize("dtype", TYPES)
def test_means(dtype: torch.dtype) -> None:
    x = (1 + torch.randn(3, 4, 1500, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = linear.mean(x, True)
    right = x.double().mean(-1, keepdim=True).to(dtype)
    torch.testing.assert_close(whole, right, atol=0, rtol=2 * torch.finfo(dtype).eps)
    assert torch.equal(linear.mean(x[1, 2], False), whole[1, 2, 0])


def test_models_functions_take_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way to write a product or a mean, as models do."""
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    monkeypatch.setattr("forerun.kernels.linear.ordered_modules.takes", lambda x, weight: False)
    called: list[str] = []

    def counting(name: str, function):
        def count(*arguments):
            called.append(name)
            return function(*arguments)

        return count

    monkeypatch.setattr(linear, "product", counting("product", linear.product))
    monkeypatch.setattr(linear, "mean", counting("mean", linear.mean))
    x, weight, bias = torch.randn(3, 32), torch.randn(16, 32), torch.randn(16)
    with Ordered():
        found = [
            torch.nn.functional.linear(x, weight, bias),
            torch.addmm(bias, x, weight.t()),
            x @ weight.t() + bias,
        ]
        means = [x.mean(-1, keepdim=True), torch.mean(x, dim=1, keepdim=True), x.mean(1)[:, None]]
        assert called == ["product"] * 3 + ["mean"] * 3
        x.mean(), x.mean(0), x.mean(-1, dtype=torch.float64)
    assert called == ["product"] * 3 + ["mean"] * 3
    for each in found:
        torch.testing.assert_close(each, x @ weight.t() + bias)
    for each in means:
        torch.testing.assert_close(each, x.mean(-1, keepdim=True))


@pytest.mark.parametrize(("rank", "count"), [(24, 37), (8, 16)])
def test_the_best_keys(monkeypatch: pytest.MonkeyPatch, rank: int, count: int) -> None:
    """The same numbers as on a CPU, to the bit."""
    generator = torch.Generator().manual_seed(rank)
    groups = -(-count // topk_rank.GROUP_CHUNKS)
    shape = (
        2,
        groups,
        topk_rank.CHUNK_KEYS,
        rank // topk_rank.QUAD_NUMBERS,
        topk_rank.GROUP_CHUNKS,
        topk_rank.QUAD_NUMBERS,
    )
    index = torch.randint(1, 256, shape, generator=generator, dtype=torch.uint8)
    q = torch.randn(6, 3, rank, generator=generator)
    right = topk_rank.by_definition(index, count, q)
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    assert torch.equal(topk_rank.by_definition(index, count, q), right)


PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


@pytest.mark.parametrize("capability", [80, 90])
def test_code_of_the_kernels(capability: int) -> None:
    """For Ampere and Hopper, without a GPU: products of all sizes are one instruction, so that sums have one order;
    weights, keys and values come 16 bytes at a time, asynchronously; eight loads of splits' states are under way before
    any is merged; and no kernel lacks registers."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "compile_gpu_kernels.py"
    command = [sys.executable, script, str(capability), "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: code["spills"] for kind in found.values() for name, code in kind.items() if code["spills"]} == {}
    reading = {name: code for name, code in found["bf16"].items() if name.split()[0] in ("sums", "scan", "combine")}
    assert len(reading) == 12
    two_bytes = {name for name, code in found["bf16"].items() if "ld.global.b16" in code["loads"]}
    assert two_bytes == {"store", "total"}  # a pass's own keys, a number a thread; and biases
    assert all(code["loads_ahead"] >= 8 for name, code in reading.items() if name.startswith("combine"))
    for name, code in reading.items():
        assert code["products"] == [PRODUCT], name
        assert 16 in code["copies"], name
        assert set(code["copies"]) <= {8, 16}, name  # eight bytes: the places of a tree's own keys
        assert "ld.global.b16" not in code["loads"], name
