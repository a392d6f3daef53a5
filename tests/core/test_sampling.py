"""The noise is what it claims to be, and a sampler's choices follow the distribution they are given."""

import math

import numpy as np
import pytest
import torch
from support.distributions import chi_square_p

from forerun.core.sampling import Salt, Sampler, draw, gumbel, uniform

MASK = (1 << 64) - 1
GOLDEN, MIX1, MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SIZE = 100_000


def splitmix(value: int) -> int:
    """Vigna's splitmix64, one round, in plain integers."""
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * MIX1) & MASK
    value = ((value ^ (value >> 27)) * MIX2) & MASK
    return value ^ (value >> 31)


def unsplitmix(value: int) -> int:
    """The inverse of ``splitmix``: every 64-bit value comes from exactly one."""
    value = unshift(value, 31) * pow(MIX2, -1, 1 << 64) & MASK
    value = unshift(value, 27) * pow(MIX1, -1, 1 << 64) & MASK
    return (unshift(value, 30) - GOLDEN) & MASK


def unshift(value: int, count: int) -> int:
    """The inverse of ``value ^ (value >> count)``."""
    result = value
    while value := value >> count:
        result ^= value
    return result


def seed_for_key(key: int, position: int, salt: Salt) -> int:
    """The seed whose noise at a position starts from ``key``."""
    return unsplitmix((unsplitmix(key) - (position << 3 | salt)) & MASK)


def uniforms(noise: torch.Tensor) -> np.ndarray:
    """The uniform numbers that Gumbel noise was made from."""
    return noise.neg().exp().neg().exp().numpy()


@pytest.mark.parametrize("salt", list(Salt))
def test_gumbel_noise_has_the_distribution_of_its_name(salt):
    noise = gumbel(1, 5, SIZE, salt)
    assert noise.dtype == torch.float64 and noise.shape == (SIZE,) and bool(noise.isfinite().all())
    standard_error = math.pi / math.sqrt(6 * SIZE)
    assert abs(float(noise.mean()) - np.euler_gamma) < 4 * standard_error
    assert abs(float(noise.var()) - math.pi**2 / 6) < 4 * math.pi**2 / 6 * math.sqrt(4.4 / SIZE)  # kurtosis 5.4
    counts = np.histogram(uniforms(noise), 1000, (0, 1))[0]
    assert chi_square_p(counts, np.full(1000, 1e-3)) > 1e-4


@pytest.mark.parametrize("other", [
    pytest.param((0, 4, Salt.TARGET), id="another seed"), pytest.param((1 << 32, 4, Salt.TARGET), id="a large seed"),
    pytest.param((-1, 4, Salt.TARGET), id="a negative seed"), pytest.param((1, 5, Salt.TARGET), id="the next position"),
    pytest.param((1, 4 + (1 << 20), Salt.TARGET), id="a far position"),
    pytest.param((1, 4, Salt.DRAFT), id="the draft's noise"),
    pytest.param((1, 4, Salt.ACCEPT), id="the acceptance noise"),
    pytest.param((1, 4, Salt.RESIDUAL), id="the residual's noise"),
    *(pytest.param(lag, id=f"a token {lag} further") for lag in (1, 2, 64)),
])  # fmt: skip
def test_noise_is_independent_of_noise_for(other):
    u = uniforms(gumbel(1, 4, SIZE, Salt.TARGET))
    u, v = (u[other:], u[:-other]) if isinstance(other, int) else (u, uniforms(gumbel(*other[:2], SIZE, other[2])))
    counts = np.histogram2d(u, v, 20, ((0, 1), (0, 1)))[0].ravel()
    assert chi_square_p(counts, np.full(400, 1 / 400)) > 1e-4
    assert abs(np.corrcoef(u, v)[0, 1]) < 4 / math.sqrt(SIZE)


NOISE = {
    "a token's": (lambda seed, place: uniforms(gumbel(seed, place, 4, Salt.TARGET))[3], 4000),
    "uniform": (lambda seed, place: uniform(seed, place, Salt.ACCEPT), 20_000),
}


@pytest.mark.parametrize("axis", ["seed", "position"])
@pytest.mark.parametrize("noise", NOISE)
def test_noise_is_uniform_and_independent_along(axis, noise):
    draw_one, count = NOISE[noise]
    u = np.array([draw_one(i, 9) if axis == "seed" else draw_one(9, i) for i in range(count)])
    assert u.min() > 0 and u.max() < 1
    assert chi_square_p(np.histogram(u, 100, (0, 1))[0], np.full(100, 1 / 100)) > 1e-4
    assert abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 4 / math.sqrt(count)


def test_a_longer_vector_of_noise_starts_with_a_shorter_one():
    longest = gumbel(3, 2, 1000, Salt.DRAFT)
    for size in (0, 1, 2, 33, 999):
        assert torch.equal(gumbel(3, 2, size, Salt.DRAFT), longest[:size])


