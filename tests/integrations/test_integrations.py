"""Drafting for other engines: against their classes where they are installed, and against what their sources say."""

import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import recorded_engines
from recorded_engines import Asked, Llama, Runner, vllm_config

import forerun
from forerun.integrations.branch_drafter import best_branch
from forerun.integrations.vllm import ForerunProposer
from forerun.trie.trie import Draft
from forerun.trie.trie_file import TrieFileError

WITHOUT_TORCH = """
import sys

class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers", "tokenizers"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refused())
import numpy as np
from recorded_engines import Asked, Runner, vllm_config
from forerun.integrations.vllm import ForerunProposer

request = Asked([1, 2, 3], [4, 5, 6, 7] * 8)
runner = Runner(ForerunProposer(vllm_config()))
runner.add(request)
runner.finish()
print(request.accepted)
"""


def words(seed: int, length: int, low: int = 0, high: int = 50_000) -> list[int]:
    return np.random.default_rng(seed).integers(low, high, length).tolist()


def served(proposer: ForerunProposer, *requests: Asked) -> Runner:
    runner = Runner(proposer)
    for request in requests:
        runner.add(request)
    runner.finish()
    return runner


def learned(proposer: ForerunProposer, namespace: str = "") -> list[list[int]]:
    return sorted(text.tolist() for text in proposer._drafter.trie.snapshot(namespace)[0])


def under_way(proposer: ForerunProposer) -> int:
    return len(proposer._drafter.texts)


def kept(file: Path, *requests: Asked, **config: Any) -> ForerunProposer:
    """A proposer with this trie file, which has served these requests and closed."""
    settings = {"trie": str(file), "namespace": "shop"} | config.pop("settings", {})
    proposer = ForerunProposer(vllm_config(settings=settings, **config))
    served(proposer, *requests)
    proposer.close()
    return proposer


def test_it_drafts_where_torch_and_transformers_cannot_be_imported():
    paths = [str(Path(forerun.__file__).parent.parent), str(Path(__file__).parent)]
    program = f"import sys; sys.path[:0] = {paths!r}\n{WITHOUT_TORCH}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 16


def test_the_signature_is_the_one_that_vllm_calls():
    inspect.signature(ForerunProposer).bind(vllm_config())
    call = inspect.signature(ForerunProposer.propose).bind(None, [[1]], np.ones(1), np.ones((1, 8)), slot_mappings=None)
    assert list(call.arguments) == ["self", "sampled_token_ids", "num_tokens_no_spec", "token_ids_cpu", "slot_mappings"]


def test_vllm_makes_it_by_its_name():
    made = pytest.importorskip("vllm.v1.spec_decode.custom_class_proposer", reason="vLLM is not installed")
    config = vllm_config()
    config.speculative_config.model = "forerun.integrations.vllm.ForerunProposer"
    request = Asked([1, 2, 3], [4, 5, 6, 7] * 8)
    served(made.create_custom_proposer(config), request)
    assert request.accepted > 16


def test_a_text_that_repeats_itself_is_drafted_and_accepted():
    request = Asked(words(1, 20), words(2, 12) * 10)
    served(ForerunProposer(vllm_config(most=8)), request)
    assert request.accepted >= 0.9 * request.drafted
    assert len(request.drafts) < len(request.answer) / 3


def test_an_answer_that_came_before_is_drafted_and_accepted():
    proposer, answer = ForerunProposer(vllm_config(most=8)), words(3, 120)
    first, second = Asked(words(4, 9), answer), Asked(words(5, 9), answer)
    served(proposer, first)
    served(proposer, second)
    assert first.accepted == 0
    assert second.accepted >= 0.9 * second.drafted > 0
    assert len(second.drafts) < len(answer) / 3


