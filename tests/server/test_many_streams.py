"""Many streams of every kind at once, some of whose clients go: each text is its request's alone, without drafts."""

import json
import random
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from support.chat_models import json_schema
from support.live_server import TEMPLATE, Json, LiveServer, tasks, until

from forerun.engine.engine import Engine
from forerun.models.loading.load import load
from forerun.server.admission import SchedulerLimits

STREAMS = 14
SOURCE = Path(json.__file__).read_text()
"""What prompts are cut from: a module of Python's own library."""
PROPERTIES = {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 999}}
PERSON = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES], "additionalProperties": False}


def mixed(number: int, seed: int) -> Iterator[Json]:
    """So many requests, each kind in turn; greedy and sampled, with short and long prompts and answers."""
    chance = random.Random(seed)
    for place in range(number):
        begin, length = chance.randrange(len(SOURCE) - 4000), chance.choice((8, 40, 200, 1000, 3000))
        prompt = SOURCE[begin : begin + length]
        kinds: list[Json] = [
            {"prompt": prompt},
            {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": prompt}]},
            {"prompt": [chance.randrange(300, 1000) for _ in range(max(1, length // 4))]},
            {"prompt": [prompt, prompt[::-1]], "n": 2},
            {"prompt": prompt, "stop": ["e", "\n\n", " the "]},
            {"prompt": prompt, "response_format": json_schema(PERSON)},
            {"prompt": prompt, "logprobs": 3},
        ]  # fmt: skip
        yield {
            **kinds[place % len(kinds)], "max_tokens": chance.randint(4, 12), "seed": chance.randrange(10**6),
            **chance.choice(({"temperature": 0}, {"temperature": 0.7, "top_p": 0.95}, {"temperature": 1})),
        }  # fmt: skip


def address(body: Json) -> str:
    return "chat/completions" if "messages" in body else "completions"


def joined(choices: Iterable[Json]) -> dict[int, tuple[str, str | None]]:
    """Of each choice, the text and why it ended."""
    found: dict[int, tuple[str, str | None]] = {}
    for each in choices:
        new = each["text"] if "text" in each else each.get("delta", each.get("message")).get("content") or ""
        found[each["index"]] = (found.get(each["index"], ("", None))[0] + new, each["finish_reason"])
    return found


def streamed(server: LiveServer, body: Json, pieces: int | None) -> dict[int, tuple[str, str | None]]:
    """The answer of a stream; of so many pieces, after which the client goes."""
    with server.http.stream("POST", f"/v1/{address(body)}", json={**body, "stream": True}) as answer:
        events = (json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line.startswith("data: {"))
        return joined(islice((choice for event in events for choice in event["choices"]), pieces))


@pytest.mark.matrix
def test_each_of_many_streams_is_its_text_alone_and_nothing_is_left():
    model, tokenizer = load("bundled", device="cpu")
    tokenizer.chat_template = TEMPLATE
    asked = list(mixed(STREAMS, seed=3))
    pieces = [3 if place % 4 == 3 else None for place in range(STREAMS)]
    with LiveServer(Engine(model, "none", tokenizer=tokenizer), SchedulerLimits(1 << 30, rows=1)) as one:
        alone = [joined(one.post(body, address(body)).json()["choices"]) for body in asked]
    engine = Engine(model, "trie", tokenizer=tokenizer, prefix_cache=1 << 24)
    with LiveServer(engine, SchedulerLimits(1 << 30, rows=8)) as many, ThreadPoolExecutor(STREAMS) as pool:
        before = tasks()
        for _ in range(2):  # the second time with drafts out of the first
            for said, body, count, wanted in zip(
                pool.map(streamed, [many] * STREAMS, asked, pieces), asked, pieces, alone, strict=True
            ):
                assert count is not None or said == wanted, body
        many.wait_idle()
        until(lambda: tasks() <= before)
        assert many.metric("forerun:spec_decode_num_accepted_tokens_total") > 0
        assert many.metric('forerun:request_ended_total{reason="cancelled"}') > 0