def test_noise_is_splitmix_of_seed_position_salt_and_token():
    for seed, position, salt in ((0, 0, Salt.TARGET), (7, 3, Salt.DRAFT), (-5, 1 << 40, Salt.RESIDUAL), (MASK, 1, 2)):
        key = splitmix((splitmix(seed & MASK) + (position << 3 | salt)) & MASK)
        bits = [splitmix((key + (token - 1) * GOLDEN) & MASK) for token in range(20)]
        expected = [-math.log(-math.log(((b >> 11) + 0.5) / 2**53)) for b in bits]
        np.testing.assert_allclose(gumbel(seed, position, 20, Salt(salt)).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_the_text_of_a_seed_stays_the_same_from_release_to_release():
    pinned = [-0.0827620479679592, -0.38531298400347297, 0.9726933906887145]
    assert gumbel(7, 3, 3, Salt.TARGET).tolist() == pytest.approx(pinned, abs=1e-12)
    assert uniform(7, 3, Salt.ACCEPT) == pytest.approx(0.8745622744221331, abs=1e-12)


@pytest.mark.parametrize("bits", [0, 1, MASK, MASK - (1 << 11), 1 << 63, (1 << 63) - 1])
def test_noise_is_finite_for_every_hash_value(bits):
    key = unsplitmix(bits)
    assert 0 < uniform(seed_for_key(key, 4, Salt.ACCEPT), 4, Salt.ACCEPT) < 1
    noise = gumbel(seed_for_key((key + GOLDEN) & MASK, 4, Salt.TARGET), 4, 2, Salt.TARGET)
    assert math.isfinite(noise[0])


def test_greedy_takes_the_best_score_and_the_first_of_equals():
    sampler = Sampler("greedy", seed=3)
    assert sampler.choose(torch.tensor([0.5, 2.0, 2.0, -1.0]), 5) == 1
    assert sampler.choose(torch.tensor([-math.inf, -math.inf, -3.0]), 0) == 2


@pytest.mark.parametrize("method", ["coupled", "rejection"])
@pytest.mark.parametrize("salt", [Salt.TARGET, Salt.DRAFT])
def test_choices_follow_the_softmax_of_the_scores(method, salt):
    scores = torch.tensor([0.3, -1.0, 1.2, 0.0, -0.4])
    chosen = [Sampler(method, seed).choose(scores, 6, salt) for seed in range(3000)]
    assert chi_square_p(np.bincount(chosen, minlength=5), scores.double().softmax(-1).numpy()) > 1e-4


def test_draw_follows_an_unnormalised_distribution():
    weights = torch.tensor([3.0, 0.0, 1.0, 0.5, 2.0])
    drawn = [[draw(w, seed, 3, Salt.RESIDUAL) for seed in range(3000)] for w in (weights, weights.double() * 1e-9)]
    counts, possible = np.bincount(drawn[0], minlength=5), weights.numpy() > 0
    assert drawn[0] == drawn[1] and counts[1] == 0
    assert chi_square_p(counts[possible], weights.double().numpy()[possible] / 6.5) > 1e-4


def test_drafts_share_the_targets_noise_unless_the_rejection_test_needs_its_own():
    for method, salt in (("greedy", Salt.TARGET), ("coupled", Salt.TARGET), ("rejection", Salt.DRAFT)):
        assert Sampler(method).draft_salt() is salt
    with pytest.raises(ValueError, match=r"^method is 'beam'; allowed are 'greedy', 'coupled' and 'rejection'$"):
        Sampler("beam")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_scores_are_float32_and_processed_with_the_ids_before(dtype):
    def ban_the_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.tolist() == [[4, 1, 2]] and scores.shape == (1, 3) and scores.dtype == torch.float32
        scores[:, ids[0, -1]] = -math.inf  # in place, as some of transformers' own do
        return scores / 2

    logits = torch.tensor([1.0, 2.0, 3.0], dtype=dtype)
    assert Sampler().scores(torch.tensor([4, 1, 2]), logits).dtype == torch.float32
    scores = Sampler(processor=ban_the_last).scores(torch.tensor([4, 1, 2]), logits)
    assert scores.tolist() == [0.5, 1.0, -math.inf]
    assert logits.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [1, 511, 512, 513, 16_384])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_the_best_tokens_are_those_of_the_noise_in_full(size, spread):
    """Of scores in any type; and a token that must come comes."""
    generator = torch.Generator().manual_seed(size)
    for seed in range(20):
        dtype = (torch.float32, torch.float32, torch.float64, torch.bfloat16)[seed % 4]
        scores = (spread * torch.randn(size, generator=generator)).to(dtype)
        if seed % 2:
            scores[torch.rand(size, generator=generator) < 0.9] = -torch.inf
        noisy = scores.double() + gumbel(seed, 3, size, Salt.TARGET)
        assert Sampler("coupled", seed).choose(scores, 3) == int(noisy.argmax())
        scores[size // 2] = torch.inf
        assert Sampler("coupled", seed).choose(scores, 3) == size // 2


def test_the_largest_and_the_smallest_noise_are_compared_rightly():
    """Keys for which some token's hash is all ones or all zeros."""
    for bits in (MASK, 0):
        key = (unsplitmix(bits) - 5 * GOLDEN) & MASK
        seed = seed_for_key(key, 2, Salt.TARGET)
        scores = torch.linspace(0, 80, 32)
        noisy = scores.double() + gumbel(seed, 2, 32, Salt.TARGET)
        assert Sampler("coupled", seed).choose(scores, 2) == int(noisy.argmax())
