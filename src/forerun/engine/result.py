"""Results of a generation: the tokens of each step, and outputs with their statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from forerun.core.request import FinishReason, Logprob, Request
from forerun.core.stats import Stats
from forerun.models.text.detokenize import Detokenizer

SHOWN = 80
"""Characters of text in a result's ``repr``: a terminal line."""


@dataclass(frozen=True)
class Commit:
    """The tokens that one step added to a request.

    Attributes:
        tokens: none if the request failed.
        drafted: how many of them, from the first on, were accepted drafts.
        proposed: nodes of the draft that the step verified.
        seconds: duration of the step; of the first one, since admission.
        text: the tokens as complete characters, from ``Engine.stream`` with a tokenizer; joined, the output without
            special tokens.
    """

    request: Request = field(repr=False)
    tokens: list[int]
    drafted: int
    proposed: int = 0
    origins: Sequence[int] = ()
    seconds: float = 0.0
    text: str | None = None


@dataclass(frozen=True, repr=False)
class GenerationResult:
    """Continued prompts, in order (``num_return_sequences`` in a row for each); ``pad_token_id`` pads ``sequences``."""

    requests: Sequence[Request]
    pad_token_id: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None

    def __repr__(self) -> str:
        tokens, steps = (sum(getattr(each, name) for each in self.stats) for name in ("tokens", "steps"))
        seconds = max((each.prefill_seconds + each.decode_seconds for each in self.stats), default=0.0)
        one = len(self.requests) == 1 and self.tokenizer is not None
        what = repr(_shortened(self.text)) if one else f"{len(self.requests)} sequences"
        return (
            f"GenerationResult({what}, {tokens} tokens, {tokens / max(steps, 1):.1f} tokens per step, {seconds:.2f} s)"
        )

    @property
    def generated(self) -> list[list[int]]:
        """The new token ids of each sequence."""
        return [request.generated.tolist() for request in self.requests]

    @property
    def texts(self) -> list[str]:
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer; give the engine one, or decode `generated` yourself")
        return [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in self.generated]

    @property
    def text(self) -> str:
        """The new text of the only sequence."""
        if len(self.requests) != 1:
            raise ValueError(f"there are {len(self.requests)} sequences; use `texts`")
        return self.texts[0]

    @property
    def finish_reasons(self) -> list[FinishReason | None]:
        """``eos``, ``stop`` or ``length``; None if interrupted."""
        return [request.finish_reason for request in self.requests]

    @property
    def stats(self) -> list[Stats]:
        """Steps and times of each sequence."""
        return [request.stats for request in self.requests]

    @property
    def logprobs(self) -> list[list[Logprob]]:
        """The log-probabilities of each sequence's new tokens; empty lists without the option ``logprobs``."""
        return [request.logprobs for request in self.requests]

    @property
    def seeds(self) -> list[int | None]:
        """The seed of each sampled sequence, None for greedy ones."""
        return [request.seed for request in self.requests]

    @property
    def sequences(self) -> torch.Tensor:
        """Prompts and new tokens as ``transformers`` returns them, padded before prompts and after ends."""
        left = max(request.prompt_length for request in self.requests)
        new = max(len(request.generated) for request in self.requests)
        rows = torch.full((len(self.requests), left + new), self.pad_token_id)
        for row, request in zip(rows, self.requests, strict=True):
            start = left - request.prompt_length
            row[start : start + len(request)] = torch.from_numpy(request.tokens)
        return rows


class GenerationInterrupted(KeyboardInterrupt):
    """Ctrl-C during ``generate``; ``result`` holds the output so far."""

    def __init__(self, result: GenerationResult) -> None:
        super().__init__("generation was interrupted")
        self.result = result


def feed(
    streamer: BaseStreamer | None,
    requests: Sequence[Request],
    commits: Iterable[Commit],
    prompt: torch.Tensor | None,
) -> None:
    """Run to the end, passing tokens to a streamer as transformers does: first the prompt, ``[1, t]``, unless the
    streamer has it (None). Raise ValueError for a streamer with more than one request."""
    if streamer is None:
        deque(commits, 0)
        return
    if len(requests) != 1:
        raise ValueError(f"a streamer supports one sequence; there are {len(requests)}")
    if prompt is not None:
        streamer.put(prompt.cpu())
    for commit in commits:
        for token in commit.tokens:
            streamer.put(torch.tensor([token]))
    streamer.end()


def with_texts(commits: Iterable[Commit], tokenizer: PreTrainedTokenizerBase) -> Iterator[Commit]:
    """Add each commit's text, decoded with the tokens before it, so that no character is split."""
    detokenizers: dict[int, Detokenizer] = {}
    for commit in commits:
        request = commit.request
        own = detokenizers.get(request.id)
        if own is None:
            own = detokenizers[request.id] = Detokenizer(tokenizer, request.prompt.tolist())
        pieces = [piece.text for token in commit.tokens for piece in own.add(token, False)]
        if request.finish_reason is not None:
            pieces += [piece.text for piece in own.flush()]
        yield replace(commit, text="".join(pieces))


def ends(config: GenerationConfig) -> list[int]:
    """Return the tokens that end a sequence."""
    eos = config.eos_token_id
    return list(eos) if isinstance(eos, list) else [] if eos is None else [eos]


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
