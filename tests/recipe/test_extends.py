"""`extends`: a recipe holds only what differs from another; values and faults keep the place where they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.cli.main import main
from finetune.errors import Fault, UserError
from finetune.paths import shipped_names, shipped_root
from finetune.recipe.explain import diff_recipes, explain
from finetune.recipe.resolve import load_recipe, profiles_of, read_recipe, recipe_digest, resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_loader import read_tree

from .conftest import VALID, Write

BASE = """\
name: the_base
description: Words of the base.
seed: 5
model:
  id: builtin:smollm2-135m-instruct
  quantize: nf4
adapter:
  rank: 8
  target_modules: [q_proj, v_proj]
data:
  spec: home_intents
train:
  epochs: 3
  max_steps: 40
eval:
  suites: [home_intents, general]
profiles:
  smoke:
    train.epochs: 1
    eval.max_items: 8
"""


def faults_of(path: Path, *overrides: str) -> list[Fault]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return list(caught.value.faults)


@pytest.fixture
def base(write: Write) -> Path:
    return write(BASE, "base.yaml")


def test_mappings_merge_and_all_else_replaces(write: Write, base: Path) -> None:
    recipe = load_recipe(
        write(
            "extends: base.yaml\nadapter: {kind: dora, target_modules: [o_proj]}\n"
            "train: {max_steps: null}\neval: {suites: [general]}\n"
        )
    )
    assert (recipe.seed, recipe.model.quantize) == (5, "nf4")
    assert (recipe.adapter.kind, recipe.adapter.rank, recipe.adapter.target_modules) == (
        "dora",
        8,
        ["o_proj"],
    )
    assert (recipe.train.epochs, recipe.train.max_steps) == (3.0, None)
    assert recipe.eval.suites == ["general"]


def test_the_resolved_recipe_is_that_of_the_text_in_full(write: Write, base: Path) -> None:
    short = load_recipe(write("extends: base.yaml\nadapter: {kind: dora}\ndescription: Mine.\n", "job.yaml"))
    full = BASE.replace("the_base", "job").replace("Words of the base.", "Mine.")
    long = load_recipe(write(full.replace("rank: 8", "rank: 8\n  kind: dora"), "long.yaml"))
    assert type(short) is Recipe
    assert short == long
    assert resolved_yaml(short) == resolved_yaml(long)
    assert recipe_digest(short) == recipe_digest(long)
    assert "extends" not in resolved_yaml(short)
    assert load_recipe(write(resolved_yaml(short), "resolved.yaml")) == short


def test_name_and_description_are_not_taken_over(write: Write, base: Path) -> None:
    recipe = load_recipe(write("extends: base.yaml\n", "mine.v2.yaml"))
    assert (recipe.name, recipe.description) == ("mine.v2", "")
    named = load_recipe(write("extends: base.yaml\nname: other\ndescription: Own words.\n"))
    assert (named.name, named.description) == ("other", "Own words.")


def test_an_empty_section_changes_nothing_and_null_takes_the_defaults(write: Write, base: Path) -> None:
    assert load_recipe(write("extends: base.yaml\nadapter:\n")).adapter.rank == 8
    assert load_recipe(write("extends: base.yaml\nadapter: null\n")).adapter.rank == 32
    assert profiles_of(write("extends: base.yaml\nprofiles:\n")) == ["smoke"]


def test_a_chain(write: Write, base: Path) -> None:
    write("extends: base.yaml\nname: middle\nseed: 6\nadapter: {rank: 16}\n", "middle.yaml")
    recipe = load_recipe(write("extends: middle\nadapter: {alpha: 2}\n", "top.yaml"))
    assert (recipe.name, recipe.seed) == ("top", 6)
    assert (recipe.adapter.rank, recipe.adapter.alpha, recipe.train.epochs) == (16, 2.0, 3.0)
    assert recipe.adapter.target_modules == ["q_proj", "v_proj"]


def test_a_long_chain_is_no_matter_of_depth(write: Write, base: Path) -> None:
    write("extends: base.yaml\n", "r0.yaml")
    for n in range(1, 1200):
        Path(f"r{n}.yaml").write_text(f"extends: r{n - 1}.yaml\n")
    assert load_recipe("r1199.yaml").seed == 5


def test_profiles_merge_by_name_and_by_key(write: Write, base: Path) -> None:
    path = write(
        "extends: base.yaml\nprofiles:\n  smoke: {train: {epochs: 2}, seed: 9}\n  long: {train.epochs: 30}\n"
    )
    assert profiles_of(path) == ["smoke", "long"]
    smoke = load_recipe(path, ["profile=smoke"])
    assert (smoke.train.epochs, smoke.eval.max_items, smoke.seed) == (2.0, 8, 9)
    assert load_recipe(path, ["profile=long", "seed=1"]).train.epochs == 30.0


def test_a_profile_chosen_by_the_base_stays_chosen_until_replaced(write: Write) -> None:
    write(BASE + "profile: smoke\n", "base.yaml")
    assert load_recipe(write("extends: base.yaml\n")).train.epochs == 1.0
    assert load_recipe(write("extends: base.yaml\nprofile: null\n")).train.epochs == 3.0


def test_the_base_is_found_from_the_file_and_not_from_the_working_folder(write: Write) -> None:
    Path("sub").mkdir()
    write(BASE.replace("seed: 5", "seed: 1"), "base.yaml")
    write(BASE.replace("seed: 5", "seed: 2"), "sub/base.yaml")
    assert load_recipe(write("extends: base.yaml\n", "sub/job.yaml")).seed == 2
    Path("sub/base.yaml").unlink()
    (fault,) = faults_of(Path("sub/job.yaml"))
    assert fault.where == "sub/job.yaml:1:10"
    assert load_recipe(write("extends: ../base\n", "sub/job.yaml")).seed == 1
    absolute = json.dumps(str(Path("base.yaml").resolve()))
    assert load_recipe(write(f"extends: {absolute}\n", "sub/job.yaml")).seed == 1


def test_a_shipped_recipe_is_a_base_by_name(write: Write) -> None:
    recipe = load_recipe(write("extends: sft/home_intents_lora\nseed: 3\n"))
    shipped = load_recipe("sft/home_intents_lora")
    assert {row.key for row in diff_recipes(shipped, recipe)} == {"name", "description", "seed"}


def test_null_extends_nothing(write: Write) -> None:
    assert load_recipe(write(VALID + "extends: null\n")) == load_recipe(write(VALID))


@pytest.mark.parametrize(
    ("text", "told"),
    [("[base.yaml]", "a list"), ("{a: b}", "a mapping"), ("true", "true")],
)
def test_a_base_must_be_text(write: Write, base: Path, text: str, told: str) -> None:
    (fault,) = faults_of(write(f"{VALID}extends: {text}\n"))
    assert fault.where == "job.yaml:7:10"
    assert fault.what == f"'extends' must be text or null, not {told}"
    write(f"extends: {text}\n" + BASE, "middle.yaml")
    assert [fault.where for fault in faults_of(write("extends: middle.yaml\n"))] == ["middle.yaml:1:10"]


def test_an_absent_base_names_the_nearest_and_hides_no_other_fault(write: Write) -> None:
    text = "seed: x\nextends: sft/home_intents_lroa\nprofile: smoke\nmodel: {qantize: nf4}\n"
    found = {fault.where: fault for fault in faults_of(write(text))}
    assert set(found) == {"job.yaml:2:10", "job.yaml:1:7", "job.yaml:4:9"}
    assert found["job.yaml:2:10"].what == "no such file or shipped recipes entry: 'sft/home_intents_lroa'"
    assert found["job.yaml:2:10"].fix == "did you mean 'sft/home_intents_lora'?"


def test_an_absent_base_of_a_base_stands_in_the_base(write: Write) -> None:
    write("seed: 1\nextends: gone.yaml\n", "middle.yaml")
    (fault,) = faults_of(write("extends: middle.yaml\n"))
    assert fault.where == "middle.yaml:2:10"


def test_a_recipe_cannot_extend_itself(write: Write) -> None:
    (fault,) = faults_of(write("extends: job.yaml\n"))
    assert (fault.where, fault.what) == ("job.yaml:1:10", "a recipe cannot extend itself")
    (fault,) = faults_of(write("extends: ../" + Path.cwd().name + "/job\n"))
    assert fault.what == "a recipe cannot extend itself"


def test_a_circle_is_told_with_its_members_where_it_closes(write: Write) -> None:
    write("extends: c.yaml\n", "b.yaml")
    write("extends: b.yaml\n", "c.yaml")
    (fault,) = faults_of(write("extends: b.yaml\n", "a.yaml"))
    assert fault.where == "c.yaml:1:10"
    assert fault.what == "recipes extend one another in a circle: b.yaml -> c.yaml -> b.yaml"
    assert fault.fix


def test_faults_point_to_the_file_that_wrote_the_value(write: Write) -> None:
    write(BASE.replace("rank: 8", "rank: 0").replace("epochs: 3", "epochs: x"), "base.yaml")
    found = faults_of(write("extends: base.yaml\ntrain:\n  epcohs: 4\nmodel: {dtype: fp8}\n"))
    assert [fault.where for fault in found] == [
        "base.yaml:8:9",
        "base.yaml:13:11",
        "job.yaml:3:3",
        "job.yaml:4:16",
    ]


def test_a_replaced_value_of_the_base_is_no_fault(write: Write) -> None:
    write(BASE.replace("rank: 8", "rank: 0"), "base.yaml")
    assert load_recipe(write("extends: base.yaml\nadapter: {rank: 4}\n")).adapter.rank == 4


def test_faults_of_the_texts_of_both_files_come_together(write: Write) -> None:
    write(BASE + "seed: 6\n", "base.yaml")
    found = faults_of(write("extends: base.yaml\ntrain: {epochs: 1}\ntrain: {epochs: 2}\n"))
    assert {(fault.where, fault.what) for fault in found} == {
        ("base.yaml:21:1", "duplicate key 'seed'"),
        ("job.yaml:3:1", "duplicate key 'train'"),
    }


def test_a_base_that_is_no_yaml_is_placed_in_the_base(write: Write) -> None:
    write("model: [\n", "base.yaml")
    where = [fault.where for fault in faults_of(write("extends: base.yaml\n"))]
    assert where == ["base.yaml:2:1"]
    write("", "base.yaml")
    assert [fault.what for fault in faults_of(write("extends: base.yaml\n"))] == ["the file is empty"]


def test_what_no_file_of_the_chain_holds_is_missing_in_the_extending_file(write: Write) -> None:
    write("model: {revision: x}\neval: {suites: [a]}\n", "base.yaml")
    found = faults_of(write("# a remark\nextends: base.yaml\neval:\n  against: few_shot\n"))
    assert {(fault.where, fault.what) for fault in found} == {
        ("base.yaml:1:8", "missing key 'model.id'"),
        ("job.yaml:2:1", "missing key 'data'"),
    }


def test_a_rule_between_keys_is_broken_where_the_extending_file_breaks_it(write: Write, base: Path) -> None:
    (fault,) = faults_of(write("extends: base.yaml\nadapter:\n  kind: none\n"))
    assert fault.where == "job.yaml:3:9"
    assert fault.what == "'adapter.kind': quantized weights (nf4) cannot be tuned in full"
    (fault,) = faults_of(write("extends: base.yaml\neval:\n  baselines: [zero_shot]\n"))
    assert fault.where == "job.yaml:3:3"


def test_faults_of_an_inherited_profile_stand_in_the_base(write: Write) -> None:
    write(BASE + "  long:\n    train.epcohs: 9\n    extends: x\n", "base.yaml")
    found = {fault.where: fault for fault in faults_of(write("extends: base.yaml\n"))}
    assert found["base.yaml:22:5"].fix == "did you mean 'epochs'?"
    assert found["base.yaml:23:5"].what == "a profile cannot set 'extends'"


def test_a_flag_cannot_change_the_base(write: Write, base: Path) -> None:
    (fault,) = faults_of(write("extends: base.yaml\n"), "extends=other.yaml")
    assert (fault.where, fault.what) == ("--set extends=other.yaml", "--set cannot change 'extends'")


@pytest.mark.parametrize("word", ["extend", "exteds", "base", "inherits", "_base_"])
def test_other_words_for_it_lead_to_the_key(write: Write, word: str) -> None:
    (fault,) = faults_of(write(f"{VALID}{word}: sft/home_intents_lora\n"))
    assert "'extends'" in fault.fix


def test_inside_a_section_it_is_sent_to_the_top(write: Write) -> None:
    (fault,) = faults_of(write(VALID + "train: {extends: x}\n"))
    assert fault.fix == "did you mean 'extends' (at the top of the file)?"


def test_origins_tell_which_file(write: Write, base: Path) -> None:
    path = write("extends: base.yaml\nadapter: {alpha: 3}\nprofiles: {smoke: {seed: 2}}\n")
    rows = {row.key: (row.value, row.origin) for row in explain(path, ["profile=smoke"])}
    assert rows["adapter.rank"] == (8, "base.yaml:8")
    assert rows["adapter.alpha"] == (3.0, "job.yaml:2")
    assert rows["adapter.dropout"] == (0.0, "default")
    assert rows["train.epochs"] == (1.0, "profile smoke (base.yaml:19)")
    assert rows["seed"] == (2, "profile smoke (job.yaml:3)")
    assert rows["name"] == ("job", "default")
    assert "extends" not in rows


def test_show_tells_the_file_of_each_value(
    write: Write, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write("extends: base.yaml\nseed: 8\n")
    with pytest.raises(SystemExit):
        main(["recipe", "show", str(path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    origins = {row["key"]: row["origin"] for row in answer["values"]}
    assert (origins["seed"], origins["adapter.rank"]) == ("job.yaml:2", "base.yaml:8")
    assert answer["profiles"] == ["smoke"]


def test_relative_paths_start_from_the_file_that_writes_them(
    write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("shared").mkdir()
    Path("own").mkdir()
    write('name: rows\nsource: {kind: jsonl, files: ["rows.jsonl"]}\n', "shared/rows.yaml")
    suite = "suite: 1\nname: suite\ndescription: d\nitems: {spec: ../shared/rows.yaml}\n"
    write(suite + "scorers: [exact_match]\nprimary_metric: exact_match\n", "own/suite.yaml")
    write(VALID.replace("spec: home_intents", "spec: rows.yaml"), "shared/base.yaml")
    path = write("extends: ../shared/base.yaml\neval: {suites: [suite.yaml]}\n", "own/job.yaml")
    loaded = read_recipe(path)
    assert loaded.folder("data.spec").resolve() == Path("shared").resolve()
    assert loaded.folder("eval.suites").resolve() == Path("own").resolve()
    assert loaded.folder("train.epochs").resolve() == Path("own").resolve()
    with pytest.raises(SystemExit) as done:
        main(["recipe", "validate", str(path)])
    assert done.value.code == 0, capsys.readouterr().err


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 9), st.sampled_from(["lora", "dora", "nf4", "x"])),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text("ab", max_size=1), inner)),
    max_leaves=4,
)
KEYS = ["seed", "adapter", "train", "profiles", "profile", "extends", "model", "eval"]
trees = st.dictionaries(
    st.sampled_from(KEYS),
    st.one_of(values, st.dictionaries(st.sampled_from(["rank", "kind", "epochs", "id"]), values)),
)


@given(below=trees, above=trees)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_two_files_give_a_recipe_or_placed_faults(
    write: Write, below: dict[str, Any], above: dict[str, Any]
) -> None:
    whole = {"model": {"id": "x"}, "data": {"spec": "x"}, "eval": {"suites": ["x"]}}
    write(json.dumps(whole | below), "base.yaml")
    path = write(json.dumps({"extends": "base.yaml"} | above))
    try:
        recipe = load_recipe(path)
    except UserError as error:
        assert error.faults
        assert all(fault.what and fault.where for fault in error.faults)
    else:
        assert load_recipe(write(resolved_yaml(recipe), "resolved.yaml")) == recipe


def test_no_shipped_recipe_repeats_what_it_extends() -> None:
    """A value written again goes stale in silence when the base changes."""
    for name in shipped_names("recipes"):
        root, _ = read_tree(shipped_root() / "recipes" / f"{name}.yaml")
        if "extends" not in root.entries:
            continue
        written = {key for key in read_recipe(name).origins if key in _own_keys(name)}
        repeated = written - {row.key for row in diff_recipes(_base_of(name), load_recipe(name))}
        assert not repeated, f"{name} repeats {sorted(repeated)}"


def _own_keys(name: str) -> set[str]:
    loaded = read_recipe(name)
    return {key for key, origin in loaded.origins.items() if Path(origin.label).stem == loaded.path.stem}


def _base_of(name: str) -> Recipe:
    path = shipped_root() / "recipes" / f"{name}.yaml"
    root, _ = read_tree(path)
    extends = root.entries["extends"].node
    return load_recipe(path.parent / extends.text)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("sft/home_intents_qlora", "model.quantize", "nf4"),
        ("sft/home_intents_dora", "adapter.kind", "dora"),
    ],
)
def test_the_shipped_variants_differ_in_one_key(name: str, key: str, value: str) -> None:
    left, right = load_recipe("sft/home_intents_lora"), load_recipe(name)
    rows = {row.key: row.right for row in diff_recipes(left, right)}
    assert set(rows) == {"name", "description", key}
    assert rows[key] == value
    assert right.description
    assert right.name == name.rpartition("/")[2]
    assert profiles_of(name) == profiles_of("sft/home_intents_lora")
