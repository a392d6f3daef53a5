"""A model that is changed between two requests: keys and values that it computed before are never used again."""

import copy
import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import batches
from support.batches import CHUNK, LONG, finish, finish_all, prompt
from support.saved_models import chat_model, chat_tokenizer
from support.tiny import FAMILIES, build, tiny
from torch import nn

from forerun.engine import kv_store
from forerun.engine.conversation import Conversation
from forerun.engine.engine import Engine
from forerun.engine.kv_store import KV_FILE_SUFFIX

BEGINNING, NEW = 90, 8
HELD = 88
"""Tokens of the beginning in whole chunks."""


@pytest.fixture(autouse=True)
def short_texts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "MIN_STORED_TOKENS", CHUNK)


def engine(model: Any, folder: Path | None = None, **options: Any) -> Engine:
    how = {"kv_store": folder} if folder else {"prefix_cache": 1 << 24}
    return Engine(model, "none", settings=LONG, prefill_block=CHUNK, **(how | options))


def ask(one: Engine) -> tuple[list[int], int]:
    return batches.ask(one, [*prompt(BEGINNING), *prompt(5, 100)], new=NEW)


def weight(model: Any) -> torch.Tensor:
    """A weight that keys and values depend on."""
    return model.model.layers[0].self_attn.k_proj.weight


def query(model: Any) -> torch.Tensor:
    return model.model.layers[0].self_attn.q_proj.weight


def step(model: Any) -> None:
    own = weight(model).requires_grad_(True)
    own.grad = torch.ones_like(own)
    torch.optim.SGD([own], lr=1.0).step()
    own.grad = None
    own.requires_grad_(False)


def each_layer(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: [change(layer) for layer in model.model.layers]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "load_state_dict": lambda model: model.load_state_dict({n: 1.2 * w for n, w in model.state_dict().items()}),
    "a step of an optimizer": step, "no_grad": torch.no_grad()(lambda model: weight(model).mul_(1.5)),
    "inference_mode": torch.inference_mode()(lambda model: weight(model).mul_(1.5)),
    "data = new": lambda model: setattr(weight(model), "data", 1.5 * weight(model).data),
    "a hook": lambda model: model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: 2 * out),
    "a forward": lambda model: setattr(model.model.layers[0].mlp, "forward", lambda x: 0.5 * x),
    "data.mul_": lambda model: weight(model).data.mul_(1.5), "data.neg_": lambda model: weight(model).data.neg_(),
    "data[:] =": lambda model: weight(model).data.__setitem__(slice(None), 1.5 * weight(model).data),
    "a NumPy view": lambda model: weight(model).detach().numpy().__imul__(1.5),
    "_foreach_mul_": lambda model: torch._foreach_mul_([p.data for p in model.parameters()], 1.5),
    "data.copy_": lambda model: [p.data.copy_(0.7 * p.data + 0.1 * p.data.flip(0)) for p in model.parameters()],
    "data = data.t()": lambda model: setattr(query(model), "data", query(model).data.t()),
    "a norm's epsilon": each_layer(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 0.5)),
    "the scores' factor": each_layer(lambda layer: setattr(layer.self_attn, "scaling", 3 * layer.self_attn.scaling)),
    "a buffer in place": lambda model: model.model.rotary_emb.inv_freq.data.mul_(1.5),
    "the angles' factor": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 2.0),
    "an activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()),
}  # fmt: skip


def fresh() -> Any:
    """A model whose texts end by their length."""
    model = copy.deepcopy(tiny("llama", torch.float32))
    model.generation_config.eos_token_id = None
    return model


def changed(change: str) -> Any:
    model = fresh()
    CHANGES[change](model)
    return model


@functools.cache
def answer(change: str | None = None) -> list[int]:
    """What a new engine answers with a model that was changed so, or not at all."""
    return ask(engine(fresh() if change is None else changed(change)))[0]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("change", CHANGES)
def test_kept_prompts_go_when_the_model_changes(change):
    model = fresh()
    one = engine(model)
    assert [ask(one) for _ in range(2)] == [(answer(), 0), (answer(), HELD)]
    CHANGES[change](model)
    assert [ask(one) for _ in range(2)] == [(answer(change), 0), (answer(change), HELD)]


STORABLE = [name for name in CHANGES if name not in ("a hook", "a forward", "data = data.t()")]
"""A store refuses a model with code of its own. The other one's passes are exact no more, so that another engine cuts
prompts elsewhere."""


@pytest.mark.one_in(7)
@pytest.mark.parametrize("change", STORABLE)
def test_a_stored_prompt_is_of_the_model_that_computed_it(tmp_path, change):
    """In this process and, under another fingerprint, in later ones; before the change and after it."""
    model = fresh()
    one = engine(model, tmp_path)
    ask(one)
    CHANGES[change](model)
    assert [ask(one) for _ in range(2)] == [(answer(change), 0), (answer(change), HELD)]
    one.close()
    assert ask(engine(fresh(), tmp_path)) == (answer(), HELD)
    assert ask(engine(changed(change), tmp_path)) == (answer(change), HELD)


