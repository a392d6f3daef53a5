"""Top-p as ``transformers`` has it, quickly."""

from __future__ import annotations

import torch
from transformers import TopPLogitsWarper

from forerun.core.compiling import COMPILES
from forerun.core.top_p import cut


class Nucleus:
    """Does for one row on a CPU what ``transformers``' own does. Sums are in float64: a token at the very edge may fall
    on the other side.

    Args:
        warper: whose settings it takes. It is called where it has to keep more tokens, for scores that are not float32,
            for several rows, and elsewhere than on a CPU.
    """

    forerun_stateless = True

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self._warper = warper

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See ``forerun.core.sampling.Processor``."""
        if COMPILES and scores.device.type == "cpu" and scores.dtype == torch.float32 and len(scores) == 1:
            own = scores[0].detach().contiguous()
            found, kept = cut(own.numpy(), own.softmax(-1).numpy(), 1 - self._warper.top_p, self._warper.filter_value)
            if kept >= self._warper.min_tokens_to_keep:
                return torch.from_numpy(found)[None]
        return self._warper(input_ids, scores)  # type: ignore[no-any-return]
