"""Build requests from the options of ``generate``, with transformers' processors and stopping criteria.

transformers merges and validates the options itself: a prompt goes through ``model.generate`` with a
``custom_generate`` that only returns what was prepared. So every option means what it means there.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from itertools import chain
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StopStringCriteria,
)

from forerun.core.checks import check_integer, check_number, check_text
from forerun.core.request import Request, Stopping
from forerun.core.sampling import Method, Sampler
from forerun.models.forward.inputs import check_inputs, check_length, check_prompt
from forerun.models.text.processors import of_row

if TYPE_CHECKING:  # grammars are imported on demand
    from forerun.models.text.grammar import Grammar, ResponseFormat

OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
    "frequency_penalty": "repetition_penalty",
    "presence_penalty": "repetition_penalty",
}
"""Names of options in other programs, and their names here."""


class GenerationOptions(TypedDict, total=False):
    """Options of ``Engine.generate``, ``Engine.stream`` and ``forerun.generate``.

    Missing options come from ``model.generation_config``, as in transformers. The first group is Forerun's: see
    ``RowOptions`` for the first five, and ``Grammars`` for ``response_format``. ``prediction`` is text, or token ids,
    that the answer is expected to resemble, such as code to edit: drafters with a trie copy drafts from it. It is
    private to the call, and changes only the speed.
    """

    seed: int | None
    verification: Method
    namespace: str
    drafts_from: str | None
    logprobs: int | None
    response_format: ResponseFormat | None
    prediction: str | Sequence[int] | None

    attention_mask: torch.Tensor | Sequence[int] | Sequence[Sequence[int]] | None
    generation_config: GenerationConfig | None
    logits_processor: LogitsProcessorList | list[LogitsProcessor] | list[Any] | None
    stopping_criteria: StoppingCriteriaList | list[StoppingCriteria] | list[Any] | None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int | None
    max_time: float | None
    stop_strings: str | list[str] | None
    eos_token_id: int | list[int] | None
    pad_token_id: int | None
    bos_token_id: int | None
    num_return_sequences: int | None

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    top_h: float | None
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None

    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: list[list[int]] | None
    sequence_bias: Any
    suppress_tokens: list[int] | None
    begin_suppress_tokens: list[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | list[int] | None
    exponential_decay_length_penalty: tuple[int, float] | None
    renormalize_logits: bool | None
    remove_invalid_values: bool | None
    watermarking_config: Any
    return_dict_in_generate: bool | None


INTEGERS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length", "num_return_sequences", "top_k")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty", "max_time")
"""Options whose wrong types transformers compares or ignores instead of reporting them."""


def check_options(options: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Raise ValueError for the first unknown name, with a suggestion, and TypeError for the first wrong type."""
    for name in INTEGERS:
        check_integer(name, options.get(name), optional=True)
    for name in NUMBERS:
        check_number(name, options.get(name), optional=True)
    known = {
        *GenerationOptions.__annotations__,
        *vars(GenerationConfig()),
        *inspect.signature(model.generate).parameters,
        *inspect.signature(model.forward).parameters,
    }
    for name in options:
        if name not in known:
            near = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, sorted(known), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name} is not an option of generate{meant}")


def own_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split options into Forerun's, for ``RowOptions``, and those for ``model.generate``."""
    own = RowOptions.__dataclass_fields__
    return (
        {name: value for name, value in options.items() if name in own},
        {name: value for name, value in options.items() if name not in own},
    )


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
"""Allowed values of options; transformers silently ignores some wrong ones."""


