"""`--set` and profiles: what they set, in which order, and what they refuse."""

from __future__ import annotations

import pytest

from finetune.errors import UserError
from finetune.recipe.explain import explain
from finetune.recipe.resolve import load_recipe, profiles_of

from .conftest import VALID, Faults, Write

PROFILES = """\
train:
  epochs: 3
  max_steps: 7
profiles:
  smoke:
    train.epochs: 1
    data.max_train_rows: 64
    name: 007
  long:
    train: {epochs: 9, report_to: [wandb]}
"""


@pytest.mark.parametrize(
    ("argument", "section", "key", "value"),
    [
        ("train.learning_rate=1e-4", "train", "learning_rate", 1e-4),
        ("train.learning_rate = 1E-4", "train", "learning_rate", 1e-4),
        ("train.max_steps=null", "train", "max_steps", None),
        ("train.max_steps=", "train", "max_steps", None),
        ("train.packing=false", "train", "packing", False),
        ("data.spec=my data", "data", "spec", "my data"),
        ("data.spec=a=b", "data", "spec", "a=b"),
        ("eval.suites=[a, b]", "eval", "suites", ["a", "b"]),
        ("adapter.target_modules=[q_proj]", "adapter", "target_modules", ["q_proj"]),
        ("model.revision=1234567", "model", "revision", "1234567"),
        ('data.spec="x: y"', "data", "spec", "x: y"),
    ],
)
def test_a_value_follows_yaml(write: Write, argument: str, section: str, key: str, value: object) -> None:
    recipe = load_recipe(write(VALID + "train: {max_steps: 5}\n"), [argument])
    assert getattr(getattr(recipe, section), key) == value


def test_the_last_of_two_counts(write: Write) -> None:
    assert load_recipe(write(), ["seed=1", "seed=2"]).seed == 2


def test_a_mapping_changes_only_what_it_names_and_a_list_replaces(write: Write) -> None:
    recipe = load_recipe(write(VALID + PROFILES), ["train={epochs: 1}", "eval.suites=[other]"])
    assert (recipe.train.epochs, recipe.train.max_steps) == (1.0, 7)
    assert recipe.eval.suites == ["other"]


def test_a_flag_gives_what_the_file_leaves_open(write: Write) -> None:
    text = (
        VALID.replace("  spec: home_intents", "  max_tokens: 64") + "profiles: {smoke: {train.epochs: 1}}\n"
    )
    assert load_recipe(write(text), ["data.spec=x"]).data.spec == "x"


@pytest.mark.parametrize(
    ("argument", "what", "fix"),
    [
        ("train.lerning_rate=1", "unknown key 'train.lerning_rate'", "did you mean 'learning_rate'?"),
        ("trian.epochs=1", "unknown key 'trian'", "did you mean 'train'?"),
        ("epochs=1", "unknown key 'epochs'", "did you mean 'train.epochs'"),
        ("lora_r=8", "unknown key 'lora_r'", "did you mean 'adapter.rank'"),
        ("seed.x=1", "'seed' must be a whole number, not a mapping", ""),
        ("train=1", "'train' must be a section, not 1", ""),
        ("seed=1.5", "'seed' must be a whole number, not 1.5", "without fraction"),
        ("seed=[1", "not valid YAML", "brackets"),
        ("train.epochs", "'train.epochs' is not of the form key=value", "--set train.learning_rate=1e-4"),
        ("=1", "'=1' is not of the form key=value", "--set"),
        ("train..epochs=1", "is not of the form key=value", "--set"),
        ("profile=smok", "unknown profile 'smok'", "did you mean 'smoke'?"),
        ("profile=xyz", "unknown profile 'xyz'", "known: long, smoke"),
    ],
)
def test_a_fault_names_the_whole_argument(faults: Faults, argument: str, what: str, fix: str) -> None:
    (fault,) = faults(VALID + PROFILES, argument)
    assert fault.where == f"--set {argument}"
    assert what in fault.what
    assert fix in fault.fix


