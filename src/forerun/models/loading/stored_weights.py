"""Modules over quantised weights in a GGUF file's format, which replace linear layers, embeddings and experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from forerun.kernels.linear.linear import product
from forerun.kernels.linear.weight_matrix import Weights


class StoredLinear(nn.Module):
    """A linear layer over quantised weights on a CPU, float32 in and out; ``bias``: float32 ``[O]``, or None;
    ``quantised``: whether inputs are quantised to eight bits; see ``linear.Weights``."""

    def __init__(
        self, rows: nn.Parameter, kind: str, in_features: int, bias: nn.Parameter | None = None, *, quantised: bool
    ) -> None:
        super().__init__()
        self.quantised = quantised
        self.register_state_dict_pre_hook(_refuse_to_save)  # type: ignore[no-untyped-call]
        self.weight, self.bias, self.kind = rows, bias, kind
        self.in_features, self.out_features = in_features, len(rows)

    @property
    def packed_weights(self) -> Weights:
        """The weights in the form that kernels use."""
        return Weights(self.weight, self.kind, self.bias, self.quantised)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _check_place(self.weight)
        if self.bias is None or self.bias.dtype == torch.float32:
            return product(x, self.packed_weights)
        return product(x, self.packed_weights._replace(bias=None)) + self.bias  # the bias was cast with the model

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, kind={self.kind}"


class InputOrder(nn.Module):
    """A reordering of a linear layer's inputs to its stored columns; ``order`` ``[K]`` has each column's input."""

    order: torch.Tensor

    def __init__(self, order: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("order", order, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[..., self.order]


class StoredEmbedding(nn.Module):
    """An embedding over quantised rows, bytes ``[V, row]`` of format ``kind``, times ``embed_scale``; float32 out."""

    def __init__(
        self,
        rows: nn.Parameter,
        kind: str,
        embedding_dim: int,
        embed_scale: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        self.register_state_dict_pre_hook(_refuse_to_save)  # type: ignore[no-untyped-call]
        self.weight, self.kind = rows, kind
        self.num_embeddings, self.embedding_dim = len(rows), embedding_dim
        if embed_scale is not None:
            self.register_buffer("embed_scale", embed_scale, persistent=False)

    @property
    def packed_weights(self) -> Weights:
        return Weights(self.weight, self.kind)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        from gguf import GGMLQuantizationType, dequantize

        _check_place(self.weight)
        rows = dequantize(self.weight[ids.reshape(-1)].numpy(), GGMLQuantizationType[self.kind])
        floats = torch.from_numpy(rows).float().view(*ids.shape, self.embedding_dim)
        scale: Any = getattr(self, "embed_scale", None)
        return floats if scale is None else floats * scale

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, kind={self.kind}"


class StoredExperts(nn.Module):
    """Gated experts over quantised weights on a CPU: ``gate``, ``up`` ``[E, I, row]``; ``down`` ``[E, H, row]``."""

    def __init__(
        self, gate: tuple[nn.Parameter, str], up: tuple[nn.Parameter, str], down: tuple[nn.Parameter, str],
        act_fn: Callable[[torch.Tensor], torch.Tensor], *, quantised: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.quantised = quantised
        self.register_state_dict_pre_hook(_refuse_to_save)  # type: ignore[no-untyped-call]
        (self.gate, self.gate_kind), (self.up, self.up_kind), (self.down, self.down_kind) = gate, up, down
        self.act_fn = act_fn

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the experts ``[T, k]`` of each token ``[T, H]``, in the experts' order."""
        _check_place(self.down)
        total = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            tokens, places = torch.where(top_k_index == expert)
            x = hidden_states[tokens]
            gate = self._product(x, self.gate[expert], self.gate_kind)
            inner = self.act_fn(gate) * self._product(x, self.up[expert], self.up_kind)
            outputs = self._product(inner, self.down[expert], self.down_kind)
            total.index_add_(0, tokens, (outputs * top_k_weights[tokens, places, None]).to(total.dtype))
        return total

    def _product(self, x: torch.Tensor, rows: torch.Tensor, kind: str) -> torch.Tensor:
        return product(x, Weights(rows, kind, quantised=self.quantised))

    def extra_repr(self) -> str:
        return f"{len(self.down)}, gate={self.gate_kind}, up={self.up_kind}, down={self.down_kind}"


def _check_place(weight: torch.Tensor) -> None:
    if weight.device.type != "cpu":
        raise ValueError(f"stored weights are on {weight.device}; there is a kernel for the CPU only")


def _refuse_to_save(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    raise ValueError(f"{prefix}weight is quantised as in its GGUF file and cannot be saved; keep the file")
