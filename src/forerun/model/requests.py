"""From what users pass to ``generate`` to requests, with transformers' own processors and stopping criteria.

``transformers`` itself merges and validates the generation configuration: a prompt goes through ``model.generate`` with
a ``custom_generate`` that only keeps what was prepared. So every option means here what it means there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    MaxLengthCriteria,
    RepetitionPenaltyLogitsProcessor,
    StopStringCriteria,
)

from forerun.model.inputs import check_inputs, check_length, check_prompt
from forerun.request import Request, Stopping
from forerun.sampling import Method, Processor, Sampler

SUPPORTED_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
UNSUPPORTED_OPTIONS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "token_healing")
SEEDS = 2**63 - 1
RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: x >= 0, "positive (or 0 with do_sample=False)"),
    "top_k": (lambda x: x >= 0, "0 (off) or more"),
    "top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "min_p": (lambda x: 0 <= x <= 1, "between 0 and 1"),
    "typical_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "repetition_penalty": (lambda x: x > 0, "positive"),
}
"""Values that make sense; transformers itself silently ignores some that do not."""


@dataclass(frozen=True)
class RowOptions:
    """What Forerun adds to transformers' options.

    Attributes:
        seed: of the sampling noise; None draws one from torch's global generator.
        verification: ``coupled`` or ``rejection`` (see ``forerun.sampling``); greedy decoding ignores it.
        namespace: whose outputs may be drafted to this text.
    """

    seed: int | None = None
    verification: Method = "coupled"
    namespace: str = "default"

    def __post_init__(self) -> None:
        if self.verification not in ("coupled", "rejection"):
            raise ValueError(f"verification is {self.verification!r}; allowed are 'coupled' and 'rejection'")


@dataclass(frozen=True)
class Prepared:
    """What transformers hands to a ``custom_generate`` function."""

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList


def build_requests(
    model: PreTrainedModel,
    prompt: Sequence[int],
    options: RowOptions,
    tokenizer: PreTrainedTokenizerBase | None = None,
    **kwargs: Any,
) -> list[Request]:
    """One request per returned sequence (``num_return_sequences``) of a prompt.

    Args:
        model: the target.
        prompt: token ids.
        options: Forerun's own.
        tokenizer: needed for ``stop_strings``.
        kwargs: what ``model.generate`` takes: ``generation_config``, its fields, ``logits_processor``, ...

    Raises:
        ValueError: for a wrong value, an empty prompt, ids out of range or too long a text.
        NotImplementedError: for what Forerun does not do, such as beam search.
    """
    check_prompt(model, prompt)
    kwargs = _with_stop_strings(model, tokenizer, kwargs)
    prepared = _prepare(model, prompt, kwargs)
    count = prepared.config.num_return_sequences or 1
    seed = options.seed if options.seed is not None else draw_seed()
    return [
        make_request(model, prompt, prepared if i == 0 else _prepare(model, prompt, kwargs), options, seed + i)
        for i in range(count)
    ]


def make_request(
    model: PreTrainedModel,
    prompt: Sequence[int],
    prepared: Prepared,
    options: RowOptions,
    seed: int,
    padding: Sequence[int] = (),
) -> Request:
    """A request for one row, from what transformers prepared for it."""
    config = prepared.config
    _check_mode(config)
    max_new_tokens = config.max_length - len(prompt) - len(padding)
    check_length(model, len(prompt), max_new_tokens)
    eos = config._eos_token_tensor
    return Request(
        prompt,
        max_new_tokens,
        eos_token_ids=frozenset() if eos is None else frozenset(eos.tolist()),
        sampler=Sampler(options.verification if config.do_sample else "greedy", seed, _in_turn(prepared.processors)),
        stopping=_stopping(prepared.criteria, model.device),
        namespace=options.namespace,
        padding=padding,
    )


def _in_turn(processors: LogitsProcessorList) -> Processor | None:
    """All of them as one; the list itself would look up the parameters of each at every token, to ask for more than a
    generation has where one takes more than ids and scores."""
    if any(len(inspect.signature(processor.__call__).parameters) > 2 for processor in processors):
        return processors  # type: ignore[no-any-return]
    return (lambda ids, scores: reduce(lambda so_far, p: p(ids, so_far), processors, scores)) if processors else None


def per_row(prepared: Prepared, row: int) -> Prepared:
    """What transformers prepared for a padded batch, for one of its rows."""
    processors = LogitsProcessorList()
    for processor in prepared.processors:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor) and processor.prompt_ignore_length is not None:
            processor = copy.copy(processor)
            processor.prompt_ignore_length = processor.prompt_ignore_length[row : row + 1]
        processors.append(processor)
    return Prepared(prepared.config, processors, prepared.criteria)


def draw_seed() -> int:
    """A seed from torch's global generator, so that ``torch.manual_seed`` fixes it."""
    return int(torch.randint(SEEDS, ()))


def _prepare(model: PreTrainedModel, prompt: Sequence[int], kwargs: dict[str, Any]) -> Prepared:
    def keep(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **given: Any,
    ) -> Prepared:
        check_inputs(input_ids, given)
        return Prepared(generation_config, logits_processor, stopping_criteria)

    ids = torch.tensor([list(prompt)], device=model.device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=keep, **kwargs)  # type: ignore[no-any-return]


def _with_stop_strings(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Turn ``stop_strings`` into the criterion itself: transformers passes no tokenizer on to custom functions."""
    given = kwargs.get("generation_config")
    in_config = given or model.generation_config
    strings = kwargs.get("stop_strings") or in_config.stop_strings or model.generation_config.stop_strings
    if not strings:
        return kwargs
    if "" in ([strings] if isinstance(strings, str) else strings):
        raise ValueError(f"stop_strings={strings!r} holds an empty one, which would stop everywhere")
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} need a tokenizer, and there is none; pass tokenizer=")
    without = copy.deepcopy(given) if given is not None else None
    if without is not None:
        without.stop_strings = None
    criteria = StoppingCriteriaList([*(kwargs.get("stopping_criteria") or [])])
    criteria.append(StopStringCriteria(tokenizer, strings))
    changed = {**kwargs, "stop_strings": None, "stopping_criteria": criteria}
    return {**changed, "generation_config": without} if without is not None else changed


def _check_mode(config: GenerationConfig) -> None:
    for name, (fits, allowed) in RANGES.items():
        value = getattr(config, name, None)
        if value is not None and not fits(value):
            raise ValueError(f"{name} is {value}; it must be {allowed}")
    mode = config.get_generation_mode()
    if mode not in SUPPORTED_MODES:
        raise NotImplementedError(f"{mode.value} is not supported; Forerun does greedy decoding and sampling")
    if config.guidance_scale not in (None, 1, 1.0):
        raise NotImplementedError(f"guidance_scale={config.guidance_scale} is not supported; only 1 is")
    wanted = [name for name in UNSUPPORTED_OPTIONS if getattr(config, name, None)]
    if wanted:
        raise NotImplementedError(f"{', '.join(wanted)} is not supported by Forerun")


def _stopping(criteria: StoppingCriteriaList, device: torch.device) -> Stopping | None:
    """All criteria but end-of-sequence and length, which requests check themselves without a tensor."""
    rest = StoppingCriteriaList([c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)])
    if not len(rest):
        return None
    return lambda ids: bool(rest(ids.to(device), None).all())
