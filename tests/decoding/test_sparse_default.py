"""Which sparse cache the target drafts over, where none is named."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forerun.core.long_context import LongContextConfig
from forerun.decoding.recipes import sparse_cache
from forerun.kv.full_cache import FullCache
from forerun.kv.low_rank import LowRankCache
from forerun.kv.retrieval import RetrievalCache


@pytest.mark.parametrize(
    ("device", "named", "kind"),
    [("cuda", None, RetrievalCache), ("cpu", None, LowRankCache), ("cuda", "low-rank", LowRankCache)],
)
def test_retrieval_is_the_default_on_cuda(device, named, kind):
    scorer: Any = SimpleNamespace(device=torch.device(device))
    assert type(sparse_cache(LongContextConfig(sparse=named))(scorer, FullCache(8))) is kind
