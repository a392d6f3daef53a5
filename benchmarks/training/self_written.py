"""Prompts and answers that a model writes itself, to train its head from.

A chat model writes a user's message after its template's beginning of one, like those it was trained on (Xu et al.,
2024, *Magpie*, section 2). All is written in batches, and kept in a file line by line, which the same call continues. A
line's seed is its number.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from benchmarks.reporting.common_options import json_lines
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import sampling
from forerun.cli.terminal import progress_bar, stderr
from forerun.core.request import Request
from forerun.engine.engine import Engine

TOGETHER = 32  # rows of a batch
PROMPT_TOKENS = 192  # most tokens of a prompt; one that has not ended by then is dropped
MARK = "\ue000"  # stands for the user's message in the template; a character that no template has


def read_rows(file: Path) -> list[dict[str, Any]]:
    return [row for _, row in json_lines(file)] if file.exists() else []


def write_prompts(engine: Engine, tokenizer: PreTrainedTokenizerBase, count: int, file: Path) -> list[str]:
    """Return ``count`` different user's messages, sampled at temperature 1; raise ValueError without a chat
    template."""
    if not tokenizer.chat_template:
        raise ValueError("this tokenizer has no chat template, so the model cannot write prompts: give --texts")
    template = tokenizer.apply_chat_template([{"role": "user", "content": MARK}], tokenize=False)
    before, after = str(template).split(MARK)
    start = tokenizer(before, add_special_tokens=False)["input_ids"]
    end = tokenizer(after, add_special_tokens=False)["input_ids"][0]
    rows = read_rows(file)
    prompts = {row["prompt"] for row in rows}
    tried = 1 + int(rows[-1]["seed"]) if rows else 0
    with progress_bar(stderr(), "prompts") as show, file.open("a", encoding="utf-8") as out:
        while len(prompts) < count:
            requests = [
                engine.requests(
                    start, max_new_tokens=PROMPT_TOKENS, do_sample=True, top_k=0, top_p=1.0, seed=tried + row,
                    eos_token_id=end,
                )[0]
                for row in range(TOGETHER)
            ]  # fmt: skip
            new = 0
            for seed, text in enumerate(_run(engine, requests, tokenizer, end), tried):
                if text and text not in prompts:
                    prompts.add(text)
                    out.write(json.dumps({"prompt": text, "seed": seed}) + "\n")
                    new += 1
            if not new:
                raise ValueError(f"none of {TOGETHER} prompts that the model wrote was a new one: give --texts")
            tried += TOGETHER
            out.flush()
            show(min(len(prompts), count), count)
    return [row["prompt"] for row in read_rows(file)][:count]


def write_answers(
    engine: Engine, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], file: Path, *, max_new_tokens: int,
    temperature: float,
) -> dict[str, str]:  # fmt: skip
    """Return the answer to each prompt; greedy at temperature 0."""
    answers = {row["prompt"]: row["answer"] for row in read_rows(file)}
    missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in answers]
    began, encode = len(answers), TemplateEncoder(tokenizer)
    with progress_bar(stderr(), "answers") as show, file.open("a", encoding="utf-8") as out:
        for done in range(0, len(missing), TOGETHER):
            asked = missing[done : done + TOGETHER]
            requests = [
                engine.requests(
                    encode(prompt), max_new_tokens=max_new_tokens, **sampling(temperature, began + done + row),
                )[0]
                for row, prompt in enumerate(asked)
            ]  # fmt: skip
            for prompt, text in zip(asked, _run(engine, requests, tokenizer), strict=True):
                answers[prompt] = text
                out.write(json.dumps({"prompt": prompt, "answer": text}) + "\n")
            out.flush()
            show(done + len(asked), len(missing))
    return answers


def _run(
    engine: Engine, requests: Sequence[Request], tokenizer: PreTrainedTokenizerBase, end: int | None = None
) -> list[str]:
    """Return all outputs; with ``end``, those without it are empty."""
    for _ in engine.run(requests):
        pass
    ended = [end is None or int(request.generated[-1]) == end for request in requests]
    texts = (str(tokenizer.decode(request.generated, skip_special_tokens=True)).strip() for request in requests)
    return [text if whole else "" for text, whole in zip(texts, ended, strict=True)]
