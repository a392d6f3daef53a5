"""Run transformers' logits processors for each row.

transformers calls a processor once per token, in order, and so does verification along its path. One with a state (a
watermark, a grammar, guidance by a second pass) must not see the calls of drafting or of other rows. So each row has a
copy, and drafts are made without it, which affects only what is accepted.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessorList, PreTrainedModel, TopPLogitsWarper

from forerun.core.compiling import COMPILES
from forerun.core.sampling import InTurn, Processor, Remembering
from forerun.core.sampling_kernels import top_p_cut


class Nucleus:
    """Top-p for one row on a CPU, in float64: a token at the very edge may be kept or cut differently. ``warper`` has
    the settings, and runs where it must keep more tokens, for scores that are not float32, for several rows, and on
    other devices."""

    forerun_stateless = True

    def __init__(self, warper: TopPLogitsWarper) -> None:
        self._warper = warper

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if COMPILES and scores.device.type == "cpu" and scores.dtype == torch.float32 and len(scores) == 1:
            own = scores[0].detach().contiguous()
            cut_scores, count = top_p_cut(
                own.numpy(), own.softmax(-1).numpy(), 1 - self._warper.top_p, self._warper.filter_value
            )
            if count >= self._warper.min_tokens_to_keep:
                return torch.from_numpy(cut_scores)[None]
        return self._warper(input_ids, scores)  # type: ignore[no-any-return]


HOME = "transformers.generation.logits_process"
STATELESS = frozenset(
    f"{name}LogitsProcessor"
    for name in (
        "EncoderNoRepeatNGram", "EncoderRepetitionPenalty", "ForcedBOSToken", "ForcedEOSToken", "MinLength",
        "MinNewTokensLength", "NoBadWords", "NoRepeatNGram", "PrefixConstrained", "RepetitionPenalty", "SequenceBias",
        "SuppressTokensAtBegin", "SuppressTokens", "Watermark",
    )
) | frozenset(
    f"{name}LogitsWarper" for name in ("Epsilon", "Eta", "MinP", "Temperature", "TopH", "TopK", "TopP", "Typical")
) | {"ExponentialDecayLengthPenalty", "InfNanRemoveLogitsProcessor", "LogitNormalization"}  # fmt: skip
"""transformers' classes whose result depends on ids and scores only; its watermark seeds itself from ids."""
ROWWISE = frozenset(
    f"{name}LogitsWarper" for name in ("Epsilon", "MinP", "Temperature", "TopK", "TopP")
) | {"InfNanRemoveLogitsProcessor", "LogitNormalization", "SuppressTokensLogitsProcessor"}  # fmt: skip
"""Processors that ignore ids, process each of many rows as if alone, and read no value back from their device. Not
typical sampling: its sums on CUDA have an order that depends on the number of rows."""
NAMELESS = (ROWWISE | {"TypicalLogitsWarper"}) - {"SuppressTokensLogitsProcessor"}
"""Processors of scores alone that treat all tokens alike."""
ANYWHERE = NAMELESS | {
    "NoRepeatNGramLogitsProcessor", "RepetitionPenaltyLogitsProcessor", "TopHLogitsWarper"
}  # fmt: skip
"""Processors without tensors on the model's device, unlike biases and those for end-of-sequence ids."""
DECLARATION = "forerun_stateless"
"""Attribute by which any other processor declares itself stateless."""


class OccurrencePenalties:
    """OpenAI's penalties for repeated tokens after the prompt: ``frequency`` per occurrence, and ``presence`` once."""

    forerun_stateless = True

    def __init__(self, start: int, frequency: float, presence: float) -> None:
        self._start, self._frequency, self._presence = start, frequency, presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in zip(scores, input_ids[:, self._start :], strict=True):
            tokens, counts = ids.unique(return_counts=True)
            row[tokens] -= self._presence + self._frequency * counts
        return scores


def stateless(processor: Any) -> bool:
    """Return whether a processor may be called in any order: its class is listed, or ``forerun_stateless`` is true."""
    kind = type(processor)
    known = kind.__module__ == HOME and kind.__name__ in STATELESS
    return bool(getattr(processor, DECLARATION, known))


