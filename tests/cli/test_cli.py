"""The command line: what it prints where, how it ends, and that its help is quick."""

import gc
import io
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from support.commands import start
from support.mocks import gullible
from support.saved_models import save_model, small_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

import forerun
import forerun.engine.step
from forerun.cli import app, demo, terminal
from forerun.cli import compile as command
from forerun.cli.terminal import printable
from forerun.core.tree import DraftTree
from forerun.decoding.recipes import trie_of
from forerun.decoding.sources.trie_source import TrieSource
from forerun.engine.engine import Engine
from forerun.engine.result import Commit
from forerun.models.loading.load import load
from forerun.models.text.detokenize import Detokenizer

pytestmark = pytest.mark.usefixtures("called_again")
PROMPT = "again and again and"
ESCAPE = "\x1b["


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model(tmp_path_factory.mktemp("model")))


def call(*arguments: object, **more: Any) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **more)


def generate(model: str, *arguments: object, n: int = 16, **more: Any) -> Result:
    common = ("-m", model, "--dtype", "float64", "--device", "cpu", "-n", n)
    return call("generate", *common, *arguments, **more)


def as_json(result: Result) -> dict[str, Any]:
    assert result.exit_code in (0, 1, 130), result.stderr
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def test_long_work_shows_how_far_it_is(monkeypatch):
    monkeypatch.setattr(terminal, "PATIENCE", 0.0)
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with terminal.working(console, "loading m.gguf") as progress:
        time.sleep(0.05)
        progress(12, 290)
        time.sleep(0.3)
    assert "loading m.gguf: 12 of 290" in console.file.getvalue()


def program(*lines: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=120)


def test_help_loads_neither_torch_nor_transformers_nor_numba():
    done = program(
        "import sys; from forerun.cli import app; app(['generate', '--help'], standalone_mode=False)",
        "heavy = {'torch', 'transformers', 'numba', 'numpy', 'tokenizers'} & set(sys.modules)",
        "sys.exit(f'loaded: {heavy}' if heavy else 0)",
    )
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout


@pytest.mark.parametrize(("command", "status"), [
    ("cli.app = lambda: sys.exit(3)", 3), ("cli.app = lambda: sys.exit()", 0),
    ("cli.app = lambda: sys.exit('wrong')", 1), ("cli.app = lambda: 1 / 0", 1),
    ("sys.argv = ['forerun', '--version']", 0), ("sys.argv = ['forerun', 'generate']", 2),
])  # fmt: skip
def test_a_command_ends_with_its_status_after_exit_handlers_and_before_modules_are_torn_down(command, status):
    done = program(
        "import atexit, sys; import forerun.cli as cli",
        "class Module:\n    def __del__(self): print('torn down')",
        f"kept = sys.modules['kept'] = Module(); {command}; app = cli.app",
        "cli.app = lambda: (atexit.register(print, 'handled'), app()); cli.main()",
    )
    assert done.returncode == status, done.stderr
    assert done.stdout.endswith("handled\n")
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in command)


@pytest.mark.matrix
def test_the_code_of_heads_is_loaded_only_with_a_head():
    heads = "{f'forerun.models.heads.{name}' for name in ('loading', 'dflash')}"
    assert program(f"import sys, forerun.cli.generate; sys.exit(bool({heads} & set(sys.modules)))").returncode == 0


