"""Requests of every kind that a server answers, mixed: what its clients are in the trials under load."""

from __future__ import annotations

import json
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]
KINDS = ("text", "chat", "ids", "several", "stop", "schema", "logprobs")
SCHEMA: Json = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 999}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TEXT = Path(json.__file__).read_text()
"""What prompts are cut from: a module of Python's own library."""


@dataclass(frozen=True)
class MixedRequest:
    """A request: its kind, and where it goes."""

    kind: str
    body: Json

    @property
    def address(self) -> str:
        """Below the server's own."""
        return "/v1/chat/completions" if "messages" in self.body else "/v1/completions"


TextAnswer = dict[int, tuple[str, str]]
"""Of each choice, the text and why it ended."""


def mixed(number: int, seed: int, longest: int = 96) -> list[MixedRequest]:
    """So many requests, each kind in turn; greedy and sampled, with short and long prompts and answers.

    Args:
        number: of requests.
        seed: of all that is random.
        longest: tokens of an answer.
    """
    chance = random.Random(seed)
    return [_asked(KINDS[each % len(KINDS)], chance, longest) for each in range(number)]


def _asked(kind: str, chance: random.Random, longest: int) -> MixedRequest:
    begin, length = chance.randrange(len(TEXT) - 4000), chance.choice((8, 40, 200, 1000, 3000))
    prompt = TEXT[begin : begin + length]
    warmth = {"temperature": 0} if chance.random() < 0.5 else {"temperature": chance.choice((0.7, 1)), "top_p": 0.95}
    body: Json = {
        "model": "bundled",
        "max_tokens": chance.randint(4, longest),
        "seed": chance.randrange(10**6),
        **warmth,
    }
    own: dict[str, Json] = {
        "text": {"prompt": prompt},
        "chat": {"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": prompt}]},
        "ids": {"prompt": [chance.randrange(300, 1000) for _ in range(max(1, length // 4))]},
        "several": {"prompt": [prompt, prompt[::-1]], "n": 2},
        "stop": {"prompt": prompt, "stop": ["e", "\n\n", " the "]},
        "schema": {
            "prompt": prompt,
            "response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}},
        },
        "logprobs": {"prompt": prompt, "logprobs": 3},
    }
    return MixedRequest(kind, body | own[kind])


async def whole(client: httpx.AsyncClient, asked: MixedRequest) -> TextAnswer:
    """The answer in one piece."""
    answer = await client.post(asked.address, json=asked.body)
    answer.raise_for_status()
    return {
        choice["index"]: (
            choice["message"]["content"] if "message" in choice else choice["text"],
            choice["finish_reason"],
        )
        for choice in answer.json()["choices"]
    }


async def streamed(client: httpx.AsyncClient, asked: MixedRequest, pieces: int | None = None) -> TextAnswer:
    """The answer of a stream; of so many pieces, after which the client goes."""
    said: TextAnswer = {}
    async with client.stream("POST", asked.address, json={**asked.body, "stream": True}) as answer:
        answer.raise_for_status()
        async for choice in _choices(answer):
            if pieces is not None and (pieces := pieces - 1) < 0:
                break
            new = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            text, _ = said.get(choice["index"], ("", ""))
            said[choice["index"]] = (text + new, choice["finish_reason"])
    return said


async def _choices(answer: httpx.Response) -> AsyncIterator[Json]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            for choice in event["choices"]:
                yield choice
