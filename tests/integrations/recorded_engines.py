"""How other engines call what drafts for them, as their sources say, with a known text in place of a model.

vLLM 0.33.0: ``v1/worker/gpu_input_batch.py`` (``add_request``, ``swap_states``, ``condense``) and
``v1/worker/gpu_model_runner.py`` (``_bookkeeping_sync``, ``propose_draft_token_ids``).
llama-cpp-python 0.3.36: ``llama_speculative.py`` and ``Llama.generate``.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

STALE = 999_999
"""Stands where a row has no token: whoever reads it is found out."""


def vllm_config(most: int = 8, room: int = 512, settings: object = None, **others: Any) -> SimpleNamespace:
    """What a proposer reads of a ``VllmConfig``."""
    model = {"max_model_len": room, "tokenizer": "a/b", "enable_prompt_embeds": False, "get_vocab_size": lambda: 50_000}
    parallel = {"rank": 0, "tensor_parallel_size": 1, "data_parallel_rank": 0}
    return SimpleNamespace(
        model_config=SimpleNamespace(**{name: others.get(name, value) for name, value in model.items()}),
        parallel_config=SimpleNamespace(**{name: others.get(name, value) for name, value in parallel.items()}),
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        additional_config={} if settings is None else {"forerun": settings},
        use_v2_model_runner=others.get("use_v2_model_runner", False),
    )


@dataclass
class Asked:
    """A request: its prompt, and what the model says to it."""

    prompt: list[int]
    answer: list[int]
    said: int = 0
    draft: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    accepted: int = 0

    @property
    def done(self) -> bool:
        return self.said >= len(self.answer)

    @property
    def drafted(self) -> int:
        return sum(map(len, self.drafts))

    def verify(self) -> list[int]:
        """The longest beginning of the draft that is right, and one token."""
        rest = self.answer[self.said :]
        right = next((at for at, token in enumerate(self.draft) if rest[at : at + 1] != [token]), len(self.draft))
        right = min(right, len(rest) - 1)
        self.accepted += right
        self.said += right + 1
        return rest[: right + 1]


class Runner:
    """vLLM's persistent batch, and its steps."""

    def __init__(self, proposer: Any, rows: int = 8, room: int = 512) -> None:
        self.proposer = proposer
        self.rows: list[Asked] = []
        self.token_ids_cpu = np.full((rows, room), STALE, np.int32)
        self.num_tokens_no_spec = np.zeros(rows, np.int32)

    def add(self, request: Asked) -> None:
        """Into the first empty row; it keeps what another left behind its text."""
        text, row = request.prompt + request.answer[: request.said], len(self.rows)
        self.token_ids_cpu[row, : len(text)] = text
        self.num_tokens_no_spec[row] = len(text)
        self.rows.append(request)

    def remove(self, request: Asked) -> None:
        """The last row moves into the gap, if there is one."""
        row, last = self.rows.index(request), len(self.rows) - 1
        count = self.num_tokens_no_spec[last]
        self.token_ids_cpu[row, :count] = self.token_ids_cpu[last, :count]
        self.num_tokens_no_spec[row] = count
        self.rows[row] = self.rows[last]
        del self.rows[last]

    def swap(self, one: int, other: int) -> None:
        self.token_ids_cpu[[one, other]] = self.token_ids_cpu[[other, one]]
        self.num_tokens_no_spec[[one, other]] = self.num_tokens_no_spec[[other, one]]
        self.rows[one], self.rows[other] = self.rows[other], self.rows[one]

    def step(self, reading: tuple[Asked, ...] = ()) -> None:
        """A pass, what came of it, and the next drafts; the prompts of ``reading`` are not read to their end yet."""
        sampled: list[list[int]] = []
        for row, request in enumerate(self.rows):
            came = [] if request in reading else request.verify()
            start = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, start : start + len(came)] = came
            self.num_tokens_no_spec[row] = start + len(came)
            sampled.append(came)
        drafts = self.proposer.propose(sampled, self.num_tokens_no_spec, self.token_ids_cpu, slot_mappings=None)
        assert len(drafts) == len(self.rows)
        for row, (request, draft) in enumerate(zip(self.rows, drafts, strict=True)):
            assert all(type(token) is int for token in draft)
            request.draft = draft
            request.drafts.append(draft)
            start = self.num_tokens_no_spec[row]
            self.token_ids_cpu[row, start : start + len(draft)] = draft  # as update_req_spec_token_ids does

    def finish(self) -> None:
        """Steps until all requests are done; each leaves after the step that ends it."""
        while self.rows:
            self.step()
            for request in [request for request in self.rows if request.done]:
                self.remove(request)


class LlamaDraftModel(abc.ABC):
    """llama-cpp-python's, for where it is not installed."""

    @abc.abstractmethod
    def __call__(self, input_ids: Any, /, **kwargs: Any) -> Any:
        raise NotImplementedError


@dataclass
class Llama:
    """llama-cpp-python's loop around a draft model."""

    draft_model: Any
    context: int = 512
    calls: int = 0
    drafted: int = 0
    accepted: int = 0

    def generate(self, prompt: list[int], answer: list[int]) -> Iterator[int]:
        ids, said = np.zeros(self.context, np.intc), 0
        ids[: len(prompt)] = prompt
        end = len(prompt)
        draft: list[int] = []
        while True:
            for token in [*draft, None]:
                sampled = answer[said]
                said += 1
                yield sampled
                if said == len(answer):
                    return
                ids[end] = sampled
                end += 1
                if token != sampled:
                    break
                self.accepted += 1
            draft = self.draft_model(ids[:end]).astype(int)[: self.context - end].tolist()
            self.calls += 1
            self.drafted += len(draft)
