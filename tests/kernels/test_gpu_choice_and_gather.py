"""Small kernels for GPUs in Triton's interpreter: tokens are chosen as by the host's sampler, and chunks gathered."""

import numpy as np
import pytest
import torch
import transformers.generation.logits_process as theirs

pytest.importorskip("triton", reason="Triton is not installed")

from support.tiny import tiny

from forerun.core.sampling import Noise, Salt, Sampler, gumbel
from forerun.core.sampling_kernels import BITS, GOLDEN, MIX1, MIX2
from forerun.kernels.gpu import token_choice
from forerun.kernels.gpu.gather import gather_chunks
from forerun.kernels.gpu.token_choice import choose
from forerun.models.text.processors import of_row

MODEL = tiny("llama")
TEMPERATURES = [None, 0.1, 0.7, 1.0, 1.9]


def sampler(temperature: float | None, seed: int, salt: Salt = Salt.TARGET) -> Sampler:
    processors = [] if temperature is None else [theirs.TemperatureLogitsWarper(temperature)]
    return Sampler("coupled", seed, of_row(processors, MODEL), salt=salt)


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
    found = choose(logits, torch.tensor([each.noise(100 * row) for row, each in enumerate(samplers)]))
    for row, own in enumerate(samplers):
        scores = own.scores(torch.zeros(0, dtype=torch.int64), logits[row].clone())
        assert int(found[row]) == own.choose(scores, 100 * row)
        assert int(found[row]) == int(own.choices(own.scores_of_rows(logits[row : row + 1]), [100 * row]))
    assert found.tolist() != logits.argmax(-1).tolist()


def test_noise_is_spread_as_the_scores_say():
    """Over 500 positions, each of four tokens is as frequent as its probability, within four standard errors."""
    count, own = 500, sampler(0.7, 3)
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5])
    found = choose(logits.expand(count, 4), torch.tensor([own.noise(position) for position in range(count)]))
    p = (logits / 0.7).double().softmax(-1).numpy()
    shares = np.bincount(found.numpy(), minlength=4) / count
    assert (np.abs(shares - p) < 4 * np.sqrt(p * (1 - p) / count)).all()


def test_the_first_of_equal_logits_wins_and_what_is_impossible_never_does(monkeypatch):
    monkeypatch.setattr(token_choice, "CHOICE_TOKENS", 4)
    logits = torch.zeros(3, 11)
    logits[0, [3, 9]] = 1.0
    logits[1] = -torch.inf
    logits[2] = torch.nan
    greedy = torch.tensor([Noise()] * 3)
    assert choose(logits, greedy).tolist() == [3, 0, 0]
    logits[0] = -torch.inf
    logits[0, 10] = 0.0
    sampled = torch.tensor([sampler(0.7, 1).noise(5)] * 3)
    assert choose(logits, sampled).tolist() == [10, 0, 0]


def test_a_pass_chooses_only_where_the_processor_divides():
    """Otherwise its table has no noise, and the choice is made from its logits."""
    model, warm = MODEL, theirs.TemperatureLogitsWarper(0.5)
    assert Sampler().divisor == 0.0 and Sampler("coupled").divisor == 1.0
    assert Sampler("rejection", 1, of_row([warm], model)).inner().divisor == 0.5
    others = [theirs.TopKLogitsWarper(3)], [warm, theirs.TopPLogitsWarper(0.9)], [lambda ids, scores: scores]
    for processors in others:
        own = Sampler("coupled", 1, of_row(processors, model))
        assert own.divisor is None and own.noise(3) == Noise()
    assert Sampler(processor=of_row([warm], model)).divisor is None


def test_a_device_divides_as_torch_does_there():
    """On CUDA, torch multiplies by the reciprocal of a number, which may differ by one bit."""
    logits, own = torch.randn(1, 700, generator=torch.Generator().manual_seed(1)), sampler(0.3, 9)
    found = []
    for reciprocal in (False, True):
        best, tokens = torch.empty(1, 1, dtype=torch.float64), torch.empty(1, 1, dtype=torch.int64)
        token_choice._choose[(1, 1)](
            logits, torch.tensor([own.noise(4)]), best, tokens, 700, reciprocal, 1024, GOLDEN, MIX1, MIX2, BITS
        )
        found.append((float(best), int(tokens)))
    divisor = torch.tensor(0.3)
    for (best, token), scores in zip(found, (logits / divisor, logits * (1 / divisor)), strict=True):
        right = scores[0, token].double() + gumbel(9, 4, 700, Salt.TARGET)[token]
        assert best == pytest.approx(float(right), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_those_of_their_heads(dtype):
    """Of rows with gaps between heads, and of a width that is no power of two; none at all is no launch."""
    rows = torch.randn(1, 3, 43, 24).to(dtype)[:, :, 3:]
    head, chunk = torch.tensor([2, 0, 1, 2]), torch.tensor([0, 4, 1, 3])
    found = gather_chunks(rows, head, chunk, 8, torch.device("cpu"))
    right = torch.stack([rows[0, h, 8 * c : 8 * c + 8] for h, c in zip(head.tolist(), chunk.tolist(), strict=True)])
    assert torch.equal(found, right)
    assert gather_chunks(rows, head[:0], chunk[:0], 8, torch.device("cpu")).shape == (0, 8, 24)
