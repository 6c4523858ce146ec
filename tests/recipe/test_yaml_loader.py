"""The generic loader on schemas of its own: scalars by type, unions of sections, anchors, defaults, origins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from finetune.errors import UserError
from finetune.recipe.schema import Count, Section
from finetune.recipe.yaml_loader import Loaded, load_typed


class FileSource(Section):
    kind: Literal["file"]
    path: Path


class WebSource(Section):
    kind: Literal["web"]
    url: str
    retries: Count = 3


class Everything(Section):
    text: str = ""
    number: float = 0.0
    whole: int = 0
    switch: bool = False
    revision: Literal[False] | str = False
    either: int | float | str | None = None
    choice: Literal["a", "b", 3] = "a"
    numbers: list[float] = Field(default_factory=list)
    shares: dict[Literal["train", "test"], Annotated[float, Field(ge=0)]] = Field(default_factory=dict)
    pair: tuple[str, int] = ("x", 1)
    source: Annotated[FileSource | WebSource, Field(discriminator="kind")] | None = None
    steps: list[str | WebSource] = Field(default_factory=list)
    free: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _shares_add_up(self) -> Everything:
        if self.shares and sum(self.shares.values()) != 1:
            raise ValueError("shares: add up to something else than 1; mend them")
        return self


def load(folder: Path, text: str, *overrides: str, **options: Any) -> Loaded[Everything]:
    path = folder / "spec.yaml"
    path.write_text(text)
    return load_typed(path, Everything, overrides=overrides, **options)


def fault_of(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(folder, text, *overrides)
    (fault,) = caught.value.faults
    return str(fault)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("2e-5", 2e-5),
        ("2E-5", 2e-5),
        ("2.e-5", 2e-5),
        ("+2e-5", 2e-5),
        ("0.00002", 2e-5),
        ("'2e-5'", 2e-5),
        ('"2E-05"', 2e-5),
        (".5", 0.5),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("1e3", 1000.0),
        ("1e+3", 1000.0),
        ("1_000", 1000.0),
        ("1_000.5", 1000.5),
        ("7", 7.0),
        ("007", 7.0),
        ("0x10", 16.0),
        ("!!float 3", 3.0),
        ("!!str 3", 3.0),
    ],
)
def test_a_number_in_every_spelling(tmp_path: Path, written: str, value: float) -> None:
    number = load(tmp_path, f"number: {written}").value.number
    assert number == value
    assert type(number) is float
    assert load(tmp_path, "text: x", f"number={written}").value.number == value


@pytest.mark.parametrize(
    "written", ["1e5x", "e5", ".", "1,5", "12:30", "2001-01-01", "one", "''", "--1", "nan", "inf"]
)
def test_what_is_no_number(tmp_path: Path, written: str) -> None:
    assert "'number' must be a number" in fault_of(tmp_path, f"number: {written}")


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("32", 32),
        ("'32'", 32),
        ("1e3", 1000),
        ("2.0", 2),
        ("007", 7),
        ("0o17", 15),
        ("-4", -4),
        ("1_024", 1024),
    ],
)
def test_a_whole_number(tmp_path: Path, written: str, value: int) -> None:
    whole = load(tmp_path, f"whole: {written}").value.whole
    assert whole == value
    assert type(whole) is int


def test_a_long_whole_number_stays_exact(tmp_path: Path) -> None:
    assert load(tmp_path, "whole: 123456789012345678901").value.whole == 123456789012345678901


@pytest.mark.parametrize(
    "written", ["007", "1e5", "12345678", "0x1F", "1.10", "2001-01-01", "12:30", "yes", ".nan"]
)
def test_text_keeps_its_spelling(tmp_path: Path, written: str) -> None:
    assert load(tmp_path, f"text: {written}").value.text == written
    assert load(tmp_path, f"revision: {written}").value.revision == written
    assert load(tmp_path, f"text: '{written}'").value.text == written


@pytest.mark.parametrize(
    ("written", "value"),
    [("true", True), ("True", True), ("TRUE", True), ("false", False), ("False", False)],
)
def test_a_boolean(tmp_path: Path, written: str, value: bool) -> None:
    assert load(tmp_path, f"switch: {written}").value.switch is value


def test_yaml_1_1_does_not_bring_its_booleans_back(tmp_path: Path) -> None:
    assert load(tmp_path, "%YAML 1.1\n---\ntext: yes\n").value.text == "yes"
    assert "must be true or false" in fault_of(tmp_path, "%YAML 1.1\n---\nswitch: on\n")


@pytest.mark.parametrize(
    ("written", "value"),
    [("3", 3), ("3.5", 3.5), ("three", "three"), ("'3'", "3"), ("null", None), ("~", None)],
)
def test_a_union_takes_what_yaml_says(tmp_path: Path, written: str, value: object) -> None:
    either = load(tmp_path, f"either: {written}").value.either
    assert either == value
    assert type(either) is type(value)


def test_a_choice_may_be_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, "choice: 3").value.choice == 3
    assert "must be one of a, b, 3, not 4" in fault_of(tmp_path, "choice: 4")


def test_false_or_text_refuses_true(tmp_path: Path) -> None:
    assert load(tmp_path, "revision: false").value.revision is False
    assert "'revision' must be false or text, not true" in fault_of(tmp_path, "revision: true")


def test_lists_and_tuples_place_faults_at_the_entry(tmp_path: Path) -> None:
    loaded = load(tmp_path, "numbers: [1, .5, '2e-5']\npair: [007, 2]")
    assert loaded.value.numbers == [1.0, 0.5, 2e-5]
    assert loaded.value.pair == ("007", 2)
    assert fault_of(tmp_path, "numbers:\n  - 1\n  - x").endswith(
        "3:5: 'numbers[1]' must be a number, not 'x'"
    )


def test_keys_of_a_closed_mapping(tmp_path: Path) -> None:
    fault = fault_of(tmp_path, "shares:\n  trian: 1")
    assert "spec.yaml:2:3: unknown key 'shares.trian'" in fault
    assert "did you mean 'train'?" in fault
    assert "2:10: 'shares.train' must be at least 0" in fault_of(tmp_path, "shares:\n  train: -1")


def test_a_rule_of_a_schema_is_placed_at_the_key_it_names(tmp_path: Path) -> None:
    fault = fault_of(tmp_path, "text: x\nshares: {train: 0.5}")
    assert "spec.yaml:2:9: 'shares': add up to something else than 1\n  fix: mend them" in fault


def test_union_of_sections_by_its_kind(tmp_path: Path) -> None:
    loaded = load(tmp_path, "source: {kind: web, url: x, retries: 5}")
    assert loaded.value.source == WebSource(kind="web", url="x", retries=5)
    wrong = fault_of(tmp_path, "source:\n  kind: wbe\n  url: x")
    assert "spec.yaml:2:9: 'source.kind' is 'wbe', which is not one of file, web" in wrong
    assert "did you mean 'web'?" in wrong
    assert "unknown key 'source.url'" in fault_of(tmp_path, "source: {kind: file, path: a, url: x}")
    assert "3:13: 'source.retries' must be at least 1" in fault_of(
        tmp_path, "source:\n  {kind: web,\n  retries:  0, url: x}"
    )


def test_union_of_sections_without_its_kind(tmp_path: Path) -> None:
    assert "missing key 'source.kind'" in fault_of(tmp_path, "source: {url: x}")


def test_entries_that_are_text_or_sections(tmp_path: Path) -> None:
    loaded = load(tmp_path, "steps: [a, {kind: web, url: 007}]")
    assert loaded.value.steps == ["a", WebSource(kind="web", url="007")]
    assert "unknown key 'steps[0].ulr'" in fault_of(tmp_path, "steps: [{kind: web, url: x, ulr: x}]")


def test_values_without_a_type_follow_yaml(tmp_path: Path) -> None:
    loaded = load(tmp_path, "free: {a: 1, b: [2.5, x, null, true], c: {d: '1'}}")
    assert loaded.value.free == {"a": 1, "b": [2.5, "x", None, True], "c": {"d": "1"}}
    assert "'free.a[1]' must be finite, not .inf" in fault_of(tmp_path, "free: {a: [1, .inf]}")


def test_anchors_and_merge_keys(tmp_path: Path) -> None:
    text = """\
