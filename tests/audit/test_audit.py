"""The audit passes what is lossless, excuses rounding, and can fail."""

import copy
import dataclasses
import math
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.mocks import RowByRow, gullible
from support.tiny import PROMPTS, tiny
from transformers import PreTrainedModel

import forerun.engine.engine
import forerun.engine.step
from forerun import DraftTree
from forerun.audit.audit import Plan, audit
from forerun.audit.divergence import Divergence, first_difference, weigh
from forerun.core.block import RowScores
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.core.sampling import Sampler
from forerun.core.verify import Verdict, verify
from forerun.decoding.recipes import DRAFTERS, Recipe, buildable
from forerun.models.forward.scorer import Scorer

PLAN = Plan(drafters=("lookup", "trie"), max_new_tokens=12)


class Guess(RowByRow):
    """Drafts the same wrong token, always."""

    def draft(self, request: Request, budget: int) -> DraftTree:
        return DraftTree.chain([(int(request.tokens[-1]) + 1) % 48][: request.max_draft_depth])


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan whose only drafter drafts wrongly."""
    monkeypatch.setitem(DRAFTERS, "lookup", Recipe(lambda setup: setup.over(setup.planner(Guess()))))
    return dataclasses.replace(PLAN, drafters=("lookup",))


def test_a_lossless_model_passes_every_check_of_every_drafter():
    report = audit(tiny("llama"), PROMPTS, Plan(max_new_tokens=12))
    assert report.dtype == "float64" and not report.divergences
    found, checks = {(c.drafter, c.check) for c in report.comparisons}, ("greedy", "plain", "coupled", "batch")
    assert found == set(product(buildable(LongContextConfig()), checks))
    assert sum(c.accepted for c in report.comparisons) > 30
    assert all(c.tokens for c in report.comparisons)


def test_progress_counts_every_run():
    calls: list[tuple[int, int]] = []
    plan = dataclasses.replace(PLAN, max_new_tokens=2)
    audit(tiny("llama"), PROMPTS[:1], plan, lambda done, total, what: calls.append((done, total)))
    assert calls == [(i, 8) for i in range(8)]  # drafters x (greedy, a seed) x (alone, in a batch)


def test_a_verification_that_accepts_wrong_drafts_fails(guessing, monkeypatch):
    monkeypatch.setattr(forerun.decoding.level, "verify", gullible)
    failed = [c for c in audit(tiny("llama"), PROMPTS, guessing).failures if c.check != "batch"]
    assert {c.check for c in failed} == {"greedy", "plain", "coupled"}
    for divergence in (comparison.divergence for comparison in failed):
        assert divergence.margin > 100 * divergence.allowance
        assert divergence.error < divergence.tolerance


def scored_by(monkeypatch: pytest.MonkeyPatch, change: Callable[[list[RowScores], Any], list[RowScores]]) -> None:
    """Engines score by ``Scorer``, whose rows are changed."""
    score_rows = Scorer.score_rows
    monkeypatch.setattr(forerun.engine.engine, "admitted", lambda model, *_, **__: Scorer(model))
    monkeypatch.setattr(
        Scorer, "score_rows", lambda self, blocks, *rest: change(score_rows(self, blocks, *rest), blocks)
    )


def test_scores_that_are_wrong_fail_though_the_walk_is_right(guessing, monkeypatch):
    def leaky(rows: list[RowScores], blocks: Any) -> list[RowScores]:
        pairs = zip(rows, blocks, strict=True)
        return [RowScores(row.logits.flip(-1)) if len(block.tree) else row for row, block in pairs]

    scored_by(monkeypatch, leaky)
    alone = [c for c in audit(tiny("llama"), PROMPTS, guessing).failures if c.check == "greedy"]
    assert alone
    assert all(c.divergence is not None and c.divergence.error > c.divergence.tolerance for c in alone)


def test_a_row_that_depends_on_its_batch_fails_that_check_only(monkeypatch):
    def mixed(rows: list[RowScores], blocks: Any) -> list[RowScores]:
        return [RowScores(row.logits.roll(1, -1)) for row in rows] if len(blocks) > 1 else rows

    scored_by(monkeypatch, mixed)
    report = audit(tiny("llama"), PROMPTS, PLAN)
    assert {c.check for c in report.failures} == {"batch"} and not report.never_drafted


def test_a_text_that_ends_too_early_fails(guessing, monkeypatch):
    def hasty(tree: DraftTree, logits: torch.Tensor, request: Request, told: object = None) -> Verdict:
        verdict = verify(tree, logits, request)
        if len(tree) and len(request.generated) >= 4:
            request.finish_reason = "stop"
        return verdict

    monkeypatch.setattr(forerun.decoding.level, "verify", hasty)
    failures = audit(tiny("llama"), PROMPTS, guessing).failures
    ended = [c.divergence for c in failures if c.check == "greedy" and c.divergence is not None]
    assert ended
    assert all(d.got is None and d.expected is not None and d.margin == math.inf for d in ended)


def diverging(model: PreTrainedModel, margin: float, noise: float) -> Divergence:
    """A text that begins with the second-best token, ``margin`` below the best, by logits that put it on top."""
    ids = torch.tensor([PROMPTS[0]])
    logits = model(ids, use_cache=False).logits[0, -1].detach()
    best, second = logits.float().topk(2).indices.tolist()
    with torch.no_grad():
        logits[second] = logits[best] - margin
    seen = logits.clone()
    seen[second] = logits[best] + noise
    request = Request(PROMPTS[0], 4, sampler=Sampler())
    request.append(second)

    output = SimpleNamespace(logits=logits[None, None])
    own = Mock(dtype=model.dtype, device=model.device, modules=model.modules, return_value=output)
    return weigh(own, request, [best], 0, seen)


@pytest.mark.parametrize(("dtype", "margin", "noise", "rounding"), [
    (torch.float32, 1e-6, 1e-6, True), (torch.float32, 3.0, 1.0, False), (torch.bfloat16, 0.03, 0.03, True),
    (torch.float64, 1e-9, 1e-9, True), (torch.float64, 0.1, 0.1, False),
])  # fmt: skip
def test_near_ties_are_rounding_and_gaps_are_not(dtype, margin, noise, rounding):
    divergence = diverging(copy.deepcopy(tiny("llama")).to(dtype), margin, noise)
    assert divergence.rounding == rounding, divergence


def test_rounding_in_bfloat16_is_no_failure():
    model = copy.deepcopy(tiny("qwen2")).to(torch.bfloat16)
    prompts = [np.random.default_rng(i).integers(6, 48, 12).tolist() for i in range(2)]
    report = audit(model, prompts, Plan(drafters=("trie",), max_new_tokens=16))
    assert report.dtype == "bfloat16" and not report.failures


def test_a_wrong_pass_in_bfloat16_is_no_rounding():
    """Logits that are off by a tenth more than the model's own are, from those in float32."""
    model = copy.deepcopy(tiny("llama")).to(torch.bfloat16)
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode():
        own, wide = (each(ids, use_cache=False).logits[0, -1].float() for each in (model, copy.deepcopy(model).float()))
    best = int(own.argmax())
    noise = torch.randn(len(own), generator=torch.Generator().manual_seed(1))
    off = noise / noise.norm() * wide.norm()
    found = []
    for size in (0.0, 0.02, 0.15):
        seen = wide + size * off
        request = Request(PROMPTS[0], 4, sampler=Sampler())
        request.append((best + 1) % len(own))
        found.append(weigh(model, request, [best], 0, seen))
    assert [each.error for each in found] == pytest.approx([0.0, 0.02, 0.15], abs=1e-5)
    assert [each.error <= each.tolerance for each in found] == [True, True, False]
    assert found[0].tolerance == pytest.approx(0.05 + float((own - wide).norm() / wide.norm()), rel=1e-4)


def test_texts_part_where_they_first_differ_or_one_ends():
    texts = [1, 2, 3], [1, 5, 3], [1, 2]
    assert [first_difference(each, [1, 2, 3]) for each in texts] == [None, 1, 2]


def test_wrong_plans_and_no_prompt_are_refused_and_drafts_have_their_full_length_by_default():
    wrong: dict[str, Any]
    for wrong in ({"drafters": ["magic"]}, {"seeds": -1}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match="magic" if "drafters" in wrong else next(iter(wrong))):
            Plan(**wrong)
    with pytest.raises(ValueError, match="no prompt"):
        audit(tiny("llama"), [])
    assert not Plan().settings.paced


def test_texts_without_a_draft_and_drafters_that_never_drafted_are_named():
    report = audit(tiny("llama"), [[5, 6, 7]], dataclasses.replace(PLAN, max_new_tokens=2, seeds=0))
    assert report.never_drafted == ["lookup"]  # three different tokens, and nothing from earlier texts
    assert {c.drafter for c in report.undrafted} >= {"lookup"}
