"""The options of a generation: Forerun's own and those of ``model.generate``, by name and type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, TypedDict

import torch
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation import LogitsProcessor, LogitsProcessorList

from forerun.core.sampling import Method

if TYPE_CHECKING:  # grammars are imported where one is asked for
    from forerun.models.text.grammar import ResponseFormat

OWN_OPTIONS = ("seed", "verification", "namespace", "drafts_from", "logprobs")
"""Options that transformers does not know; see ``RowOptions``."""
OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "max_length_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "stop": "stop_strings",
    "frequency_penalty": "repetition_penalty",
    "presence_penalty": "repetition_penalty",
}
"""Names of options elsewhere, and what they are here."""


class GenerationOptions(TypedDict, total=False):
    """Options of ``Engine.generate``, ``Engine.stream`` and ``forerun.generate``.

    What is not given is taken from ``model.generation_config``, as in transformers. The first group is Forerun's own:
    see ``RowOptions`` for the first five, and ``Grammars`` for ``response_format``.
    """

    seed: int | None
    verification: Method
    namespace: str
    drafts_from: str | None
    logprobs: int | None
    response_format: ResponseFormat | None

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


def check_options(names: Iterable[str], model: PreTrainedModel) -> None:
    """Refuse names that are neither options nor inputs of the model.

    Raises:
        ValueError: for the first of them, with the name that was probably meant.
    """
    known = {
        *GenerationOptions.__annotations__,
        *vars(GenerationConfig()),
        *inspect.signature(model.generate).parameters,
        *inspect.signature(model.forward).parameters,
    }
    for name in names:
        if name not in known:
            near = [OTHER_NAMES[name]] if name in OTHER_NAMES else get_close_matches(name, sorted(known), 1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name} is no option of generate{meant}")


def own_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Forerun's own options for ``RowOptions``, and those for ``model.generate``."""
    own = {name: value for name, value in options.items() if name in OWN_OPTIONS}
    return own, {name: value for name, value in options.items() if name not in OWN_OPTIONS}
