"""Forerun's trie as a speculative algorithm of SGLang: ``--speculative-algorithm FORERUN``.

Written against SGLang 0.5.23, which calls ``register`` in each of its processes through the entry point group
``sglang.srt.plugins``. The algorithm is SGLang's ``NGRAM`` with other drafts, and answers as ``NGRAM`` wherever SGLang
checks which one runs.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo

ALGORITHM_NAME = "FORERUN"


class ForerunAlgorithm(CustomSpecAlgo):  # type: ignore[misc]  # the engine may be missing where types are checked
    """``NGRAM`` with other drafts: it answers as ``NGRAM``, also where ``CustomSpecAlgo`` of 0.5.23 cannot."""

    def is_ngram(self) -> bool:
        return True

    def has_draft_kv(self) -> bool:
        return bool(SpeculativeAlgorithm.NGRAM.has_draft_kv())

    def need_topk(self) -> bool:
        return bool(SpeculativeAlgorithm.NGRAM.need_topk())

    def carries_draft_hidden_states(self) -> bool:
        return bool(SpeculativeAlgorithm.NGRAM.carries_draft_hidden_states())

    def create_future_map(self, *args: Any, **kwargs: Any) -> Any:
        return SpeculativeAlgorithm.NGRAM.create_future_map(*args, **kwargs)

    def handle_server_args(self, server_args: Any) -> None:
        SpeculativeAlgorithm.NGRAM.handle_server_args(server_args)


def register() -> None:
    """Register the algorithm with SGLang. The worker, which imports most of SGLang, is imported where it runs."""
    SpeculativeAlgorithm.register(ALGORITHM_NAME, supports_overlap=True, spec_class=ForerunAlgorithm)(_worker)


def _worker(server_args: Any) -> type:
    from forerun.integrations.sglang_worker import ForerunWorker

    return ForerunWorker
