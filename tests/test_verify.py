"""Verification changes nothing: enumerated exactly, sampled by seed, and compared with a slow generator's text.

The mock target and the loop here serve the drafters' own tests too.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sampling import chi_square_p

from forerun.drafters.base import Drafter, NoDrafter
from forerun.request import Request
from forerun.sampling import Processor, Salt, Sampler, draw, gumbel
from forerun.stats import Stats
from forerun.tree import ROOT, DraftTree
from forerun.verify import Outcome, Verdict, verify

verify_module = importlib.import_module("forerun.verify")

PROMPT = (1, 4, 2)


class MockTarget:
    """A random table from the last ``order`` tokens to the next one's logits.

    Args:
        peak: the logits' standard deviation; a large one makes the target predictable.
    """

    def __init__(self, vocabulary: int = 5, order: int = 2, peak: float = 1.0, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.order = order
        self.table = torch.randn([vocabulary] * (order + 1), generator=generator, dtype=torch.float64) * peak

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        """After a context of at least ``order`` tokens."""
        return self.table[tuple(context[-self.order :])]

    def score(self, context: Sequence[int], tree: DraftTree) -> torch.Tensor:
        """What a model's forward pass gives: logits after the context and after each node, found by its parents."""
        return torch.stack([self.logits([*context, *branch]) for branch in paths(tree)])


def paths(tree: DraftTree) -> Iterator[list[int]]:
    """The tokens from the root to the root itself (none) and to every node."""
    yield []
    for i in range(len(tree)):
        yield tree.tokens[np.flatnonzero(tree.ancestors[i])].tolist()


