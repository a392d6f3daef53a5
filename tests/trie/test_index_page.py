"""docs/trie.md: what it says the code prints is what the code prints, and it leaves no file of the index out."""

import doctest
import re
from pathlib import Path

import forerun.trie

PAGE = Path(__file__).parents[2] / "docs" / "trie.md"


def test_the_numbers_on_the_page_are_what_the_code_gives():
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 40
    assert result.failed == 0


def test_the_page_names_every_file_of_the_index_and_no_other():
    table = PAGE.read_text(encoding="utf-8").split("## Where everything is")[1]
    named = set(re.findall(r"`(\w+\.py)`", table))
    files = {path.name for path in Path(forerun.trie.__file__).parent.glob("*.py")}
    assert named == files - {"__init__.py"}


def test_what_the_page_links_is_there():
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert len(links) > 10
    assert [link for link in links if not (PAGE.parent / link).is_file()] == []
