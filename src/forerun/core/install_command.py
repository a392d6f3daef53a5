"""The command that installs optional parts of Forerun, which is on no package index."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


def install_command(extras: str) -> str:
    """Return the ``pip install`` of extras (``"serve,bench"``) from pip's recorded URL (PEP 610), or the checkout."""
    try:
        written = metadata.distribution("forerun").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        written = None
    checkout: dict[str, Any] = {"url": Path(__file__).parents[3].as_uri(), "dir_info": {"editable": True}}
    origin: dict[str, Any] = json.loads(written) if written else checkout
    url, vcs = str(origin["url"]), origin.get("vcs_info")
    url = f"{vcs['vcs']}+{url}" if vcs else url
    what = f"{unquote(urlsplit(url).path)}[{extras}]" if "dir_info" in origin else f"forerun[{extras}] @ {url}"
    editable = "-e " if origin.get("dir_info", {}).get("editable") else ""
    return f"{sys.executable} -m pip install {editable}'{what}'"
