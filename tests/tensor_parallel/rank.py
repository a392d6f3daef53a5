"""Two processes with a model between them, for ``test_parallel``: what each of them gets is written to a file.

The imports take seconds, so one process does them, and forks the ranks of each case. What a rank returns is JSON.

    python rank.py FOLDER CASE...
"""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from support.fixed_runtime import fixed_runtime
from support.mocks import RowByRow
from support.processes import fork
from support.tiny import PROMPTS, small_caches, tiny
from transformers import AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.distributed import DistributedConfig

import forerun
from forerun import DraftTree, Engine
from forerun.core.long_context import LongContextConfig
from forerun.core.request import Request
from forerun.kv.full_cache import FullCache
from forerun.models.forward.pass_timing import measure
from forerun.models.forward.runtime import default_runtime, runtime_as_default
from forerun.models.forward.scorer import Scorer
from forerun.policy.cost_curve import CostCurve

SMALL = "qwen2"
"""Drafts for the other models; its vocabulary is theirs."""
LIMIT = 100.0
"""Seconds of a case, with what it compiles."""
SHARED = [int(token) for token in np.random.default_rng(5).integers(6, 48, 70)]
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}


def settings() -> LongContextConfig:
    return small_caches(tiny(SMALL), cache_budget=16, chunk=4, gamma2=3, window=8, sinks=2)


def recipe(model: PreTrainedModel, name: str, **options: Any) -> dict[str, Any]:
    engine = Engine(model, name, settings=settings())
    return told(engine.generate([*PROMPTS, SHARED[:40]], max_new_tokens=9, eos_token_id=47, **options)) | {
        "exact": engine.exactness.level
    }


def told(result: forerun.GenerationResult) -> dict[str, Any]:
    return {
        "generated": result.generated, "reasons": result.finish_reasons, "seeds": result.seeds,
        "drafted": [stats.drafted for stats in result.stats], "accepted": [stats.accepted for stats in result.stats],
    }  # fmt: skip


def leads() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


class Wary(RowByRow):
    """Drafts on rank 0 only."""

    def draft(self, request: Request, budget: int) -> DraftTree:
        assert leads(), "another rank drafts"
        return DraftTree.chain(request.tokens[-3:])


def wary(*inputs: Any, **more: Any) -> torch.Tensor:
    assert leads(), "another rank decides"
    return torch.tensor([inputs[0].shape[1] > 20])


