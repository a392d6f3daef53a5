"""Text comes out of a stream of tokens as soon as its characters are complete."""

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import forerun.reference
from forerun.models.text.detokenize import Detokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    folder = Path(forerun.reference.__file__).parent / "weights" / "target"
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "text", ["\N{REPLACEMENT CHARACTER}" * 300, "\u4f60\u597d \N{REPLACEMENT CHARACTER} w\u00f6rld \U0001f642" * 20]
)
def test_a_run_of_replacement_characters_is_given_out_character_by_character(tokenizer, text):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    detokenizer, pieces, silent = Detokenizer(tokenizer, [5, 6]), list[str](), [0]
    for token in ids:
        new = [piece.text for piece in detokenizer.add(int(token), False)]
        pieces += new
        silent.append(0 if new else silent[-1] + 1)
    assert max(silent) <= 3  # a character has four bytes
    assert "".join(pieces) == text


def test_bytes_that_are_no_text_read_as_in_the_whole(tokenizer):
    choose = random.Random(0)
    ids = [choose.randrange(len(tokenizer)) for _ in range(2000)]
    detokenizer = Detokenizer(tokenizer, [])
    pieces = [piece.text for token in ids for piece in detokenizer.add(token, False)]
    pieces += [piece.text for piece in detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
