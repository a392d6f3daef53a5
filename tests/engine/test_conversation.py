"""Conversations: every answer is the one to the whole conversation, and only what is new is read for it."""

import copy
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from support.processes import heed_interrupts
from support.saved_models import change, chat_model, chat_tokenizer, save
from typer.testing import CliRunner, Result

from forerun import Conversation, Engine
from forerun.cli import app
from forerun.core.long_context import LongContextConfig
from forerun.engine.conversation import ConversationTurn

pty = pytest.importorskip("pty", reason="this system has no pseudo-terminals")

pytestmark = pytest.mark.usefixtures("called_again")
SAID = ("again and again", "the quick brown fox", "and the fox again?")


@pytest.fixture(scope="module")
def engine() -> Engine:
    tokenizer = chat_tokenizer()
    return Engine(chat_model(tokenizer), "trie", tokenizer=tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A chat model whose answers end by length."""
    tokenizer, path = chat_tokenizer(), tmp_path_factory.mktemp("chat")
    model = chat_model(tokenizer)
    model.generation_config.eos_token_id = model.config.eos_token_id = None
    return str(save(model, path, tokenizer))


def fresh_answer(engine: Engine, messages: list[dict[str, str]], **options: Any) -> list[int]:
    """What transformers answers to the whole conversation, read anew."""
    tokenizer = engine.tokenizer
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    model = chat_model(chat_tokenizer())
    return model.generate(ids, do_sample=False, **options)[0, ids.shape[1] :].tolist()


def answered(conversation: Conversation, text: str) -> ConversationTurn:
    """The turn of a message, with its whole answer."""
    turn = conversation.send(text)
    list(turn)
    return turn


@pytest.mark.one_in(2)
@pytest.mark.parametrize("drafter", ["none", "trie", "lookup", "low-rank"])
def test_answers_are_those_to_the_whole_conversation_read_anew(drafter):
    tokenizer = chat_tokenizer()
    settings = LongContextConfig(cache_budget=16, chunk=4, gamma2=4, paced=False)
    engine = Engine(chat_model(tokenizer), drafter, settings=settings, tokenizer=tokenizer, prune_drafts=False)
    conversation, drafted = Conversation(engine, "brown", max_new_tokens=14), 0
    for text in SAID:
        told = [*conversation.messages, {"role": "user", "content": text}]
        turn = conversation.send(text)
        answer = [token for commit in turn for token in commit.tokens]
        assert answer == turn.request.generated.tolist() == fresh_answer(engine, told, max_new_tokens=14)
        assert conversation.messages == [*told, {"role": "assistant", "content": turn.text}]
        drafted += sum(turn.request.stats.drafted)
    assert (drafted > 0) == (drafter != "none")


def test_a_turn_reads_only_what_is_new(engine):
    conversation = Conversation(engine, max_new_tokens=8)
    first = conversation.send(SAID[0])
    sizes = [len(commit.tokens) for commit in first]
    assert sum(sizes) == len(first.request.generated) and min(sizes) > 0
    assert first.cached == 0
    assert first.read == first.request.prompt_length
    second = answered(conversation, SAID[1])
    before, now = first.request.prompt.tolist(), second.request.prompt.tolist()
    assert now[: len(before)] == before
    assert second.cached >= len(before)
    assert second.read == second.request.prompt_length - second.cached < second.request.prompt_length


def test_what_the_template_changes_in_earlier_turns_is_read_again():
    tokenizer = chat_tokenizer(
        "{% for m in messages %}{{ m['role'] + ': ' + (m['content'] if loop.last else 'fox') + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    engine = Engine(chat_model(tokenizer), "none", tokenizer=tokenizer)
    conversation = Conversation(engine, max_new_tokens=6)
    conversation.ask("again and again")
    told = [*conversation.messages, {"role": "user", "content": "brown"}]
    turn = answered(conversation, "brown")
    assert turn.cached < len(tokenizer("user: fox<end>", add_special_tokens=False)["input_ids"])
    assert turn.request.generated.tolist() == fresh_answer(engine, told, max_new_tokens=6)


@pytest.mark.parametrize("closed", [True, False])
def test_an_answer_that_was_ended_stays_and_the_next_one_is_right(engine, closed):
    """By its reader, or by a new message."""
    conversation = Conversation(engine, max_new_tokens=30)
    turn = conversation.send(SAID[0])
    next(turn)
    if closed:
        turn.close()
    again = answered(conversation, SAID[1])
    told = [{"role": "user", "content": SAID[0]}, {"role": "assistant", "content": turn.text}]
    told += [{"role": "user", "content": SAID[1]}]
    assert conversation.messages == [*told, {"role": "assistant", "content": again.text}]
    assert again.request.generated.tolist() == fresh_answer(engine, told, max_new_tokens=30)
    assert list(turn) == []


@pytest.mark.parametrize("moment", ["propose", "score_rows"])
def test_an_interruption_at_any_moment_leaves_a_conversation_that_goes_on_rightly(moment, monkeypatch):
    tokenizer = chat_tokenizer()
    engine = Engine(chat_model(tokenizer), "lookup", tokenizer=tokenizer)
    conversation, calls = Conversation(engine, max_new_tokens=12), iter(range(1000))
    owner = engine.level.planner.own[0] if moment == "propose" else engine.target
    inner = getattr(owner, moment)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return inner(*arguments, **more)

    monkeypatch.setattr(owner, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        conversation.ask(SAID[0])
    told = [*conversation.messages, {"role": "user", "content": SAID[1]}]
    turn = answered(conversation, SAID[1])
    assert turn.request.generated.tolist() == fresh_answer(engine, told, max_new_tokens=12)


def test_an_answer_that_never_began_leaves_the_conversation_as_it_was(engine):
    conversation = Conversation(engine, max_new_tokens=4)
    conversation.ask(SAID[0])
    before = copy.deepcopy(conversation.messages)
    conversation.send(SAID[1]).close()
    assert conversation.messages == before
    for text, message in (("", "the message is empty"), ("again " * 3000, "exceed the model's 2048 positions")):
        with pytest.raises(ValueError, match=message):
            conversation.send(text)
        assert conversation.messages == before


def test_reset_forgets_the_turns_but_not_the_system_message(engine):
    conversation = Conversation(engine, "brown", max_new_tokens=4)
    first = conversation.ask(SAID[0])
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "brown"}]
    turn = answered(conversation, SAID[0])
    assert (turn.cached, turn.text) == (0, first)


def test_sampled_answers_are_the_same_for_a_seed(engine):
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": True, "temperature": 1.2, "seed": 5}
    told = [Conversation(engine, **options) for _ in range(2)]
    assert [told[0].ask(text) for text in SAID] == [told[1].ask(text) for text in SAID]


def test_what_cannot_be_a_conversation_is_refused(engine):
    tokenizer = chat_tokenizer(None)
    with pytest.raises(ValueError, match="the tokenizer has no chat template; it is not a chat model"):
        Conversation(Engine(chat_model(tokenizer), "none", tokenizer=tokenizer))
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        Conversation(Engine(chat_model(tokenizer), "none"))
    with pytest.raises(ValueError, match="num_return_sequences is 2"):
        Conversation(engine, num_return_sequences=2, do_sample=True).send("again")


# --- the command line


COMMON = ("--dtype", "float64", "--device", "cpu", "-n", "8")


def call(name: str, folder: str, *arguments: object, **more: Any) -> Result:
    return CliRunner().invoke(app, [name, "-m", folder, *COMMON, *map(str, arguments)], **more)


def test_piped_lines_are_answered_one_by_one(folder, engine):
    result = call("chat", folder, "--system", "brown", input="\n".join([SAID[0], "", SAID[1]]))
    assert result.exit_code == 0, result.stderr
    conversation = Conversation(engine, "brown", max_new_tokens=8, eos_token_id=-1)
    expected = "".join(conversation.ask(text) + "\n" for text in SAID[:2])
    assert result.stdout == expected
    assert result.stderr == ""


def test_json_tells_all_about_every_turn(folder):
    result = call("chat", folder, "--json", "-t", "0.9", "--seed", 3, input="\n".join(SAID))
    report = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert (report["model"], report["drafter"]) == (folder, "auto")
    assert [turn["message"] for turn in report["turns"]] == list(SAID)
    assert report["turns"][0]["cached_tokens"] == 0
    for turn in report["turns"]:
        assert len(turn["token_ids"]) == len(turn["drafted"]) == 8
        assert (turn["seed"], turn["finish_reason"]) == (3, "length")
    assert 0 < report["turns"][1]["cached_tokens"] < report["turns"][1]["prompt_tokens"]


def test_commands(folder):
    lines = ["/stats", SAID[0], "/stats", "/reset", SAID[0], "/help", "/magic", "/etc/hosts again", "/exit", SAID[1]]
    result = call("chat", folder, "--json", input="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    turns = json.loads(result.stdout)["turns"]
    assert [turn["message"] for turn in turns] == [SAID[0], SAID[0], "/etc/hosts again"]
    assert [turn["cached_tokens"] > 0 for turn in turns] == [False, False, True]
    assert turns[0]["token_ids"] == turns[1]["token_ids"]
    assert result.stderr.startswith("there is no answer yet\n")
    assert result.stderr.count("tokens per second") == 1
    assert "0 came from the cache" in result.stderr
    assert "/magic is not a command; commands are:\n  /reset" in result.stderr


def test_stats_say_what_came_from_the_cache(folder):
    result = call("chat", folder, "--stats", input="\n".join(SAID[:2]))
    assert result.stderr.count("tokens per second") == 2
    assert len(re.findall(r"of which \d+ were prefilled and \d+ came from the cache", result.stderr)) == 2
    assert "tokens" not in result.stdout


@pytest.mark.parametrize(("arguments", "said", "message"), [
    (("--top-k", 5), "again", "--top-k has no effect at temperature 0"),
    (("--drafter", "magic"), "again", "drafter is 'magic'"), ((), "again " * 3000, "exceed the model's 2048 positions"),
    ((), b"\xff\xfe", "line 1 is not UTF-8 text (byte 0)"),
])  # fmt: skip
def test_errors_are_one_line_and_status_2(folder, arguments, said, message):
    result = call("chat", folder, *arguments, input=said)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_message_that_cannot_be_answered_does_not_cost_the_answers_before_it(folder):
    result = call("chat", folder, "--json", input=f"{SAID[0]}\n{'again ' * 3000}\n")
    assert result.exit_code == 2 and "exceed the model's 2048 positions" in result.stderr
    assert [turn["message"] for turn in json.loads(result.stdout)["turns"]] == [SAID[0]]


def test_chat_needs_a_model_with_a_template(tmp_path):
    tokenizer = chat_tokenizer(None)
    save(chat_model(tokenizer), tmp_path, tokenizer)
    assert "the tokenizer has no chat template" in call("chat", str(tmp_path), input="again").stderr
    assert "give --model" in CliRunner().invoke(app, ["chat"]).stderr
    assert "has no chat template; leave --chat out" in call("generate", str(tmp_path), "--chat", "-p", "a").stderr
    assert "has no chat template" in call("generate", str(tmp_path), "--system", "brown", "-p", "a").stderr
    assert call("generate", str(tmp_path), "-p", "again").exit_code == 0


def test_generate_answers_by_default_where_there_is_a_template_and_continues_with_raw(folder, engine):
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def report(*arguments: object) -> dict[str, Any]:
        result = call("generate", folder, "--json", "-p", SAID[0], *arguments)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    user = {"role": "user", "content": SAID[0]}
    expected = engine.generate([user], max_new_tokens=8, eos_token_id=-1).generated[0]
    assert report()["token_ids"] == report("--chat")["token_ids"] == expected
    told = [{"role": "system", "content": "brown"}, user]
    expected = engine.generate(told, max_new_tokens=8, eos_token_id=-1).generated[0]
    assert report("--system", "brown")["token_ids"] == expected
    raw = report("--raw")
    assert raw["prompt_tokens"] == len(tokenizer(SAID[0])["input_ids"])
    assert raw["token_ids"] == engine.generate(SAID[0], max_new_tokens=8, eos_token_id=-1).generated[0]
    assert "--raw turns that off" in call("generate", folder, "--raw", "--system", "a", "-p", "a").stderr
    assert "--context would cut the chat template" in call("generate", folder, "--context", 3, "-p", "a").stderr


ENDLESS = 100_000
"""Tokens of an answer, of a few characters each; a terminal holds at most 64 KiB that nobody has read."""


class Terminal:
    """``forerun chat`` in a terminal of its own, without the answers' ends: they would not come before Ctrl-C."""

    def __init__(self, folder: str) -> None:
        self.process, self.end = pty.fork()
        if not self.process:
            arguments = ["-m", "forerun.cli", "chat", "-m", folder, "--dtype", "float32", "-d", "none"]
            arguments += ["-n", str(ENDLESS)]
            heed_interrupts()
            os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, "TERM": "dumb"})
        self.shown = b""
        self.ended = False

    def wait(self) -> int:
        _, status = os.waitpid(self.process, 0)
        self.ended = True
        return status

    def close(self) -> None:
        """It does not outlive its test."""
        if not self.ended:
            os.kill(self.process, signal.SIGKILL)
            self.wait()
        os.close(self.end)

    def until(self, text: bytes, seconds: float = 60) -> bytes:
        """What is shown up to ``text``; what follows is for the next call."""
        last = time.monotonic() + seconds
        while text not in self.shown:
            assert select.select([self.end], [], [], max(0.0, last - time.monotonic()))[0], self.shown
            self.shown += os.read(self.end, 1 << 16)
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text: bytes) -> None:
        os.write(self.end, text)

    def interrupt(self, shown: bytes) -> None:
        """Ctrl-C at the prompt, again and again until ``shown`` is. Python's prompt misses a signal that comes when it
        is shown and not yet waited at; a user presses the keys once more, too."""
        for _ in range(30):
            self.type(b"\x03")
            with suppress(AssertionError):
                self.until(shown, 2)
                return
        raise AssertionError(self.shown)


