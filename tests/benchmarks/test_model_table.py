"""The committed page of models: every family that the tests build, by the path that a fresh look finds."""

import pytest
from support.model_trials import look, refusals, variants

from benchmarks.studies.models import COLUMNS, PAGE, REFUSED_HEAD, TRIALS, Row, merged
from forerun.kernels.runtime import vector_ir


def read(text: str) -> tuple[list[Row], dict[str, str]]:
    """Return the page's rows, and the reasons of what is refused."""
    tables = []
    for part in text.split(REFUSED_HEAD):
        lines = [line for line in part.splitlines() if line.startswith("| ")]
        tables.append([[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]])
    return [dict(zip(COLUMNS, cells, strict=True)) for cells in tables[0]], {each[0]: each[1] for each in tables[1]}


ROWS, REFUSED = read(PAGE.read_text(encoding="utf-8"))


@pytest.mark.skipif(not vector_ir.fused(), reason="the processor has no fused multiply-add")
def test_the_page_names_every_family_and_its_path():
    nothing = dict.fromkeys(TRIALS, "-")
    fresh = merged([{"name": variant.name, **look(variant), **nothing} for variant in variants()])
    shown = ("type", "shapes", "path", "gpu", "own", "also")
    assert [[row[name] for name in shown] for row in ROWS] == [[row[name] for name in shown] for row in fresh]


def test_the_page_says_why_models_are_refused():
    assert refusals() == REFUSED
    assert "not refused" not in REFUSED.values()


def test_everything_on_the_page_is_equal_or_refused_by_name():
    for row in ROWS:
        assert {row["trie"], row["draft model"]} == {"equal"}
        assert {row["float32"], row["bfloat16"]} <= {"bitwise", "rounding"}
        for name in ("store", "offload"):
            assert {result.split(": ")[-1] for result in row[name].split("; ")} <= {"equal", "-", "refused"}
