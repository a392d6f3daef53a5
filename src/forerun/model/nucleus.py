"""Top-p without sorting the vocabulary, which for 50,000 tokens takes as long as half a pass of a small model.

The smallest probabilities that sum to at most 1 - p are left out. All that are at most (1 - p) / V sum to no more than
that, so they are left out in any case. That is nearly all of the vocabulary; only what remains is sorted.
"""

from __future__ import annotations

import torch
from transformers import TopPLogitsWarper


class Nucleus:
    """Does for one row what ``transformers``' own does. Sums are in float64: a token at the very edge may fall on the
    other side.

    Args:
        warper: whose settings it takes; it is called where too few tokens are large.
    """

    forerun_stateless = True

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self._warper = warper

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """See ``forerun.core.sampling.Processor``."""
        chances, out = scores[0].softmax(-1).double(), 1 - self._warper.top_p
        large = chances > out / len(chances)
        found, least = large.nonzero()[:, 0], self._warper.min_tokens_to_keep
        if len(found) < least:
            return self._warper(input_ids, scores)  # type: ignore[no-any-return]
        rising, order = chances[found].sort()
        left_out = rising.cumsum(0) + chances.masked_fill(large, 0).sum() <= out
        left_out[-least:] = False
        kept = found[order[~left_out]]
        return torch.full_like(scores, self._warper.filter_value).index_copy_(1, kept, scores[:, kept])
