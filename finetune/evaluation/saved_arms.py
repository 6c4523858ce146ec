"""Saved answers by the name a user gives them: `base`, a run folder, or a file of records."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.digest import digest_file
from finetune.errors import UserError, did_you_mean
from finetune.evaluation.claims import Correction
from finetune.evaluation.records import (
    ArmSummary,
    Record,
    is_intact,
    read_records,
    read_summary,
    records_path,
    summary_path,
)
from finetune.evaluation.reviewed import run_folder_of
from finetune.evaluation.suite import Suite, load_suite
from finetune.paths import read_json, runs_root

BASE = "base"
TUNED = "tuned"
_LEAST_DIGEST = 4  # characters of a digest that name a run


@dataclass(frozen=True)
class SavedArm:
    """One arm on disk: `<folder>/<arm>.jsonl`, and its summary where it was evaluated here.

    of_run: it lies in a run folder, where answers without a summary are those of an arm that was not finished.
    """

    folder: Path
    arm: str
    of_run: bool = False

    @property
    def path(self) -> Path:
        return records_path(self.folder, self.arm)

    def records(self) -> list[Record]:
        """Raises UserError when the file is missing, empty, damaged, or not what was evaluated."""
        if not self.path.is_file():
            raise UserError(
                f"no saved answers: {self.path}", fix="evaluate that arm first: finetune eval run RUN"
            )
        found, summary = read_records(self.folder, self.arm), self.summary()
        if summary is None and self.of_run:
            raise UserError(
                f"{self.path} has no summary beside it",
                why="an arm is complete when its summary is written, and only that says what was asked",
                fix="finish the arm: finetune eval run RUN",
            )
        if summary is not None and not (is_intact(self.folder, summary) and len(found) == summary.n):
            raise UserError(
                f"{self.path} was changed after it was written",
                why="its SHA-256 or number of answers is not that of its summary, so these are not the model's answers",
                fix="bring the file back, or have it answered again: finetune eval run RUN",
            )
        if summary is not None and self.of_run:
            _refuse_other_adapter(self.folder, summary)
        return found

    def summary(self) -> ArmSummary | None:
        """None for records from elsewhere."""
        return read_summary(self.folder, self.arm) if summary_path(self.folder, self.arm).is_file() else None


def _refuse_other_adapter(answers: Path, summary: ArmSummary) -> None:
    """Answers of an adapter that is in the run folder no more say nothing about the one that is."""
    run = run_folder_of(answers)
    adapter = run / "adapter" / "adapter_model.safetensors" if run is not None else None
    if summary.adapter_sha256 is None or adapter is None or not adapter.is_file():
        return
    if digest_file(adapter) != summary.adapter_sha256:
        raise UserError(
            f"the answers in {answers} are not of the adapter in {adapter.parent}",
            why="its SHA-256 is another one than that of the adapter that was evaluated",
            fix="bring that adapter back, or finish the run with the new one: finetune run with the same recipe",
        )


@dataclass(frozen=True)
class RunAnswers:
    """The answers in a run folder, and what its recipe says about them.

    backend: folder below each suite's own; answers of a server are kept apart from those computed here.
    """

    folder: Path
    recipe: dict[str, Any]
    backend: str = ""

    @classmethod
    def open(cls, folder: Path, *, backend: str = "") -> RunAnswers:
        """Raises UserError when `folder` is not a run folder."""
        path = folder / "recipe.resolved.yaml"
        if not path.is_file():
            raise UserError(
                f"{folder} is not a run folder: it holds no {path.name}",
                fix="name the folder that `finetune run` printed, e.g. runs/home_intents_lora-1a2b3c4d",
            )
        return cls(folder, _recipe_of(path), backend)

    @property
    def folders(self) -> dict[str, str]:
        """Key of the recipe -> where its relative paths start; the run may have been started from anywhere."""
        path = self.folder / "manifest.json"
        found: dict[str, str] = read_json(path).get("folders", {}) if path.is_file() else {}
        return found

    @property
    def correction(self) -> Correction:
        """How the recipe declared that claims of several suites are corrected."""
        declared: Correction = self.recipe["eval"].get("correction", "holm")
        return declared

    @property
    def suite_names(self) -> list[str]:
        """Names of the suites with an answer of the tuned model."""
        return sorted(path.parent.name for path in (self.folder / "eval").glob(f"*/{TUNED}.jsonl"))

    def load_suites(self, names: Sequence[str] | None = None) -> list[Suite]:
        """The suites that this run was evaluated on, as they are now, the recipe's first; or those given by name or path."""
        if names:
            return [self.suite(name) for name in names]
        evaluated = self.suite_names
        if not evaluated:
            raise UserError(f"{self.folder} holds no answers of the tuned model", fix="finish the run first")
        own = [suite for suite in self.recipe_suites() if suite.name in evaluated]
        known = {suite.name for suite in own}
        return [*own, *(load_suite(name) for name in evaluated if name not in known)]

    def suite(self, name: str) -> Suite:
        """A suite by path or name: one of the recipe's, whatever its file is called, or any other."""
        own: dict[str, Suite] = {}
        with contextlib.suppress(UserError):  # one that is gone matters only to who asks for it
            own = {suite.name: suite for suite in self.recipe_suites()}
        return own[name] if name in own else load_suite(name, relative_to=self._suites_beside)

    def recipe_suites(self, names: Sequence[str] | None = None) -> list[Suite]:
        """The suites of the recipe, answered or not; or those given by name or path."""
        if names:
            return [self.suite(name) for name in names]
        return [load_suite(name, relative_to=self._suites_beside) for name in self.recipe["eval"]["suites"]]

    @property
    def _suites_beside(self) -> Path:
        return Path(self.folders.get("eval.suites", self.folder))

    def tuned(self, suite: str) -> SavedArm:
        return SavedArm(self.folder / "eval" / suite / self.backend, TUNED, of_run=True)

    def saved(self, suite: str) -> list[SavedArm]:
        """Every arm of a suite that is complete in this folder, untuned ones first."""
        folders = [self.folder / "baseline" / suite, self.folder / "eval" / suite]
        return [
            SavedArm(folder, path.name.removesuffix(".summary.json"))
            for folder in folders
            for path in sorted(folder.glob("*.summary.json"))
        ]

    def base(self, suite: Suite) -> SavedArm:
        """The untuned arm that the recipe compares with; zero-shot where the suite has no few-shot arm."""
        arm = suite.baseline_arms([self.recipe["eval"]["against"]])[0]
        return SavedArm(self.folder / "baseline" / suite.name / self.backend, arm, of_run=True)


