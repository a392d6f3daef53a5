"""DSpark (DeepSeek, 2026): DFlash's block, and a Markov head that conditions each token on the one before.

The block's first row predicts the next token, so a block of n rows drafts n tokens. The low-rank term
``markov_w2(f(markov_w1[token before]))`` is added to each row's logits. ``f`` is the identity (``vanilla``), a gate
computed from the row's hidden state and the token (``gated``), or a recurrent state along the tree's path (``rnn``).

The confidence head, which estimates acceptance, is not used: estimates come from the logits. Supported are the authors'
format (DeepSpec), SpecForge's and that of ``speculators``, but not layers inside a DeepSeek-V4 checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from forerun.kernels.linear.ordered_modules import Ordered
from forerun.models.forward.scorer import Scorer
from forerun.models.heads.dflash import DFLASH_ENTRIES, DFlashHead
from forerun.models.heads.entries import count_in
from forerun.models.heads.head import Growth, HeadSequence
from forerun.models.heads.head_file import HeadFile
from forerun.models.heads.matrices import linear

MARKOV_KINDS = ("vanilla", "gated", "rnn")
CONFIDENCE_ENTRIES = ("enable_confidence_head", "confidence_head_with_markov")


class MarkovGrowth(Growth):
    """A growing tree. ``hidden``: logits without the Markov head, ``[levels, D]``; ``rows``: hidden states, ``[levels,
    hidden]``; ``memory``: recurrent states, ``[n, rank]``, the sequence's end in row 0."""

    def __init__(self, sequence: HeadSequence, hidden: torch.Tensor, rows: torch.Tensor, rank: int) -> None:
        super().__init__(sequence, hidden)
        self.rows, self.memory = rows, rows.new_zeros(1, rank)


class DSparkHead(DFlashHead):
    """A DSpark head in a folder."""

    kind = "DSpark"
    architectures = frozenset({"Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"})
    read_entries = DFLASH_ENTRIES | {"markov_head_type", "markov_rank", *CONFIDENCE_ENTRIES}
    single_valued: Mapping[str, Any] = {**DFlashHead.single_valued, "projector_type": "dspark"}
    looked_up = frozenset({"markov_head.markov_w1.weight"})
    takes_shortlists = False
    from_anchor = True

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self._rank = count_in({"markov_rank": self._value("markov_rank")}, "markov_rank", self.folder)
        self._markov = str(self._value("markov_head_type", "vanilla"))
        if self._markov not in MARKOV_KINDS:
            raise ValueError(f"markov_head_type is {self._markov!r} in {self.folder}; it must be one of {MARKOV_KINDS}")

    def _load(self, file: HeadFile, target: Scorer) -> None:
        self._vocabulary = target.vocabulary
        super()._load(file, target)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        size, rank, at = self._size, self._rank, "markov_head."
        names = super()._shapes()
        names |= {
            f"{at}markov_w1.weight": (self._vocabulary, rank),
            f"{at}markov_w2.weight": (self._draft_vocabulary, rank),
        }
        made = {"gated": ("gate_proj", rank, size + rank), "rnn": ("joint_proj", 3 * rank, size + 2 * rank)}
        if self._markov in made:
            name, out, wide = made[self._markov]
            names |= {f"{at}{name}.weight": (out, wide), f"{at}{name}.bias": (out,)}
        return names

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        hidden = self._fill(sequences)
        with Ordered():
            logits = self._logits(hidden.flatten(0, 1)).view(len(sequences), self.levels, -1)
            parts = zip(sequences, logits, hidden, strict=True)
            growths = [MarkovGrowth(*part, self._rank) for part in parts]
            made = [self._after(growth, 0, growth.memory, [int(growth.sequence.last)]) for growth in growths]
        for growth, (_, memory) in zip(growths, made, strict=True):
            growth.memory = memory
        return [*growths], torch.cat([first for first, _ in made])

    def at_level(self, growth: Growth, level: int, parents: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        assert isinstance(growth, MarkovGrowth)
        logits, memory = self._after(growth, level, growth.memory[list(parents)], tokens)
        growth.memory = torch.cat([growth.memory, memory])
        return logits

    def _after(
        self, growth: MarkovGrowth, level: int, memory: torch.Tensor, before: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits ``[n, D]`` at a level after these tokens, and the recurrent state there, ``[n, rank]``."""
        if level >= len(growth.hidden):
            return growth.hidden.new_zeros(len(before), growth.hidden.shape[1]), memory
        w, at = self._weights, "markov_head."
        bias = w[f"{at}markov_w1.weight"][torch.tensor(before, device=memory.device)]
        row = growth.rows[level].expand(len(before), -1)
        if self._markov == "gated":
            x = torch.cat([row, bias], -1)
            bias = linear(x, w[f"{at}gate_proj.weight"], w[f"{at}gate_proj.bias"]).sigmoid() * bias
        elif self._markov == "rnn":
            x = torch.cat([memory, bias, row], -1)
            gate, new, out = linear(x, w[f"{at}joint_proj.weight"], w[f"{at}joint_proj.bias"]).chunk(3, -1)
            gate, bias = gate.sigmoid(), out.tanh()
            memory = gate * memory + (1 - gate) * new.tanh()
        return growth.hidden[level] + linear(bias, w[f"{at}markov_w2.weight"]), memory


def is_dspark(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is a DSpark head's."""
    return "DSpark" in str(config.get("architectures")) or config.get("speculators_model_type") == "dspark"
