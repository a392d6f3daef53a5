"""Messages as prompts: what the tokenizer's chat template makes of them, and what is refused."""

import pytest
from support.saved_models import chat_model, chat_tokenizer
from transformers import PreTrainedTokenizerFast

import forerun
from forerun import Engine
from forerun.models.text.prompts import encode

USER = {"role": "user", "content": "again and"}
ANSWER = {"role": "assistant", "content": "the fox"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return chat_tokenizer()


@pytest.fixture(scope="module")
def engine(tokenizer: PreTrainedTokenizerFast) -> Engine:
    return Engine(chat_model(tokenizer), "trie", tokenizer=tokenizer)


def test_the_template_is_applied_up_to_where_the_answer_begins_and_begins_the_text_once(tokenizer):
    (ids,) = encode([USER], tokenizer)
    assert tokenizer.decode(ids) == "<start>user: again and<end>assistant: "
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer("user")["input_ids"][0] == tokenizer.bos_token_id  # which text alone begins with


def test_several_turns_and_several_conversations(tokenizer):
    system = {"role": "system", "content": "brown"}
    rows = encode([[USER], (system, USER, ANSWER, USER)], tokenizer)
    assert rows[0] == encode([USER], tokenizer)[0]
    assert tokenizer.decode(rows[1]) == (
        "<start>system: brown<end>user: again and<end>assistant: the fox<end>user: again and<end>assistant: "
    )


def test_generate_takes_messages_and_gives_what_transformers_gives(engine, tokenizer):
    model = engine.target.model
    ids = tokenizer.apply_chat_template([USER], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    plain = chat_model(tokenizer)
    expected = plain.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    assert engine.generate([USER], max_new_tokens=12).generated == [expected]
    assert forerun.generate(model, [USER], tokenizer=tokenizer, max_new_tokens=12).generated == [expected]
    both = engine.generate([[USER], [USER, ANSWER, USER]], max_new_tokens=12)
    assert both.generated[0] == expected
    assert len(both.texts) == 2


@pytest.mark.parametrize(("prompt", "error", "message"), [
    ([{"role": "user"}], ValueError, r"message 0 has no 'content'; it has 'role'"),
    ([{"content": "a"}], ValueError, r"message 0 has no 'role'; it has 'content'"),
    ([{}], ValueError, "message 0 has no 'role'; it has no keys"),
    ([USER, {"role": "user", "content": 3}], TypeError, "the content of message 1 is int; it must be text"),
    ([{"role": "user", "content": None}], TypeError, "the content of message 0 is NoneType"),
    ([{"role": "user", "content": [{"type": "image"}]}], TypeError, "the content of message 0 is list"),
    ([{"role": 1, "content": "a"}], TypeError, "the role of message 0 is int"),
    ([{"role": "", "content": "a"}], ValueError, "the role of message 0 is empty"),
    ([{**USER, 1: "a"}], TypeError, "message 0 has the key 1; keys are text"),
    ([USER, "again"], TypeError, "message 1 is str; it must be a dict with role and content"),
    (["again", USER], TypeError, "message 0 is str; it must be a dict with role and content"),
    ([[USER], "again"], TypeError, "prompt 1 is str and others are messages"),
    ([[1, 2], [USER]], TypeError, "prompt 0 is list and others are messages"),
    ([[USER], []], TypeError, "prompt 1 is list and others are messages"),
    ([[USER], [USER, 3]], TypeError, "in conversation 1, message 1 is int"),
    ([USER, ANSWER], ValueError, "the last message is the assistant's"),
    ([[USER], [USER, ANSWER]], ValueError, "in conversation 1, the last message is the assistant's"),
    ([], ValueError, "there is no prompt"),
    (USER, TypeError,
        "a mapping with 'role', 'content'; a tokenizer's output has 'input_ids', and messages are a list"),
    ([{"role": "ghost", "content": "boo"}], ValueError, "the chat template refuses these messages: no ghosts"),
])  # fmt: skip
def test_wrong_messages_are_refused_before_any_work(engine, monkeypatch, prompt, error, message):
    monkeypatch.setattr(Engine, "run", lambda *_: pytest.fail("it began to generate"))
    with pytest.raises(error, match=message):
        engine.generate(prompt, max_new_tokens=4)


def test_messages_need_a_tokenizer_with_a_template():
    with pytest.raises(ValueError, match="the prompt is messages, and there is no tokenizer"):
        encode([USER], None)
    with pytest.raises(ValueError, match="the tokenizer has no chat template; pass text instead"):
        encode([USER], chat_tokenizer(None))


def test_what_a_mask_leaves_out_of_lists_is_left_out(tokenizer):
    texts = ["again", "again and the fox"]
    tokenizer.pad_token = tokenizer.eos_token
    for side in ("left", "right"):
        tokenizer.padding_side = side
        wanted = [tokenizer(text)["input_ids"] for text in texts]
        assert encode(tokenizer(texts, padding=True), tokenizer) == wanted
        assert encode(tokenizer(texts, padding=True, return_tensors="pt"), tokenizer) == wanted
    assert encode(tokenizer(texts[0]), tokenizer) == wanted[:1]
    assert encode([[0, 0, 5], [3, 4]], None, [[0, 1, 1], [1, 1]]) == [[0, 5], [3, 4]]
    with pytest.raises(ValueError, match=r"attention_mask has rows of \[2\] and the ids of \[3\]"):
        encode([[0, 0, 5]], None, [[1, 1]])
    with pytest.raises(ValueError, match="is for token ids"):
        encode("again", tokenizer, [[1]])
