"""Forerun's index as a proposer of vLLM, whose ``speculative_config`` names it as its model.

Written to the sources of vLLM 0.33: ``v1/spec_decode/custom_class_proposer.py`` makes it, and the first of vLLM's two
model runners, ``v1/worker/gpu_model_runner.py``, calls it after each step, when the new tokens are in the rows already.
The second runner (``v1/worker/gpu``) takes no proposer from outside: ``init_speculator`` chooses among its own, whose
drafts are tensors on the device. vLLM itself chooses the first runner where a proposer like this one is named.
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
    """Drafts the best branch for each row of a batch, and learns from all rows.

    A row is recognised by its text (see ``FollowedTexts``). Prompts stay private to their request; outputs are shared
    in one namespace by all requests of this engine, unless ``share`` is false.

    Args:
        vllm_config: vLLM's ``VllmConfig``. ``speculative_config.num_speculative_tokens`` is the most tokens of a draft;
            ``additional_config["forerun"]`` may hold ``DraftSettings``. The name of the vocabulary is by default that
            of the tokenizer.

    Raises:
        ValueError: for wrong settings, a trie file that does not fit, prompts that are not tokens, or vLLM's
            second model runner.
        OSError: if the trie file cannot be read.
    """

    def __init__(self, vllm_config: Any) -> None:
        if vllm_config.use_v2_model_runner:
            raise ValueError(
                "VLLM_USE_V2_MODEL_RUNNER is true; allowed: 0 or unset, as vLLM's second model runner takes no proposer"
                " from outside"
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
            sampled_token_ids: by row, the tokens that came at this step; none while its prompt is still being read.
            num_tokens_no_spec: tokens of each row, those that came included, int ``[at least rows]``.
            token_ids_cpu: the rows, int ``[at least rows, at least max_model_len]``; what lies beyond a row's tokens is
                not read.
            slot_mappings: not read.

        Returns:
            By row, up to ``num_speculative_tokens`` token ids, none beyond ``max_model_len``, which leaves room for the
            token after them.

        Raises:
            ValueError: if the new tokens are not at the end of their row, or a token is none; nothing is learned then.
        """
        rows = []
        for row, sampled in enumerate(sampled_token_ids):
            text = token_ids_cpu[row, : num_tokens_no_spec[row]]
            if list(sampled) != text[len(text) - len(sampled) :].tolist():
                raise ValueError(f"row {row} ends with other tokens than came, {list(sampled)}; this is not vLLM 0.33")
            rows.append(RowText(text, len(sampled)))
        lengths = [min(self._draft_tokens, self._room - len(row.text) - 1) for row in rows]
        drafts = self._drafter.step(rows, lengths)
        # up to the first token that the model does not have, such as one of a trie file of another model
        return [list(takewhile(lambda token: token < self._vocabulary, draft)) for draft in drafts]

    def close(self) -> None:
        """Save what is new. vLLM does not call it; it is done at the interpreter's end too."""
        self._drafter.close()
