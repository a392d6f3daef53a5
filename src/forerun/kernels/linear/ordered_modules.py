"""Linear layers and attention with fixed summation order, one call each: for models that do not run as one program.

Inside ``Ordered()`` every linear layer of a model, in any module or expert, goes through the kernel whose bits do not
depend on what shares the pass (``linear.py``). Activations do the same (``elementwise.py``). torch computes whatever
the kernel does not take. The kernel needs each output's weights in one contiguous row; ``lay_out`` arranges that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import linear as torch_linear
from torch.overrides import TorchFunctionMode

from forerun.kernels import gpu
from forerun.kernels.attention.attention_combine import COMBINE
from forerun.kernels.attention.attention_scan import SCAN
from forerun.kernels.attention.float64_attention import ATTEND_FLOAT64, FLOAT64_KIND
from forerun.kernels.attention.ordered_attention import AttendOp
from forerun.kernels.linear import elementwise, linear
from forerun.kernels.linear.linear import NUMBER_KINDS
from forerun.kernels.runtime import executor
from forerun.kernels.runtime.addresses import ScratchMemory
from forerun.kernels.runtime.vector_ir import LINE, fused

CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: FLOAT64_KIND}

_scratch = ScratchMemory()


class Ordered(TorchFunctionMode):
    """A context in which a token's results have the same bits whatever shares the pass."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See ``TorchFunctionMode``."""
        handler = HANDLERS.get(func)
        result = None if handler is None else handler(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if result is None else result


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
    if weight.device.type == "cpu" and not takes(x, rows):  # another layout is copied: slower, but as exact
        rows = rows.contiguous()
    return _product(x, rows)


def _product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """By the kernel for this device; None if it takes none of these."""
    if takes(x, weight):
        return product(x, weight, bias)
    if not gpu.runs_on(weight.device):
        return None
    from forerun.kernels.gpu import linear as there  # which needs Triton

    return there.product(x, weight, bias) if there.takes(x, weight) else None


def _mean(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x = args[0] if args else kwargs["input"]
    if not gpu.runs_on(x.device):
        return None
    told = dict(zip(("input", "dim", "keepdim"), args, strict=False)) | kwargs
    last = told.get("dim")
    if told.keys() - {"input", "dim", "keepdim"} or last not in (-1, x.dim() - 1):
        return None
    from forerun.kernels.gpu import mean as there  # which needs Triton

    return there.mean(x, bool(told.get("keepdim"))) if there.takes(x) else None


def _multiply(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    a, b = args
    if kwargs or not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return None
    return elementwise.times(a, b) if a.is_complex() and b.is_complex() and a.device.type == "cpu" else None


def _fill(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    x = args[0] if args else None
    plain = isinstance(x, torch.Tensor) and x.is_floating_point() and x.device.type == "cpu"
    if not plain or kwargs.get("inplace") or kwargs.get("out") is not None or any(each is True for each in args[1:]):
        return None
    return elementwise.filled(func, *args, **kwargs)


def _fill_halves(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """``_fill`` for 16-bit input only; in wider types the function rounds the same everywhere."""
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
    """Whether the kernel can read these: on a CPU, of one of its types, each row of weights contiguous."""
    return bool(
        weight.dim() == 2
        and weight.dtype in NUMBER_KINDS
        and x.dtype == weight.dtype
        and weight.device.type == "cpu"
        and weight.stride(1) == 1
        and weight.stride(0) == weight.shape[1]
        and fused()
        and weight.shape[1] * weight.element_size() % 4 == 0
    )


def lay_out(weight: torch.nn.Parameter) -> None:
    """Change the memory layout of a matrix ``[..., K, O]``, used as ``x @ weight``, to the one that the kernel reads.

    Shape and numbers stay. Afterwards the weights of each output are contiguous.
    """
    if weight.device.type == "cpu" and weight.dtype in NUMBER_KINDS and weight.stride(-2) != 1:
        weight.data = weight.data.transpose(-2, -1).contiguous().transpose(-2, -1)


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x @ weight.T + bias`` for rows of x ``[..., K]`` and a matrix ``[O, K]``; see ``takes``."""
    return linear.product(x, linear.plain(weight, bias))


def attends(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether ``attend`` can compute attention of these ``[1, H, n, d]``."""
    plain = k.dtype != torch.float16
    return (
        q.device.type == "cpu" and fused() and k.dtype in CACHE_KINDS and q.dtype == k.dtype and (fast(k, v) or plain)
    )


def fast(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the fast kernel takes heads of this type and width."""
    return k.dtype != torch.float64 and k.shape[3] % 16 == 0 and v.shape[3] % 16 == 0


def attend(
    q: torch.Tensor,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    tables: dict[str, int],
    room: tuple[int, int],
    how: tuple[float, int | None, float | None, torch.Tensor | None],
) -> torch.Tensor:
    """Attention of packed queries over their rows' keys, which are in the caches already.

    Args:
        q: ``[1, H, n, d]``.
        rows: keys and values of each row's cache, ``[1, Hkv, >= m, d]``.
        tables: the tape's fields that describe the pass.
        room: bytes per thread, and for states.
        how: scaling, window, soft cap and sinks, as in ``AttentionSpec``.

    Returns:
        ``[1, H, n, dv]``.
    """
    k, v = rows[0]
    (_, heads, n, dim), kv_heads, out_dim = q.shape, k.shape[1], v.shape[3]
    quick, (scaling, window, softcap, sinks) = fast(k, v), how
    asked = q if k.dtype == torch.float64 else q.float()
    asked = asked if asked.stride(3) == 1 else asked.contiguous()
    kv = np.array([[keys.data_ptr(), values.data_ptr()] for keys, values in rows], np.int64)
    wide = k.dtype == torch.float16 or (not quick and k.dtype == torch.bfloat16)
    out = torch.empty(n, heads * out_dim, dtype=torch.float32 if wide else k.dtype)
    held = None if sinks is None else sinks.detach().to(asked.dtype).contiguous()
    number = asked.element_size()
    fields = (
        CACHE_KINDS[k.dtype], k.element_size(), heads, kv_heads, dim, out_dim, window or 0, asked.data_ptr(),
        asked.stride(2) * number, asked.stride(1) * number, kv.ctypes.data, 0 if held is None else held.data_ptr(),
        out.data_ptr(), out.stride(0) * out.element_size(), int(out.dtype == torch.bfloat16),
        scaling / math.log(2) if quick else scaling, softcap or 0.0,
    )  # fmt: skip
    operations = (SCAN, COMBINE) if quick else (ATTEND_FLOAT64,)
    threads = torch.get_num_threads()
    size = LINE * math.ceil(room[0] / LINE)
    slots = _scratch.claim(threads * size + room[1] + LINE)
    program = executor.Program([(each, AttendOp(*fields)) for each in operations])
    program.run(n=n, **tables, slots=slots, slot_size=size, states=slots + threads * size)
    return out.view(1, n, heads, out_dim).transpose(1, 2).to(q.dtype)