def test_a_prompt_is_drafted_to_its_own_request_alone():
    prompt = words(6, 60)
    proposer = ForerunProposer(vllm_config(settings={"least_probability": 0}))
    own, other = Asked(prompt, prompt[10:40]), Asked(words(7, 5) + prompt[5:9], prompt[9:40])
    served(proposer, own, other)
    assert own.accepted > 10
    secret = set(prompt[41:])
    assert not secret & {token for draft in other.drafts for token in draft}
    assert secret & {token for draft in own.drafts for token in draft}


def test_nothing_is_drafted_beyond_the_limits():
    proposer, cycle = ForerunProposer(vllm_config(most=5, room=64)), [1, 2, 3, 4]
    request, runner = Asked(cycle * 3, cycle * 13), Runner(proposer, room=64)
    runner.add(request)
    ends = []
    while not request.done:
        runner.step()
        if request.draft:
            ends.append(len(request.prompt) + request.said + len(request.draft))
    assert max(map(len, request.drafts)) == 5
    assert max(ends) == 63  # and one token comes with them
    assert request.draft == []


@pytest.mark.parametrize("length", [62, 63, 64])
def test_at_the_end_of_the_room_there_is_at_most_what_fits(length):
    runner, text = Runner(ForerunProposer(vllm_config(most=5, room=64)), room=64), [1, 2] * 40
    request = Asked(text[: length - 1], text[length - 1 : length])
    runner.add(request)
    runner.step()
    assert len(request.draft) == max(0, 63 - length)


def test_a_prompt_that_is_still_being_read_waits():
    proposer = ForerunProposer(vllm_config())
    request, other, runner = Asked([1, 2] * 20, [1, 2] * 20), Asked(words(8, 9), words(9, 30)), Runner(proposer)
    runner.add(request)
    runner.add(other)
    for _ in range(3):
        runner.step((request,))
    assert request.drafts == [[], [], []]
    assert under_way(proposer) == 1
    runner.finish()
    assert request.accepted > 20


