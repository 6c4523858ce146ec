"""What the wheel carries: every declarative file, found again by an installed command that has no checkout beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from finetune.paths import shipped_names, shipped_root

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("recipes", "data", "eval")
SHARE = "share/finetune"
RECIPE = "sft/home_intents_lora"


def declarative_files() -> set[str]:
    """Every file of the declarative folders but their pages, as 'recipes/sft/x.yaml'."""
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file())
    return {path.relative_to(ROOT).as_posix() for path in files if path.suffix != ".md"}


def run(*command: str | Path, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_declarative_file_has_a_place_in_the_wheel() -> None:
    """Also without building one: a new folder needs a line under [tool.setuptools.data-files]."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    placed: set[str] = set()
    for target, patterns in listed.items():
        for path in (path for pattern in patterns for path in ROOT.glob(pattern)):
            assert f"{SHARE}/{path.relative_to(ROOT).parent.as_posix()}" == target
            placed.add(path.relative_to(ROOT).as_posix())
    assert placed == declarative_files()


def test_the_shipped_root_is_the_checkout_when_there_is_one() -> None:
    assert shipped_root() == ROOT
    assert RECIPE in shipped_names("recipes")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy, so that nothing old in `build/` gets in and nothing new stays behind."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("finetune", *FOLDERS):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (path for path in ROOT.iterdir() if path.is_file()):
        shutil.copy(file, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, ".", folder=source)
    (built,) = out.glob("*.whl")
    return built


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_every_declarative_file(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    held = {name.partition(f".data/data/{SHARE}/")[2] for name in names} - {""}
    assert held == declarative_files()
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "finetune").rglob("*") if path.is_file()}
    assert {name for name in package if "__pycache__" not in name} <= names


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["--target", "--prefix"])
def test_an_installed_command_finds_what_is_shipped(wheel: Path, scheme: str, tmp_path: Path) -> None:
    """`--prefix` has the layout of an environment or of `--user`; `--target` puts package and share side by side."""
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    options = ("--quiet", "--no-deps", "--no-index", "--ignore-installed", scheme, installed)
    run(*pip, "install", *options, wheel, folder=empty)
    (package,) = installed.rglob("finetune/paths.py")
    path = str(package.parent.parent)
    root = run(
        *(sys.executable, "-c", "from finetune.paths import shipped_root; print(shipped_root())"),
        folder=empty,
        PYTHONPATH=path,
    )
    assert Path(root.strip()) == installed / SHARE
    command = installed / "bin" / "finetune"
    answer = run(command, "recipe", "validate", RECIPE, folder=empty, PYTHONPATH=path)
    assert answer.startswith(f"valid: {RECIPE} (name home_intents_lora, digest ")
    everything = run(command, "recipe", "validate", folder=empty, PYTHONPATH=path)
    every = [name for kind in ("recipes", "merges", "searches") for name in shipped_names(kind)]
    assert [line.split()[1] for line in everything.splitlines()] == every
    assert not list(empty.iterdir())
