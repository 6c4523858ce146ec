"""Read the files of a run folder as they are: a run may be a smoke run, interrupted, or older than this page.

A file that is absent or damaged becomes a gap that the page names; only a folder that holds nothing of a run is an error.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from finetune.errors import UserError
from finetune.evaluation.repeats import per_item
from finetune.paths import read_json
from finetune.telemetry.events import read_events

Record = dict[str, Any]
_ARM_ORDER = {"zero_shot": 0, "few_shot": 1, "start": 2, "teacher": 3, "tuned": 4}


def as_dict(value: object) -> Record:
    """`value` when it is a mapping, else an empty one: a page never fails on a field of the wrong shape."""
    return value if isinstance(value, dict) else {}


def as_list(value: object) -> list[Any]:
    """`value` when it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def as_text(value: object) -> str | None:
    """`value` when it is a string with something in it, else None."""
    return value if isinstance(value, str) and value else None


@dataclass(frozen=True, slots=True)
class Arm:
    """One arm on one suite: its summary and its per-item records, either of which may be missing."""

    suite: str
    name: str
    summary: Record
    items: dict[str, Record]

    def metric(self, name: str) -> Record:
        return as_dict(as_dict(self.summary.get("metrics")).get(name))


@dataclass(frozen=True, slots=True)
class Later:
    """A comparison that a command wrote after the run, `eval/comparison-<name>.json`."""

    name: str
    record: Record

    @property
    def against_base(self) -> bool:
        """Whether it compares the run's own answers with its own untuned model, as `comparison.json` does."""
        words = self.name.split("-")
        return words[0] in ("base", "scored") and words[-1] != "server"


@dataclass(frozen=True, slots=True)
class RunFiles:
    """Everything the page reads. Missing files are empty mappings here and sentences in `gaps`."""

    folder: Path
    recipe: Record
    recipe_text: str | None
    manifest: Record
    environment: Record
    forecast: Record
    comparison: Record
    data_manifest: Record
    tokenised: Record
    events: list[Record]
    arms: tuple[Arm, ...]
    gaps: tuple[str, ...] = ()
    later: tuple[Later, ...] = ()
    power: Record = field(default_factory=dict)
    judges: tuple[Record, ...] = ()
    reviewed: tuple[Record, ...] = ()  # lines of eval/review.jsonl
    distillation: Record = field(default_factory=dict)
    teacher_cache: Record = field(default_factory=dict)
    alignment: Record = field(default_factory=dict)
    checks: Record = field(default_factory=dict)

    @property
    def suite_records(self) -> dict[str, Record]:
        """Suite -> what a comparison says of it besides its comparisons: role, primary metric, cost, notes.

        The run's own comparison first; suites that were evaluated later from the newest that has them.
        """
        found: dict[str, Record] = {}
        for comparison in (
            self.comparison,
            *(one.record for one in reversed(self.later) if one.against_base),
        ):
            for record in map(as_dict, as_list(comparison.get("suites")) or [comparison]):
                if (name := as_text(record.get("suite"))) is not None:
                    found.setdefault(name, record)
        return found

    def primary_metric(self, suite: str) -> str | None:
        """The metric that decides a suite; that of the deciding suite where nothing else is recorded."""
        return as_text(as_dict(self.suite_records.get(suite)).get("primary_metric"))

    def cost(self, suite: str) -> Record:
        """Costs of a suite's two arms: the newest that has prices, else the run's own."""
        found: Record = {}
        for comparison in (self.comparison, *(one.record for one in self.later if one.against_base)):
            for record in map(as_dict, as_list(comparison.get("suites")) or [comparison]):
                cost = as_dict(record.get("cost"))
                if record.get("suite") == suite and cost and (not found or "break_even" in cost):
                    found = cost
        return found

    def guards(self, suite: str) -> bool:
        """Whether the suite must only not get worse than its margin."""
        return as_dict(self.suite_records.get(suite)).get("role") in ("regression", "forgetting")

    @property
    def suites(self) -> list[str]:
        """Suites with any arm, the one that decides the verdict first."""
        names = list(dict.fromkeys(arm.suite for arm in self.arms))
        deciding = as_text(self.comparison.get("suite"))
        return sorted(names, key=lambda name: (name != deciding, name))

    def arms_of(self, suite: str) -> list[Arm]:
        """Arms of one suite: zero-shot, few-shot, any other baseline, tuned."""
        chosen = [arm for arm in self.arms if arm.suite == suite]
        return sorted(chosen, key=lambda arm: (_ARM_ORDER.get(arm.name, 2), arm.name))

    def arm(self, suite: str, name: str) -> Arm | None:
        return next((arm for arm in self.arms if (arm.suite, arm.name) == (suite, name)), None)

    def recipe_value(self, dotted: str) -> Any:
        """A key of the resolved recipe, e.g. 'train.max_grad_norm', or None."""
        value: Any = self.recipe
        for key in dotted.split("."):
            value = as_dict(value).get(key)
        return value


