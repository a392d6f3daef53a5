"""The study of quantised activations: divergences are those of the formula, and zero for the same model."""

from functools import partial

import pytest
import torch
from support.compiled_models import kept
from transformers import PreTrainedModel

from benchmarks.peers.process import Peer
from benchmarks.studies.activations import Reader, compare, divergences, log_probabilities, read_by


def read(model: PreTrainedModel) -> Reader:
    return partial(log_probabilities, model)


def test_divergences_are_those_of_the_distributions():
    exact, other = kept("llama", torch.float32), kept("qwen2", torch.float32)
    pieces = [torch.arange(20)[None], torch.arange(7)[None] + 30]
    same, different = compare(read(exact), {"same": read(exact), "other": read(other)}, pieces)
    assert same["divergence"] == 0 and same["same"] == "100.0 %" and same["tokens"] == 25
    with torch.inference_mode():
        expected = [
            torch.nn.functional.kl_div(
                other(ids).logits[0, :-1].double().log_softmax(-1), exact(ids).logits[0, :-1].double().softmax(-1),
                reduction="sum",
            )
            for ids in pieces
        ]  # fmt: skip
    assert different["divergence"] == pytest.approx(float(sum(expected)) / 25, rel=1e-6)
    assert different["exact_perplexity"] == same["perplexity"] != different["perplexity"]


def test_another_engine_s_logits_are_read_from_its_file(tmp_path):
    ids = torch.tensor([[5, 7, 9]])
    with Peer("support.fake_peer", {"folder": str(tmp_path), "threads": 1}) as peer:
        found = read_by(peer, tmp_path / "logits.npy", ids)
    assert found.shape == (2, 16) and found.dtype == torch.float64
    assert torch.allclose(found.exp().sum(-1), torch.ones(2, dtype=torch.float64))
    assert found.argmax(-1).tolist() == [5, 7]


def test_divergences_of_texts_are_weighted_by_their_tokens():
    rows = [{"file": "m", "who": "int8", "tokens": n, "divergence": d} for n, d in ((10, 0.1), (30, 0.5))]
    assert divergences(rows).splitlines()[-1] == "| m | 4.00e-01 |"
    rows += [{"file": file, "who": "stored", "tokens": 1, "divergence": 0.3} for file in "mn"]
    rows += [{"file": file, "who": "llama.cpp", "tokens": 1, "divergence": d} for file, d in (("m", 0.2), ("n", 0.4))]
    assert divergences(rows).splitlines()[0] == "| file | int8 | stored | llama.cpp | llama.cpp / stored |"
    assert divergences(rows).splitlines()[-2:] == [
        "| m | 4.00e-01 | 3.00e-01 | 2.00e-01 | 0.67 |",
        "| n | - | 3.00e-01 | 4.00e-01 | 1.33 |",
    ]
