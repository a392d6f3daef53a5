"""Forerun's trie as a proposer of vLLM, whose ``speculative_config`` names it as its model.

Written against vLLM 0.33. ``v1/spec_decode/custom_class_proposer.py`` creates it. Of vLLM's two model runners,
``v1/worker/gpu_model_runner.py`` calls it after each step, when the rows already hold the new tokens; vLLM chooses that
one if an external proposer is named. The other (``v1/worker/gpu``) keeps drafts on the device and accepts none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt

from forerun.integrations.branch_drafter import BranchDrafter
from forerun.integrations.draft_settings import DraftSettings, checked_length
from forerun.integrations.row_texts import RowText

CONFIG_SECTION = "forerun"
"""Key of the settings in ``additional_config``; vLLM's ``speculative_config`` refuses unknown names."""

Rows = npt.NDArray[np.integer[Any]]


class ForerunProposer:
    """A proposer that drafts the best branch for each row of a batch, and indexes all rows.

    Rows are recognised by their tokens (see ``FollowedTexts``). Prompts stay private to their request. All requests of
    the engine share their outputs in one namespace, unless ``share`` is false. In ``vllm_config``,
    ``speculative_config.num_speculative_tokens`` is the maximum draft length; ``additional_config["forerun"]`` may hold
    ``DraftSettings``, whose vocabulary is by default the tokenizer's name. Raises ValueError for prompts that are not
    tokens and for vLLM's second model runner, and as ``BranchDrafter``.
    """

    def __init__(self, vllm_config: Any) -> None:
        if vllm_config.use_v2_model_runner:
            raise ValueError(
                "VLLM_USE_V2_MODEL_RUNNER is true; allowed: 0 or unset, as vLLM's second model runner accepts no "
                "external proposer"
            )
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        if model.enable_prompt_embeds:
            raise ValueError("enable_prompt_embeds is true; allowed: false, as rows are known by their prompts' tokens")
        length = vllm_config.speculative_config.num_speculative_tokens
        self._draft_tokens = checked_length("num_speculative_tokens", length)
        self._room, self._vocabulary = int(model.max_model_len), int(model.get_vocab_size())
        extra = vllm_config.additional_config
        values = extra.get(CONFIG_SECTION, {}) if isinstance(extra, Mapping) else {}
        settings = DraftSettings.from_values(values, vocabulary=str(model.tokenizer))
        first = parallel.rank % parallel.tensor_parallel_size == 0 and parallel.data_parallel_rank == 0
        self._drafter = BranchDrafter(settings, saves=first)

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Rows,
        token_ids_cpu: Rows,
        slot_mappings: object = None,
    ) -> list[list[int]]:
        """Draft the next tokens of each row.

        Args:
            sampled_token_ids: by row, the step's new tokens; empty during prefill.
            num_tokens_no_spec: tokens of each row, including the new ones, int ``[at least rows]``.
            token_ids_cpu: the rows, int ``[at least rows, at least max_model_len]``; not read after a row's tokens.

        Returns up to ``num_speculative_tokens`` ids by row; the row, its draft and one more token fit
        ``max_model_len``. Raises ValueError, and indexes nothing, if a row does not end with its new tokens, or a token
        id is invalid.
        """
        rows = []
        for row, sampled in enumerate(sampled_token_ids):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            if list(sampled) != text[len(text) - len(sampled) :].tolist():
                raise ValueError(
                    f"row {row} does not end with the sampled tokens {list(sampled)}; this is not vLLM 0.33"
                )
            rows.append(RowText(text, len(sampled)))
        lengths = [min(self._draft_tokens, self._room - len(row.text) - 1) for row in rows]
        drafts = self._drafter.step(rows, lengths)
        # a trie file of another model may hold tokens that this model lacks
        return [list(takewhile(lambda token: token < self._vocabulary, draft)) for draft in drafts]

    def close(self) -> None:
        self._drafter.close()
