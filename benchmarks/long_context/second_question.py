"""How long a second question about a book waits for its first token: with the store, in this process and in a new one.

    python -m benchmarks long-context second-question --text Middlemarch.txt --contexts 16000,60000 --drafters
    trie,triforce

For each context and drafter one process reads the book and asks two questions, and another one asks the second and
then the first. Starting a process and loading the model are not counted. The first question was read without help, so
its answer must come again from the store, token for token. The last line printed is one JSON object; exit status 1 if
an answer differs.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from forerun.cli.models import encoder
from forerun.cli.options import AnyDtype, DebugOptions, Model
from forerun.core.long_context import LongContextConfig
from forerun.engine.engine import Engine
from forerun.models.loading.load import BUNDLED, load, load_draft

QUESTIONS = (
    "\n\nQuestion: who is the heroine?\nAnswer:",
    "\n\nQuestion: where and when does all this happen?\nAnswer:",
)


@dataclass(frozen=True, kw_only=True)
class SecondQuestionOptions(DebugOptions):
    """How long a second question about a book waits for its first token: with the store, here and in a new process."""

    text: Annotated[Path, typer.Option(help="A book.")]
    model: Model = BUNDLED
    dtype: AnyDtype = "auto"
    contexts: Annotated[str, typer.Option(help="Tokens of the book; commas between.")] = "16000,60000"
    drafters: Annotated[str, typer.Option(help="Commas between.")] = "trie,triforce"
    max_new_tokens: Annotated[int, typer.Option(help="Per answer.")] = 32
    folder: Annotated[
        Path | None, typer.Option(help="Where stores are made; by default where temporary files are.")
    ] = None
    asked: Annotated[str | None, typer.Option(hidden=True)] = None


def run(options: SecondQuestionOptions) -> None:
    """Ask; exit status 1 if an answer differs."""
    if options.asked is not None:
        _ask(options)
        return
    rows = []
    for context in options.contexts.split(","):
        for drafter in options.drafters.split(","):
            with tempfile.TemporaryDirectory(dir=options.folder) as store:
                rows.append(_row(options, int(context), drafter, store))
            print(rows[-1], file=sys.stderr)
    print(json.dumps({"model": options.model, "dtype": options.dtype, "text": options.text.name, "rows": rows}))
    if not all(row["equal"] for row in rows):
        raise typer.Exit(1)


def _row(options: SecondQuestionOptions, context: int, drafter: str, store: str) -> dict[str, Any]:
    first, second = _process(options, context, drafter, store, "0,1")
    again, old = _process(options, context, drafter, store, "1,0")
    return {
        "context": context,
        "drafter": drafter,
        "first_question_seconds": first["seconds"],
        "second_question_seconds": second["seconds"],
        "new_process_seconds": again["seconds"],
        "second_share": round(second["seconds"] / first["seconds"], 4),
        "new_process_share": round(again["seconds"] / first["seconds"], 4),
        "answer_seconds": [each["answer_seconds"] for each in (first, second, again)],
        "stored_seconds": first["stored_seconds"],
        "stored_bytes": first["stored_bytes"],
        "equal": first["tokens"] == old["tokens"] and second["tokens"] == again["tokens"],
    }


def _process(
    options: SecondQuestionOptions, context: int, drafter: str, store: str, asked: str
) -> list[dict[str, Any]]:
    told = ["--model", options.model, "--dtype", options.dtype, "--text", str(options.text), "--contexts", str(context)]
    told += ["--drafters", drafter, "--max-new-tokens", str(options.max_new_tokens), "--folder", store]
    command = [sys.executable, "-m", "benchmarks", "long-context", "second-question", *told, "--asked", asked]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def _ask(options: SecondQuestionOptions) -> None:
    """In a process of its own: answers with their times."""
    model, tokenizer = load(options.model, options.dtype)
    draft = load_draft("bundled-draft", model, tokenizer) if options.model == BUNDLED else None
    engine = Engine(
        model,
        options.drafters,
        settings=LongContextConfig(draft_model=draft),
        tokenizer=tokenizer,
        kv_store=options.folder,
    )
    engine.generate("A text to warm up.", max_new_tokens=8)
    book, answers = _book(options.text, int(options.contexts), tokenizer), []
    for number in map(int, (options.asked or "").split(",")):
        ids = book + encoder(tokenizer)(QUESTIONS[number])
        answers.append(_answer(engine, ids, options.max_new_tokens))
    engine.close()
    print(json.dumps(answers))


def _answer(engine: Engine, ids: list[int], count: int) -> dict[str, Any]:
    began, first = time.perf_counter(), None
    (request,) = engine.requests([ids], max_new_tokens=count)
    for commit in engine.run([request]):
        first = first or (time.perf_counter() if commit.tokens else None)
    ended = time.perf_counter()
    engine.flush()
    return {
        "seconds": round((first or ended) - began, 4),
        "answer_seconds": round(ended - began, 4),
        "stored_seconds": round(time.perf_counter() - ended, 4),
        "stored_bytes": engine.store.nbytes if engine.store else 0,
        "tokens": request.generated.tolist(),
    }


def _book(path: Path, count: int, tokenizer: Any) -> list[int]:
    found = encoder(tokenizer)(path.read_text(encoding="utf-8"))[:count]
    if len(found) < count:
        raise ValueError(f"{path} has {len(found)} tokens; {count} are needed")
    return found
