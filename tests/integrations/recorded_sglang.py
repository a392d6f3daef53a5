"""How SGLang calls a speculative worker that answers as ``NGRAM``: recorded on 2026-11-25 from the sources of 0.5.23.

``speculative/spec_registry.py`` and ``spec_info.py`` (``register``), ``speculative/ngram_worker.py`` (its methods),
``kernels/ops/speculative/reconstruct_tree.py`` (what the kernel makes of a mask) and ``managers/overlap_utils.py``:
with overlapped scheduling, a request gets a step's tokens one step later. The model is a table: token, next tokens.
"""

import sys
from array import array
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

NODES, TOKENS = 12, 200
GARBAGE = 190
"""Stands behind the accepted tokens of a row."""
LIKELY = 20.0
"""Logit of the right token; those of seven runners-up follow it."""

Array = np.ndarray[Any, np.dtype[Any]]


def following(token: int) -> list[int]:
    """The model's best tokens after one, best first."""
    return [(token * 7 + 3 + 31 * rank) % TOKENS for rank in range(8)]


class CustomSpecAlgo:
    """Of a plug-in; without what a plug-in is asked and it cannot answer."""

    def __init__(
        self, name: str, factory: Any, *, supports_overlap: bool = False, validate_server_args: Any = None
    ) -> None:
        self.name, self.factory, self.supports_overlap = name, factory, supports_overlap

    def is_ngram(self) -> bool:
        return False

    def has_draft_kv(self) -> bool:
        return True

    def handle_server_args(self, server_args: Any) -> None:
        return None

    def create_worker(self, server_args: Any) -> Any:
        return self.factory(server_args)


class SpeculativeAlgorithm:
    """The registry; its names are upper case."""

    NGRAM = SimpleNamespace(
        **dict.fromkeys(("has_draft_kv", "need_topk", "carries_draft_hidden_states"), lambda: False),
        handle_server_args=lambda server_args: setattr(server_args, "speculative_num_draft_tokens", NODES),
    )
    registered: dict[str, CustomSpecAlgo] = {}  # noqa: RUF012

    @classmethod
    def register(
        cls, name: str, *, supports_overlap: bool = False, validate_server_args: Any = None,
        spec_class: type[CustomSpecAlgo] = CustomSpecAlgo,
    ) -> Any:  # fmt: skip
        def decorator(factory: Any) -> Any:
            how = {"supports_overlap": supports_overlap, "validate_server_args": validate_server_args}
            cls.registered[name.upper()] = spec_class(name=name.upper(), factory=factory, **how)
            return factory

        return decorator


