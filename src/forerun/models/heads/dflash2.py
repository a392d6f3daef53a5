"""DFlash2 (2026): DFlash with convolutions inside the block, and a selector that conditions tokens on the one before.

A causal convolution over the block's rows precedes and follows each attention and MLP. Its kernel is a fixed one plus
one computed from the incoming rows, shared by ``conv_group_size`` channels:
``out[i, c] = sum over t of (base[t, c] + delta[i, t, group(c)]) * x[i - t, c]``.

The ``selector_top_k`` best logits of each row are candidates. After token ``p``, candidate ``c`` scores
``logit[c] + <predecessor[p] * projection(hidden), successor[c]>``, so each node of a tree has different children.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import pad

from forerun.kernels.linear.ordered_modules import Ordered
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.dflash import DFLASH_ENTRIES, DFlashHead
from forerun.models.heads.entries import count_in
from forerun.models.heads.head import Growth, HeadSequence
from forerun.models.heads.head_file import HeadFile
from forerun.models.heads.matrices import linear, placed
from forerun.models.heads.norms_and_rotary import rms_norm

SELECTOR_NUMBERS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
CODEBOOKS = ("predecessor_codebook", "successor_codebook")


class SelectorGrowth(Growth):
    """A growing tree with candidates and their logits, ``[levels, k]``, and projected states, ``[levels, rank]``."""

    def __init__(
        self, sequence: HeadSequence, hidden: torch.Tensor, candidates: torch.Tensor, projected: torch.Tensor
    ) -> None:
        super().__init__(sequence, hidden)
        self.candidates, self.projected = candidates, projected


class DFlash2Head(DFlashHead):
    """A DFlash2 head in a folder."""

    kind = "DFlash2"
    architectures = frozenset({"DFlash2DraftModel"})
    read_entries = DFLASH_ENTRIES - {"sample_from_anchor"} | {*SELECTOR_NUMBERS}
    single_valued: Mapping[str, Any] = {
        **DFlashHead.single_valued,
        "projector_type": "dflash2",
        "sample_from_anchor": False,
    }
    takes_shortlists = False
    non_causal_windows = True

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        stated = {name: self._value(name) for name in SELECTOR_NUMBERS}
        self._taps, self._group, self._rank, self._top = (
            count_in(stated, name, self.folder) for name in SELECTOR_NUMBERS
        )
        if self._size % self._group or self._taps > self._block:
            raise ValueError(
                f"conv_group_size is {self._group} and conv_kernel_size {self._taps} in {self.folder}; "
                f"they must divide hidden_size, {self._size}, and be at most block_size, {self._block}"
            )

    def bind(self, target: Scorer) -> None:
        super().bind(target)
        if self.tokens is not None or self._top > target.vocabulary:
            raise ValueError(
                f"the DFlash2 head in {self.folder} has {self._draft_vocabulary} tokens and selects among {self._top}; "
                f"it must have all of the target's {target.vocabulary}"
            )

    def _load(self, file: HeadFile, target: Scorer) -> None:
        super()._load(file, target)
        for name in CODEBOOKS:  # a parameter, or saved as an embedding
            full, shape = f"candidate_selector.{name}", (target.vocabulary, self._rank)
            found = file.find(f"{full}.weight", *shape)
            found = file.take(full, *shape) if found is None else found
            self._weights[name] = placed(target, found)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size, taps = self._size, self._taps
        names = super()._shapes() | {"candidate_selector.hidden_projection.weight": (self._rank, size)}
        for at in (f"layers.{layer}.{part}_conv." for layer in range(self._count) for part in ("attention", "mlp")):
            names |= {f"{at}base_kernel": (2, taps, size)}
            names[f"{at}kernel_projection.weight"] = 2 * taps * (size // self._group), size
        return names

    def _decoder_layer(
        self, layer: int, x: torch.Tensor, sequences: Sequence[HeadSequence], angles: Any
    ) -> torch.Tensor:
        w, eps, at = self._weights, self._eps, f"layers.{layer}."
        y, deltas = self._enter(f"{at}attention_conv.", rms_norm(x, w[f"{at}input_layernorm.weight"], eps))
        x = x + self._leave(f"{at}attention_conv.", self._attention(layer, y, sequences, angles), deltas)
        y, deltas = self._enter(f"{at}mlp_conv.", rms_norm(x, w[f"{at}post_attention_layernorm.weight"], eps))
        return x + self._leave(f"{at}mlp_conv.", self._mlp(layer, y), deltas)

    def _enter(self, at: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Convolve a sublayer's input ``[n, hidden]``; also return its kernels, ``[n, 2, taps, groups]``."""
        deltas = linear(x, self._weights[f"{at}kernel_projection.weight"]).view(len(x), 2, self._taps, -1)
        return self._convolve(x, self._weights[f"{at}base_kernel"][0], deltas[:, 0]), deltas

    def _leave(self, at: str, x: torch.Tensor, deltas: torch.Tensor) -> torch.Tensor:
        return self._convolve(x, self._weights[f"{at}base_kernel"][1], deltas[:, 1])

    def _convolve(self, x: torch.Tensor, base: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Convolve rows ``[n, hidden]`` of complete blocks with kernel ``[taps, hidden]`` plus each row's."""
        kernels = base + delta.repeat_interleave(self._group, -1)
        blocks = x.view(-1, self._block, self._size)
        shifted = [pad(blocks, (0, 0, tap, 0))[:, : self._block].flatten(0, 1) for tap in range(self._taps)]
        return torch.stack([kernels[:, tap] * each for tap, each in enumerate(shifted)]).sum(0)

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        hidden = self._fill(sequences)
        with Ordered():
            top = self._logits(hidden.flatten(0, 1)).topk(self._top)
            projected = linear(hidden, self._weights["candidate_selector.hidden_projection.weight"])
            shape = len(sequences), self.levels, self._top
            parts = zip(sequences, top.values.view(shape), top.indices.view(shape), projected, strict=True)
            growths = [SelectorGrowth(*part) for part in parts]
            first = [self._scores(growth, 0, [int(growth.sequence.last)]) for growth in growths]
        return [*growths], torch.cat(first)

    def at_level(self, growth: Growth, level: int, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        assert isinstance(growth, SelectorGrowth)
        return self._scores(growth, level, tokens)

    def _scores(self, growth: SelectorGrowth, level: int, before: Sequence[int]) -> torch.Tensor:
        """Return scores at a level after these tokens, ``[n, V]``; minus infinity except at candidates."""
        w, n = self._weights, len(before)
        if level >= len(growth.hidden):
            return growth.hidden.new_zeros(n, self._target.vocabulary)
        candidates, device = growth.candidates[level], growth.hidden.device
        predecessors = w["predecessor_codebook"][torch.tensor(before, device=device)] * growth.projected[level]
        edges = linear(predecessors, w["successor_codebook"][candidates])
        scores = growth.hidden.new_full((n, self._target.vocabulary), -torch.inf)
        return scores.index_copy_(1, candidates, growth.hidden[level] + edges.to(scores.dtype))


def is_dflash2(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is a DFlash2 head's."""
    return "DFlash2DraftModel" in (config.get("architectures") or ()) or (
        config.get("speculators_model_type") == "dflash2"
    )  # fmt: skip
