"""Programs against a real server: the examples with OpenAI's client, and clients that nobody here wrote.

These go through the table of docs/results/clients.md; those that are not installed are skipped.
"""

import importlib.util
import re
import runpy
from pathlib import Path

import pytest
from support.chat_models import QWEN
from support.live_server import serving
from support.real_clients import ROWS

import forerun

pytest.importorskip("llguidance")
EXAMPLES = Path(forerun.__file__).parents[2] / "examples" / "server"
SAYS = {
    "chat": r"> What is a trie\?\n[\s\S]*> What is it good for\?\n[\s\S]*\[\d+\.\d\d tokens per step\]",
    "stream": r"\x1b\[32m[\s\S]*\[80 tokens in [1-7]?\d steps\]",
    "clients": r"the same texts together and alone: True",
    "retrieval": r"the Silver Heron\?\n.*[Ss]ilver Heron[\s\S]*\[[1-9]\d* of \d+ tokens were drafted\]",
}


engine, server = serving(QWEN, max_tokens=512)


def test_all_examples_are_known():
    assert {example.stem for example in EXAMPLES.glob("*.py")} == set(SAYS)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SAYS)
def test_the_example_runs(server, name, monkeypatch, capsys):
    monkeypatch.setenv("FORERUN_URL", f"http://127.0.0.1:{server.port}/v1")
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(SAYS[name], said), said


@pytest.mark.parametrize(("client", "function"), [(client, function) for client, _, function in ROWS])
def test_a_row_of_the_table(server, client, function, monkeypatch):
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed; pip install '.[clients]' has it")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    function(f"http://127.0.0.1:{server.port}/v1", "bundled")
