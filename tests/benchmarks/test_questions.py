"""The questions for models that chat: enough of each, the same at every call, as long as they say."""

import json
from random import Random

import pytest

from benchmarks.reporting.common_options import SourceOptions
from benchmarks.tasks.passages import LONGEST, SHORTEST, Passages
from benchmarks.tasks.questions import questions
from benchmarks.tasks.task_prompts import LackingError, Tasks
from benchmarks.tasks.task_sets import check_sources

NAMES = ["maths", "code", "rag", "summary", "edit", "table"]


def count(text: str) -> int:
    return len(text.split())


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> SourceOptions:
    folder = tmp_path_factory.mktemp("files")
    maths = [{"prompt": f"Question: What is {i} and 1?\nAnswer: ", "answer": str(i + 1)} for i in range(25)]
    code = [{"prompt": f"def f{i}(x):\n", "answer": "return x"} for i in range(25)]
    for name, rows in (("maths", maths), ("code", code)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    text = "\n\n".join(f"Anna met Peter number {i}. " + "They walked along the river again. " * 9 for i in range(900))
    (folder / "book.txt").write_text(text)
    return SourceOptions(False, folder, folder / "maths.jsonl", folder / "code.jsonl")


@pytest.fixture(scope="module")
def tasks(files: SourceOptions) -> Tasks:
    return questions(files, count)


@pytest.mark.parametrize("name", NAMES)
def test_each_task_has_twenty_prompts_or_more_and_always_the_same(name, tasks, files):
    found = tasks[name](22)
    assert len(set(map(str, found))) == 22
    assert found == questions(files, count)[name](22)
    assert found[:5] == tasks[name](5)


@pytest.mark.parametrize("books", [True, False])
def test_passages_are_as_long_as_they_say(books, files):
    passages = Passages.read(files.books if books else None, "x")
    found = [passages.draw(Random(i), count) for i in range(12)]
    assert all(SHORTEST <= count(passage) <= LONGEST for passage in found)
    assert max(map(count, found)) > 2 * min(map(count, found))


def test_a_task_without_its_file_says_so_and_short_files_are_refused(files):
    with pytest.raises(LackingError, match="--maths"):
        questions(SourceOptions(), count)["maths"](1)
    with pytest.raises(ValueError, match="25 different prompts and 26 are needed"):
        questions(files, count)["code"](26)


def test_a_wrong_file_of_questions_is_refused(tmp_path):
    file = tmp_path / "q.jsonl"
    for line, said in (("{}", "line 2 has no prompt"), ("{", "line 2 is no JSON"), ('{"prompt": 1}', "line 2 has no")):
        file.write_text('{"prompt": "a"}\n' + line)
        with pytest.raises(ValueError, match=said):
            check_sources(SourceOptions(maths=file))
    with pytest.raises(ValueError, match="there is no such file"):
        check_sources(SourceOptions(code=tmp_path / "none"))
    with pytest.raises(ValueError, match="no such folder"):
        check_sources(SourceOptions(books=tmp_path / "none"))
