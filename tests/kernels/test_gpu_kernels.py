"""Products, means and scans for GPUs, in Triton's interpreter; and that all GPU kernels compile."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
import triton.language as tl
from support.triton_products import interpret_products, interpret_quickly
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.interpreter import GridExecutor

from forerun.core.block import Block
from forerun.core.tree import DraftTree
from forerun.kernels import gpu
from forerun.kernels.gpu import attend, linear
from forerun.kernels.gpu.pass_tables import PassDescription, PassTables
from forerun.kernels.gpu.prefetch import PREFETCH_PROGRAM_BYTES, Ahead, piece_of
from forerun.kernels.linear.ordered_modules import Ordered
from forerun.models.forward.gpu_forward import GpuForward

pytestmark = pytest.mark.matrix  # Triton's interpreter is slow

TYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_products(monkeypatch)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("columns", [40, 1100])
def test_a_product_is_right_and_its_bits_do_not_depend_on_others(dtype, columns):
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
def test_means(dtype):
    x = (1 + torch.randn(3, 4, 1500, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = linear.mean(x, True)
    right = x.double().mean(-1, keepdim=True).to(dtype)
    torch.testing.assert_close(whole, right, atol=0, rtol=2 * torch.finfo(dtype).eps)
    assert torch.equal(linear.mean(x[1, 2], False), whole[1, 2, 0])


def test_models_functions_take_the_kernels(monkeypatch):
    """Each way to write a product or a mean, as models do."""
    monkeypatch.setattr(gpu, "runs_on", lambda device: True)
    monkeypatch.setattr("forerun.kernels.linear.ordered_modules.takes", lambda x, weight: False)
    called: list[str] = []

    for name in ("product", "mean"):
        own = getattr(linear, name)
        monkeypatch.setattr(linear, name, lambda *given, name=name, own=own: (called.append(name), own(*given))[1])
    x, weight, bias = torch.randn(3, 32), torch.randn(16, 32), torch.randn(16)
    with Ordered():
        found = [torch.nn.functional.linear(x, weight, bias), torch.addmm(bias, x, weight.t()), x @ weight.t() + bias]
        means = [x.mean(-1, keepdim=True), torch.mean(x, dim=1, keepdim=True), x.mean(1)[:, None]]
        assert called == ["product"] * 3 + ["mean"] * 3
        x.mean(), x.mean(0), x.mean(-1, dtype=torch.float64)
    assert called == ["product"] * 3 + ["mean"] * 3
    for each in found:
        torch.testing.assert_close(each, x @ weight.t() + bias)
    for each in means:
        torch.testing.assert_close(each, x.mean(-1, keepdim=True))


@triton.jit
def pieces(at, count, size, THREADS: tl.constexpr):  # noqa: N803
    """Write what each thread of each program asks for."""
    found_at, found = piece_of(size, tl.program_id(0), THREADS)
    place = tl.program_id(0) * THREADS + tl.arange(0, THREADS)
    tl.store(at + place, found_at)
    tl.store(count + place, found)


@pytest.mark.parametrize("threads", [128, 256])
@pytest.mark.parametrize("size", [16, 4096 * 3 + 32, 1 << 19, (1 << 19) + 48])
def test_threads_ask_for_all_of_the_weights_once(size, threads):
    programs = triton.cdiv(size, PREFETCH_PROGRAM_BYTES.value)
    at, count = (torch.zeros(programs * threads, dtype=kind) for kind in (torch.int64, torch.int32))
    pieces[(programs,)](at, count, size, threads)
    asked = [(first, first + n) for first, n in zip(at.tolist(), count.tolist(), strict=True) if n]
    assert [end for _, end in asked[:-1]] == [first for first, _ in asked[1:]]
    assert asked[0][0] == 0 and asked[-1][1] == size


def test_nothing_is_prefetched_without_the_instruction(monkeypatch):
    weights = torch.zeros(64, 64)
    other = torch.zeros(1)
    assert Ahead.of(weights, other) == Ahead.of(None, other) == Ahead(other, 0, 0)
    there = SimpleNamespace(device=torch.device("cuda"), nbytes=100 << 20, data_ptr=lambda: 32)
    for capability, programs in (((8, 9), 0), ((9, 0), 128)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert Ahead.of(there, other).programs == programs


KERNELS_OF_A_LAYER = {"_sums": 4, "_add_norm": 2, "_rotate_and_store": 1, "_scan": 1, "_combine": 1, "_gate": 1}


@torch.inference_mode()
def test_a_layer_has_ten_kernels(monkeypatch):
    """Launches of a pass over one token, by what one more layer adds."""
    interpret_quickly(monkeypatch)
    launched: list[str] = []
    call = GridExecutor.__call__

    def count(self: Any, *arguments: Any, **options: Any) -> Any:
        launched.append(self.fn.__name__)
        return call(self, *arguments, **options)

    monkeypatch.setattr(GridExecutor, "__call__", count)
    counts = []
    for layers in (1, 2):
        sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=61, **sizes)).eval()
        kv = torch.zeros(layers, 2, 1, 1, 16)
        addresses = np.array([[[keys.data_ptr(), values.data_ptr()]] for keys, values in kv])
        block = Block(np.zeros(1, np.int64), DraftTree.empty(), 0)
        batch = PassDescription([block], addresses, np.full((layers, 1, 4), 16), 2, 1)
        places = PassTables.of(batch, torch.device("cpu"))
        launched.clear()
        GpuForward(model).run(places, attend.attend, lambda layer: None)
        counts.append(Counter(launched))
    assert counts[1] - counts[0] == KERNELS_OF_A_LAYER


PRODUCT = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"


class Needs(NamedTuple):
    """Bounds of what a kernel needs: registers of a thread, and how many programs there is room for at a time on an
    Ampere's processor, which has less shared memory, and on a Hopper's."""

    registers: int
    ampere: int
    hopper: int


NEEDS = {
    "sums 16 alone": Needs(64, 5, 7), "sums 32 alone": Needs(80, 4, 6), "sums 64 alone": Needs(224, 3, 4),
    "sums 64 in turn": Needs(255, 3, 4), "scan 16 spread": Needs(168, 2, 3), "scan 16 merging": Needs(255, 2, 2),
    "scan 32 spread": Needs(255, 2, 2), "scan 32 merging": Needs(255, 1, 1), "combine of 1": Needs(255, 2, 2),
    "combine of 4": Needs(255, 2, 2), "combine of 8": Needs(255, 2, 2), "combine of 16": Needs(255, 1, 1),
    "add and norm": Needs(255, 1, 1), "rotate": Needs(96, 16, 16), "gate": Needs(128, 4, 4),
}  # fmt: skip
"""In bfloat16, with heads of 128."""


@pytest.fixture(scope="module", params=[80, 90])
def compiled(request: pytest.FixtureRequest) -> tuple[int, Any]:
    """A capability, and the code of all kernels for it, by type."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parents[1] / "support" / "compile_gpu_kernels.py"
    command = [sys.executable, script, str(request.param), "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return request.param, json.loads(done.stdout)


def test_products_and_loads_of_the_kernels(compiled):
    """For Ampere and Hopper, without a GPU: products of all sizes are one instruction, so that sums have one order;
    weights, keys and values come 16 bytes at a time, asynchronously; and the loads of 32 splits' states are under way
    before any is merged."""
    capability, found = compiled
    reading = {name: code for name, code in found["bf16"].items() if name.split()[0] in ("sums", "scan", "combine")}
    assert len(reading) == 12
    two_bytes = {name for name, code in found["bf16"].items() if "ld.global.b16" in code["loads"]}
    assert two_bytes == {"store", "total"}  # a pass's own keys, a number a thread; and biases
    assert all(code["loads_ahead"] >= 32 for name, code in reading.items() if name.startswith("combine"))
    for name, code in reading.items():
        assert code["products"] == [PRODUCT], name
        assert 16 in code["copies"], name
        assert set(code["copies"]) <= {8, 16}, name  # eight bytes: the places of a tree's own keys
        assert "ld.global.b16" not in code["loads"], name
    for name in ("add and norm", "gate"):
        assert "ld.global.v4.b32" in found["bf16"][name]["loads"], name
    prefetching = {name for name, code in found["bf16"].items() if code["prefetches"]}
    between = {"add and norm", "gate", *(f"combine of {group}" for group in (1, 4, 8, 16))}
    assert prefetching == (between if capability >= 90 else set())


def test_registers_and_programs_of_the_kernels(compiled):
    """No kernel spills registers, and a processor has room for as many programs as the kernels were made for."""
    capability, found = compiled
    assert {name: code["spills"] for kind in found.values() for name, code in kind.items() if code["spills"]} == {}
    for name, needs in NEEDS.items():
        code = found["bf16"][name]
        assert code["registers"] <= needs.registers, (name, code["registers"])
        assert code["programs"] >= (needs.hopper if capability >= 90 else needs.ampere), (name, code["programs"])
