"""What a request and its statistics promise."""

import numpy as np
import pytest
import torch

from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.stats import Stats


def test_a_request_without_prompt_or_room_is_refused():
    with pytest.raises(ValueError, match=r"^the prompt is empty; at least one token is needed$"):
        Request([], 4)
    for limit in (0, -3):
        with pytest.raises(ValueError, match=f"^max_new_tokens is {limit}; it must be at least 1$"):
            Request([1], limit)


def test_a_request_counts_its_tokens_and_ends_by_length():
    request, other = Request(np.array([5, 6, 7]), 2), Request([1], 1)
    request.stats.record(3, 1, 2)
    assert request.id != other.id and other.stats == Stats()
    assert (len(request), request.remaining, request.max_draft_depth) == (3, 2, 1)
    assert request.append(8) is False and request.finish_reason is None
    assert (len(request), request.remaining, request.max_draft_depth) == (4, 1, 0)
    assert request.append(9) is True and request.finish_reason == "length"
    assert request.tokens.tolist() == [5, 6, 7, 8, 9]
    assert request.prompt.tolist() == [5, 6, 7] and request.generated.tolist() == [8, 9]


def test_end_of_sequence_counts_before_stopping_and_stopping_before_length():
    for token, stop, reason in ((2, True, "eos"), (1, True, "stop"), (1, False, "length")):
        request = Request([0], 1, eos_token_ids=frozenset({2, 3}), stopping=lambda ids, stop=stop: stop)
        assert request.append(token)
        assert request.finish_reason == reason


def test_padding_is_seen_by_processors_and_stopping_but_not_by_the_noise():
    seen: list[list[int]] = []

    def look(ids: torch.Tensor, scores: torch.Tensor | None = None) -> torch.Tensor | None:
        seen.append(ids[0].tolist())
        return scores

    padded = Request([4, 5], 3, sampler=Sampler("coupled", 1, look), stopping=look, padding=[0, 0])
    plain = Request([4, 5], 3, sampler=Sampler("coupled", 1))
    logits = torch.zeros(50)
    assert padded.tokens.tolist() == [4, 5] and len(padded) == 2
    assert padded.choose(logits) == plain.choose(logits)
    padded.append(9)
    assert seen == [[0, 0, 4, 5], [0, 0, 4, 5, 9]]


def test_statistics_add_up():
    stats = Stats(prefill_seconds=9.0, propose_seconds=0.5, score_seconds=1.0, verify_seconds=0.5)
    for counts in ((0, 0, 1), (4, 2, 3), (4, 4, 4)):  # the last step ends the text inside its accepted run
        stats.record(*counts)
    assert (stats.steps, stats.tokens) == (3, 8)
    assert stats.tokens_per_step == pytest.approx(8 / 3)
    assert stats.acceptance == 0.75
    assert stats.decode_seconds == 2.0
    assert stats.tokens_per_second == 3.5
    assert stats.drafted_mask() == [False, True, True, False, True, True, True, True]
    assert stats.histogram() == {1: 1, 3: 1, 4: 1}
    assert stats.summary() == {
        "tokens": 8, "steps": 3, "tokens_per_step": 2.6667, "drafted": 8, "accepted": 6, "acceptance": 0.75,
        "histogram": {"1": 1, "3": 1, "4": 1}, "prefill_seconds": 9.0, "propose_seconds": 0.5, "score_seconds": 1.0,
        "verify_seconds": 0.5, "tokens_per_second": 3.5,
    }  # fmt: skip
    nothing = Stats()
    assert nothing.tokens_per_step == nothing.acceptance == nothing.tokens_per_second == 0.0
    assert nothing.histogram() == {} and nothing.drafted_mask() == []