@dataclass(frozen=True)
class RowOptions:
    """Forerun's options, alongside transformers'.

    Attributes:
        seed: of the sampling noise; None draws one from torch's global generator.
        verification: ``coupled`` or ``rejection`` (see ``forerun.core.sampling``); greedy decoding ignores it.
        budget: maximum nodes per draft, if less than the engine's; 0 for no drafts and no indexing.
        logprobs: likeliest tokens to keep per position, with the chosen one's log-probability; None keeps nothing.
        drafts_from: a namespace to draft from and index into instead; see ``Request``.
        prediction: token ids that the output is expected to resemble; see ``Request``.

    Raises:
        TypeError: for a value of the wrong type.
        ValueError: for a wrong verification, or ``logprobs`` below 0.
    """

    seed: int | None = None
    verification: Method = "coupled"
    namespace: str = "default"
    budget: int | None = None
    logprobs: int | None = None
    grammar: Grammar | None = None
    drafts_from: str | None = None
    prediction: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_integer("seed", self.seed, optional=True)
        check_integer("budget", self.budget, 0, optional=True)
        check_integer("logprobs", self.logprobs, 0, optional=True)
        check_text("namespace", self.namespace)
        check_text("drafts_from", self.drafts_from, optional=True)
        if self.verification not in ("coupled", "rejection"):
            raise ValueError(f"verification is {self.verification!r}; allowed are 'coupled' and 'rejection'")


@dataclass(frozen=True)
class Place:
    """A row's number, and the number of rows."""

    row: int = 0
    rows: int = 1


@dataclass(frozen=True)
class Prepared:
    """What transformers passes to a ``custom_generate`` function."""

    config: GenerationConfig
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList


def build_requests(
    model: PreTrainedModel,
    prompt: Sequence[int],
    options: RowOptions,
    tokenizer: PreTrainedTokenizerBase | None = None,
    row: int = 0,
    prompts: int = 1,
    **kwargs: Any,
) -> list[Request]:
    """Build one request per returned sequence (``num_return_sequences``) of a prompt.

    Args:
        tokenizer: needed for ``stop_strings``.
        row, prompts: the prompt's number, and the number of prompts.
        kwargs: options of ``model.generate``: ``generation_config``, its fields, ``logits_processor``, ...

    Raises:
        ValueError: for a wrong value, an empty prompt, ids out of range, or a sequence that is too long.
        NotImplementedError: for what Forerun does not support, such as beam search.
    """
    check_prompt(model, prompt)
    _check_helpers(kwargs)
    kwargs = _with_stop_strings(model, tokenizer, kwargs)
    prepared = _prepare(model, prompt, kwargs)
    count = prepared.config.num_return_sequences or 1
    seed = options.seed if options.seed is not None else draw_seed()
    return [
        make_request(
            model,
            prompt,
            prepared if i == 0 else _prepare(model, prompt, kwargs),
            replace(options, seed=seed + i),
            Place(row * count + i, prompts * count),
        )
        for i in range(count)
    ]


def make_request(
    model: PreTrainedModel,
    prompt: Sequence[int],
    prepared: Prepared,
    options: RowOptions,
    place: Place,
    padding: Sequence[int] = (),
) -> Request:
    """Build one row's request from what transformers prepared for the row or its batch."""
    config = prepared.config
    _check_mode(config)
    eos, max_length, stopping = _ends(prepared.criteria, config.max_length, model.device)
    max_new_tokens = max_length - len(prompt) - len(padding)
    if max_length != config.max_length:  # a user's criterion; transformers checks it after the first token
        max_new_tokens = max(1, max_new_tokens)
    check_length(model, len(prompt), max_new_tokens)
    processor = of_row(prepared.processors, model, place.row, place.rows)
    method = options.verification if config.do_sample else "greedy"
    seed = draw_seed() if options.seed is None else options.seed
    constraint = None if options.grammar is None else options.grammar.follow(len(padding) + len(prompt))
    return Request(
        prompt,
        max_new_tokens,
        eos_token_ids=eos,
        sampler=Sampler(method, seed, processor, constraint, config.temperature or 1.0),
        stopping=stopping,
        namespace=options.namespace,
        drafts_from=options.drafts_from,
        budget=options.budget,
        padding=padding,
        prediction=options.prediction,
        top_logprobs=options.logprobs,
    )