def oracle(
    target: MockTarget,
    prompt: Sequence[int],
    limit: int,
    sampler: Sampler,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """The slow and obvious generator."""
    text = list(prompt)
    while len(text) < len(prompt) + limit and not (len(text) > len(prompt) and text[-1] in eos):
        scores = target.logits(text).float()
        if sampler.processor is not None:
            scores = sampler.processor(torch.tensor([text]), scores[None].clone())[0]
        noise = 0 if sampler.method == "greedy" else gumbel(sampler.seed, len(text), len(scores), Salt.TARGET)
        text.append(int((scores.double() + noise).argmax()))
    return text[len(prompt) :]


def generate(target: MockTarget, drafter: Drafter, request: Request, budget: int = 8) -> list[int]:
    """The engine's loop, with the contract between the parts asserted at every step."""
    drafter.begin(request)
    while request.finish_reason is None:
        step(target, drafter, request, budget)
    drafter.finish(request)
    return request.generated.tolist()


def step(target: MockTarget, drafter: Drafter, request: Request, budget: int = 8) -> Outcome:
    """Propose, score, verify, observe."""
    before = request.tokens.tolist()
    tree = drafter.propose(request, budget)
    assert tree.drafted <= budget and (tree.depths <= request.max_draft_depth).all()
    logits = target.score(before, tree)
    outcome = Outcome(tree, verify(tree, logits, request), logits)
    assert request.tokens.tolist() == before + outcome.verdict.tokens
    assert_consistent(outcome, request)
    request.stats.record(tree.drafted, len(outcome.verdict.path), len(outcome.verdict.tokens))
    drafter.observe(request, outcome)
    return outcome


def assert_consistent(outcome: Outcome, request: Request) -> None:
    """The accepted path leads down from the root over verifiable nodes; one token follows unless the text ended."""
    tree, path, tokens = outcome.tree, outcome.verdict.path, outcome.verdict.tokens
    assert tree.parents[path].tolist() == [ROOT, *path][: len(path)]
    assert tree.tokens[path].tolist() == tokens[: len(path)]
    assert tree.probe is None or not tree.probe[path].any()
    assert len(tokens) == len(path) + 1 or (request.finish_reason is not None and len(tokens) == len(path) > 0)


def ban_repeats(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor that looks at the prefix: no token twice in a row, and a temperature."""
    scores[:, ids[0, -1]] = -math.inf
    return scores / 0.7


SAMPLERS = {
    "greedy": Sampler(),
    "greedy with a processor": Sampler(processor=ban_repeats),
    "coupled": Sampler("coupled", seed=3),
    "coupled with a processor": Sampler("coupled", seed=4, processor=ban_repeats),
    "rejection without q": Sampler("rejection", seed=5),
}


@dataclass
class Prophet(Drafter):
    """Knows the text, and drafts it with some tokens spoilt: never, sometimes or always accepted."""

    text: Sequence[int]
    spoilt: Callable[[int], bool] = lambda position: False
    depth: int = 4
    probe: bool = False

    def propose(self, request: Request, budget: int) -> DraftTree:
        start = len(request.generated)
        depth = min(self.depth, budget, request.max_draft_depth)
        after = [*self.text, *[0] * depth][start : start + depth]  # drafts go on behind the end of the text
        tokens = np.array([(t + 1) % 5 if self.spoilt(start + i) else t for i, t in enumerate(after)], np.int64)
        tree = DraftTree.chain(tokens)
        return DraftTree(tree.tokens, tree.parents, probe=np.full(len(tree), self.probe))


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("limit", [1, 2, 5, 33])
@pytest.mark.parametrize(
    ("spoilt", "fastest"),
    [
        pytest.param(lambda position: False, 5, id="always accepted"),
        pytest.param(lambda position: position % 7 % 3 == 0, 4, id="sometimes accepted"),
        pytest.param(lambda position: True, 1, id="never accepted"),
    ],
)
def test_the_text_is_the_oracles_when_drafts_are(
    name: str, limit: int, spoilt: Callable[[int], bool], fastest: int
) -> None:
    target = MockTarget(peak=2, seed=1)
    text = oracle(target, PROMPT, limit, SAMPLERS[name])
    request = Request(PROMPT, limit, sampler=SAMPLERS[name])
    assert generate(target, Prophet(text, spoilt), request) == text
    assert request.finish_reason == "length"
    assert max(request.stats.emitted) <= fastest
    if limit == 33:
        assert (request.stats.steps == 33) == (fastest == 1)


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_text_is_the_oracles_without_drafts(name: str) -> None:
    target = MockTarget()
    request = Request(PROMPT, 20, sampler=SAMPLERS[name])
    assert generate(target, NoDrafter(), request) == oracle(target, PROMPT, 20, SAMPLERS[name])
    assert request.stats.emitted == [1] * 20


@pytest.mark.parametrize("name", SAMPLERS)
def test_probes_are_never_accepted_however_right_they_are(name: str) -> None:
    target = MockTarget(seed=2)
    text = oracle(target, PROMPT, 12, SAMPLERS[name])
    request = Request(PROMPT, 12, sampler=SAMPLERS[name])
    assert generate(target, Prophet(text, probe=True), request) == text
    assert request.stats.emitted == [1] * 12
    assert request.stats.drafted == [0] * 12


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("end", range(9))
def test_an_end_of_sequence_inside_an_accepted_run_cuts_exactly_there(name: str, end: int) -> None:
    target = MockTarget(vocabulary=12, order=1, seed=3)
    prompt = (1, 2)
    text = oracle(target, prompt, 20, SAMPLERS[name])
    eos = frozenset({text[end]})
    cut = text[: text.index(text[end]) + 1]
    assert oracle(target, prompt, 20, SAMPLERS[name], eos) == cut
    request = Request(prompt, 20, sampler=SAMPLERS[name], eos_token_ids=eos)
    assert generate(target, Prophet(text), request) == cut
    assert request.finish_reason == "eos"
    assert max(request.stats.emitted) == min(len(cut), 5)


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_stopping_criterion_inside_an_accepted_run_cuts_exactly_there(name: str) -> None:
    target = MockTarget(seed=3)
    text = oracle(target, PROMPT, 20, SAMPLERS[name])
    for end in range(1, 9):
        request = Request(PROMPT, 20, sampler=SAMPLERS[name], stopping=lambda ids, n=end: ids.shape[1] == 3 + n)
        assert generate(target, Prophet(text), request) == text[:end]
        assert request.finish_reason == "stop"


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_tree_whatsoever_changes_the_text(name: str, data: st.DataObject) -> None:
    class Anything(Drafter):
        def propose(self, request: Request, budget: int) -> DraftTree:
            n = data.draw(st.integers(0, budget))
            parents = [data.draw(st.integers(ROOT, i - 1)) for i in range(n)]
            tokens = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
            probe = data.draw(st.lists(st.sampled_from([False, False, True]), min_size=n, max_size=n))
            tree = DraftTree(np.array(tokens), np.array(parents), probe=np.array(probe, np.bool_))
            return tree.trim(request.max_draft_depth)

    target = MockTarget(vocabulary=3, seed=4)
    request = Request((1, 2), 6, sampler=SAMPLERS[name], eos_token_ids=frozenset({0}))
    expected = oracle(target, (1, 2), 6, SAMPLERS[name], frozenset({0}))
    assert generate(target, Anything(), request, budget=6) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("processor", [None, lambda ids, scores: scores])
def test_greedy_breaks_ties_alike_on_every_path_and_in_every_dtype(
    dtype: torch.dtype, processor: Processor | None
) -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]], dtype=dtype)
    if dtype == torch.float64:
        logits[0, 2] += 1e-12  # a tie in float32, in which transformers compares
    request = Request([0], 4, sampler=Sampler(processor=processor))
    assert verify(DraftTree.chain([1]), logits, request) == Verdict([0], [1, 0])


def test_of_equal_siblings_the_first_is_followed() -> None:
    tree = DraftTree(np.array([1, 1, 2, 0]), np.array([ROOT, ROOT, 0, 1]))
    logits = torch.eye(3)[[1, 2, 0, 1, 1]]
    assert verify(tree, logits, Request([0], 4)) == Verdict([0, 2], [1, 2, 1])


# Exactness by enumeration: the code runs once for every sequence of random decisions, weighted by their probability.

Decide = Callable[[Sequence[float]], int]


def enumerate_outcomes(experiment: Callable[[Decide], tuple[int, ...]]) -> dict[tuple[int, ...], float]:
    """The exact distribution of a random experiment, which leaves every random decision to its argument."""
    distribution: dict[tuple[int, ...], float] = defaultdict(float)
    pending: list[list[int]] = [[]]
    while pending:
        decisions, weights = pending.pop(), list[float]()

        def decide(probabilities: Sequence[float], decisions=decisions, weights=weights) -> int:
            if len(weights) == len(decisions):
                first, *others = (i for i, p in enumerate(probabilities) if p > 0)
                pending.extend([*decisions, other] for other in others)
                decisions.append(first)
            choice = decisions[len(weights)]
            weights.append(probabilities[choice])
            return choice

        distribution[experiment(decide)] += math.prod(weights)
    return distribution


@dataclass
class UniformVariable:
    """A variable uniform on (0, scale): compared with a bound, it leaves the answer to ``decide``."""

    decide: Decide
    scale: float = 1.0

    def __mul__(self, factor: torch.Tensor | float) -> UniformVariable:
        return UniformVariable(self.decide, self.scale * float(factor))

    def __ge__(self, bound: torch.Tensor | float) -> bool:
        below = min(1.0, float(bound) / self.scale)
        return self.decide([below, 1 - below]) == 1


@dataclass
class Noise:
    """Replaces the library's draws by decisions, and checks that no two of them share their noise."""

    decide: Decide
    used: set[tuple[int, Salt]]

    def take(self, position: int, salt: Salt, probabilities: torch.Tensor) -> int:
        self.claim(position, salt)
        return self.decide((probabilities / probabilities.sum()).tolist())

    def claim(self, position: int, salt: Salt) -> None:
        assert (position, salt) not in self.used
        self.used.add((position, salt))

    def install(self, patch: pytest.MonkeyPatch) -> None:
        def uniform(seed: int, position: int, salt: Salt) -> UniformVariable:
            self.claim(position, salt)
            return UniformVariable(self.decide)

        def draw(probability: torch.Tensor, seed: int, position: int, salt: Salt) -> int:
            return self.take(position, salt, probability)

        def choose(sampler: Sampler, scores: torch.Tensor, position: int, salt: Salt = Salt.TARGET) -> int:
            return self.take(position, salt, scores.double().softmax(-1))

        patch.setattr(verify_module, "uniform", uniform)
        patch.setattr(verify_module, "draw", draw)
        patch.setattr(Sampler, "choose", choose)


def probabilities(model: MockTarget, context: Sequence[int], sampler: Sampler) -> torch.Tensor:
    """The distribution of the next token, in float64."""
    return sampler.scores(torch.tensor(context), model.logits(context)).double().softmax(-1)


def joint(target: MockTarget, prompt: Sequence[int], length: int, sampler: Sampler) -> dict[tuple[int, ...], float]:
    """The target's own distribution of the next ``length`` tokens."""
    return complete({(): 1.0}, target, prompt, length, sampler)


def complete(
    distribution: dict[tuple[int, ...], float],
    target: MockTarget,
    prompt: Sequence[int],
    length: int,
    sampler: Sampler,
) -> dict[tuple[int, ...], float]:
    """A distribution of texts, each continued by the target itself to ``length`` tokens."""
    for _ in range(length):
        longer: dict[tuple[int, ...], float] = defaultdict(float)
        for text, weight in distribution.items():
            if len(text) == length:
                longer[text] += weight
                continue
            for token, p in enumerate(probabilities(target, [*prompt, *text], sampler).tolist()):
                longer[(*text, token)] += weight * p
        distribution = longer
    return {text: weight for text, weight in distribution.items() if weight}


def drawn_chain(
    model: MockTarget, request: Request, length: int, sampler: Sampler, pick: Callable[[torch.Tensor, int], int]
) -> DraftTree:
    """Tokens drawn one after the other from ``model``, with the distributions they came from."""
    text, rows = request.tokens.tolist(), []
    for _ in range(length):
        rows.append(probabilities(model, text, sampler))
        text.append(pick(rows[-1], len(text)))
    q = torch.stack(rows) if rows else torch.empty(0, 5, dtype=torch.float64)
    return DraftTree.chain(text[len(request) :], q=q)


def assert_same_distribution(
    found: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float], tolerance: float = 1e-12
) -> None:
    assert sum(found.values()) == pytest.approx(1, abs=tolerance)
    for text in {*found, *expected}:
        assert abs(found.get(text, 0) - expected.get(text, 0)) < tolerance


DRAFTS = {
    "unlike the target": MockTarget(peak=1.5, seed=8),
    "equal to the target": MockTarget(peak=1.5, seed=7),
    "certain of one token": MockTarget(peak=400, seed=9),
}


@pytest.mark.parametrize("processor", [None, ban_repeats])
@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("draft", DRAFTS)
def test_rejection_leaves_the_targets_distribution_exactly(
    monkeypatch: pytest.MonkeyPatch, draft: str, length: int, processor: Processor | None
) -> None:
    target, sampler = MockTarget(peak=1.5, seed=7), Sampler("rejection", processor=processor)
    accepted: dict[int, float] = defaultdict(float)

    def one_step(decide: Decide) -> tuple[int, ...]:
        noise = Noise(decide, set())
        noise.install(monkeypatch)
        request = Request(PROMPT, length + 1, sampler=sampler)
        tree = drawn_chain(
            DRAFTS[draft], request, length, sampler, lambda q, position: noise.take(position, Salt.DRAFT, q)
        )
        verdict = verify(tree, target.score(PROMPT, tree), request)
        assert_consistent(Outcome(tree, verdict, torch.empty(0)), request)
        return (len(verdict.path), *verdict.tokens)

    texts: dict[tuple[int, ...], float] = defaultdict(float)
    for (path_length, *tokens), weight in enumerate_outcomes(one_step).items():
        texts[tuple(tokens)] += weight
        accepted[path_length] += weight
    assert_same_distribution(
        complete(texts, target, PROMPT, length + 1, sampler), joint(target, PROMPT, length + 1, sampler)
    )
    p, q = (probabilities(model, PROMPT, sampler) for model in (target, DRAFTS[draft]))
    assert accepted[0] == pytest.approx(1 - float(torch.minimum(p, q).sum()), abs=1e-12)


@pytest.mark.parametrize("eos", [frozenset[int](), frozenset({2})])
def test_rejection_is_exact_over_several_steps_up_to_the_end(
    monkeypatch: pytest.MonkeyPatch, eos: frozenset[int]
) -> None:
    target, draft = MockTarget(3, peak=1.5, seed=7), MockTarget(3, peak=1.5, seed=8)
    sampler = Sampler("rejection")

    def whole_text(decide: Decide) -> tuple[int, ...]:
        noise = Noise(decide, set())
        noise.install(monkeypatch)
        request = Request((1, 2), 3, sampler=sampler, eos_token_ids=eos)
        while request.finish_reason is None:
            pick = Noise(decide, set())  # drafts behind a rejected one are drawn anew: nothing depended on them
            length = min(2, request.max_draft_depth)
            tree = drawn_chain(draft, request, length, sampler, lambda q, at, pick=pick: pick.take(at, Salt.DRAFT, q))
            q = torch.empty(0, 3) if not len(tree) else tree.q
            verify(DraftTree.chain(tree.tokens, q=q), target.score(request.tokens.tolist(), tree), request)
        return tuple(request.generated.tolist())

    def cut(text: tuple[int, ...]) -> tuple[int, ...]:
        return next((text[: i + 1] for i, token in enumerate(text) if token in eos), text)

    expected: dict[tuple[int, ...], float] = defaultdict(float)
    for text, weight in joint(target, (1, 2), 3, sampler).items():
        expected[cut(text)] += weight
    assert_same_distribution(enumerate_outcomes(whole_text), expected)


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("branches", [[], [[1, 2, 3]], [[0, 1], [0, 2], [3, 3, 3], [4]]])
def test_the_walk_leaves_the_targets_distribution_exactly(
    monkeypatch: pytest.MonkeyPatch, method: str, branches: Iterable[Sequence[int]]
) -> None:
    target, tree = MockTarget(seed=6), DraftTree.from_branches(branches, 16)
    sampler = Sampler(method, processor=ban_repeats)

    def one_step(decide: Decide) -> tuple[int, ...]:
        Noise(decide, set()).install(monkeypatch)
        request = Request(PROMPT, 4, sampler=sampler)
        return tuple(verify(tree, target.score(PROMPT, tree), request).tokens)

    found = complete(enumerate_outcomes(one_step), target, PROMPT, 4, sampler)
    assert_same_distribution(found, joint(target, PROMPT, 4, sampler))


# Exactness by sampling: the real noise, a seed a text.


def draft_and_verify(draft: MockTarget, target: MockTarget, request: Request) -> tuple[int, int]:
    """A step with at most two drafts, drawn with the noise the sampler says; how many were drafted and accepted."""
    sampler, length = request.sampler, min(2, request.max_draft_depth)
    tree = drawn_chain(
        draft, request, length, sampler, lambda q, position: draw(q, sampler.seed, position, sampler.draft_salt())
    )
    verdict = verify(tree, target.score(request.tokens.tolist(), tree), request)
    return len(tree), len(verdict.path)


@pytest.mark.parametrize("processor", [None, ban_repeats])
@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_texts_of_many_seeds_have_the_targets_distribution(method: str, processor: Processor | None) -> None:
    target, draft = DRAFTS["equal to the target"], DRAFTS["unlike the target"]
    found: dict[tuple[int, ...], int] = defaultdict(int)
    drafted = accepted = 0
    for seed in range(4000):
        request = Request(PROMPT, 3, sampler=Sampler(method, seed, processor))
        while len(request.generated) < 2:
            counts = draft_and_verify(draft, target, request)
            drafted, accepted = drafted + counts[0], accepted + counts[1]
        found[tuple(request.generated[:2].tolist())] += 1
    expected = joint(target, PROMPT, 2, request.sampler)
    assert set(found) <= set(expected)
    counted, weights = np.array([found[text] for text in expected]), np.array(list(expected.values()))
    assert chi_square_p(counted, weights) > 1e-4
    assert 0.1 < accepted / drafted < 0.9


@pytest.mark.parametrize("method", ["coupled", "rejection"])
def test_drafts_from_the_targets_own_distribution_are_always_accepted(method: str) -> None:
    target = DRAFTS["equal to the target"]
    for seed in range(300):
        assert draft_and_verify(target, target, Request(PROMPT, 3, sampler=Sampler(method, seed, ban_repeats))) == (
            2,
            2,
        )


def test_greedy_has_one_text_with_or_without_q() -> None:
    target = MockTarget(seed=7)
    text = oracle(target, PROMPT, 4, Sampler())
    for tokens in itertools.product(range(5), repeat=2):
        tree = DraftTree.chain(tokens, q=torch.full((2, 5), 0.2))
        verdict = verify(tree, target.score(PROMPT, tree), Request(PROMPT, 4))
        assert verdict.tokens == text[: len(verdict.tokens)]
        assert len(verdict.path) == next((i for i in range(2) if tokens[i] != text[i]), 2)


def test_drafts_of_no_probability_are_rejected_and_certain_ones_accepted() -> None:
    logits = torch.tensor([[0.0, -math.inf, -math.inf], [-math.inf, -math.inf, 0.0]])
    for seed in range(50):
        request = Request([0], 4, sampler=Sampler("rejection", seed))
        verdict = verify(DraftTree.chain([0, 1], q=torch.eye(3)[:2]), torch.cat([logits, logits[:1]]), request)
        assert verdict == Verdict([0], [0, 2])


def test_a_residual_lost_to_rounding_falls_back_to_the_target() -> None:
    request = Request([0], 4, sampler=Sampler("rejection"))
    p = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert verify_module._draw_residual(p, p, request) in (0, 1)
    assert verify_module._draw_residual(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 1.0]), request) == 1


