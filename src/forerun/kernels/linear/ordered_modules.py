"""Fix the order of sums in linear layers and elementwise functions of models that do not run as one program.

Inside ``Ordered()`` all linear layers, including those of experts, use the kernel whose bits do not depend on what
shares the pass (``linear.py``), or torch where it cannot. torch computes activations of full vectors and of the
remainder of a thread's share by different formulas, so rows are padded, and complex products are written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from forerun.kernels import gpu
from forerun.kernels.linear import linear
from forerun.kernels.linear.weight_matrix import NUMBER_KINDS, plain
from forerun.kernels.runtime.vector_ir import fused

VECTOR_MULTIPLE = 64
"""A multiple of torch's vector length, in numbers, on any CPU."""
THREAD_GRAIN = 32768
"""Fewest numbers per thread in most of torch's functions; some functions use all threads at once."""


class Ordered(TorchFunctionMode):
    """A context in which a token's results have the same bits whatever shares the pass."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = HANDLERS.get(func)
        result = None if handler is None else handler(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is None else result


unwatched = torch._C.DisableTorchFunction
"""A context inside ``Ordered()`` for code that fixes its order of sums itself: its calls are not intercepted."""

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], torch.Tensor | None]


def _linear(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    return None if kwargs else _product(*args)


def _addmm(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    if kwargs or args[0].dim() != 1 or args[2].dim() != 2:
        return None
    return _product(args[1], args[2].t(), args[0])


def _matmul(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x, weight = args
    if kwargs or weight.dim() != 2:
        return None
    rows = weight.t()
    if weight.device.type == "cpu" and not takes(x, rows) and takes(x, copied := rows.contiguous()):
        return linear.product(x, plain(copied), keep=False)  # another layout is copied: slower, but as exact
    return _product(x, rows)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    if takes(x, weight):
        return product(x, weight, bias)
    if not gpu.runs_on(weight.device):
        return None
    from forerun.kernels.gpu import linear as there  # needs Triton

    return there.product(x, weight, bias) if there.takes(x, weight) else None


def _mean(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x = args[0] if args else kwargs["input"]
    if not gpu.runs_on(x.device):
        return None
    given = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    last = given.get("dim")
    if given.keys() - {"input", "dim", "keepdim"} or last not in (-1, x.dim() - 1):
        return None
    from forerun.kernels.gpu import linear as there  # needs Triton

    return there.mean(x, bool(given.get("keepdim"))) if there.takes_mean(x) else None


def _multiply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    a, b = args
    if not (isinstance(a, torch.Tensor) and a.dtype.is_complex and a.is_cpu) or kwargs:
        return None
    return times(a, b) if isinstance(b, torch.Tensor) and b.dtype.is_complex else None


def _fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x = args[0] if args else None
    plain = isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == "cpu"
    if not plain or kwargs.get("inplace") or kwargs.get("out") is not None or any(each is True for each in args[1:]):
        return None
    return filled(func, *args, **kwargs)


def _fill_halves(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """Apply ``_fill`` to 16-bit input only; in wider types the function rounds the same everywhere."""
    return _fill(func, args, kwargs) if args and args[0].dtype in (torch.bfloat16, torch.float16) else None


HANDLERS: dict[Callable[..., Any], Handler] = {
    torch_linear: _linear,
    torch.addmm: _addmm,
    **dict.fromkeys((torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__), _multiply),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, functional.sigmoid, functional.silu, functional.gelu), _fill),
    **dict.fromkeys((functional.softplus, functional.mish, functional.elu), _fill),
    **dict.fromkeys((torch.rsqrt, Tensor.rsqrt), _fill_halves),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
}
"""Replacements for torch's functions; each returns None if torch should compute the call."""


def takes(x: Any, weight: Any) -> bool:
    """Return whether the kernel can read these: on a CPU, of one of its types, each row of weights contiguous."""
    dtype = weight.dtype
    return bool(
        weight.device.type == "cpu"
        and dtype in NUMBER_KINDS
        and x.dtype == dtype
        and weight.dim() == 2
        and weight.is_contiguous()
        and fused()
        and weight.shape[1] * dtype.itemsize % 4 == 0
    )


def lay_out(weight: torch.nn.Parameter) -> None:
    """Make each output's weights contiguous in a matrix ``[..., K, O]`` used as ``x @ weight``, with equal results."""
    if weight.device.type == "cpu" and weight.dtype in NUMBER_KINDS and weight.stride(-2) != 1:
        weight.data = weight.data.transpose(-2, -1).contiguous().transpose(-2, -1)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` for x ``[..., K]`` and a matrix ``[O, K]``; see ``takes``."""
    return linear.product(x, plain(weight, bias))


def filled(function: Callable[..., torch.Tensor], x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """Return ``function(x, *rest, **options)``, with every number computed by the formula for full vectors."""
    flat = x.reshape(-1)
    missing = _padded_size(len(flat)) - len(flat)
    if not missing:
        return function(flat, *rest, **options).view(x.shape)
    return function(pad(flat, (0, missing)), *rest, **options)[: len(flat)].view(x.shape)


def _padded_size(count: int) -> int:
    """Pad a count so that every thread has full vectors, however many threads torch uses."""
    size, threads = 0, torch.get_num_threads()
    while size < count:
        size = count
        multiple = VECTOR_MULTIPLE * math.lcm(threads, max(1, min(threads, math.ceil(size / THREAD_GRAIN))))
        count = multiple * math.ceil(size / multiple)
    return size


def times(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply complex numbers, rounding every real operation separately."""
    return torch.complex(a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real)