@dataclass
class Req:
    """A request, and the tokens that its answer has at the most."""

    rid: str
    origin_input_ids_unpadded: "array[int]"
    most: int
    output_ids: "array[int]" = field(default_factory=lambda: array("q"))
    accepted: int = 0
    trees: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Tokens and parents of each tree, padding included."""

    @property
    def text(self) -> list[int]:
        return [*self.origin_input_ids_unpadded, *self.output_ids]


def schedule_batch(reqs: list[Req], decode: bool, spec_info: Any = None, grammar: bool = False) -> SimpleNamespace:
    """What a worker reads of a batch."""
    mode, sync = SimpleNamespace(is_decode=lambda: decode), lambda: grammar
    return SimpleNamespace(reqs=reqs, forward_mode=mode, spec_info=spec_info, grammar_needs_sync=sync)


class NGRAMWorker:
    """Verifies greedily; the links between nodes come from the mask alone."""

    def __init__(self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any) -> None:
        self.enable_overlap, self.draft_token_num = server_args.overlap, server_args.speculative_num_draft_tokens
        self.model_runner = target_worker.model_runner

    def _prepare_draft_tokens(self, batch: SimpleNamespace) -> tuple[Array, Array]:
        raise AssertionError("the corpus is empty")

    def _update_ngram_corpus(self, batch: SimpleNamespace) -> None:
        raise AssertionError("the corpus is to stay empty")

    def forward_batch_generation(
        self, batch: SimpleNamespace, on_publish: Any = None, pp_proxy_tensors: Any = None
    ) -> SimpleNamespace:
        rows, size = len(batch.reqs), self.draft_token_num
        accepted = np.full((rows, size), GARBAGE)
        counts = np.ones(rows, np.int32)
        logits = torch.zeros(rows, TOKENS)
        if batch.forward_mode.is_decode():
            tokens, mask = self._prepare_draft_tokens(batch)
            assert tokens.shape == (rows * size,)
            assert mask.shape == (rows * size * size,)
            logits = torch.zeros(rows * size, TOKENS)
            for node, token in enumerate(tokens):
                for rank, best in enumerate(following(int(token))):
                    logits[node, best] = LIKELY - rank
            for row, req in enumerate(batch.reqs):
                tree = tokens[row * size : (row + 1) * size]
                came = walk(tree, links(mask.reshape(rows, size, size)[row]), logits[row * size : (row + 1) * size])
                req.trees.append((tree.tolist(), parents_of(mask.reshape(rows, size, size)[row])))
                req.accepted += len(came) - 1
                counts[row] = len(came)
                accepted[row, : len(came)] = came
            self._update_ngram_corpus(batch)
        else:
            accepted[:, 0] = [following(req.text[-1])[0] for req in batch.reqs]
        draft = SimpleNamespace(
            accept_tokens=torch.from_numpy(accepted.astype(np.int32)).flatten(), accept_lens=torch.from_numpy(counts)
        )
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits), next_draft_input=draft, accept_lens=counts
        )


def parents_of(mask: Array) -> list[int]:
    """The nearest ancestor of each node, -1 for the root."""
    return [max((j for j in range(i) if mask[i, j]), default=-1) for i in range(len(mask))]


def links(mask: Array) -> tuple[list[int], list[int]]:
    """The first child and the next sibling of each node, -1 where there is none."""
    size, parents = len(mask), parents_of(mask)
    child = [next((k for k in range(i + 1, size) if mask[k, i]), -1) for i in range(size)]
    sibling = [
        next((k for k in range(i + 1, size) if parents[i] >= 0 and parents[k] == parents[i]), -1) for i in range(size)
    ]
    return child, sibling


def walk(tokens: Array, tree: tuple[list[int], list[int]], logits: torch.Tensor) -> list[int]:
    """The accepted tokens and one more."""
    child, sibling = tree
    node, came = 0, [int(logits[0].argmax())]
    while True:
        below = child[node]
        while below >= 0 and tokens[below] != came[-1]:
            below = sibling[below]
        if below < 0:
            return came
        node = below
        came.append(int(logits[node].argmax()))


class Scheduler:
    """Requests that come and go; with overlap they get a step's tokens after the next step has been drafted."""

    def __init__(self, worker: Any, grammar: bool = False) -> None:
        self.worker, self._grammar = worker, grammar
        self.running: list[Req] = []
        self._relayed: dict[str, tuple[Array, int]] = {}

    def add(self, *reqs: Req) -> None:
        """Read their prompts."""
        self._take(list(reqs), self.worker.forward_batch_generation(schedule_batch(list(reqs), decode=False)))
        self.running.extend(reqs)

    def step(self) -> None:
        """Verify; whoever is done leaves."""
        reqs = list(self.running)
        spec_info = SimpleNamespace(
            accept_tokens=torch.from_numpy(np.stack([self._relayed[req.rid][0] for req in reqs])).flatten(),
            accept_lens=torch.tensor([self._relayed[req.rid][1] for req in reqs], dtype=torch.int32),
        )
        before = dict(self._relayed)
        result = self.worker.forward_batch_generation(schedule_batch(reqs, True, spec_info, self._grammar))
        if self._overlaps:
            self._give(reqs, before)
        self._take(reqs, result)
        self.running = [req for req in reqs if len(req.output_ids) < req.most]

    def finish(self) -> None:
        """Steps until all are done."""
        while self.running:
            self.step()

    @property
    def _overlaps(self) -> bool:
        return bool(self.worker.enable_overlap) and not self._grammar

    def _take(self, reqs: list[Req], result: SimpleNamespace) -> None:
        tokens = result.next_draft_input.accept_tokens.reshape(len(reqs), -1).numpy()
        for row, req in enumerate(reqs):
            self._relayed[req.rid] = tokens[row], int(result.accept_lens[row])
        if not self._overlaps:
            self._give(reqs, self._relayed)

    def _give(self, reqs: list[Req], relayed: dict[str, tuple[Array, int]]) -> None:
        for req in reqs:
            tokens, count = relayed[req.rid]
            req.output_ids.extend(tokens[:count].tolist())


def modules(tp_size: int = 1, pp_size: int = 1) -> dict[str, ModuleType]:
    """What an adapter imports, by name."""
    content: dict[str, dict[str, Any]] = {
        "sglang": {}, "sglang.srt": {}, "sglang.srt.speculative": {},
        "sglang.srt.speculative.spec_info": {"SpeculativeAlgorithm": SpeculativeAlgorithm},
        "sglang.srt.speculative.spec_registry": {"CustomSpecAlgo": CustomSpecAlgo},
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": NGRAMWorker},
        "sglang.srt.runtime_context": {
            "get_parallel": lambda: SimpleNamespace(tp_size=tp_size, tp_rank=0, pp_size=pp_size)},
    }  # fmt: skip
    found = {}
    for name, values in content.items():
        found[name] = ModuleType(name)
        vars(found[name]).update(values)
    return found


def forget() -> None:
    """Forget the adapter, which imports them."""
    for name in ("forerun.integrations.sglang", "forerun.integrations.sglang_worker"):
        sys.modules.pop(name, None)


def target() -> SimpleNamespace:
    """A target worker."""
    return SimpleNamespace(
        model_runner=SimpleNamespace(model_config=SimpleNamespace(model_path="a/b", vocab_size=TOKENS))
    )
