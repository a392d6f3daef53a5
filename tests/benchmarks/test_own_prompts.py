"""The user's own prompts: every wrong line is named before any work, and the chat template is applied once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from support.tiny import VOCABULARY, tiny
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.chat import Encoder
from benchmarks.own import Line, encode, read
from benchmarks.prompts import Counts, own_jobs

pytestmark = pytest.mark.matrix

TEMPLATE = "{{ bos_token }}{% for m in messages %}{% if m.role == 'owl' %}{{ raise_exception('no owls') }}{% endif %}"
TEMPLATE += "{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
WORDS = ["<unk>", "<s>", "user", "assistant", "system", "</s>", *"abcdefghij"]


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = {word: i for i, word in enumerate([*WORDS, *(f"w{i}" for i in range(len(WORDS), VOCABULARY))])}
    backend = Tokenizer(models.WordLevel(words, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    made.chat_template = template
    return made


def written(tmp_path: Path, *lines: Any) -> Path:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_a_prompt_becomes_one_user_message_and_begins_once() -> None:
    encoder = Encoder(tokenizer())
    assert encoder("a b") == [1, 2, 6, 7, 3]
    assert encoder([{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]) == [1, 4, 8, 2, 6, 3]
    for plain in (Encoder(tokenizer(), raw=True), Encoder(tokenizer(None))):
        assert plain("a b") == [1, 6, 7]
        assert plain("<s> a b") == [1, 6, 7]
        assert plain.count("a b") == 2


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2 is no JSON"),
        ([1], "line 2 is a list; it must be an object with task"),
        ({"prompt": "a"}, "line 2 has no task"),
        ({"task": "t"}, "line 2 has neither of prompt and messages"),
        ({"task": "t", "prompt": "a", "messages": []}, "line 2 has both of prompt and messages"),
        ({"task": 3, "prompt": "a"}, "line 2 has a task that is a number; it must be text"),
        ({"task": " ", "prompt": "a"}, "line 2 has a task without any text"),
        ({"task": "t", "prompt": None}, "line 2 has a prompt that is null"),
        ({"task": "t", "messages": "a"}, "line 2 has messages that are text"),
        ({"task": "t", "messages": []}, "line 2 has messages that are an empty list"),
        ({"task": "t", "messages": [{"role": "user"}]}, "line 2 has wrong messages: message 0 has no 'content'"),
        (
            {"task": "t", "messages": [{"role": "user", "content": 5}]},
            "line 2 has wrong messages: the content of message 0 is int; it must be text",
        ),
        ('{"task": "t", "prompt": "\\ud800"}', "line 2 has a prompt that is not Unicode text"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, line: Any, said: str) -> None:
    file = written(tmp_path, {"task": "t", "prompt": "a"}, line, {"task": "t", "prompt": "b"})
    done = CliRunner().invoke(app, ["tasks", "--prompts-file", str(file), "--model", "no such model"])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_all_wrong_lines_are_named_together(tmp_path: Path) -> None:
    good = {"task": "t", "prompt": "a"}
    with pytest.raises(ValueError, match=r"line 2 is no JSON.*; line 4 has no task$"):
        read(written(tmp_path, good, "x", good, {"prompt": "a"}))
    with pytest.raises(ValueError, match=r"line 5 is no JSON.*; and 2 more lines"):
        read(written(tmp_path, *"[[[[[[["))
    for text in ("", "\n \n"):
        with pytest.raises(ValueError, match=r"mine\.jsonl is empty"):
            read(written(tmp_path, text))
    (tmp_path / "mine.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read(tmp_path / "mine.jsonl")
    with pytest.raises(ValueError, match="there is no such file"):
        read(tmp_path / "none.jsonl")


def test_what_the_model_cannot_read_is_named_by_its_line() -> None:
    chat = [{"role": "owl", "content": "a"}]
    lines = [Line(3, "t", chat), Line(4, "t", "a b c"), Line(9, "t", "a")]
    with pytest.raises(ValueError, match=r"line 3: the chat template refuses these messages: no owls; line 4: 6 "):
        encode(Path("f"), lines, Encoder(tokenizer()), 8, 4)
    assert encode(Path("f"), lines[2:], Encoder(tokenizer()), 8, 4) == [[1, 2, 6, 3]]
    for raw, reason in ((True, "--raw turns it off"), (False, "tokenizer has none")):
        with pytest.raises(ValueError, match=f"line 3: messages need a chat template, and .*{reason}"):
            encode(Path("f"), lines[:1], Encoder(tokenizer(TEMPLATE if raw else None), raw), None, 4)


def test_tasks_are_measured_in_the_file_s_order_and_the_rest_warms() -> None:
    lines = [Line(i, task, "a") for i, task in enumerate("bababb")]
    ids = [[i + 1] for i in range(6)]
    every = own_jobs(lines, ids, Counts(None, 5, 8))
    assert [(job.task, job.prompts, job.warm_prompts) for job in every] == [
        ("b", [[1], [3], [5], [6]], []),
        ("a", [[2], [4]], []),
    ]
    some = own_jobs(lines, ids, Counts(1, 2, 8))
    assert [(job.prompts, job.warm_prompts) for job in some] == [([[1]], [[3], [5]]), ([[2]], [[4]])]


def test_the_command_measures_the_file_on_any_model(tmp_path: Path) -> None:
    model = tmp_path / "model"
    copy.deepcopy(tiny("llama")).float().save_pretrained(model)
    tokenizer().save_pretrained(model)
    chat = {"task": "mine", "messages": [{"role": "user", "content": "a b a b"}]}
    file = written(tmp_path, {"task": "mine", "prompt": "c d c d"}, chat, {"task": "other", "prompt": "e"})
    arguments = ["--model", str(model), "--prompts-file", str(file), "--rounds", "1", "-n", "12", "--dtype", "float64"]
    more = ["--drafter", "trie", "--batch", "2", "--out", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(app, ["tasks", *arguments, *more])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert {row["task"] for row in found["rows"]} == {"mine", "other"}
    assert {row["same_output"] for row in found["rows"] + found["batches"]} == {1.0}
    assert {row["contestant"] for row in found["batches"]} >= {"transformers padded", "forerun none", "forerun trie"}
    assert found["settings"]["dtype"] == "float64"
    assert (tmp_path / "out" / "speed-batches.png").exists()
    markdown = (tmp_path / "out" / "speed.md").read_text()
    assert "geometric mean" in markdown and "processor" in markdown and "max new tokens 12" in markdown


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--prompts-file", "f", "--task", "json"], "--prompts-file has tasks of its own; leave out --task"),
        (["--batch", "1,2"], "--batch is '1,2'; no number may be below 2"),
        (["--gguf", "f"], "--gguf is for the peers; add --peers"),
        (["--task", "verse"], "task is 'verse'; known are copy, json"),
        (["--code", __file__], "is no JSON"),
        (["--task", "json", "--prompts", "1", "--warm-prompts", "0", "--batch", "2"], "--batch has 2 and there are 1"),
    ],
)
def test_wrong_options_are_refused(given: list[str], said: str) -> None:
    done = CliRunner().invoke(app, ["tasks", *given])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())
