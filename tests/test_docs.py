"""What the documents promise exists: tests that they name, files that they link, commands that they show."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])


def names_of(file: Path) -> set[str]:
    return {node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page):
    missing = [f"{file}::{name}" for file, name in re.findall(r"(tests/\w+\.py)::(\w+)", page.read_text())
               if not (ROOT / file).is_file() or name not in names_of(ROOT / file)]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_files_exist(page):
    named = set(re.findall(r"`((?:jaxmeg|scripts|tests|configs|docs|tpu_gpu_setup)/[\w./-]+)`", page.read_text()))
    assert [name for name in sorted(named) if not list(ROOT.glob(f"{name.rstrip('/')}*"))] == []


def test_the_cases_that_are_answered_for_are_all_there():
    text = (ROOT / "docs" / "cases.md").read_text()
    wanted = [1, 3, 4, 5, 7, 8, 9, *range(10, 17), 17, 19, 20, 21, 22, 24, 25, 26, 28, 29, 30, 32, 33, 34, 35, 37, 38, 40, 42, 43, 44, 45,
              46, 47, *range(50, 57), 81, 84, 85, 86, *range(87, 97)]
    for number in wanted:
        [row] = re.findall(rf"^\| P{number:02} \|.*$", text, re.MULTILINE)
        assert "::" in row or "not yet:" in row, row
