"""No text, however hostile, makes the loader raise anything but a UserError with places."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.errors import UserError
from finetune.recipe.resolve import load_recipe, resolved_yaml
from finetune.recipe.schema import Recipe
from finetune.recipe.suggest import dotted_keys

from .conftest import VALID

FUZZ = settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

SNIPPETS = [
    *(
        "a",
        "b: ",
        "- ",
        "? ",
        ": ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "&x ",
        "*x",
        "<<: ",
        "!!int ",
        "!!binary ",
        "!t ",
        "|",
        ">-",
    ),
    *(
        "\n",
        "\n  ",
        "\n    ",
        "\t",
        "'",
        '"',
        "#",
        "---",
        "...",
        "%YAML 1.1\n",
        "@",
        "`",
        "~",
        "\\ud800",
        "\x85",
        "\ufeff",
    ),
    *(
        "1",
        "1e999",
        ".nan",
        "0x",
        "0o9",
        "1_",
        "9" * 5000,
        "true",
        "yes",
        "2001-13-45",
        "train:",
        "profiles:",
        "profile: a",
    ),
    *(
        "!!set {a}",
        "!!omap [a: 1]",
        "!!timestamp x",
        "!!python/object:os.system x",
        "=",
        "!!merge x",
        "!!null x",
        "\u2028",
    ),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    st.sampled_from(["yes", "1e3", "007"]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def outcome(path: Path, text: str | bytes, overrides: list[str]) -> None:
    """Load; either a recipe that can be written out, or faults that say something and where."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass"))
    try:
        recipe = load_recipe(path, overrides)
    except UserError as error:
        assert error.exit_code == 2
        assert error.faults
        assert all(fault.what and fault.where and "\n" not in fault.what for fault in error.faults)
    else:
        assert resolved_yaml(recipe).encode()


@given(data=st.binary(max_size=60))
@FUZZ
def test_any_bytes(tmp_path: Path, data: bytes) -> None:
    outcome(tmp_path / "job.yaml", data, [])


@given(parts=st.lists(st.sampled_from(SNIPPETS), max_size=14), valid_before=st.booleans())
@FUZZ
def test_any_mix_of_yaml_syntax(tmp_path: Path, parts: list[str], valid_before: bool) -> None:
    outcome(tmp_path / "job.yaml", (VALID if valid_before else "") + "".join(parts), [])


@given(
    keys=st.lists(st.one_of(st.sampled_from(list(dotted_keys(Recipe))), st.text(max_size=8)), max_size=4),
    content=st.lists(values, min_size=4, max_size=4),
)
@FUZZ
def test_any_value_under_any_key(tmp_path: Path, keys: list[str], content: list[Any]) -> None:
    tree: dict[str, Any] = {"model": {"id": "x"}, "data": {"spec": "x"}, "eval": {"suites": ["x"]}}
    for key, value in zip(keys, content, strict=False):
        section, dot, leaf = key.partition(".")
        if not dot:
            tree[section] = value
        elif isinstance(below := tree.setdefault(section, {}), dict):
            below[leaf] = value
    outcome(tmp_path / "job.yaml", json.dumps(tree), [])


@given(
    key=st.one_of(st.sampled_from(list(dotted_keys(Recipe))), st.text(max_size=8)),
    value=st.one_of(st.text(max_size=12), st.sampled_from(SNIPPETS)),
)
@FUZZ
def test_any_override(tmp_path: Path, key: str, value: str) -> None:
    outcome(tmp_path / "job.yaml", VALID, [f"{key}={value}"])


@pytest.mark.parametrize(
    "text", ["{" * 1000, "- " * 1000, "&a " * 50 + "x", "? " * 1000, "!" * 500, "'" * 999]
)
def test_pathological_shapes(tmp_path: Path, text: str) -> None:
    outcome(tmp_path / "job.yaml", text, [])