def _recipe_of(path: Path) -> dict[str, Any]:
    """The resolved recipe of a run folder; what is read of it here is checked, the rest where a run reads it."""
    try:
        found = YAML(typ="safe").load(path.read_text(encoding="utf-8"))
        section = found["eval"]
        complete = isinstance(section["suites"], list) and isinstance(section["against"], str)
    except (YAMLError, UnicodeDecodeError, TypeError, KeyError):
        complete = False
    if not complete:
        raise UserError(
            f"{path} is not the resolved recipe of a run",
            fix="bring the file back; `finetune run` with the same recipe writes it again",
        )
    recipe: dict[str, Any] = found
    return recipe


def find_baseline(name: str, run: RunAnswers, suite: Suite) -> SavedArm:
    """`base` (the run's own untuned model), another run's folder, name or digest (its tuned model), or a file of records."""
    if name == BASE:
        return run.base(suite)
    path = Path(name).expanduser()
    if path.is_file():
        return SavedArm(path.parent, path.stem)
    folder = path if path.is_dir() else _past_run(name)
    if folder is not None and folder.resolve() == run.folder.resolve():
        raise UserError(
            f"{folder} is the run itself",
            where="--baseline",
            why="nothing is worse than itself",
            fix="name another run, or `base` for this run's untuned model",
        )
    if folder is not None:
        return RunAnswers.open(folder).tuned(suite.name)
    near = did_you_mean(name, [BASE]) if len(name) < 8 else ""
    raise UserError(
        f"no such baseline: '{name}'",
        where="--baseline",
        fix=near or "`base`, a run folder or the digest in its name, or a file of records",
    )


def _past_run(name: str) -> Path | None:
    """The run folder of that name, or whose name ends in a digest that begins so; None when there is none."""
    runs = sorted(path.parent for path in runs_root().glob("*/recipe.resolved.yaml"))
    found = [run for run in runs if run.name == name]
    if not found and len(name) >= _LEAST_DIGEST:
        found = [run for run in runs if run.name.rpartition("-")[2].startswith(name)]
    if len(found) > 1:
        raise UserError(
            f"'{name}' names {len(found)} runs: {', '.join(run.name for run in found)}",
            where="--baseline",
            fix="give the whole name of one",
        )
    return found[0] if found else None


def find_suite(name: str, *places: str) -> Suite:
    """A suite by path or name, as the first run folder among `places`, or with one of them in it, knows it."""
    paths = [Path(place).expanduser() for place in places]
    runs = [run_folder_of(path.parent if path.is_file() else path / "eval") for path in paths]
    run = next((path for path in runs if path is not None), None)
    return RunAnswers.open(run).suite(name) if run is not None else load_suite(name)


def find_arm(name: str, suite: str | None) -> SavedArm:
    """A file of records, or a run folder with the suite whose tuned answers are meant."""
    path = Path(name).expanduser()
    if path.is_file():
        return SavedArm(path.parent, path.stem)
    if not path.is_dir():
        raise UserError(f"no such file or run folder: '{name}'", fix="name a file of records or a run folder")
    run = RunAnswers.open(path)
    names = run.suite_names
    if suite is None and len(names) != 1:
        raise UserError(
            f"{path} was evaluated on {len(names)} suites", fix=f"add --suite: {', '.join(names)}"
        )
    return run.tuned(suite or names[0])