@pytest.mark.parametrize(("arguments", "message"), [
    ((), "give either --prompt or --prompt-file"), (("-p", ""), "--prompt is empty"),
    (("-p", "a", "--drafter", "magic"), "drafter is 'magic'; known are none,"),
    (("-p", "a", "--top-k", "5", "--seed", "1"), "--top-k, --seed has no effect at temperature 0"),
    (("-p", "a", "-t", "inf"), "--temperature is inf; it must be a finite number"),
    (("-p", "a", "--repetition-penalty", "0"), "--repetition-penalty is 0; it must be above 0"),
    (("-p", "a", "-d", "triforce"), "drafter triforce needs a small model: --draft-model"),
    (("-p", "a", "-d", "head"), "drafter head needs --draft-model"),
    (("-p", "a", "--kv-host-memory", "1GB"), "--kv-host-memory is for what does not fit on the device; add"),
    (("-p", "a", "--kv-memory", "1GB", "--kv-folder", "no"), "--kv-folder is no; there is no such folder"),
    (("-p", "a" * 9000, "-n", "9000"), "exceed the model's 2048 positions"),
    (("-f", "nowhere.txt"), "nowhere.txt: No such file or directory"),
    (("-p", "a", "--prediction", "nowhere.txt"), "nowhere.txt: No such file or directory"),
    (("-p", "a", "-d", "lookup", "--trie-file", "t"), "--trie-file needs a trie drafter"),
    (("-p", "a", "--trie-file", "no/t"), "there is no folder no"),
])  # fmt: skip
def test_an_error_of_the_user_is_one_line_and_status_2(model, arguments, message):
    result = generate(model, *arguments)
    lines = [line for line in result.stderr.splitlines() if not line.startswith("compiling")]  # once per machine
    assert (result.exit_code, result.stdout, len(lines)) == (2, "", 1)
    assert lines[0].startswith("error: ") and message in lines[0]


def test_a_missing_model_is_an_error_and_debug_raises_it():
    result = call("generate", "-m", "./nowhere", "-p", "a")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "there is no folder ./nowhere" in result.stderr
    assert isinstance(call("generate", "-m", "./nowhere", "-p", "a", "--debug").exception, ValueError)


def test_the_text_is_the_models_own_and_json_tells_all_about_it(model):
    decoder, tokenizer = load(model, "float64", device="cpu")
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    expected = decoder.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    report = as_json(generate(model, "-p", PROMPT, "--json", n=24))
    assert (report["token_ids"], report["text"]) == (expected, tokenizer.decode(expected))
    assert report["prompt_tokens"] == ids.shape[1]
    assert (report["finish_reason"], report["seed"], report["drafter"]) == ("length", None, "auto")
    assert report["stats"]["tokens"] == len(report["drafted"]) == 24
    assert generate(model, "-p", PROMPT, "-d", "none", n=24).stdout == report["text"] + "\n"


def test_stats_go_to_stderr_and_the_collector_does_not_look_at_what_a_command_has_loaded(model):
    before = gc.get_freeze_count()
    result = generate(model, "-p", PROMPT, "--stats")
    assert gc.get_freeze_count() > before
    assert "tokens per step" in result.stderr and "loading" in result.stderr and "tokens" not in result.stdout
    assert generate(model, "-p", PROMPT).stderr == ""


def test_a_seed_gives_the_same_sample_with_any_drafter(model):
    sampled = [as_json(generate(model, "-p", PROMPT, "-t", "0.9", "--json", *more)) for more in ((), ("--top-k", 20))]
    assert all(isinstance(report["seed"], int) for report in sampled)
    for drafter in ("none", "lookup"):
        again = as_json(generate(model, "-p", PROMPT, "-t", 0.9, "--seed", sampled[0]["seed"], "-d", drafter, "--json"))
        assert again["token_ids"] == sampled[0]["token_ids"]


def test_stop_strings_end_the_text(model):
    text = as_json(generate(model, "-p", PROMPT, "--json"))["text"]
    stop = next(character for character in text[5:] if character.isprintable() and character != "\ufffd")
    report = as_json(generate(model, "-p", PROMPT, "--stop", stop, "--json"))
    assert report["finish_reason"] == "stop" and text.startswith(report["text"]) and stop in report["text"]
    _, tokenizer = load(model)
    assert stop not in tokenizer.decode(report["token_ids"][:-1])


def test_prompts_come_from_files_and_stdin_without_their_last_line_break(model, tmp_path):
    expected = generate(model, "-p", PROMPT).stdout
    (tmp_path / "prompt").write_text(PROMPT + "\n")
    assert generate(model, "-f", tmp_path / "prompt").stdout == expected
    assert generate(model, "-f", "-", input=PROMPT + "\n").stdout == expected
    (tmp_path / "prompt").write_bytes(b"\xff\xfe")
    assert "is not UTF-8" in generate(model, "-f", tmp_path / "prompt").stderr


