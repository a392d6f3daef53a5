"""P-EAGLE (2602.01469): EAGLE-3 that predicts several tokens in one pass.

Masks follow the sequence's last entry: each has the mask token's embedding, and the learned vector ``mask_hidden`` in
place of the target's states. A mask attends to the entries and masks before it, and predicts the token at its depth,
whatever was drafted in between. The layers are EAGLE-3's, plain decoder layers after the first. Supported are the
formats of the authors (AWS), of NeMo and of ``speculators``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from forerun.kernels.linear.ordered_modules import Ordered
from forerun.kv.cache import Cache
from forerun.models.forward.scorer import Scorer, attending
from forerun.models.heads.block_head import BlockHead
from forerun.models.heads.eagle3 import EAGLE_ENTRIES, EAGLE_SINGLE_VALUED, EagleHead
from forerun.models.heads.head import Growth, HeadSequence
from forerun.models.heads.head_file import HeadFile
from forerun.models.heads.recurrent_head import Reading
from forerun.models.heads.shortlist import drafting

PARALLEL_DEPTHS = 8
"""Default number of tokens per pass, as trained in the paper."""
MASK_ENTRIES = ("mask_token_id", "pard_token", "ptd_token_id")
"""Entries that name the mask token, in vLLM's order of look-up."""


class PEagleHead(BlockHead, EagleHead):
    """A P-EAGLE head in a folder."""

    kind = "P-EAGLE"
    read_entries = EAGLE_ENTRIES | {*MASK_ENTRIES, "num_depths", "para_depths", "parallel_drafting"}
    single_valued: Mapping[str, Any] = {
        name: value for name, value in EAGLE_SINGLE_VALUED.items() if name != "parallel_drafting"
    }

    def __init__(self, folder: str | Path) -> None:
        super().__init__(folder)
        self.levels = int(_depths(self.config))
        named = {name: self.config[name] for name in MASK_ENTRIES if self.config.get(name) is not None}
        self._mask_token = next(iter(named.values()), None)
        if self.levels < 1 or not isinstance(self._mask_token, int) or not 0 <= self._mask_token < self._vocabulary:
            raise ValueError(
                f"a P-EAGLE head predicts at least one token, with a mask that is a token of the target; "
                f"{self.folder / 'config.json'} says {self.levels}, and {named or 'no mask_token_id'}"
            )

    def _load(self, file: HeadFile, target: Scorer, wide: int) -> None:
        super()._load(file, target, wide)
        mask = file.take("mask_hidden", 1, 1, len(self.layers) * wide)
        with Ordered():
            self._mask = self.features(mask[0].to(target.device))

    def open(self, cache: Cache) -> HeadSequence:
        return HeadSequence(self.count, cache)

    def read(self, sequences: Sequence[HeadSequence]) -> None:
        self._pass([sequence for sequence in sequences if sequence.pending], 0)

    def start(self, sequences: Sequence[HeadSequence]) -> tuple[list[Growth], torch.Tensor]:
        left = self._pass(sequences, self.levels - 1)
        with Ordered(), drafting([sequence.shortlist for sequence in sequences], [self.levels] * len(sequences)):
            logits = self.matrix(self.final_norm(torch.cat(left))).view(len(sequences), self.levels, -1)
        return [Growth(sequence, own) for sequence, own in zip(sequences, logits, strict=True)], logits[:, 0]

    def _pass(self, sequences: Sequence[HeadSequence], masks: int) -> list[torch.Tensor]:
        """Process pending entries and masks; return outputs at last entries and masks, ``[1 + masks, hidden]``."""
        if not sequences:
            return []
        entries = [
            torch.cat([states for states, _ in sequence.pending]) if sequence.pending else None
            for sequence in sequences
        ]
        fresh = [0 if own is None else len(own) for own in entries]
        counts = [count + masks for count in fresh]
        tokens = [[*(token for _, own in sequence.pending for token in own.tolist()), *[self._mask_token] * masks]
                  for sequence in sequences]  # fmt: skip
        ends = [sequence.next or 0 for sequence in sequences]
        places = [np.arange(end - count, end + masks) for end, count in zip(ends, fresh, strict=True)]
        device = self._target.device
        with Ordered():
            embeddings = self.embed(torch.tensor([token for own in tokens for token in own], device=device))
            hidden = torch.cat([part for own in entries for part in self._inputs(own, masks)])
            positions = torch.from_numpy(np.concatenate(places)).to(device)
            with attending(Reading(sequences, counts)):
                for layer in range(self.count):
                    hidden = self.decoder_layer(layer, embeddings, hidden, positions)
        left = []
        for sequence, count, part in zip(sequences, fresh, torch.split(hidden, counts), strict=True):
            sequence.lengths = [length + count for length in sequence.lengths]
            sequence.hidden = part[count - 1 : count] if count else sequence.hidden
            sequence.pending.clear()
            left.append(part[count:] if sequence.hidden is None else torch.cat([sequence.hidden, part[count:]]))
        return left

    def _inputs(self, states: torch.Tensor | None, masks: int) -> list[torch.Tensor]:
        return [*([] if states is None else [self.features(states)]), self._mask.expand(masks, -1)]


def _depths(config: Mapping[str, Any]) -> int:
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    stated = (config.get("num_depths"), config.get("para_depths"), methods[0].get("speculative_tokens"))
    return next((int(depths) for depths in stated if depths), PARALLEL_DEPTHS)


def is_peagle(config: Mapping[str, Any]) -> bool:
    """Return whether a configuration is a P-EAGLE head's."""
    masked = any(config.get(name) is not None for name in MASK_ENTRIES) and "draft_vocab_size" in config
    return config.get("speculators_model_type") == "peagle" or bool(config.get("parallel_drafting")) or (
        masked and "speculators_model_type" not in config and "dflash_config" not in config
    )  # fmt: skip