free:
  base: &base {x: 1, y: 2}
  one:
    <<: *base
    y: 3
  two: {<<: [*base, {y: 9, z: 4}]}
  three: *base
"""
    free = load(tmp_path, text).value.free
    assert free["one"] == {"x": 1, "y": 3}
    assert free["two"] == {"x": 1, "y": 2, "z": 4}
    assert free["three"] == {"x": 1, "y": 2}


def test_two_merge_keys_are_a_duplicate(tmp_path: Path) -> None:
    assert "duplicate key '<<'" in fault_of(tmp_path, "free: {a: &a {x: 1}, b: {<<: *a, <<: *a}}")


def test_a_pair_of_escaped_surrogates_is_one_character(tmp_path: Path) -> None:
    assert load(tmp_path, 'text: "\\ud83d\\ude00"').value.text == "\N{GRINNING FACE}"


def test_an_empty_section_takes_its_defaults(tmp_path: Path) -> None:
    class Outer(Section):
        inner: Everything = Field(default_factory=Everything)

    path = tmp_path / "outer.yaml"
    path.write_text("inner:\n")
    assert load_typed(path, Outer).value == Outer()


def test_an_open_schema_keeps_unknown_keys(tmp_path: Path) -> None:
    class Open(Section):
        model_config = Section.model_config | {"extra": "allow"}

    path = tmp_path / "open.yaml"
    path.write_text("a: [1]\n")
    assert load_typed(path, Open).value.model_extra == {"a": [1]}


def test_defaults_lie_below_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "whole: 2", defaults={"text": "007", "whole": 1}).value.text == "007"
    loaded = load(tmp_path, "whole: 2", defaults={"text": "stem", "whole": 1})
    assert (loaded.value.whole, loaded.value.text) == (2, "stem")
    assert loaded.origins["text"].source == "default"


def test_where_points_to_file_flag_or_the_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load(tmp_path, "text: a\nshares:\n  train: 1", "whole=3")
    assert loaded.where("shares.train") == "spec.yaml:3:10"
    assert loaded.where("whole") == "--set whole=3"
    assert loaded.where("number") == "spec.yaml"


def test_names_of_other_tools_are_the_callers(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load(tmp_path, "lrate: 1", renamed={"lrate": "number"})
    assert caught.value.faults[0].fix == "did you mean 'number'?"


def test_a_folder_and_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        load_typed(tmp_path, Everything)
    (tmp_path / "suite.yaml").write_text("text: x")
    with pytest.raises(UserError, match="no such file") as caught:
        load_typed(tmp_path / "siute.yaml", Everything)
    assert caught.value.faults[0].fix == "did you mean 'suite.yaml'?"