def test_a_trie_file_is_kept_from_one_run_to_the_next_and_drafts_are_coloured(model, tmp_path):
    trie = ("--trie-file", tmp_path / "trie")
    first = as_json(generate(model, "-p", PROMPT, "--json", *trie))
    second = as_json(generate(model, "-p", PROMPT, "--json", *trie))
    other = as_json(generate(model, "-p", PROMPT, "--json", *trie, "--namespace", "other"))
    assert first["token_ids"] == second["token_ids"] == other["token_ids"]
    assert second["stats"]["steps"] < first["stats"]["steps"] == other["stats"]["steps"]
    coloured = generate(model, "-p", PROMPT, *trie, "--color").stdout
    assert ESCAPE in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printable(first["text"]) + "\n"
    for plain in (generate(model, "-p", PROMPT, *trie), generate(model, "-p", PROMPT, *trie, "--no-color")):
        assert plain.stdout == first["text"] + "\n"


def test_texts_to_draft_from_join_those_of_a_trie_file(model, tmp_path):
    trie, known = ("--trie-file", tmp_path / "trie"), tmp_path / "known.txt"
    cold = as_json(generate(model, "-p", PROMPT, "--json", *trie, "--namespace", "other"))
    known.write_text(PROMPT + cold["text"])
    warm = as_json(generate(model, "-p", PROMPT, "--json", *trie, "--warm", known))
    assert warm["token_ids"] == cold["token_ids"]
    loaded, tokenizer = load(model, "float64")
    engine = Engine(loaded, "trie", tokenizer=tokenizer)
    engine.load_trie(tmp_path / "trie")
    texts = {name: trie_of(engine.level).snapshot(name)[0] for name in ("default", "other")}
    assert [each.tolist() for each in texts["other"]] == [cold["token_ids"]]
    known_ids = tokenizer(PROMPT + cold["text"])["input_ids"]
    assert [each.tolist() for each in texts["default"]] == [known_ids, cold["token_ids"]]


def test_ctrl_c_keeps_what_was_generated(model, monkeypatch):
    run = Engine.run

    def interrupted(self: Engine, requests: Any, on_prefill: Any = None) -> Iterator[Commit]:
        for i, commit in enumerate(run(self, requests, on_prefill)):
            if i == 3:  # after the commit, before it is handed over
                raise KeyboardInterrupt
            yield commit

    monkeypatch.setattr(Engine, "run", interrupted)
    result = generate(model, "-p", PROMPT, "-d", "none", "--json")
    report = as_json(result)
    assert (result.exit_code, report["finish_reason"]) == (130, "interrupted")
    assert len(report["token_ids"]) == len(report["drafted"]) == 4
    shown = generate(model, "-p", PROMPT, "-d", "none")
    assert (shown.exit_code, shown.stdout) == (130, report["text"] + "\n")


@pytest.mark.matrix
def test_a_process_ends_with_130_on_sigint_and_141_without_a_reader(model):
    long = ("generate", "-m", model, "--dtype", "float32", "-n", 2000)
    with start(*long, "-p", PROMPT, "-d", "none", "--stats") as process:
        first = process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        assert process.returncode == 130 and (first + rest).endswith(b"\n")
        assert b"tokens per second" in errors and b"Traceback" not in errors
    with start(*long, "-f", "-", stdin=subprocess.PIPE) as process:  # a reader that goes away ends it quietly
        process.stdin.write(PROMPT.encode())
        process.stdin.close()
        process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        process.stderr.close()
        assert process.wait(timeout=60) == 141 and errors == b""


