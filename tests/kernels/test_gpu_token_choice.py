"""Tokens that a GPU's pass chooses, in Triton's interpreter: those of the sampler on the host."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as theirs

pytest.importorskip("triton", reason="Triton is not installed")

from support.tiny import tiny

from forerun.core.sampling import Salt, Sampler, gumbel
from forerun.core.sampling_kernels import BITS, GOLDEN, MIX1, MIX2
from forerun.kernels.gpu import token_choice
from forerun.kernels.gpu.token_choice import choose
from forerun.models.text.processors import of_row

MODEL = tiny("llama")
TEMPERATURES = [None, 0.1, 0.7, 1.0, 1.9]


def sampler(temperature: float | None, seed: int, salt: Salt = Salt.TARGET) -> Sampler:
    processors = [] if temperature is None else [theirs.TemperatureLogitsWarper(temperature)]
    return Sampler("coupled", seed, of_row(processors, MODEL), salt=salt)


def table(samplers: Sequence[Sampler], positions: Sequence[int]) -> torch.Tensor:
    noise = [own.noise([position]) for own, position in zip(samplers, positions, strict=True)]
    return torch.from_numpy(np.concatenate([np.zeros((1, 2), np.int64) if own is None else own for own in noise]))


@pytest.mark.parametrize("vocabulary", [5, 1024, 2500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tokens_are_those_of_the_host(vocabulary, dtype, monkeypatch):
    """Of rows with different seeds, temperatures, positions and salts, and greedy ones among them."""
    monkeypatch.setattr(token_choice, "CHOICE_TOKENS", 512)
    logits = 3 * torch.randn(20, vocabulary, generator=torch.Generator().manual_seed(vocabulary), dtype=dtype)
    samplers = [
        Sampler() if row % 4 == 3 else sampler(TEMPERATURES[row % 5], 1 << row, Salt.DRAFT if row % 2 else Salt.TARGET)
        for row in range(20)
    ]
    found = choose(logits, table(samplers, range(0, 2000, 100)))
    for row, own in enumerate(samplers):
        scores = own.scores(torch.zeros(0, dtype=torch.int64), logits[row].clone())
        assert int(found[row]) == own.choose(scores, 100 * row)
        assert int(found[row]) == int(own.choices(own.scores_of_rows(logits[row : row + 1]), [100 * row]))
    assert found.tolist() != logits.argmax(-1).tolist()


def test_noise_is_spread_as_the_scores_say():
    """Over 500 positions, each of four tokens is as frequent as its probability, within four standard errors."""
    count, own = 500, sampler(0.7, 3)
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    found = choose(logits.expand(count, 4), torch.from_numpy(own.noise(range(count))))
    p = (logits / 0.7).double().softmax(-1).numpy()
    shares = np.bincount(found.numpy(), minlength=4) / count
    assert (np.abs(shares - p) < 4 * np.sqrt(p * (1 - p) / count)).all()


def test_the_first_of_equal_logits_wins_and_what_is_impossible_never_does(monkeypatch):
    monkeypatch.setattr(token_choice, "CHOICE_TOKENS", 4)
    logits = torch.zeros(3, 11)
    logits[0, [3, 9]] = 1.0
    logits[1] = -torch.inf
    logits[2] = torch.nan
    assert choose(logits, table([Sampler()] * 3, range(3))).tolist() == [3, 0, 0]
    logits[0] = -torch.inf
    logits[0, 10] = 0.0
    assert choose(logits, table([sampler(0.7, 1)] * 3, range(3))).tolist() == [10, 0, 0]


def test_a_pass_chooses_only_where_the_processor_divides():
    """Otherwise its table has no noise, and the choice is made from its logits."""
    model, warm = MODEL, theirs.TemperatureLogitsWarper(0.5)
    assert Sampler().divisor == 0.0 and Sampler("coupled").divisor == 1.0
    assert Sampler("rejection", 1, of_row([warm], model)).inner().divisor == 0.5
    others = [theirs.TopKLogitsWarper(3)], [warm, theirs.TopPLogitsWarper(0.9)], [lambda ids, scores: scores]
    for processors in others:
        own = Sampler("coupled", 1, of_row(processors, model))
        assert own.divisor is None and own.noise([3]) is None
    assert Sampler(processor=of_row([warm], model)).divisor is None


def test_a_device_divides_as_torch_does_there():
    """On CUDA, torch multiplies by the reciprocal of a number, which may differ by one bit."""
    logits, own = torch.randn(1, 700, generator=torch.Generator().manual_seed(1)), sampler(0.3, 9)
    found = []
    for reciprocal in (False, True):
        best, tokens = torch.empty(1, 1, dtype=torch.float64), torch.empty(1, 1, dtype=torch.int64)
        token_choice._choose[(1, 1)](
            logits, table([own], [4]), best, tokens, 700, reciprocal, 1024, GOLDEN, MIX1, MIX2, BITS
        )
        found.append((float(best), int(tokens)))
    divisor = torch.tensor(0.3)
    for (best, token), scores in zip(found, (logits / divisor, logits * (1 / divisor)), strict=True):
        right = scores[0, token].double() + gumbel(9, 4, 700, Salt.TARGET)[token]
        assert best == pytest.approx(float(right), abs=1e-12)
