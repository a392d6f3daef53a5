"""Pages, docstrings and comments avoid our old private language: no phrase of ``PHRASES`` comes back.

Pages have none. ``words.txt`` says how many each folder of the package still has; its counts can only shrink:

    python tests/repo/test_words.py    # list the phrases, and lower the counts
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "forerun"
EXCEPTIONS = Path(__file__).with_name("words.txt")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *PACKAGE.rglob("*.md")])
PHRASES = {
    r"\bbehind\b(?! (a proxy|\[?Ray Serve))": "after", r"\b(takes?|took) (so|as) (long|much time)\b": "costs",
    r"\b(are|be|is|was|were) asked\b": "propose; name who does what",
    r"\bg(ave|ives?) (\S+ )?tokens\b": "yields", r"\brests\b(?! on)": "skips drafting",
    r"\bbeg(an|ins?) (alike|like)\b": "shares a prefix", r"\bof (its|their) own\b": "private, separate, per-request",
    r"\bweights as stored\b": "quantised weights", r"\b(reading|reads?) (a|the|their) prompts?\b": "prefill",
    r"\bprompts? (are|is|was|were) read\b": "prefill", r"\b(was|were) right\b": "accepted, rejected",
    r"\bnobody\b": "name the subject", r"\bdear(er|est)?\b": "expensive",
    r"\bforeseen?\b|\bforesees\b": "predict, estimate", r"\bwhat came of\b": "the result of",
    r"\b(texts?|prompts?|prefix(es)?) (that (are|is|was|were) )?read once\b": "prefilled once",
    r"\bhow long the end was seen\b": "the length of the known suffix",
    r"\bput the other way\b|\bas a rule,": "leave it out",
    r"\bl(ies|ay)\b": "is, is stored", r"\bsettle[sd]?\b": "synchronise, fit", r"\bif need be\b": "if necessary",
    r"\b(begin|start)s? anew\b": "start again", r"\ba second and core\b": "per second and core",
}  # fmt: skip
"""What must not come back, and what to say instead; see the field's words in docs/how-it-works.md."""
OPENING = {r"^The same\b": "say what it does"}
"""What must not open a docstring."""


def phrases(text: str, found: dict[str, str]) -> Iterator[str]:
    for pattern, instead in found.items():
        for match in re.finditer(pattern, text, re.IGNORECASE):
            yield f"{' '.join(text[max(0, match.start() - 30) : match.end() + 20].split())!r}: {instead}"


def in_page(page: Path) -> list[str]:
    """Phrases of a page, without its code."""
    prose = re.sub(r"```.*?```|`[^`\n]*`|\]\([^)]*\)", " ", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return list(phrases(re.sub(r"\s+", " ", prose), PHRASES))


def in_module(path: Path) -> list[str]:
    """Phrases of a module's docstrings and comments."""
    source, found = path.read_text(encoding="utf-8"), list[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            said = " ".join(node.value.value.split())
            found += [f"{node.lineno}: {each}" for each in (*phrases(said, PHRASES), *phrases(said, OPENING))]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            found += [f"{token.start[0]}: {each}" for each in phrases(token.string, PHRASES)]
    return found


def folder(path: Path) -> str:
    """The part of the package that a module is in: a folder of the first level."""
    inside = path.relative_to(PACKAGE).parts
    return f"src/forerun/{inside[0]}" if len(inside) > 1 else "src/forerun"


def places() -> dict[str, list[str]]:
    """All phrases in the package by folder, with file and line."""
    found: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        found.setdefault(folder(path), []).extend(f"{path.relative_to(ROOT)}:{each}" for each in in_module(path))
    return found


def allowed() -> Counter[str]:
    """The counts of ``words.txt``."""
    lines = (line.rpartition(": ") for line in EXCEPTIONS.read_text(encoding="utf-8").splitlines() if line)
    return Counter({name: int(count) for name, _, count in lines})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_phrase_that_must_not_come_back(page):
    assert in_page(page) == []


def test_docstrings_and_comments_have_no_more_such_phrases_than_before():
    limits = allowed()
    assert {name: found for name, found in places().items() if len(found) > limits[name]} == {}


def lower() -> None:
    """Print all places, and write the counts that are lower now."""
    known, found = (allowed() if EXCEPTIONS.exists() else None), places()
    sys.stdout.writelines(f"{place}\n" for each in found.values() for place in each)
    counts = {name: len(each) if known is None else min(len(each), known[name]) for name, each in found.items()}
    EXCEPTIONS.write_text("".join(f"{name}: {count}\n" for name, count in sorted(counts.items()) if count))


if __name__ == "__main__":
    lower()
