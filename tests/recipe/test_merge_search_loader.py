"""Searches over merges: what is written out, and every fault before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest

from finetune.errors import UserError
from finetune.paths import find_declarative, shipped_names
from finetune.recipe.merge_search_loader import LoadedSearch, load_search

SEARCH = """\
merge_search: 1
name: two
base: base-model
parents:
  - {name: one, model: models/one}
  - {name: two, model: models/two}
candidates:
  - merge: merge/soup
    weights: [[1, 1], [0.25, 0.75]]
  - merge: merge/ties
    over: {parameters.density: [0.2, 0.4], parameters.lambda: [1]}
suites: [general]
"""


def load(tmp_path: Path, text: str = SEARCH, *overrides: str) -> LoadedSearch:
    path = tmp_path / "search.yaml"
    path.write_text(text)
    return load_search(path, overrides)


def faults(tmp_path: Path, old: str, new: str) -> str:
    assert old in SEARCH
    with pytest.raises(UserError) as caught:
        load(tmp_path, SEARCH.replace(old, new))
    return str(caught.value)


def test_every_list_of_weights_and_every_point_of_the_grid_is_a_candidate(tmp_path: Path) -> None:
    candidates = load(tmp_path).candidates
    assert [one.name for one in candidates] == [
        "soup 1:1",
        "soup 0.25:0.75",
        "ties density 0.2 lambda 1",
        "ties density 0.4 lambda 1",
    ]
    soup = candidates[1].load("b", ["x", "y"]).recipe
    assert soup.base_model == "b" and soup.models is not None
    assert [(one.model, one.parameters.weight) for one in soup.models] == [("x", 0.25), ("y", 0.75)]
    assert candidates[3].load("b", ["x", "y"]).recipe.parameters.density == 0.4


def test_the_written_type_holds_for_every_candidate(tmp_path: Path) -> None:
    loaded = load(tmp_path, SEARCH, "dtype=fp32")
    assert {one.load("b", ["x", "y"]).recipe.dtype for one in loaded.candidates} == {"fp32"}


def test_slerp_runs_from_the_base_to_one_parent_or_from_parent_to_parent(tmp_path: Path) -> None:
    text = SEARCH[: SEARCH.index("candidates:")] + "candidates: [{merge: merge/slerp}]\nsuites: [general]\n"
    (slerp,) = load(tmp_path, text).candidates
    between = slerp.load("b", ["x", "y"]).recipe
    assert (between.base_model, [one.model for one in between.models or []]) == ("x", ["y"])
    alone = slerp.load("b", ["x"]).recipe
    assert (alone.base_model, [one.model for one in alone.models or []]) == ("b", ["x"])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[0.25, 0.75]", "[1, 2, 3]", "3 weights [1.0, 2.0, 3.0] for 2 parents"),
        ("merge/ties", "merge/tys", "no such file or shipped merges entry: 'merge/tys'"),
        (
            "parameters.density: [0.2, 0.4]",
            "parameters.density: [0.2, 4]",
            "every value must lie between 0 and 1",
        ),
        ("parameters.density", "parameters.t", "ties does not read 't'"),
        ("parameters.density", "parameters.densty", "did you mean 'density'"),
        ("[[1, 1], [0.25, 0.75]]", "[[1, 1], [1, 1]]", "'soup 1:1' stands in the recipe twice"),
        ("name: two, model", "name: one, model", "two parents are called 'one'"),
        ("name: two, model", "name: base, model", "'base' is what the untuned model is called"),
        ("model: models/two", "model: models/two, recipe: sft/home_intents_lora", "one of recipe and model"),
        (
            "suites: [general]",
            "suites: [general]\nconfirm: [{suite: general, against: three}]",
            "'three' is neither",
        ),
        ("[0.2, 0.4]", str([n / 100 for n in range(1, 80)]), "81 candidates, at most 64"),
        ("suites: [general]", "suites: [general]\nchose: {}", "did you mean 'choose'"),
    ],
)
def test_faults_are_told_with_their_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert said in faults(tmp_path, old, new)


def test_a_merge_that_would_be_asked_in_other_tokens_is_refused(tmp_path: Path) -> None:
    (tmp_path / "union.yaml").write_text("merge: 1\nmerge_method: linear\ntokenizer_source: union\n")
    assert "changes the tokenizer" in faults(tmp_path, "merge/soup", "union.yaml")


def test_every_shipped_search_can_be_done() -> None:
    names = shipped_names("searches")
    assert {"merge/home_intents_average", "merge/home_intents_languages"} <= set(names)
    assert not set(names) & {*shipped_names("merges"), *shipped_names("recipes")}
    for name in names:
        assert load_search(find_declarative("searches", name)).candidates
