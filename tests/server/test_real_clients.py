"""Clients that nobody here wrote go through the table of docs/results/clients.md; missing clients are skipped."""

import importlib.util

import pytest
from support.chat_models import QWEN
from support.live_server import serving
from support.real_clients import ROWS

pytest.importorskip("llguidance")
engine, server = serving(QWEN, max_tokens=512)


@pytest.mark.parametrize(("client", "function"), [(client, function) for client, _, function in ROWS])
def test_a_row_of_the_table(server, client, function, monkeypatch):
    if importlib.util.find_spec(client) is None:
        pytest.skip(f"{client} is not installed; pip install '.[clients]' has it")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    function(f"http://127.0.0.1:{server.port}/v1", "bundled")