def pieces(tokenizer: PreTrainedTokenizerFast, prompt: list[int], tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    shown = [piece.text for token in tokens for piece in detokenizer.add(token, False)]
    return shown + [piece.text for piece in detokenizer.flush()]


def test_a_run_of_bytes_is_decoded_as_a_whole_wherever_the_text_begins():
    vocabulary = {"<unk>": 0, "a": 1} | {f"<0x{byte:02X}>": 2 + byte for byte in range(256)}
    backend = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    character = [2 + byte for byte in "\u0f00".encode()]
    assert "".join(pieces(tokenizer, [1, *character * 3], [*character, 1])) == "\u0f00a"


def test_characters_of_several_tokens_come_whole():
    tokenizer, text = small_tokenizer(), "naïve 中文 🎉 again"
    tokens = tokenizer(text)["input_ids"]
    shown = pieces(tokenizer, tokenizer("the")["input_ids"], tokens)
    assert "".join(shown) == text and "中" in shown and "\ufffd" not in "".join(shown)
    assert pieces(tokenizer, tokens[:1], tokenizer("🎉")["input_ids"][:2])[-1] == "\ufffd"  # cut off inside


def test_the_space_before_the_first_word_is_kept():
    inner = Tokenizer(models.WordLevel({"<unk>": 0, "▁good": 1, "▁morning": 2, "s": 3}, "<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert pieces(tokenizer, [1], [2, 3]) == [" morning", "s"]


def test_a_piece_is_drafted_if_all_of_its_tokens_were():
    tokenizer = small_tokenizer()
    detokenizer = Detokenizer(tokenizer, tokenizer("the")["input_ids"])
    tokens = tokenizer("é")["input_ids"]
    assert len(tokens) == 2
    marks = [(tokens[0], False), (tokens[1], True), (tokens[0], True), (tokens[1], True)]
    shown = [piece for token, drafted in marks for piece in detokenizer.add(token, drafted)]
    assert [(piece.text, piece.drafted) for piece in shown] == [("é", False), ("é", True)]


def test_generated_text_cannot_control_the_terminal():
    assert printable("a\x1b]0;title\x07b\tc\n") == "a\ufffd]0;title\ufffdb\tc\n"


def audit(model: str, *arguments: object) -> Result:
    return call("audit", "-m", model, "--device", "cpu", "-n", 12, *arguments)


def test_an_audit_passes_and_says_in_which_dtype_and_fails_if_a_drafter_never_drafted(model):
    result = audit(model, "-p", PROMPT, "-d", "trie", "-d", "lookup")
    assert result.exit_code == 0 and "audit in float64" in result.stdout, result.output
    assert "All 14 texts are equal, token for token." in result.stdout  # one prompt, greedy beside two texts
    assert "'magic'" in audit(model, "-p", PROMPT, "-d", "magic").stderr
    assert "--prompt" in call("audit", "-m", model).stderr
    result = audit(model, "-p", PROMPT, "-d", "lookup", "-n", 1, "--seeds", 0)
    assert result.exit_code == 1, result.output
    columns = ("texts", "tokens", "accepted", "equal", "rounding", "different")
    for said in ("texts had no draft", "lookup never drafted", *columns):
        assert said in result.stdout


def test_an_audit_fails_when_verification_is_broken(model, monkeypatch):
    monkeypatch.setattr(forerun.decoding.level, "verify", gullible)
    broken = ("-p", "again again again again", "-d", "lookup", "-n", 24, "--seeds", 0)
    result = audit(model, *broken, "--json")
    report = as_json(result)
    assert result.exit_code == 1 and not report["lossless"] and report["different"] >= 1
    details = {"drafter", "prompt", "position", "expected", "got", "margin", "allowance"}
    assert details <= set(report["divergences"][0])
    table = audit(model, *broken)
    assert table.exit_code == 1 and "margin" in table.stdout and "texts differ" in table.stdout


def test_an_audit_with_a_small_model_names_it_in_json(model):
    small = ("-d", "triforce", "--draft-model", model, "--seeds", 0, "--json")
    plan = as_json(audit(model, "-p", PROMPT, *small))["plan"]
    assert plan["settings"]["draft_model"] == model and plan["drafters"] == ["triforce"]


@pytest.fixture
def small_demo(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = {"kind": "rag", "title": "An answer", "prompt": PROMPT, "max_new_tokens": 12}
    monkeypatch.setattr(demo, "load", lambda name: load(model, "float64", device="cpu"))
    monkeypatch.setattr(demo, "demo_prompts", lambda: [dict(prompt), {**prompt, "kind": "code"}])


@pytest.mark.usefixtures("small_demo")
def test_a_demo_shows_both_and_checks_that_they_are_equal():
    result = call("demo", "--repeats", 2, "--warm")
    assert result.exit_code == 0, result.output
    for expected in ("An answer", "plain:", "auto:", "same text, token for token", "speed-up", "all"):
        assert expected in result.stdout
    assert ESCAPE not in result.stdout
    wide = call("demo", "--repeats", 1, "--kind", "code", "--color", env={"COLUMNS": "120"})
    assert ESCAPE in wide.stdout and "╭─" in wide.stdout
    refused = call("demo", "--kind", "verse", env={"COLUMNS": "120"})  # typer draws a box
    assert refused.exit_code == 2 and "'verse' is not one of 'rag', 'code'" in refused.stderr


@pytest.mark.usefixtures("small_demo")
def test_a_warm_trie_needs_fewer_steps_and_json_has_both():
    cold, warm = (as_json(call("demo", "--repeats", 1, "--json", *more)) for more in ((), ("--warm",)))
    assert cold["equal"] and [prompt["kind"] for prompt in cold["prompts"]] == ["rag", "code"]
    assert cold["prompts"][0]["plain"]["tokens_per_step"] == 1
    assert warm["prompts"][1]["auto"]["tokens_per_step"] > cold["prompts"][1]["auto"]["tokens_per_step"]


@pytest.mark.usefixtures("small_demo")
def test_a_demo_whose_texts_differ_fails(monkeypatch):
    wrong = Mock(side_effect=lambda rows, limits: [DraftTree.chain([1][: r.request.max_draft_depth]) for r in rows])
    monkeypatch.setattr(TrieSource, "propose", wrong)
    monkeypatch.setattr(forerun.decoding.level, "verify", gullible)
    result = call("demo", "--repeats", 1, "--kind", "rag", "--color")
    assert result.exit_code == 1 and "the texts differ" in result.stdout


def test_the_bundled_demo_runs():
    assert as_json(call("demo", "--repeats", 1, "--max-new-tokens", 12, "--json"))["equal"]


def test_generate_keeps_long_prompts_and_a_wrong_size_is_refused(tmp_path):
    text, folder = "The same words again. " * 300, tmp_path / "kept"
    asked = ("generate", "--kv-store", folder, "--kv-store-limit", "1GiB", "-n", 4, "--json", "--prompt")
    first, second = (as_json(call(*asked, text)) for _ in range(2))
    assert len(list(folder.rglob("*.safetensors"))) == 1
    assert first["token_ids"] == second["token_ids"]
    for wrong in ("many", "-1", "5 XB"):
        refused = call(*asked[:4], wrong, *asked[5:], text)
        assert refused.exit_code == 2 and "Invalid value for '--kv-store-limit'" in refused.stderr
    assert "add --kv-store" in call("generate", "--kv-store-limit", "1GB", "--prompt", "a").stderr


def test_the_version_is_told_and_a_shell_completes_commands_and_options():
    env = {"_FORERUN_COMPLETE": "complete_bash", "COMP_WORDS": "forerun ge", "COMP_CWORD": "1"}
    assert "generate" in CliRunner().invoke(app, [], env=env, prog_name="forerun").output
    assert "--install-completion" in call("--help").output
    assert call("--version").stdout == f"forerun {forerun.__version__}\n"


def test_it_compiles_a_models_passes_and_waits_for_the_trie(model, tmp_path, monkeypatch):
    waited: list[object] = []
    monkeypatch.setattr(command, "compiled_before", lambda: False)
    monkeypatch.setattr(command, "Compilation", lambda: SimpleNamespace(wait=waited.append))
    result = call("compile", "-m", model)
    assert result.exit_code == 0, result.output
    assert "compiled in" in result.stderr and len(waited) == 1
    assert call("compile", "-m", tmp_path / "none").exit_code == 2