def of_row(processors: Sequence[Any], model: PreTrainedModel, row: int = 0, rows: int = 1) -> Processor | None:
    """Combine a row's processors into one, or None if there are none; ``prefix_allowed_tokens_fn`` receives the row's
    number. With several rows, use copies, which share the target; raise NotImplementedError if one cannot be copied."""
    own = [_quick(_of_place(each, row, rows)) if stateless(each) else each for each in processors]
    if rows > 1:
        own = [each if stateless(each) else _copied(each, model) for each in own]
    combined, pure = _in_turn(own), [each for each in own if stateless(each)]
    return combined if combined is None or len(pure) == len(own) else Remembering(combined, _in_turn(pure))


def _in_turn(processors: Sequence[Any]) -> Processor | None:
    """Combine processors. transformers' list inspects each processor's parameters at every token."""
    if any(len(inspect.signature(processor.__call__).parameters) > 2 for processor in processors):
        return LogitsProcessorList(processors)  # type: ignore[no-any-return]
    if not processors:
        return None
    rowwise, anywhere, nameless = (
        all(_among(names, each) for each in processors) for names in (ROWWISE, ANYWHERE, NAMELESS)
    )
    divides = len(processors) == 1 and _among(frozenset({"TemperatureLogitsWarper"}), processors[0])
    temperature = processors[0].temperature if divides else None
    return InTurn(tuple(processors), rowwise, anywhere, nameless, temperature)


def _among(names: frozenset[str], processor: Any) -> bool:
    kind = TopPLogitsWarper if type(processor) is Nucleus else type(processor)
    return kind.__module__ == HOME and kind.__name__ in names


def _copied(processor: Any, model: PreTrainedModel) -> Any:
    shared = {id(module): module for module in model.modules()}
    try:
        twin = copy.deepcopy(processor, shared)
        if twin is not processor:
            return twin
        reason = "a copy of it is itself"
    except Exception as error:  # a processor may raise anything
        reason = f"{type(error).__name__}: {error}"
    raise NotImplementedError(
        f"the logits processor {getattr(processor, '__name__', type(processor).__name__)} may remember its calls, and "
        f"several rows need a copy each, which cannot be made ({reason}); generate one row at a time, or set "
        f"{DECLARATION} = True on it if its result depends on nothing but ids and scores"
    )


def _quick(processor: Any) -> Any:
    return Nucleus(processor) if type(processor) is TopPLogitsWarper else processor


def _of_place(processor: Any, row: int, rows: int) -> Any:
    change = _CHANGES.get(type(processor).__name__)
    if change is None:
        return processor
    twin = copy.copy(processor)
    change(twin, row, rows)
    return twin


def _own(entries: Any, row: int, rows: int) -> Any:
    """Return a row's part of ``entries``, which are per row, per prompt of several rows, or of this prompt alone."""
    place = row * len(entries) // rows
    return entries[place : place + 1]


def _ignore_prompt(processor: Any, row: int, rows: int) -> None:
    if isinstance(processor.prompt_ignore_length, torch.Tensor):
        processor.prompt_ignore_length = _own(processor.prompt_ignore_length, row, rows)


def _tell_row(processor: Any, row: int, rows: int) -> None:
    """Pass on the prompt's number; since transformers 5.24 all sequences of a prompt share one."""
    allowed, number = processor._prefix_allowed_tokens_fn, row // processor._num_beams
    processor._prefix_allowed_tokens_fn, processor._num_beams = (lambda _, ids: allowed(number, ids)), 1


def _cut_prompts(processor: Any, row: int, rows: int) -> None:
    processor.encoder_input_ids = _own(processor.encoder_input_ids, row, rows)


def _cut_ngrams(processor: Any, row: int, rows: int) -> None:
    processor.generated_ngrams, processor.batch_size = _own(processor.generated_ngrams, row, rows), 1


_CHANGES: dict[str, Callable[[Any, int, int], None]] = {
    "RepetitionPenaltyLogitsProcessor": _ignore_prompt,
    "PrefixConstrainedLogitsProcessor": _tell_row,
    "EncoderRepetitionPenaltyLogitsProcessor": _cut_prompts,
    "EncoderNoRepeatNGramLogitsProcessor": _cut_ngrams,
}
