"""Find where two outputs diverge, and decide whether rounding explains it.

The scores of the diverging step are compared with those of the model's own forward pass over the same tokens:
- ``error`` is the relative error of the step's logits (norms over the vocabulary, as in
  ``forerun.models.forward.gate``) to the model's own; in 16-bit types and with quantised activations, to those of the
  model in float32, as its own are rounded as much.
- ``margin`` is the gap between the two tokens in the model's own processed scores, including noise if sampled.
- ``allowance`` is four times d, the largest difference between the two sets of scores, or one unit of rounding at their
  magnitude if that is larger. (The best token by scores with an error of d has a margin of at most 2d. The reference is
  rounded as well, hence four. Scores are processed in float32 whatever the model's dtype.)

Rounding explains a divergence if its margin is within the allowance and its error within the tolerance: the gate's,
plus the error of the model's own logits if the reference is in float32. A wrong verification fails the first condition,
a wrong forward pass the second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from forerun.core.request import Request
from forerun.core.sampling import Salt, gumbel
from forerun.models.forward.gate import relative_error, rounding_error, rounds, unrounded


@dataclass(frozen=True)
class Divergence:
    """The first difference of an output, at index ``position``; a token is None if its output has ended."""

    position: int
    expected: int | None
    got: int | None
    margin: float
    allowance: float
    error: float
    tolerance: float

    @property
    def rounding(self) -> bool:
        """Whether rounding explains the divergence."""
        return self.margin <= self.allowance and self.error <= self.tolerance


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the index of the first difference of two sequences; None if they are equal."""
    pairs = zip(expected, got, strict=False)
    different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if different is None and len(expected) != len(got):
        return min(len(expected), len(got))
    return different


@torch.inference_mode()
def weigh(
    model: PreTrainedModel,
    request: Request,
    expected: Sequence[int],
    position: int,
    logits: torch.Tensor | None,
    kv_dtype: torch.dtype | None = None,
) -> Divergence:
    """Measure the divergence of ``request`` from ``expected`` at a step with ``logits`` ``[V]``; see the module."""
    a = expected[position] if position < len(expected) else None
    b = int(request.generated[position]) if position < len(request.generated) else None
    tolerance = rounding_error(model, kv_dtype)
    if a is None or b is None or logits is None:
        return Divergence(position, a, b, math.inf, 0.0, math.inf, tolerance)
    ids = torch.from_numpy(request.tokens[: request.prompt_length + position].copy()).to(model.device)
    own = model(input_ids=ids[None], use_cache=False).logits[0, -1]
    error = relative_error(logits, own)
    if rounds(model):
        with unrounded(model):
            wide = model(input_ids=ids[None], use_cache=False).logits[0, -1]
        error, tolerance = relative_error(logits, wide), tolerance + relative_error(own, wide)
    reference, step_scores = (_scores(request, ids, row) for row in (own, logits))
    margin = abs(float(reference[a] - reference[b]))
    return Divergence(position, a, b, margin, _allowance(reference, step_scores, model.dtype), error, tolerance)


def _scores(request: Request, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return processed scores plus noise, float64 ``[V]``; the next token is their argmax."""
    sampler = request.sampler
    scores = sampler.scores(ids, logits.clone()).double()
    if sampler.method == "greedy":
        return scores
    return scores + gumbel(sampler.seed, len(ids), len(scores), Salt.TARGET, scores.device)


def _allowance(reference: torch.Tensor, step_scores: torch.Tensor, dtype: torch.dtype) -> float:
    finite = reference.isfinite() & step_scores.isfinite()
    difference = float((reference - step_scores)[finite].abs().max())
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return 4 * max(difference, unit * float(reference[finite].abs().max()))
