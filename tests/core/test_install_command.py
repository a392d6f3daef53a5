"""Errors name a command that installs what is missing, from where Forerun itself was installed from."""

import json
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from forerun.core import install_command
from forerun.core.install_command import install_command as command

CHECKOUT = Path(install_command.__file__).parents[3]


@pytest.mark.parametrize(("origin", "expected"), [
    ({"url": "file:///a%20b/forerun", "dir_info": {"editable": True}}, "-e '/a b/forerun[serve]'"),
    ({"url": "file:///ab/forerun", "dir_info": {}}, "'/ab/forerun[serve]'"),
    ({"url": "https://host/forerun.git", "vcs_info": {"vcs": "git"}},
        "'forerun[serve] @ git+https://host/forerun.git'"),
    ({"url": "https://host/forerun.whl", "archive_info": {}}, "'forerun[serve] @ https://host/forerun.whl'"),
    (None, f"-e '{CHECKOUT}[serve]'"),
])  # fmt: skip
def test_extras_come_from_where_forerun_came_from(origin, expected, monkeypatch):
    written = None if origin is None else json.dumps(origin)
    monkeypatch.setattr(metadata, "distribution", lambda _: SimpleNamespace(read_text=lambda _: written))
    assert command("serve") == f"{sys.executable} -m pip install {expected}"
