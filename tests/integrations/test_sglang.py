"""Trees for SGLang, against what its sources say, and against the sources where they are."""

import importlib
import inspect
import json
import sys
import tomllib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import recorded_sglang
from recorded_sglang import NODES, TOKENS, Req, Scheduler, following

import forerun
from forerun.integrations.verified_tree import VerifiedTree
from forerun.trie.trie import Draft

Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """A worker over what the sources say."""

    def made(settings: object = None, overlap: bool = False, tp_size: int = 1, pp_size: int = 1) -> Any:
        for name, module in recorded_sglang.modules(tp_size, pp_size).items():
            monkeypatch.setitem(sys.modules, name, module)
        recorded_sglang.forget()
        if settings is not None:
            monkeypatch.setenv("FORERUN_SGLANG", json.dumps(settings))
        args = SimpleNamespace(overlap=overlap, speculative_num_draft_tokens=None)
        plugin = importlib.import_module("forerun.integrations.sglang")
        plugin.register()
        algorithm = recorded_sglang.SpeculativeAlgorithm.registered["FORERUN"]
        algorithm.handle_server_args(args)
        return algorithm.create_worker(args)(
            server_args=args, gpu_id=0, nccl_port=1, target_worker=recorded_sglang.target()
        )

    yield made
    recorded_sglang.forget()


def asked(rid: str, *prompt: int, most: int = 60) -> Req:
    return Req(rid, array("q", prompt), most)


def served(worker: Any, *reqs: Req, grammar: bool = False) -> None:
    scheduler = Scheduler(worker, grammar)
    scheduler.add(*reqs)
    scheduler.finish()


def plain(req: Req) -> list[int]:
    """What the model says without drafts."""
    text = list(req.origin_input_ids_unpadded)
    for _ in req.output_ids:
        text.append(following(text[-1])[0])
    return text[len(req.origin_input_ids_unpadded) :]


def learned(worker: Any) -> list[list[int]]:
    return sorted(text.tolist() for text in worker._drafter.trie.snapshot("")[0])


@pytest.mark.parametrize("overlap", [False, True])
def test_whole_trees_are_verified_and_the_text_is_the_models(make, overlap):
    worker, reqs = make(overlap=overlap), [asked("a", 5, 6, 7), asked("b", 9), asked("c", 5, 6, 8, most=30)]
    served(worker, *reqs)
    again = asked("d", 1, 7)
    served(worker, again)
    for req in [*reqs, again]:
        assert list(req.output_ids) == plain(req)
    assert again.accepted > 0.7 * len(again.output_ids)
    below = [[parent for parent in parents if parent > 0] for req in reqs for _, parents in req.trees]
    assert any(len(set(parents)) < len(parents) for parents in below)  # they branch; padding hangs below the root


@pytest.mark.parametrize("settings", [{}, {"share": False}, {"least_probability": 0.3}])
def test_settings_change_drafts_and_no_text(make, settings):
    worker, reqs = make(settings), [asked("a", 5, 6, 7), asked("b", 5, 6, 7)]
    served(worker, *reqs)
    assert [list(req.output_ids) for req in reqs] == [plain(req) for req in reqs]
    assert worker._drafter.settings.vocabulary == "a/b"


def test_unlikely_nodes_are_left_out(make):
    sizes: list[float] = []
    for settings in ({}, {"least_probability": 0.3}):
        req = asked("a", 5, 6, 7)
        served(make(settings), req)
        sizes.append(sum(parent > 0 for _, parents in req.trees for parent in parents) / len(req.trees))
    assert 0 < sizes[1] < sizes[0]  # padding hangs below the root


@pytest.mark.parametrize(("overlap", "grammar"), [(False, False), (True, False), (True, True)])
def test_outputs_are_learned_once_and_no_prompt_is_shared(make, overlap, grammar):
    """A request that ends at a step does not show its tokens any more, if they come at once."""
    worker, reqs = make(overlap=overlap), [asked("a", 5, 6, 7, most=40), asked("b", 11, most=25)]
    served(worker, *reqs, grammar=grammar)
    worker.close()
    assert [list(req.output_ids) for req in reqs] == [plain(req) for req in reqs]
    for text, output in zip(learned(worker), sorted(list(req.output_ids) for req in reqs), strict=True):
        assert text == output[: len(text)]
        assert len(output) - len(text) <= (0 if overlap and not grammar else NODES)


