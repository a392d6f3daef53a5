"""The user's own prompts: every wrong line is named before any work, and the chat template is applied once."""

from pathlib import Path

import pytest
from support.prompt_files import TEMPLATE, tokenizer, written
from typer.testing import CliRunner

from forerun.bench.prompts_file import PromptLine, TemplateEncoder, encode_lines, prompt_sets, read_prompts_file
from forerun.cli import app


def test_a_prompt_becomes_one_user_message_and_begins_once():
    encoder = TemplateEncoder(tokenizer())
    assert encoder("a b") == [1, 2, 6, 7, 3]
    assert encoder([{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]) == [1, 4, 8, 2, 6, 3]
    for plain in (TemplateEncoder(tokenizer(), raw=True), TemplateEncoder(tokenizer(None))):
        assert plain("a b") == [1, 6, 7]
        assert plain("<s> a b") == [1, 6, 7]
        assert plain.count("a b") == 2


@pytest.mark.parametrize(("line", "said"), [
    ("{", "line 2 is not JSON"), ([1], "line 2 is a list; it must be an object with task"),
    ({"prompt": "a"}, "line 2 has no task"),
    ({"task": "t"}, "line 2 has neither of prompt and messages"),
    ({"task": "t", "prompt": "a", "messages": []}, "line 2 has both of prompt and messages"),
    ({"task": 3, "prompt": "a"}, "line 2 has a task that is a number; it must be text"),
    ({"task": " ", "prompt": "a"}, "line 2 has a task without any text"),
    ({"task": "t", "prompt": None}, "line 2 has a prompt that is null"),
    ({"task": "t", "messages": "a"}, "line 2 has messages that are text"),
    ({"task": "t", "messages": []}, "line 2 has messages that are an empty list"),
    ({"task": "t", "messages": [{"role": "user"}]}, "line 2 has wrong messages: message 0 has no 'content'"),
    ({"task": "t", "messages": [{"role": "user", "content": 5}]},
        "line 2 has wrong messages: the content of message 0 is int; it must be text"),
    ('{"task": "t", "prompt": "\\ud800"}', "line 2 has a prompt that is not Unicode text"),
])  # fmt: skip
def test_a_wrong_line_is_named_by_its_number(tmp_path, line, said):
    file = written(tmp_path, {"task": "t", "prompt": "a"}, line, {"task": "t", "prompt": "b"})
    done = CliRunner().invoke(app, ["bench", "--prompts-file", str(file), "--model", "no such model"])
    assert done.exit_code == 2
    assert said in " ".join(done.stderr.split())


def test_all_wrong_lines_are_named_together(tmp_path):
    good = {"task": "t", "prompt": "a"}
    with pytest.raises(ValueError, match=r"line 2 is not JSON.*; line 4 has no task$"):
        read_prompts_file(written(tmp_path, good, "x", good, {"prompt": "a"}))
    with pytest.raises(ValueError, match=r"line 5 is not JSON.*; and 2 more lines"):
        read_prompts_file(written(tmp_path, *"[[[[[[["))
    for text in ("", "\n \n"):
        with pytest.raises(ValueError, match=r"mine\.jsonl is empty"):
            read_prompts_file(written(tmp_path, text))
    (tmp_path / "mine.jsonl").write_bytes(b"\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        read_prompts_file(tmp_path / "mine.jsonl")
    with pytest.raises(ValueError, match="there is no such file"):
        read_prompts_file(tmp_path / "none.jsonl")


def test_what_the_model_cannot_read_is_named_by_its_line():
    chat = [{"role": "owl", "content": "a"}]
    lines = [PromptLine(3, "t", chat), PromptLine(4, "t", "a b c"), PromptLine(9, "t", "a")]
    with pytest.raises(ValueError, match=r"line 3: the chat template refuses these messages: no owls; line 4: 6 "):
        encode_lines(Path("f"), lines, TemplateEncoder(tokenizer()), 8, 4)
    assert encode_lines(Path("f"), lines[2:], TemplateEncoder(tokenizer()), 8, 4) == [[1, 2, 6, 3]]
    for raw, reason in ((True, "--raw turns it off"), (False, "tokenizer has none")):
        with pytest.raises(ValueError, match=f"line 3: messages need a chat template, and .*{reason}"):
            encode_lines(Path("f"), lines[:1], TemplateEncoder(tokenizer(TEMPLATE if raw else None), raw), None, 4)


def test_tasks_are_measured_in_the_file_s_order_and_the_rest_warms():
    lines = [PromptLine(i, task, "a") for i, task in enumerate("bababb")]
    ids = [[i + 1] for i in range(6)]
    every = prompt_sets(lines, ids, None, 5, 8)
    assert [(job.task, job.prompts, job.warm_prompts) for job in every] == [
        ("b", [[1], [3], [5], [6]], []),
        ("a", [[2], [4]], []),
    ]
    some = prompt_sets(lines, ids, 1, 2, 8)
    assert [(job.prompts, job.warm_prompts) for job in some] == [([[1]], [[3], [5]]), ([[2]], [[4]])]
