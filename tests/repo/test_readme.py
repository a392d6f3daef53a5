"""The commands, code and links of the README and its pages work as they stand there."""

import re
import runpy
import shlex
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from forerun.cli import app

pytestmark = pytest.mark.usefixtures("called_again")
ROOT = Path(__file__).parents[2]
PAGES = [
    "README.md", "docs/install.md", "docs/python.md", "docs/command-line.md", "docs/drafters.md",
    "docs/long-contexts.md", "docs/lossless.md", "docs/benchmarks.md", "docs/how-it-works.md", "docs/decisions.md",
]  # fmt: skip
LINKING = sorted(str(page.relative_to(ROOT)) for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")))
"""Pages whose links are followed; commands and code of those that are no ``PAGES`` are tested elsewhere."""
README = (ROOT / "README.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings: lower case, no punctuation, hyphens for spaces."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_fits_on_a_screen():
    assert len(README.splitlines()) <= 80


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_python_blocks_run_one_after_another(page, capsys):
    scope: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), scope)
    assert len(capsys.readouterr().out.strip()) > 50


LONG = ("forerun audit", "forerun bench")
"""What these do is tested on tiny models each time, and on the bundled one by ``make matrix``."""
WORDS = 18000
"""Of all pages in docs together."""
LINES = {line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line}


def marked(line: str) -> Any:
    return pytest.param(line, marks=[pytest.mark.matrix] * line.startswith(LONG))


@pytest.mark.parametrize("line", [marked(line) for line in sorted(LINES)])
def test_commands_run(line, monkeypatch):
    command = shlex.split(line)
    assert command[0] == "forerun"
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, command[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


@pytest.mark.parametrize("page", LINKING)
def test_links_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
    for image in re.findall(r'<img src="([^"]+)"', path.read_text()):
        assert (path.parent / image).is_file(), image


def test_the_docs_are_short_enough_to_be_read():
    words = {page.name: len(page.read_text().split()) for page in (ROOT / "docs").glob("*.md")}
    assert words["decisions.md"] <= 4000
    assert sum(words.values()) <= WORDS, sorted(words.items())


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_print_what_they_say(example, capsys):
    said = runpy.run_path(str(example), run_name="__main__")["__doc__"]
    _, expected = said.split("It prints:\n\n")
    assert capsys.readouterr().out.strip("\n") == textwrap.dedent(expected).strip("\n")


def test_the_readme_s_example_prints_what_stands_below_it(capsys):
    (code,), (expected,) = blocks("README.md", "python"), blocks("README.md", "text")
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == expected


def test_make_targets_that_the_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"^    make (\w+)", README, re.MULTILINE) + re.findall(r"`make (\w+)", README)
    assert named[:2] == ["demo", "test"]
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    ("page", "marker"),
    [("README.md", "bench"), ("docs/benchmarks.md", "long"), ("docs/benchmarks.md", "how-much-slower")],
)
def test_each_table_has_its_place(page, marker):
    text = (ROOT / page).read_text()
    assert re.search(rf"<!-- {marker}:begin -->\n\n\|.*\|\n\n<!-- {marker}:end -->", text, re.DOTALL)
