"""Prompts and answers that a model writes itself: different ones, kept in files, and gone on with."""

import json

import pytest

from benchmarks.training import self_written
from benchmarks.training.self_written import read_rows, write_answers, write_prompts
from forerun.engine.engine import Engine
from forerun.models.loading.load import load

TEMPLATE = "{% for message in messages %}It was {{ message['content'] }}, and so {% endfor %}"


@pytest.fixture
def engine() -> Engine:
    model, tokenizer = load("bundled-draft", device="cpu")
    tokenizer.chat_template = TEMPLATE
    return Engine(model, "none", tokenizer=tokenizer)


def test_prompts_and_answers_are_written_once_and_repeat(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(self_written, "TOGETHER", 4)
    tokenizer, file = engine._tokenizer, tmp_path / "prompts.jsonl"
    assert tokenizer is not None
    prompts = write_prompts(engine, tokenizer, 3, file)
    more = write_prompts(engine, tokenizer, 6, file)
    assert more[:3] == prompts and len(set(more)) == 6
    assert not any(self_written.MARK in prompt or not prompt for prompt in more)
    seeds = [row["seed"] for row in read_rows(file)]
    assert seeds == sorted(set(seeds))
    assert write_prompts(engine, tokenizer, 6, tmp_path / "again.jsonl")[:3] == prompts
    for temperature in (0.0, 0.8):
        kept = tmp_path / f"answers-{temperature}.jsonl"
        write_answers(engine, tokenizer, prompts[:2], kept, max_new_tokens=8, temperature=temperature)
        answers = write_answers(engine, tokenizer, prompts, kept, max_new_tokens=8, temperature=temperature)
        assert [json.loads(line)["prompt"] for line in kept.read_text().splitlines()] == prompts
        if not temperature:
            asked = [[{"role": "user", "content": prompt}] for prompt in prompts]
            texts = engine.generate(asked, max_new_tokens=8, do_sample=False).texts
            assert list(answers.values()) == [text.strip() for text in texts]


def test_a_model_that_cannot_write_prompts_is_refused(engine, tmp_path, monkeypatch):
    tokenizer = engine._tokenizer
    assert tokenizer is not None
    monkeypatch.setattr(self_written, "_run", lambda engine, requests, *more: ["the same"] * len(requests))
    with pytest.raises(ValueError, match="none of 32 prompts that the model wrote was a new one"):
        write_prompts(engine, tokenizer, 2, tmp_path / "prompts.jsonl")
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        write_prompts(engine, tokenizer, 2, tmp_path / "none.jsonl")
