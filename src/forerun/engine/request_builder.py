"""Build a model's requests from prompts and options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from forerun.core.request import Request
from forerun.engine.result import ends
from forerun.models.text.prompts import Prompts, encode, encode_prediction
from forerun.models.text.requests import (
    GenerationOptions,
    RowOptions,
    build_requests,
    check_options,
    inferred_mask,
    own_options,
)

if TYPE_CHECKING:
    from forerun.models.text.grammar import Grammars


class RequestBuilder:
    """Builds requests; the grammars of the last tokenizer are kept."""

    def __init__(self, model: PreTrainedModel, vocabulary: int) -> None:
        self._model, self._vocabulary = model, vocabulary
        self._grammars: Grammars | None = None

    def grammars(self, tokenizer: PreTrainedTokenizerBase | None) -> Grammars:
        """Return what compiles ``response_format`` for a tokenizer."""
        grammars = self._grammars
        if grammars is None or grammars.tokenizer is not tokenizer:
            from forerun.models.text.grammar import Grammars  # most requests have no grammar

            end = ends(self._model.generation_config)
            grammars = self._grammars = Grammars(tokenizer, self._vocabulary, end)
        return grammars

    def build(
        self,
        prompts: Prompts,
        tokenizer: PreTrainedTokenizerBase | None,
        budget: int | None,
        options: GenerationOptions,
    ) -> list[Request]:
        """Return the checked requests of one prompt or several; see ``Engine.generate``."""
        check_options(options, self._model)
        response_format, mask = options.pop("response_format", None), options.pop("attention_mask", None)
        prediction = encode_prediction(options.pop("prediction", None) or (), tokenizer)
        own, others = own_options(options)
        row_options = RowOptions(**own, budget=budget, prediction=prediction)
        if response_format is not None:
            grammar = self.grammars(tokenizer).of(response_format, row_options.namespace)
            row_options = replace(row_options, grammar=grammar)
        given = prompts if isinstance(prompts, Mapping) else {"input_ids": prompts}
        ids = given.get("input_ids")
        if mask is None and given.get("attention_mask") is None and isinstance(ids, torch.Tensor):
            mask = inferred_mask(self._model, ids, options)
        rows = encode(prompts, tokenizer, mask)
        built = [
            build_requests(self._model, prompt, row_options, tokenizer, row, len(rows), **others)
            for row, prompt in enumerate(rows)
        ]
        return [request for group in built for request in group]
