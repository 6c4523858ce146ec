"""Recipes written on the spot, and the faults that reading them gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from finetune.errors import Fault, UserError
from finetune.recipe.resolve import load_recipe

VALID = """\
model:
  id: builtin:smollm2-135m-instruct
data:
  spec: home_intents
eval:
  suites: [home_intents]
"""

Write = Callable[..., Path]
Faults = Callable[..., list[Fault]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a recipe into the working folder: `write(text)`; without text, the smallest valid one."""
    monkeypatch.chdir(tmp_path)

    def write_file(text: str | bytes = VALID, name: str = "job.yaml") -> Path:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
        return Path(name)

    return write_file


@pytest.fixture
def faults(write: Write) -> Faults:
    """The faults of a recipe's text: `faults(text, *overrides)`."""

    def read(text: str | bytes, *overrides: str) -> list[Fault]:
        with pytest.raises(UserError) as caught:
            load_recipe(write(text), overrides)
        assert caught.value.exit_code == 2
        return list(caught.value.faults)

    return read