@pytest.fixture
def talkative(folder: str, tmp_path: Path) -> str:
    """The same model with so many positions that its answers are longer than what a terminal holds: it waits for its
    reader, and is not done before Ctrl-C comes, however late that is."""
    copied = Path(shutil.copytree(folder, tmp_path / "talkative"))
    change(copied, max_position_embeddings=2 * ENDLESS)
    return str(copied)


@pytest.mark.matrix
def test_ctrl_c_ends_the_answer_and_ctrl_d_the_program(talkative):
    with closing(Terminal(talkative)) as terminal:
        terminal.until(b"> ")
        terminal.type(b"again and again\n")
        terminal.until(b"again and again\r\n")
        while len(terminal.shown) < 20:
            terminal.shown += os.read(terminal.end, 64)
        terminal.type(b"\x03")
        terminal.until(b"\r\n> ")
        terminal.interrupt(b"(Ctrl-D or /exit leaves)\r\n> ")
        terminal.type(b"/stats\n")
        assert b"tokens per second" in terminal.until(b"from the cache\r\n> ")
        terminal.type(b"\x04")
        status = terminal.wait()
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.matrix
def test_ctrl_c_between_piped_lines_ends_with_130(folder):
    answer = call("chat", folder, input="again\n").stdout.encode()
    command = [sys.executable, "-m", "forerun.cli", "chat", "-m", folder, *COMMON]
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, preexec_fn=heed_interrupts) as process:
        process.stdin.write(b"again\n")
        process.stdin.flush()
        process.stdout.read(len(answer))
        process.send_signal(signal.SIGINT)
        try:
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130
    assert b"Traceback" not in errors