@pytest.mark.one_in(7)
@pytest.mark.parametrize("change", STORABLE)
def test_a_change_before_the_first_request_poisons_no_store(tmp_path, change):
    """The store was opened with the weights before. What is computed by others never gets their fingerprint."""
    model = fresh()
    one = engine(model, tmp_path)
    CHANGES[change](model)
    ask(one)
    one.close()
    assert ask(engine(fresh(), tmp_path)) == (answer(), 0)


@pytest.mark.parametrize("how", ["memory", "store"])
def test_a_prompt_is_not_kept_if_the_model_changes_while_it_is_read(tmp_path, how):
    """Nobody may do that; the request's own text is then of neither model. But others must not suffer."""
    model, folder = fresh(), tmp_path if how == "store" else None
    one = engine(model, folder)
    (request,) = one.requests([prompt(BEGINNING)], max_new_tokens=NEW)
    with one.batch() as batch:
        batch.admit(request)
        batch.step()
        weight(model).data.mul_(1.5)
        finish(batch)
    one.flush()
    wanted, _ = ask(engine(copy.deepcopy(model)))
    assert ask(one) == (wanted, 0)
    one.close()
    assert ask(engine(fresh(), folder))[1] == 0


def test_rows_on_both_sides_of_a_change_share_nothing():
    """In one batch that goes on, as a server's."""
    model = fresh()
    one = engine(model)
    first, second = one.requests([prompt(BEGINNING)] * 2, max_new_tokens=NEW)
    with one.batch() as batch:
        batch.admit(first)
        for _ in range(4):
            batch.step()
        weight(model).data.mul_(1.5)
        batch.admit(second)
        finish(batch)
    assert second.cached_tokens == 0
    (alone,) = engine(copy.deepcopy(model)).generate([prompt(BEGINNING)], max_new_tokens=NEW).generated
    assert second.generated.tolist() == alone


def test_a_batch_that_goes_on_takes_from_the_renewed_store(tmp_path):
    model = fresh()
    one = engine(model, tmp_path)
    with one.batch() as batch:
        for number, hits in enumerate((0, HELD, 0, HELD)):
            if number == 2:
                weight(model).data.mul_(1.5)
            (request,) = one.requests([[*prompt(BEGINNING), *prompt(5, number)]], max_new_tokens=NEW)
            batch.admit(request)
            finish(batch)
            one.flush()
            assert request.cached_tokens == hits


@pytest.fixture
def unseen(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Changes a number that no checksum sees, as single numbers of a large weight."""
    monkeypatch.setattr("forerun.models.forward.weight_watch.checksum", lambda *tensors: 0)
    return lambda model: weight(model).data[3, 5].add_(1.0)


def test_what_no_sample_sees_can_be_said(unseen, tmp_path):
    for folder in (None, tmp_path):
        model = fresh()
        one = engine(model, folder)
        before, _ = ask(one)
        unseen(model)
        assert ask(one)[1] == HELD
        one.weights_changed()
        wanted, _ = ask(engine(copy.deepcopy(model)))
        assert wanted != before
        assert ask(one) == (wanted, 0)


def test_texts_stored_after_an_unseen_change_go_when_the_store_is_closed(unseen, tmp_path, caplog):
    model = fresh()
    one = engine(model, tmp_path)
    unseen(model)
    ask(one)
    with caplog.at_level(logging.WARNING, "forerun"):
        one.close()
        one.close()
    assert [record.getMessage() for record in caplog.records] == [
        "removed 1 stored prefixes: the model's weights changed unnoticed"
    ]
    assert not list(tmp_path.rglob(f"*{KV_FILE_SUFFIX}"))
    assert ask(engine(fresh(), tmp_path)) == (answer(), 0)


def test_nothing_is_read_again_at_the_end_without_new_texts(monkeypatch, tmp_path):
    model = fresh()
    first = engine(model, tmp_path)
    ask(first)
    first.close()
    second = engine(model, tmp_path)
    assert ask(second)[1] == HELD
    monkeypatch.setattr(Engine, "_fingerprint", lambda engine: pytest.fail("no new texts"))
    second.close()


def test_what_passes_write_themselves_is_no_change():
    """Rotations that depend on the length write frequencies in each pass; states of layers leave hooks."""
    for name in ("phi3, longrope", "llama, dynamic", "gpt_oss"):
        one = engine(build(*FAMILIES[name], seed=1).float())
        (tokens,) = one.requests([[*prompt(40)]], max_new_tokens=NEW)
        finish_all(one, [tokens])
        version = one.target.refresh()
        one.target.model(torch.tensor([[1, 2]]), output_hidden_states=True)
        one.target.model.train().eval()
        assert one.target.refresh() == version


def test_a_conversation_reads_anew_what_another_model_read():
    tokenizer = chat_tokenizer()
    model = chat_model(tokenizer)
    one = Conversation(Engine(model, "none", tokenizer=tokenizer), max_new_tokens=NEW)
    one.ask("Who are you?")
    for parameter in model.parameters():
        parameter.data.mul_(1.01)
    other = Conversation(Engine(copy.deepcopy(model), "none", tokenizer=tokenizer), max_new_tokens=NEW)
    other.messages = copy.deepcopy(one.messages)
    turn, wanted = one.send("And then?"), other.send("And then?")
    assert [*turn] and [*wanted]
    assert turn.cached == wanted.cached == 0
    assert turn.request.generated.tolist() == wanted.request.generated.tolist()
