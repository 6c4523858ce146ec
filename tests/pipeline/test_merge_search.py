"""A search over merges of two tiny runs: chosen on one side, confirmed once on the other, killed and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from finetune.errors import UserError
from finetune.paths import read_json
from finetune.pipeline import merge_search as module
from finetune.pipeline.merge_search import search_merges
from finetune.recipe.merge_search_loader import load_search
from finetune.report.merge_search import FILE_NAME

SEARCH = """\
merge_search: 1
name: both
base: tiny-model
parents:
  - {name: first, recipe: recipe.yaml}
  - {name: second, recipe: other.yaml}
candidates:
  - merge: merge/soup
    weights: [[1, 1], [3, 1]]
  - {merge: merge/task_sum, over: {parameters.lambda: [0.5]}}
suites: [suite.yaml, texts.yaml]
"""

OTHER = """\
extends: recipe.yaml
name: other
seed: 18
train: {learning_rate: 5e-3}
"""

TEXTS = """\
suite: 1
name: texts
role: forgetting
task: text
items: {jsonl: texts.jsonl}
scorers: [nll_per_token, kl_per_token]
primary_metric: nll_per_token
cluster: null
margin: 0.1
"""


@pytest.fixture
def search(project: Any) -> Any:
    (project.folder / "other.yaml").write_text(OTHER)
    (project.folder / "search.yaml").write_text(SEARCH)
    (project.folder / "texts.yaml").write_text(TEXTS)
    texts = [{"id": f"t{n}", "reference": f"a text with the number {n * 7}"} for n in range(8)]
    (project.folder / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))

    def made(*overrides: str) -> module.SearchOutcome:
        return search_merges(load_search(Path("search.yaml"), overrides), say=project.said.append)

    return made


def test_a_search_killed_in_the_middle_ends_as_if_it_was_not(
    search: Any, project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, built = module.merge_models, []

    def merge(loaded: Any, out: Path, **options: Any) -> Any:
        built.append(out)
        if len(built) == 2:
            raise KeyboardInterrupt
        return real(loaded, out, **options)

    monkeypatch.setattr(module, "merge_models", merge)
    with pytest.raises(KeyboardInterrupt):
        search("max_items=5")
    assert sum("has no finished run" in line for line in project.said) == 2
    runs = {path: path.read_bytes() for path in Path("runs").glob("*/eval/*/tuned*")}
    assert len(runs) == 4
    project.said.clear()
    done = search("max_items=5")
    assert all(path.read_bytes() == before for path, before in runs.items())  # a run's answers are only read
    assert not any("has no finished run" in line for line in project.said)
    assert len(built) == 5  # one before the kill, one killed, two left, the winner again
    assert built[1] == built[2] and built[0] not in built[1:]

    result = read_json(done.folder / "search.json")
    assert result == json.loads(json.dumps(done.result))
    kinds = [model["kind"] for model in result["models"]]
    assert kinds == ["base", "parent", "parent", "merge", "merge", "merge"]
    assert [model["name"] for model in result["models"][3:]] == [
        "soup 1:1",
        "soup 3:1",
        "task_sum lambda 0.5",
    ]
    assert all(model["weights_bytes"] > 0 for model in result["models"][3:])
    assert len(result["comparisons"]) == 3 * 2 * 3  # merges, suites, both parents and the base
    assert all(one["p_adjusted"] >= one["p_value"] for one in result["comparisons"])
    check_levels(result)

    n = {one["suite"]: one["n"] for one in result["comparisons"]}
    confirmation = result["confirmation"]
    assert n["texts"] == 4 and {
        one["n"] for one in confirmation["comparisons"] if one["suite"] == "texts"
    } == {4}
    assert [claim["against"] for claim in confirmation["claims"]] == list(
        result["choice"]["best_parent"].values()
    )
    assert done.exit_code == confirmation["exit_code"]
    left = sorted(path.relative_to(done.folder).as_posix() for path in done.folder.rglob("*.safetensors"))
    assert left == ["winner/model.safetensors"]
    page = (done.folder / FILE_NAME).read_text()
    assert "soup 3:1" in page and "task_sum lambda 0.5" in page

    monkeypatch.setattr(module, "merge_models", None)  # all is there: nothing is built, asked or chosen again
    again = search("max_items=5")
    assert not again.worked and again.result == done.result


def check_levels(result: dict[str, Any]) -> None:
    """What the models score on the texts is what their weights make of them."""
    # Adding half of both changes is the mean of both models.
    levels = {model["name"]: model["suites"]["texts"]["metrics"] for model in result["models"]}
    for metric in ("nll_per_token", "kl_per_token"):
        same = [levels[name][metric]["mean"] for name in ("soup 1:1", "task_sum lambda 0.5")]
        assert same[0] == pytest.approx(same[1], rel=1e-4)
    assert levels["base"]["kl_per_token"]["mean"] == 0.0
    assert levels["soup 3:1"]["kl_per_token"]["mean"] > 0.0 and levels["first"]["kl_per_token"]["mean"] > 0.0


def test_what_cannot_be_done_is_told_before_anything_is_trained(search: Any, project: Any) -> None:
    (project.folder / "suite.yaml").write_text(
        (project.folder / "suite.yaml").read_text().replace("split: test", "split: validation")
    )
    with pytest.raises(UserError, match="validation split, which chooses"):
        search()
    with pytest.raises(UserError, match="'digit' is no suite"):
        search("choose.best=[digit]")
    with pytest.raises(UserError, match="no mean: they differ in unit"):
        search("choose.best=[digits, texts]")
    assert not (project.folder / "runs" / "merges").exists()
    assert project.said == []