def draw_seed() -> int:
    """Draw a seed from torch's global generator, so that ``torch.manual_seed`` fixes it."""
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
    """Turn ``stop_strings`` into a stopping criterion, because transformers passes no tokenizer to custom functions."""
    own_config = kwargs.get("generation_config")
    config = own_config or model.generation_config
    given = kwargs.get("stop_strings", config.stop_strings or model.generation_config.stop_strings)
    strings = given or None  # an empty value switches the model's own off
    if strings is None:
        return {**kwargs, "stop_strings": None} if "stop_strings" in kwargs else kwargs
    if "" in ([strings] if isinstance(strings, str) else strings):
        raise ValueError(f"stop_strings={strings!r} contains an empty string, which would stop everywhere")
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} need a tokenizer, and there is none; pass tokenizer=")
    criteria = StoppingCriteriaList(kwargs.get("stopping_criteria") or [])
    if not any(type(each) is StopStringCriteria for each in criteria):  # the user's own takes precedence
        criteria.append(StopStringCriteria(tokenizer, strings))
    changed = {**kwargs, "stop_strings": None, "stopping_criteria": criteria}
    if own_config is not None:
        changed["generation_config"] = copy.deepcopy(own_config)
        changed["generation_config"].stop_strings = None
    return changed


def _check_helpers(options: Mapping[str, Any]) -> None:
    """Reject objects that transformers uses besides the model, and does not pass to a custom generate."""
    if options.get("assistant_model") is not None:
        raise NotImplementedError(
            "assistant_model is not supported; pass it as draft_model to a drafter that needs one"
        )
    if options.get("streamer") is not None:
        raise NotImplementedError("streamer is not supported here; iterate over the commits")
    if options.get("cache_implementation") == "paged":
        raise NotImplementedError("cache_implementation='paged' is not supported; Forerun batches requests itself")


def token_setting(model: PreTrainedModel, options: Mapping[str, Any], name: str) -> Any:
    """Return a token setting, or several, with transformers' precedence: options, their configuration, the model's."""
    if name in options:
        return options[name]
    own = getattr(options.get("generation_config"), name, None)
    return getattr(model.generation_config, name) if own is None else own


def padding(model: PreTrainedModel, options: Mapping[str, Any]) -> int:
    """Return the padding token, or else an end-of-sequence token, or else 0."""
    pad, eos = (token_setting(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    if pad is None:
        pad = next(iter(eos), 0) if isinstance(eos, list) else eos or 0
    return int(pad)


def inferred_mask(model: PreTrainedModel, ids: torch.Tensor, options: Mapping[str, Any]) -> torch.Tensor | None:
    """Infer the mask of a tensor of ids: padding is masked, unless it is also an end-of-sequence token."""
    pad, eos = (token_setting(model, options, name) for name in ("pad_token_id", "eos_token_id"))
    if pad is None or pad in (eos if isinstance(eos, list) else [eos]) or not (ids == pad).any():
        return None
    mask: torch.Tensor = ids != pad
    return mask


def _check_mode(config: GenerationConfig) -> None:
    for name, (fits, allowed) in RANGES.items():
        value = getattr(config, name, None)
        if value is not None and not fits(value):
            raise ValueError(f"{name} is {value}; it must be {allowed}")
    mode = config.get_generation_mode()
    if mode not in SUPPORTED_MODES:
        raise NotImplementedError(f"{mode.value} is not supported; Forerun does greedy decoding and sampling")
    if config.cache_implementation == "quantized":
        raise NotImplementedError("cache_implementation='quantized' changes outputs; Forerun's caches are exact")
    if config.guidance_scale not in (None, 1, 1.0):
        raise NotImplementedError(f"guidance_scale={config.guidance_scale} is not supported; only 1 is")
    outputs = [name for name in UNSUPPORTED_OPTIONS if getattr(config, name, None)]
    if outputs:
        raise NotImplementedError(f"{', '.join(outputs)} is not supported by Forerun")


def _ends(
    criteria: StoppingCriteriaList, max_length: int, device: torch.device
) -> tuple[frozenset[int], int, Stopping | None]:
    """Return end-of-sequence tokens and the maximum length from transformers' own criteria, so that requests check them
    without a tensor, and all other criteria as one. A user's criteria replace those made from the options."""
    eos = [c.eos_token_id.flatten().tolist() for c in criteria if type(c) is EosTokenCriteria]
    lengths = [int(c.max_length) for c in criteria if type(c) is MaxLengthCriteria]
    rest = StoppingCriteriaList([c for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)])
    stopping: Stopping | None = (lambda ids: bool(rest(ids.to(device), None).all())) if len(rest) else None
    return frozenset(chain.from_iterable(eos)), min(lengths, default=max_length), stopping
