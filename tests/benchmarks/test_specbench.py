"""``python -m benchmarks specbench``: prompts of both turns, drafters that are kept, and resuming."""

import pytest
from support.prompt_files import tokenizer
from support.tiny import PROMPTS, tiny

from benchmarks.studies.specbench import SpecBench, SpecBenchOptions, _measured, _totals, prompt_set
from forerun.bench.journal import Journal
from forerun.bench.prompts_file import TemplateEncoder
from forerun.bench.rounds import PromptSet
from forerun.decoding.recipes import trie_of


def test_the_second_turn_follows_the_models_own_answer():
    encoder, whole = TemplateEncoder(tokenizer()), [["a", "b"], ["c"]]
    chats = prompt_set("writing", whole, encoder, lambda prompt: "c", 4)
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "b"}]
    assert chats.prompts == [encoder("a"), encoder(asked), encoder("c")]
    plain = prompt_set("writing", whole, TemplateEncoder(tokenizer(None)), lambda prompt: "c", 4, positions=6)
    assert plain.prompts == [[1, 6], [1, 8]]  # the second turn has four tokens, and four new ones are too many


def test_drafters_learn_from_prompt_to_prompt_and_a_measured_category_is_not_run_again(tmp_path):
    options = SpecBenchOptions(tasks=True, drafter=["none", "trie"], budget="4,8", every_node=True)
    bench = SpecBench(tiny("llama"), tokenizer(), options)
    job = PromptSet("qa", [*PROMPTS, PROMPTS[1]], (), 12)
    series = _measured(bench, job, Journal(tmp_path / "turns.jsonl", {}))
    assert [one.contestant for one in series] == ["forerun none", "forerun trie, 4", "forerun trie, 8"]
    assert trie_of(bench.engine.level).kept
    none, _, trie = ([runs[0] for runs in one.runs] for one in series)
    assert [run.texts for run in none] == [run.texts for run in trie]
    assert [run.passes for run in none] == [len(run.texts[0]) for run in none]
    assert trie[3].passes is not None and trie[1].passes is not None and trie[3].passes < trie[1].passes
    bench.category = lambda job: pytest.fail("measured again")  # type: ignore[method-assign]
    again = _measured(bench, job, Journal(tmp_path / "turns.jsonl", {}, resume=True))
    assert [one.runs for one in again] == [one.runs for one in series]
    total = _totals({"qa": series, "rag": again}, {"all": ["qa", "rag"]})["all"]
    assert total[2].tokens_per_step == series[2].tokens_per_step