@dataclass(slots=True)
class _Reader:
    """Reads one file after another and collects what was missing or damaged."""

    folder: Path
    gaps: list[str] = field(default_factory=list)
    n_found: int = 0

    def mapping(self, name: str, holds: str) -> Record:
        path = self.folder / name
        if not path.is_file():
            self.gaps.append(f"{name} is not in the run folder: {holds} not shown.")
            return {}
        self.n_found += 1
        try:
            value = read_json(path)
        except UserError:
            self.gaps.append(f"{name} is damaged: {holds} not shown.")
            return {}
        if not isinstance(value, dict):
            self.gaps.append(f"{name} does not hold one JSON object: {holds} not shown.")
        return as_dict(value)

    def optional(self, name: str, holds: str) -> Record:
        """A file that not every run has: its absence is no gap."""
        return self.mapping(name, holds) if (self.folder / name).is_file() else {}

    def later(self) -> tuple[Later, ...]:
        """Comparisons written after the run, the newest last."""
        paths = sorted(
            (self.folder / "eval").glob("comparison-*.json"),
            key=lambda path: (path.stat().st_mtime_ns, path.name),
        )
        found = [
            (path.stem.removeprefix("comparison-"), self.mapping(f"eval/{path.name}", "its comparisons are"))
            for path in paths
        ]
        return tuple(Later(name, record) for name, record in found if record)

    def reviewed(self) -> tuple[Record, ...]:
        path = self.folder / "eval" / "review.jsonl"
        return tuple(self.lines(path)) if path.is_file() else ()

    def judge_files(self) -> list[str]:
        paths = sorted((self.folder / "eval").glob("*/judge.json"))
        return [path.relative_to(self.folder).as_posix() for path in paths]

    def lines(self, path: Path) -> list[Record]:
        """JSON objects of an append-only file. A killed writer leaves half a last line: counted, not fatal."""
        rows: list[Record] = []
        n_damaged = 0
        for line in path.read_bytes().split(b"\n"):
            if not line.strip():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = None
            if isinstance(value, dict):
                rows.append(value)
            else:
                n_damaged += 1
        if n_damaged:
            name = path.relative_to(self.folder).as_posix()
            self.gaps.append(f"{name}: {n_damaged} damaged line{'s' * (n_damaged > 1)} left out.")
        return rows

    def events(self) -> list[Record]:
        path = self.folder / "events.jsonl"
        if not path.is_file():
            self.gaps.append("events.jsonl is not in the run folder: no training curve.")
            return []
        self.n_found += 1
        try:
            return read_events(path)
        except (KeyError, TypeError):
            self.gaps.append("events.jsonl is damaged: no training curve.")
            return []

    def recipe(self) -> tuple[Record, str | None]:
        path = self.folder / "recipe.resolved.yaml"
        if not path.is_file():
            self.gaps.append("recipe.resolved.yaml is not in the run folder: the recipe is not shown.")
            return {}, None
        self.n_found += 1
        text = path.read_text(encoding="utf-8", errors="replace")
        try:
            return as_dict(YAML(typ="safe", pure=True).load(text)), text
        except YAMLError:
            self.gaps.append("recipe.resolved.yaml is not valid YAML: shown as text only.")
            return {}, text

    def arms(self) -> tuple[Arm, ...]:
        found: list[Arm] = []
        for root in ("baseline", "eval"):
            stems = {
                path.with_name(path.name.split(".")[0])
                for pattern in ("*/*.jsonl", "*/*.summary.json")
                for path in (self.folder / root).glob(pattern)
            }
            found += [arm for stem in sorted(stems) if (arm := self._arm(stem))]
            self.n_found += len(stems)
        return tuple(found)

    def _arm(self, stem: Path) -> Arm | None:
        """An arm, or None while it is still being answered: half of the items would pass for all of them."""
        records, partial = stem.with_name(f"{stem.name}.jsonl"), stem.with_name(f"{stem.name}.partial.jsonl")
        if partial.is_file():
            n_answers = sum("record" in row for row in self.lines(partial))
            self.gaps.append(
                f"{stem.parent.name} / {stem.name} is not complete: {n_answers:,} answers so far."
            )
            return None
        summary = stem.with_name(f"{stem.name}.summary.json").relative_to(self.folder).as_posix()
        items: dict[str, Record] = {}
        if records.is_file():
            # A continued run may write an answer again: the last one counts.
            named = [row for row in self.lines(records) if isinstance(row.get("item"), (str, int))]
            answers = {(str(row["item"]), row.get("repeat", 0)): row for row in named}
            items = {str(row["item"]): row for row in per_item(list(answers.values()))}
        else:
            self.gaps.append(f"{records.relative_to(self.folder).as_posix()} is not in the run folder.")
        held = self.mapping(summary, f"the metrics of {stem.parent.name} / {stem.name} are")
        return Arm(suite=stem.parent.name, name=stem.name, summary=held, items=items)


