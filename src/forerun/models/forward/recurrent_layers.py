"""Run recurrent layers of transformers' models inside a Forerun pass.

A mixer (a short convolution, a gated delta net, Mamba-2) calls its recurrences by name, as functions of its source
file. Inside a pass these names are bound to Forerun's functions, which separate rows, follow the draft tree, and find
each row's states in its cache; elsewhere, mixers are unchanged. They are recognised by the names that their code uses,
and the gate's self-test checks their results.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from forerun.kernels import gpu
from forerun.kernels.linear.ordered_modules import unwatched
from forerun.kernels.recurrent.gated_states import GatedShape
from forerun.models.forward.scorer import STATELESS_LAYERS, Pass, is_recurrent, is_sharded, running


class _RunningMixer(NamedTuple):
    rows: Pass
    layer: int


_mixer: ContextVar[_RunningMixer] = ContextVar("mixer")


def causal_convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Replace transformers' ``causal_conv1d_fn``: ``[1, C, n]`` in and out, with weights ``[C, K]``."""
    rows, layer = _mixer.get()
    with unwatched():
        x, taps = _wide(hidden_states[0].t()), _wide(weight.t())
        offset = None if bias is None else _wide(bias)
        out = torch.cat(
            [
                cache.recurrent().convolve(layer, part, taps, offset, block)
                for cache, part, block in zip(rows.caches, _split(rows, x), rows.blocks, strict=True)
            ]
        )
        result = out.to(weight.dtype).t()[None]
    return (result if activation is None else ACT2FN[activation](result)).to(hidden_states.dtype)


def gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Replace transformers' ``chunk_gated_delta_rule``, and Kimi's with a gate per channel: ``[1, n, heads, dim]``."""
    n, key_heads, dim = key.shape[1:]
    heads, out_dim = value.shape[2:]
    gates = g.shape[3] if g.dim() == 4 else 1
    shape = GatedShape(key_heads, heads, dim, out_dim, gates, True, use_qk_l2norm_in_kernel, dim**-0.5)
    inputs = torch.cat([_wide(each[0]).reshape(n, -1) for each in (key, value, g, beta)], 1)
    return _advance(shape, inputs, _wide(query[0])).to(query.dtype)[None], None


def mamba2_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,  # noqa: N803 - transformers' name
    B: torch.Tensor,  # noqa: N803
    C: torch.Tensor,  # noqa: N803
    D: torch.Tensor | None = None,  # noqa: N803
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> torch.Tensor:
    """Replace transformers' ``mamba2_chunk_scan``: ``[1, n, heads, dim]`` in and out."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(functional.softplus(dt) if dt_softplus else dt, *dt_limit)
    x, step, keys, queries = (_wide(each[0]) for each in (hidden_states, dt, B, C))
    heads, out_dim = x.shape[1:]
    shape = GatedShape(keys.shape[1], heads, keys.shape[2], out_dim, 1, False, False, 1.0)
    inputs = torch.cat([keys.flatten(1), (x * step[..., None]).flatten(1), _wide(A) * step], 1)
    out = _advance(shape, inputs, queries)
    return (out if D is None else out + _wide(D)[:, None] * x)[None]


RECURRENCES: Mapping[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_convolution,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
UNSUPPORTED = {"mamba_selective_scan": "Mamba-1's selective scan"}
"""Recurrences without a kernel here, by transformers' names."""


def _advance(shape: GatedShape, inputs: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    rows, layer = _mixer.get()
    with unwatched():
        parts = zip(rows.caches, _split(rows, inputs), _split(rows, q), rows.blocks, strict=True)
        return torch.cat(
            [cache.recurrent().advance(layer, shape, own, query, block) for cache, own, query, block in parts]
        )


def _split(rows: Pass, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(x.contiguous(), [len(block) for block in rows.blocks])


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Convert to contiguous float64 or else float32, in which recurrences compute."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32).contiguous()


def adapt(model: PreTrainedModel) -> None:
    """Let the classes of a model's mixers use Forerun's recurrences inside passes."""
    for kind in {type(mixer) for mixer in mixers(model)}:
        if not hasattr(kind.forward, "recurrent_forward"):
            kind.forward = _inside_passes(kind.forward)


def mixers(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yield modules whose code uses a recurrence."""
    for module in model.modules():
        if _names(module) & (RECURRENCES.keys() | UNSUPPORTED.keys()):
            yield module


def unsupported(model: PreTrainedModel) -> str | None:
    """Return why a model's recurrent layers cannot follow a draft tree, or None."""
    if not is_recurrent(model):
        return None
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    recurrent, found = [kind for kind in kinds if kind not in STATELESS_LAYERS], list(mixers(model))
    reasons = [
        f"there is no kernel for {UNSUPPORTED[name]}"
        for name in UNSUPPORTED
        if any(name in _names(each) for each in found)
    ]
    if len(found) < len(recurrent):
        return f"it has layers of type {sorted(set(recurrent))}"
    if not found:
        reasons.append("there is no kernel for them")
    if model.device.type != "cpu" and not gpu.runs_on(model.device):
        reasons.append(f"their kernels run on CPUs and on GPUs with Triton, not on {model.device.type!r}")
    if is_sharded(model):
        reasons.append("their states cannot be cut into parts for several processes")
    return f"its layers are recurrent, and {reasons[0]}" if reasons else None


def _names(module: nn.Module) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def _inside_passes(own: Any) -> Any:
    plain: Any = inspect.unwrap(own)
    names = {**plain.__globals__, **RECURRENCES}
    inside = FunctionType(plain.__code__, names, plain.__name__, plain.__defaults__, plain.__closure__)
    inside.__kwdefaults__ = plain.__kwdefaults__

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows = running.get()
        if not isinstance(rows, Pass):
            return own(self, *args, **kwargs)
        layer: Any = self.layer_idx
        before = _mixer.set(_RunningMixer(rows, layer))
        try:
            return inside(self, *args, **kwargs)
        finally:
            _mixer.reset(before)

    forward.recurrent_forward = True  # type: ignore[attr-defined]
    return forward