def test_rejection_refuses_q_on_a_tree_that_branches() -> None:
    tree = DraftTree(np.array([1, 2]), np.array([ROOT, ROOT]), q=torch.full((2, 3), 1 / 3))
    request = Request([0], 4, sampler=Sampler("rejection"))
    with pytest.raises(ValueError, match=r"^rejection sampling with q needs a chain; this tree branches$"):
        verify(tree, torch.zeros(3, 3), request)
    assert verify(tree, torch.zeros(3, 3), Request([0], 4, sampler=Sampler("coupled"))).tokens


def test_rejection_with_q_accepts_no_probe_either() -> None:
    uniform_q = torch.full((2, 3), 1 / 3)
    tree = DraftTree(np.array([1, 2]), np.array([ROOT, 0]), q=uniform_q, probe=np.array([False, True]))
    try:
        verdict = verify(tree, torch.zeros(3, 3), Request([0], 4, sampler=Sampler("rejection")))
    except ValueError:
        return  # refusing is as good as passing over it
    assert verdict.path == [0]


# What a request and its statistics promise.


@pytest.mark.parametrize(
    ("prompt", "limit", "message"),
    [
        ([], 4, "the prompt is empty; at least one token is needed"),
        ([1], 0, "max_new_tokens is 0; it must be at least 1"),
        ([1], -3, "max_new_tokens is -3; it must be at least 1"),
    ],
)
def test_a_request_without_prompt_or_room_is_refused(prompt: list[int], limit: int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        Request(prompt, limit)


def test_a_request_counts_its_tokens_and_ends_by_length() -> None:
    request = Request(np.array([5, 6, 7]), 2)
    assert (len(request), request.remaining, request.max_draft_depth) == (3, 2, 1)
    assert request.append(8) is False and request.finish_reason is None
    assert (len(request), request.remaining, request.max_draft_depth) == (4, 1, 0)
    assert request.append(9) is True and request.finish_reason == "length"
    assert request.tokens.tolist() == [5, 6, 7, 8, 9]
    assert request.prompt.tolist() == [5, 6, 7] and request.generated.tolist() == [8, 9]


def test_end_of_sequence_counts_before_stopping_and_stopping_before_length() -> None:
    for token, stop, reason in ((2, True, "eos"), (1, True, "stop"), (1, False, "length")):
        request = Request([0], 1, eos_token_ids=frozenset({2, 3}), stopping=lambda ids, stop=stop: stop)
        assert request.append(token)
        assert request.finish_reason == reason


def test_padding_is_seen_by_processors_and_stopping_but_not_by_the_noise() -> None:
    seen: list[list[int]] = []

    def look(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids[0].tolist())
        return scores

    def stop(ids: torch.Tensor) -> bool:
        seen.append(ids[0].tolist())
        return False

    padded = Request([4, 5], 3, sampler=Sampler("coupled", 1, look), stopping=stop, padding=[0, 0])
    plain = Request([4, 5], 3, sampler=Sampler("coupled", 1))
    logits = torch.zeros(50)
    assert padded.tokens.tolist() == [4, 5] and len(padded) == 2
    assert padded.choose(logits) == plain.choose(logits)
    padded.append(9)
    assert seen == [[0, 0, 4, 5], [0, 0, 4, 5, 9]]


def test_requests_have_ids_and_statistics_of_their_own() -> None:
    one, other = Request([1], 1), Request([1], 1)
    assert one.id != other.id
    one.stats.record(3, 1, 2)
    assert other.stats == Stats()


def test_statistics_add_up() -> None:
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
        "tokens": 8,
        "steps": 3,
        "tokens_per_step": 2.6667,
        "drafted": 8,
        "accepted": 6,
        "acceptance": 0.75,
        "histogram": {"1": 1, "3": 1, "4": 1},
        "prefill_seconds": 9.0,
        "propose_seconds": 0.5,
        "score_seconds": 1.0,
        "verify_seconds": 0.5,
        "tokens_per_second": 3.5,
    }


def test_statistics_of_nothing_are_zero() -> None:
    stats = Stats()
    assert stats.tokens_per_step == stats.acceptance == stats.tokens_per_second == 0.0
    assert stats.histogram() == {} and stats.drafted_mask() == []