def read_run(folder: Path) -> RunFiles:
    """Read a run folder. Raises UserError when there is no such folder or nothing in it is of a run."""
    if not folder.is_dir():
        raise UserError(
            f"no such run folder: {folder}", fix="give a folder under runs/, as `finetune run` printed it"
        )
    reader = _Reader(folder)
    recipe, recipe_text = reader.recipe()
    run = RunFiles(
        folder=folder,
        recipe=recipe,
        recipe_text=recipe_text,
        manifest=reader.mapping("manifest.json", "stages and input digests are"),
        environment=reader.mapping("environment.json", "the environment is"),
        forecast=reader.mapping("forecast.json", "the memory forecast is"),
        comparison=reader.mapping("eval/comparison.json", "verdict and comparisons are"),
        data_manifest=reader.mapping("data/manifest.json", "the row ledger and the leak check are"),
        tokenised=reader.mapping("data/tokenised.json", "what tokenising left of the rows is"),
        reviewed=reader.reviewed(),
        events=reader.events(),
        arms=reader.arms(),
        later=reader.later(),
        power=reader.optional("baseline/power.json", "what the items could show is"),
        distillation=reader.optional("distillation.json", "who taught is"),
        teacher_cache=reader.optional("teacher_cache.json", "what was kept of the teacher is"),
        alignment=reader.optional("alignment.json", "how the tokens of teacher and student lie is"),
        checks=reader.optional("checks.json", "what the doctor checked is"),
        judges=tuple(reader.optional(path, "what the judge said is") for path in reader.judge_files()),
        gaps=tuple(reader.gaps),  # last: the readers above fill it
    )
    if not reader.n_found:
        raise UserError(
            f"nothing in {folder} belongs to a run",
            why="none of recipe.resolved.yaml, manifest.json, events.jsonl, baseline/ and eval/ is there",
            fix="give a folder under runs/, as `finetune run` printed it",
        )
    return run
