"""The suites of the documentation are suites."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from finetune.evaluation.item_template import check_templates
from finetune.evaluation.suite import Suite
from finetune.recipe.yaml_loader import load_typed

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "docs" / "suites.md", ROOT / "eval" / "README.md")
EXAMPLES = [
    textwrap.dedent(block)
    for page in PAGES
    for block in re.findall(r"^[ ]*```yaml\n(.*?)^[ ]*```", page.read_text(), re.DOTALL | re.MULTILINE)
    if "suite: 1" in block
]


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_is_a_suite(number: int, tmp_path: Path) -> None:
    path = tmp_path / "example.yaml"
    path.write_text(EXAMPLES[number])
    suite = load_typed(path, Suite).value
    check_templates(suite.items, where=str(path))
    suite.score_functions()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 4