def test_requests_that_move_between_rows_are_followed_and_never_mixed_up():
    rng = np.random.default_rng(10)
    proposer = ForerunProposer(vllm_config(settings={"share": False, "least_probability": 0}))
    runner = Runner(proposer)

    def part(seed: int, number: int, length: int) -> list[int]:
        return words(seed, length, 100 * number, 100 * number + 100)

    everyone = [Asked(part(100 + n, n, int(rng.integers(1, 9))), part(n, n, 7) * int(rng.integers(3, 9)))
                for n in range(30)]  # fmt: skip
    waiting = list(everyone)
    while waiting or runner.rows:
        while waiting and len(runner.rows) < 6:
            runner.add(waiting.pop())
        if len(runner.rows) > 1:
            runner.swap(*rng.choice(len(runner.rows), 2, replace=False).tolist())
        runner.step()
        assert under_way(proposer) <= 6
        for request in [request for request in runner.rows if request.done]:
            runner.remove(request)
    assert proposer._drafter.texts._begun == len(everyone)  # none was taken for a new one
    for seed, request in enumerate(everyone):
        assert request.accepted > 0
        assert {token // 100 for draft in request.drafts for token in draft} <= {seed}
    proposer.propose([], runner.num_tokens_no_spec, runner.token_ids_cpu)
    assert under_way(proposer) == 0


def test_requests_of_one_text_are_followed_each_for_itself():
    proposer, answer = ForerunProposer(vllm_config()), words(11, 10) * 6
    twins = [Asked([1, 2, 3], list(answer)) for _ in range(3)]
    twins[2].answer = answer[:25] + words(12, 10) * 4
    served(proposer, *twins)
    assert learned(proposer) == sorted(twin.answer for twin in twins)


def test_what_is_shared_is_what_was_generated_and_no_prompt():
    """Two prompts go on where the first request ended, as in a conversation. The one that says nothing new goes on with
    what was learned of it, since it cannot be told from it, and its prompt still is no output."""
    proposer = ForerunProposer(vllm_config())
    first = Asked(words(13, 20), words(14, 30))
    served(proposer, first)
    second = Asked(first.prompt + first.answer + words(15, 10), words(16, 30))
    third = Asked(first.prompt + first.answer, words(17, 30))
    served(proposer, second, third)
    assert learned(proposer) == sorted([first.answer + third.answer, second.answer])


def test_a_request_that_comes_back_after_a_pause_starts_anew():
    """As one does that gave its memory to another; what was generated before is in its own text then."""
    proposer = ForerunProposer(vllm_config())
    runner, request = Runner(proposer), Asked(words(18, 5), words(19, 9) * 9)
    runner.add(request)
    for _ in range(6):
        runner.step()
    runner.remove(request)
    served(proposer, Asked([5], words(20, 8)))
    request.draft = []
    said = request.said
    runner.add(request)
    runner.finish()
    assert learned(proposer)[0] in (request.answer[:said], request.answer[said:])
    assert request.accepted > 50


def test_another_contract_is_told_of():
    proposer = ForerunProposer(vllm_config())
    with pytest.raises(ValueError, match=r"row 1 does not end with the sampled tokens \[9\]"):
        proposer.propose([[3], [9]], np.array([3, 3]), np.array([[1, 2, 3], [1, 2, 3]], np.int32))
    with pytest.raises(ValueError, match="token id is -1"):
        proposer.propose([[3], [-1]], np.array([3, 3]), np.array([[1, 2, 3], [1, 2, -1]], np.int32))
    assert under_way(proposer) == 0


@pytest.mark.parametrize(("config", "message"), [
    ({"most": None}, "num_speculative_tokens is None; allowed: 1 to 1024"),
    ({"enable_prompt_embeds": True}, "enable_prompt_embeds is true"),
    ({"use_v2_model_runner": True}, "VLLM_USE_V2_MODEL_RUNNER is true; allowed: 0 or unset"),
    *(({"settings": settings}, message) for settings, message in (
        ({"names": "x"}, "no setting 'names'; allowed: namespace, share, trie"),
        (["x"], r"settings are \['x'\]; allowed: an object"), ({"namespace": 3}, "namespace is 3; allowed: a string"),
        ({"share": 1}, "share is 1; allowed: true or false"), ({"capacity": 100}, r"capacity is 100; allowed: 2\*\*16"),
        ({"capacity": 1e6}, "capacity is 1000000.0; allowed"), ({"trie": 3}, "trie is 3; allowed: a path"),
        ({"least_probability": 1.5}, "least_probability is 1.5; allowed: 0 to 1"),
        ({"save_seconds": "60"}, "save_seconds is '60'; allowed: 0 to"), ({"trie": "/"}, "and this is a folder"),
        ({"trie": "/no/such/folder/x.trie"}, "a file in a folder that exists and can be written"),
        ({"trie": "nothing.trie", "save_seconds": 0}, "a file that exists"),
        ({"trie": "x.trie", "share": False}, "share is False; allowed: true, where a trie file"),
    )),
])  # fmt: skip
def test_wrong_settings_limits_and_prompts_without_tokens_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        ForerunProposer(vllm_config(**config))


def test_a_trie_file_outlives_the_engine(tmp_path):
    file, answer, request = tmp_path / "x.trie", words(21, 60), Asked([2], words(21, 60))
    kept(file, Asked([1], answer), settings={"save_seconds": 1000})
    assert learned(kept(file, settings={"save_seconds": 0}), "shop") == [answer]
    kept(file, request, settings={"save_seconds": 0})
    assert request.accepted > 40
    with pytest.raises(TrieFileError, match="another vocabulary"):
        kept(file, tokenizer="c/d")
    kept(file, settings={"vocabulary": ""}, tokenizer="c/d")  # what is told comes before the default
    file.write_bytes(b"nothing")
    with pytest.raises(TrieFileError, match="is not a trie file"):
        kept(file)


def test_one_process_of_an_engine_saves(tmp_path):
    file = tmp_path / "x.trie"
    for rank, size, of_data, saves in ((1, 2, 0, False), (0, 1, 1, False), (2, 2, 0, True)):
        kept(file, Asked([1], words(22, 20)), rank=rank, tensor_parallel_size=size, data_parallel_rank=of_data)
        assert file.exists() == saves


def test_tokens_that_the_model_does_not_have_are_not_drafted(tmp_path):
    request = Asked([2], [10, 11, 3])
    for each in (Asked([1], [10, 11, 12, 13, 60_000, 14, 15]), request):
        kept(tmp_path / "x.trie", each)
    assert request.drafts[0] == [11, 12, 13]
    assert 60_000 not in {token for draft in request.drafts for token in draft}


def test_the_best_branch_is_the_one_of_which_most_is_expected():
    parents, probabilities = np.array([-1, -1, 1, 2, 3]), np.array([0.5, 0.4, 0.35, 0.3, 0.1])
    draft = Draft(np.array([1, 2, 3, 4, 5]), parents, probabilities, np.zeros(5, np.int8))
    for size, best in ((5, [2, 3, 4, 5]), (4, [2, 3, 4]), (1, [1]), (0, [])):
        assert best_branch(draft.cut(size)) == best


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over llama-cpp-python or over what its sources say."""
    if importlib.util.find_spec("llama_cpp") is None:
        package, module = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
        module.LlamaDraftModel = recorded_engines.LlamaDraftModel
        monkeypatch.setitem(sys.modules, "llama_cpp", package)
        monkeypatch.setitem(sys.modules, "llama_cpp.llama_speculative", module)
    monkeypatch.delitem(sys.modules, "forerun.integrations.llama_cpp", raising=False)
    yield importlib.import_module("forerun.integrations.llama_cpp")
    sys.modules.pop("forerun.integrations.llama_cpp", None)


def test_it_is_a_draft_model_of_llama_cpp(llama):
    theirs = sys.modules["llama_cpp.llama_speculative"].LlamaDraftModel
    assert issubclass(llama.ForerunDraft, theirs)
    ours, asked = (inspect.signature(each.__call__).parameters.values() for each in (llama.ForerunDraft, theirs))
    assert [(each.name, each.kind) for each in ours] == [(each.name, each.kind) for each in asked]


def test_llama_cpp_is_drafted_along_its_texts(llama):
    draft = llama.ForerunDraft(draft_tokens=6)
    engine = Llama(draft)
    answer = words(23, 11) * 8
    assert list(engine.generate(words(24, 9), answer)) == answer
    assert engine.accepted >= 0.9 * engine.drafted
    assert engine.calls < len(answer) / 3
    again = Llama(draft)
    assert list(again.generate(words(25, 9), answer)) == answer
    assert again.calls < engine.calls
    found = draft(np.array(answer[:20], np.intc))
    assert found.dtype == np.intc
    assert 1 <= len(found) <= 6
    assert len(draft(np.empty(0, np.intc))) == 0


def test_the_next_prompt_of_a_conversation_stays_private(llama):
    draft, first, answer = llama.ForerunDraft(), words(26, 12), words(27, 20)
    list(Llama(draft).generate(first, answer))
    question = words(28, 12)
    list(Llama(draft).generate(first + answer + question, words(29, 20)))
    shared = {token for text in draft._drafter.trie.snapshot("")[0] for token in text.tolist()}
    assert shared >= set(answer[:-1])
    assert not shared & set(question)


def test_settings_of_llama_cpp(llama, tmp_path):
    with pytest.raises(ValueError, match="draft_tokens is 0; allowed: 1 to 1024"):
        llama.ForerunDraft(0)
    with pytest.raises(ValueError, match="no setting 'tokens'"):
        llama.ForerunDraft(tokens=3)
    answer = words(30, 50)
    draft = llama.ForerunDraft(trie=tmp_path / "x.trie")
    list(Llama(draft).generate([1, 2], answer))
    draft.close()
    again = Llama(llama.ForerunDraft(trie=tmp_path / "x.trie", save_seconds=0))
    assert list(again.generate([3, 4], answer)) == answer
    assert again.accepted > 30
