"""The invented run folder and, where there is a Chromium, a tab to open its page in."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _beside(name: str) -> ModuleType:
    """A module of this folder; test folders are no packages, so it is loaded by its path."""
    spec = importlib.util.spec_from_file_location(f"report_{name}", Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def factory() -> ModuleType:
    return _beside("factory")


@pytest.fixture
def run_folder(factory: ModuleType, tmp_path: Path) -> Path:
    """A finished run with an improvement, a regression elsewhere, and hostile answers."""
    folder: Path = factory.write_run(tmp_path / "runs" / "home_intents_lora-1a2b3c4d")
    return folder


@pytest.fixture(scope="session")
def tab() -> Iterator[Any]:
    """One tab of a headless Chromium for all tests of the session."""
    module = _beside("browser")
    chromium = module.find_chromium()
    if chromium is None:
        pytest.skip("no Chromium on this machine: the page is not looked at")
    with module.browser(chromium) as page:
        yield page
