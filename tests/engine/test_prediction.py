"""``prediction``, which an answer is expected to resemble, changes steps, never the text, and stays private."""

import pytest
from support.prompt_files import tokenizer
from support.tiny import PROMPTS, tiny

from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import Engine
from forerun.trie.trie import Trie

PROMPT, NEW = PROMPTS[1], 24


def plain() -> list[int]:
    [text] = Engine(tiny("llama"), "none").generate(PROMPT, max_new_tokens=NEW, eos_token_id=None).generated
    return text


@pytest.mark.one_in(10)
@pytest.mark.parametrize("drafter", ["trie", "auto", "lookup", "triforce-trie", "none"])
@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.9, "seed": 5}])
def test_the_text_is_the_same_whatever_is_predicted(drafter, sampling):
    model, options = tiny("llama"), {"max_new_tokens": NEW, "eos_token_id": None, **sampling}
    expected = Engine(model, "none").generate(list(PROMPTS), **options).generated
    for prediction in (expected[1], [*expected[1][:7], 3, 3, *expected[1][7:]], [31, 30, 29] * 9, [1 << 30], [5]):
        found = Engine(model, drafter).generate(list(PROMPTS), prediction=prediction, **options)
        assert found.generated == expected


def test_a_right_prediction_is_accepted_from_the_first_token_on():
    expected = plain()
    engine = Engine(tiny("llama"), "trie", prune_drafts=False)
    [stats] = engine.generate(PROMPT, prediction=expected, max_new_tokens=NEW, eos_token_id=None).stats
    assert stats.steps == 1  # the one that ends the prefill accepts all
    changed = [*expected[:12], 63, *expected[13:]]
    engine.set_drafter("trie")
    [stats] = engine.generate(PROMPT, prediction=changed, max_new_tokens=NEW, eos_token_id=None).stats
    assert stats.steps <= 5


def test_a_prediction_is_never_drafted_to_another_request_nor_kept():
    secret = [101, 102, 103, 104, 105, 106]
    trie = Trie()
    engine = Engine(tiny("llama"), TrieSource(trie=trie), prune_drafts=False)
    engine.generate(PROMPT, prediction=secret, max_new_tokens=4)
    assert not {*secret} & {token for text in trie.snapshot("default")[0] for token in text.tolist()}
    trie.begin(1 << 40, "another", [1], prediction=secret)
    trie.begin(1 << 41, "another", secret[:3])
    assert not {*secret[3:]} & {*trie.retrieve(1 << 41, 64, 9).tokens.tolist()}
    assert {*secret} <= {*trie.retrieve(1 << 40, 64, 9).tokens.tolist()}
    trie.finish(1 << 40)
    assert not {*secret[3:]} & {*trie.retrieve(1 << 41, 64, 9).tokens.tolist()}


def test_a_prediction_is_text_or_token_ids():
    model = tiny("llama")
    engine = Engine(model, "trie", tokenizer=tokenizer())
    [request] = engine.requests("a b", prediction="c d", max_new_tokens=2)
    assert request.prediction.tolist() == [8, 9]
    assert engine.requests("a b", prediction=None, max_new_tokens=2)[0].prediction.tolist() == []
    with pytest.raises(ValueError, match="prediction has the token id -1"):
        engine.requests("a b", prediction=[3, -1], max_new_tokens=2)
    with pytest.raises(TypeError, match="prediction is float; it must be text or a list of token ids"):
        engine.requests("a b", prediction=0.5, max_new_tokens=2)
    with pytest.raises(ValueError, match="the prediction is text and there is no tokenizer"):
        Engine(model, "trie").requests([1], prediction="c", max_new_tokens=2)