def test_a_request_that_comes_back_goes_on(make):
    worker, req = make(), asked("a", 5, 6, 7)
    scheduler = Scheduler(worker)
    scheduler.add(req)
    for _ in range(3):
        scheduler.step()
    scheduler.running = []
    served(worker, asked("b", 3, most=20))
    scheduler.add(req)
    scheduler.finish()
    assert list(req.output_ids) == plain(req)


def test_logits_at_rejected_nodes_are_drafted_from(make):
    """Many short answers: what follows most tokens was never generated, and was worked out behind some draft."""
    accepted = []
    for tp_size in (1, 2):
        worker, rng = make(tp_size=tp_size), np.random.default_rng(1)
        reqs = [asked(str(n), *rng.integers(0, TOKENS, 2).tolist(), most=5) for n in range(60)]
        for req in reqs:
            served(worker, req)
        assert [list(req.output_ids) for req in reqs] == [plain(req) for req in reqs]
        accepted.append(sum(req.accepted for req in reqs))
    assert accepted[0] > 1.2 * accepted[1]


def test_what_does_not_fit_is_refused(make, monkeypatch):
    with pytest.raises(ValueError, match="pp_size is 2; allowed: 1"):
        make(pp_size=2)
    with pytest.raises(ValueError, match="no setting 'names'"):
        make({"names": 1})
    monkeypatch.setenv("FORERUN_SGLANG", "namespace=shop")
    with pytest.raises(ValueError, match="FORERUN_SGLANG is 'namespace=shop'; allowed: an object of JSON"):
        make()


def test_a_mask_is_that_of_the_tree():
    draft = Draft(np.array([1, 2, 3, TOKENS + 5]), np.array([-1, 0, 0, 1]), np.full(4, 0.5), np.zeros(4, np.int8))
    tree = VerifiedTree(np.array([4, 7]), draft, 7, TOKENS)
    assert tree.tokens.tolist() == [7, 1, 2, 3, 0, 0, 0]
    assert recorded_sglang.parents_of(tree.mask()) == [-1, 0, 1, 1, 2, 0, 0]
    child, sibling = recorded_sglang.links(tree.mask())
    assert child == [1, 2, 4, -1, -1, -1, -1]
    assert sibling == [-1, 5, 3, -1, -1, 6, -1]
    rows = tree.recycled(np.arange(7 * 8).reshape(7, 8), np.zeros((7, 8), np.float32))
    assert rows.last.tolist() == [7, 1, 2, 3, 0]
    assert rows.before.tolist() == [4, 7, 1, 1, 2]
    assert rows.tokens[:, 0].tolist() == [0, 8, 16, 24, 32]


def test_sglang_finds_the_plug_in_by_its_entry_point():
    project = tomllib.loads((Path(forerun.__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["sglang.srt.plugins"] == {"forerun": "forerun.integrations.sglang:register"}


@pytest.mark.parametrize(("module", "name", "methods"), [
    ("speculative.spec_info", "SpeculativeAlgorithm", ["register"]),
    ("speculative.spec_registry", "CustomSpecAlgo", ["__init__", "create_worker", "handle_server_args"]),
    ("speculative.ngram_worker", "NGRAMWorker",
        ["__init__", "_prepare_draft_tokens", "_update_ngram_corpus", "forward_batch_generation"]),
])  # fmt: skip
def test_the_recorded_signatures_are_sglangs(module, name, methods):
    theirs = getattr(pytest.importorskip(f"sglang.srt.{module}", reason="SGLang is not installed"), name)
    for method in methods:
        ours, asked = (inspect.signature(getattr(each, method)) for each in (getattr(recorded_sglang, name), theirs))
        assert list(ours.parameters) == list(asked.parameters)
        assert [each.kind for each in ours.parameters.values()] == [each.kind for each in asked.parameters.values()]


def test_sglang_takes_the_algorithm():
    info = pytest.importorskip("sglang.srt.speculative.spec_info", reason="SGLang is not installed")
    recorded_sglang.forget()
    importlib.import_module("forerun.integrations.sglang").register()
    algorithm, ngram = info.SpeculativeAlgorithm.from_string("forerun"), info.SpeculativeAlgorithm.NGRAM
    asked = [name for name in vars(type(ngram)) if name.startswith(("is_", "supports_", "has_", "need_", "carries_"))]
    assert {name: getattr(algorithm, name)() for name in asked} == {name: getattr(ngram, name)() for name in asked}
    assert not set(vars(type(ngram))) - set(dir(algorithm)) - {
        "from_string", "register", "get_platform_worker_cls", *info.SpeculativeAlgorithm.__members__
    } - {name for name in vars(type(ngram)) if name.startswith("_")}  # fmt: skip