def test_a_profile_lies_between_the_file_and_the_flags(write: Write) -> None:
    path = write(VALID + PROFILES)
    recipe = load_recipe(path, ["data.max_train_rows=8", "profile=smoke"])
    assert (recipe.train.epochs, recipe.train.max_steps, recipe.data.max_train_rows) == (1.0, 7, 8)
    assert (recipe.profile, recipe.profiles) == ("smoke", {"smoke": {}})
    assert recipe.name == "007"
    assert profiles_of(path) == ["smoke", "long"]


def test_nested_entries_of_a_profile(write: Write) -> None:
    recipe = load_recipe(write(VALID + PROFILES), ["profile=long"])
    assert (recipe.train.epochs, recipe.train.report_to, recipe.train.max_steps) == (9.0, ["wandb"], 7)


def test_a_file_may_choose_its_profile_and_a_flag_may_drop_it(write: Write) -> None:
    path = write(VALID + PROFILES + "profile: smoke\n")
    assert load_recipe(path).train.epochs == 1.0
    dropped = load_recipe(path, ["profile=null"])
    assert (dropped.train.epochs, dropped.profile, dropped.profiles) == (3.0, None, {})


def test_profiles_are_checked_even_when_unused(faults: Faults) -> None:
    text = (
        VALID
        + PROFILES
        + """\
  broken:
    train.epcohs: 1
    train.epochs: fast
    adapter.rank: 0
    profile: smoke
    profiles.x: 1
    train..epochs: 1
    eval.baselines: [zero_shot]
"""
    )
    found = faults(text)
    assert [fault.where for fault in found] == [
        f"job.yaml:{place}" for place in ("18:5", "19:19", "20:19", "21:5", "22:5", "23:5", "24:21")
    ]
    assert [fault.what for fault in found][3:6] == [
        "a profile cannot set 'profile'",
        "a profile cannot set 'profiles.x'",
        "a profile cannot set 'train..epochs'",
    ]


def test_a_profile_that_sets_a_key_twice(faults: Faults) -> None:
    (fault,) = faults(VALID + "profiles:\n  p:\n    train.epochs: 1\n    train: {epochs: 2}\n")
    assert fault.what == "profile 'p' sets 'train.epochs' twice"
    assert fault.where == "job.yaml:10:13"


def test_a_profile_that_is_no_mapping(faults: Faults) -> None:
    (fault,) = faults(VALID + "profiles:\n  p: 3\n")
    assert fault.what == "'profiles.p' must be a mapping, not 3"


def test_origins_of_values(write: Write) -> None:
    path = write(VALID + PROFILES)
    origin = {row.key: row.origin for row in explain(path, ["profile=smoke", "seed=3"])}
    assert origin["model.id"] == "job.yaml:2"
    assert origin["train.max_steps"] == "job.yaml:9"
    assert origin["train.epochs"] == "profile smoke (job.yaml:12)"
    assert origin["seed"] == "--set seed=3"
    assert origin["profile"] == "--set profile=smoke"
    assert origin["train.learning_rate"] == "default"


def test_flags_that_belong_together_are_judged_together(write: Write) -> None:
    """The file says lora; a key that only another kind has is right once a flag names that kind."""
    path = write(VALID + "adapter: {kind: lora}\n")
    recipe = load_recipe(path, ["adapter.kind=none", "adapter.freeze=[norm]"])
    assert (recipe.adapter.kind, recipe.adapter.freeze) == ("none", ["norm"])
    with pytest.raises(UserError, match="means nothing to adapter"):
        load_recipe(path, ["adapter.freeze=[norm]"])


def test_a_fault_of_the_file_stays_one_though_a_flag_covers_it(write: Write) -> None:
    path = write(VALID + "adapter: {kind: lora, freeze: [norm]}\n")
    with pytest.raises(UserError, match="means nothing to adapter"):
        load_recipe(path, ["adapter.freeze=[]"])