def jittery(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    assert leads(), "another rank samples"
    return scores * 0.9


jittery.forerun_stateless = True


def decided(model: PreTrainedModel) -> dict[str, Any]:
    """Criteria, processors and drafters of one's own; a seed that is drawn; probabilities."""
    torch.manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    processors, criteria = LogitsProcessorList([jittery]), StoppingCriteriaList([wary])
    result = Engine(model, Wary()).generate(
        list(PROMPTS), max_new_tokens=9, logprobs=2, stopping_criteria=criteria, logits_processor=processors, **SAMPLED
    )
    return told(result) | {"logprobs": [[each.logprob for each in kept] for kept in result.logprobs]}


def beginnings(model: PreTrainedModel) -> dict[str, Any]:
    """Prompts that begin alike, in a batch and one after the other, over a sparse cache; a stream that is left."""
    engine = Engine(model, "low-rank", settings=settings(), prefix_cache=1 << 22, prefill_block=16)
    first = engine.generate([SHARED, [*SHARED[:50], 7, 8]], max_new_tokens=6)
    for commit in engine.stream(SHARED, max_new_tokens=9):
        if len(commit.request.generated) > 2:
            break
    second = engine.generate([[*SHARED[:60], 9]], max_new_tokens=6)
    return {"generated": first.generated + second.generated, "hits": engine.prefixes.hits}


def sharded_logits(model: PreTrainedModel) -> dict[str, Any]:
    """Each rank's last layer gives logits of its own tokens only."""
    if dist.is_initialized():
        model = load("llama", tp_plan={"lm_head": "colwise"})
    return recipe(model, "retrieval")


def measured(model: PreTrainedModel) -> dict[str, Any]:
    """With passes that rank 0 times, for drafters that ask for that at different places."""
    calls = 0

    def counted(scorer: Scorer) -> CostCurve:
        nonlocal calls
        calls += 1
        return measure(scorer)

    with runtime_as_default(replace(default_runtime(), costs=counted)):
        generated = [recipe(model, name)["generated"] for name in ("auto", "triforce-trie")]
    return {"generated": generated, "measured": calls}


def unsayable(model: PreTrainedModel) -> dict[str, Any]:
    """Rank 0 finds what no message can hold; then all go on."""
    engine = Engine(model, "none")
    try:
        engine.target.led(lambda: {object()})
    except (TypeError, forerun.ParallelError) as error:
        return {"error": type(error).__name__, "generated": engine.generate(PROMPTS, max_new_tokens=3).generated}
    return {"error": None}


def refused(model: PreTrainedModel) -> dict[str, Any]:
    """Settings that need one process, and requests that differ between ranks."""
    errors = []
    for options in ({"kv_store": FOLDER / "store"}, {"kv_memory": 1 << 20}, {"drafter": "streaming"}):
        small = LongContextConfig(draft_model=model)
        try:
            Engine(model, **({"settings": small} | options))
        except ValueError as error:
            errors.append(str(error))
    try:
        Engine(model, "none").generate(PROMPTS[dist.get_rank()], max_new_tokens=3)
    except forerun.ParallelError as error:
        errors.append(str(error))
    return {"errors": errors}


def heads(model: PreTrainedModel) -> dict[str, Any]:
    """KV heads that this rank's caches hold."""
    seen, append = set(), FullCache.append

    FullCache.append = lambda self, layer, k, v: (seen.add(k.shape[1]), append(self, layer, k, v))[1]
    engine = Engine(model, "none")
    engine.generate(PROMPTS, max_new_tokens=2)
    return {"heads": sorted(seen), "vocabulary": engine.target.vocabulary}


def lost(model: PreTrainedModel, rank: int, how: Callable[[], None]) -> dict[str, Any]:
    """Something befalls a rank in the middle of a generation; when the others end, and how."""
    engine, count, append = Engine(model, "retrieval", settings=settings()), 0, FullCache.append
    began = time.monotonic()

    def later(self: FullCache, layer: int, k: torch.Tensor, v: torch.Tensor) -> Any:
        nonlocal count, began
        count += 1
        if count == 30:
            began = time.monotonic()
            if dist.get_rank() == rank:
                how()
        return append(self, layer, k, v)

    FullCache.append = later
    try:
        engine.generate(PROMPTS, max_new_tokens=80, eos_token_id=47)
    except (KeyboardInterrupt, forerun.ParallelError) as error:
        return {"error": type(error).__name__, "says": str(error), "seconds": time.monotonic() - began}
    return {"error": None}


def interrupted(model: PreTrainedModel) -> dict[str, Any]:
    """Ctrl-C at rank 0, between two passes."""

    class Interrupting(Wary):
        def draft(self, request: Request, budget: int) -> DraftTree:
            if len(request.generated) > 3:
                raise KeyboardInterrupt
            return super().draft(request, budget)

    try:
        Engine(model, Interrupting(), prune_drafts=False).generate(PROMPTS, max_new_tokens=80)
    except forerun.GenerationInterrupted as error:
        return {"generated": error.result.generated}
    return {}


def fail() -> None:
    raise ZeroDivisionError("there is no memory")


CASES: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "decided": decided, "beginnings": beginnings, "sharded logits": sharded_logits, "measured": measured,
    "unsayable": unsayable, "refused": refused, "heads": heads, "interrupted": interrupted,
    "rank 0 dies": lambda model: lost(model, 0, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "rank 1 dies": lambda model: lost(model, 1, lambda: os.kill(os.getpid(), signal.SIGKILL)),
    "rank 1 hangs": lambda model: lost(model, 1, lambda: time.sleep(30)),
    "rank 1 fails": lambda model: lost(model, 1, fail), "rank 0 fails": lambda model: lost(model, 0, fail),
}  # fmt: skip
FOLDER = Path()


def run(case: str, model: PreTrainedModel) -> dict[str, Any]:
    if case in CASES:
        return CASES[case](model)
    name, _, method = case.partition(":")
    options = {} if not method else SAMPLED | {"seed": 3, "verification": method}
    return recipe(model, name, **options)


def load(name: str, **more: Any) -> PreTrainedModel:
    """This rank's part of a model."""
    config = DistributedConfig(tp_size=2, **more)
    return AutoModelForCausalLM.from_pretrained(FOLDER / name, dtype=torch.float64, distributed_config=config).eval()


def main(name: str, cases: list[str], rank: int, port: int, out: Path) -> bool:
    """One rank: run all cases with one model."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    model = load(name)
    with fixed_runtime(), out.open("a") as file:
        for case in cases:
            file.write(json.dumps([case, run(case, model)]) + "\n")
            file.flush()
    return True


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def wait(processes: list[int]) -> None:
    """Until they have ended; those that take too long are ended."""
    end = time.monotonic() + LIMIT
    while processes and time.monotonic() < end:
        processes = [each for each in processes if not os.waitpid(each, os.WNOHANG)[0]]
        time.sleep(0.05)
    for process in processes:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    for number, group in enumerate(sys.argv[2:]):
        name, *cases = group.split(",")
        port = free_port()
        files = [FOLDER / f"{number}-{rank}.jsonl" for rank in range(2)]
        wait([fork(partial(main, name, cases, rank, port, files[rank])) for rank in range(2)])
