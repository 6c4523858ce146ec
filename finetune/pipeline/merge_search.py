"""Search over merges: build them one after another, judge each on the choosing side, confirm one on the other side, once.

Only one candidate's weights are on the disk at a time; what it answered stays, and the winner is built again (a merge's
bytes depend on its recipe and models alone, which is checked). Everything is keyed by digests, so a killed search goes on.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.digest import digest_file, digest_json
from finetune.errors import UserError
from finetune.evaluation.candidates import (
    Beside,
    Choice,
    Side,
    choose,
    compare_beside,
    side_of,
    suites_to_win,
)
from finetune.evaluation.merge_claims import judge_claims, standing_claims
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import SuiteData
from finetune.merge.models.merge import merge_models
from finetune.model.load import load_tokenizer
from finetune.model.source import ModelSource, resolve_model
from finetune.paths import disk_faults, read_json, runs_root, write_json
from finetune.pipeline.manifest import only_process
from finetune.pipeline.merge_parents import Parent, Voice, base_voice, find_parents, model_voice
from finetune.recipe.merge_search_loader import Candidate, LoadedSearch
from finetune.recipe.merge_search_section import BASE
from finetune.report.merge_search import write_search_page

Say = Callable[[str], None]
RESULT = "search.json"
_BUILT = "built.json"
_ID_DIGITS = 12


def searches_root() -> Path:
    return runs_root() / "merges"


@dataclass(frozen=True)
class SearchOutcome:
    """Where a search ended: its folder, `search.json`, and whether anything was left to do."""

    folder: Path
    result: dict[str, Any]
    worked: bool

    @property
    def exit_code(self) -> int:
        return int(self.result["confirmation"]["exit_code"])


def search_merges(loaded: LoadedSearch, *, say: Say) -> SearchOutcome:
    """Carry out a search, from where it stopped. Raises UserError for what the user can mend, before anything is built
    where files tell it."""
    recipe = loaded.recipe
    beside = loaded.path.parent
    suites = [load_suite(name, relative_to=beside, where=f"{loaded.path}: suites") for name in recipe.suites]
    suites_to_win(suites, recipe.choose)
    standing_claims(suites, recipe.confirm, {})
    sides: dict[Side, list[SuiteData]] = {  # every item is there, before anything is trained
        side: [side_of(suite, side, recipe.max_items) for suite in suites] for side in ("choose", "confirm")
    }
    base = resolve_model(recipe.base, announce=say, where=f"{loaded.path}: base")
    parents = find_parents(recipe.parents, base, beside, recipe.arm, recipe.eval_dtype, say=say)
    search = _Search(loaded, suites, sides, base, parents, say)
    folder = searches_root() / f"{recipe.name}-{search.digest[:8]}"
    with disk_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with only_process(folder):
        if (folder / RESULT).is_file() and read_json(folder / RESULT).get("digest") == search.digest:
            say("nothing to do: this search is complete")
            result = read_json(folder / RESULT)
            write_search_page(folder, result)
            return SearchOutcome(folder, result, worked=False)
        write_json(folder / RESULT, search.run(folder))
        result = read_json(folder / RESULT)
        write_search_page(folder, result)
        shutil.rmtree(folder / "parents", ignore_errors=True)
    return SearchOutcome(folder, result, worked=True)


@dataclass
class _Search:
    loaded: LoadedSearch
    suites: Sequence[Suite]
    sides: Mapping[Side, Sequence[SuiteData]]
    base: ModelSource
    parents: Sequence[Parent]
    say: Say
    started: float = field(default_factory=time.monotonic)

    @property
    def digest(self) -> str:
        """Of everything that decides the result."""
        recipe = self.loaded.recipe.model_dump(mode="json", exclude={"description", "batch_size"})
        return digest_json(
            {
                "recipe": recipe,
                "candidates": [self.key_of(candidate) for candidate in self.loaded.candidates],
                "suites": [suite.digest for suite in self.suites],
            }
        )

    def key_of(self, candidate: Candidate) -> str:
        """Of what a candidate is made of and how; its answers are kept by it, so they outlive its weights."""
        merge = candidate.load(BASE, [parent.name for parent in self.parents]).recipe
        return digest_json(
            {
                "merge": merge.model_dump(
                    mode="json", by_alias=True, exclude={"description"}, exclude_none=True
                ),
                "base": self.base.digest,
                "parents": {parent.name: parent.voice.key for parent in self.parents},
                "dtype": self.loaded.recipe.eval_dtype,
            }
        )

    def _asked(self, side: Side) -> list[Suite]:
        """The suites as they are asked on a side: with the split that it takes."""
        return [data.suite for data in self.sides[side]]

    def run(self, folder: Path) -> dict[str, Any]:
        self.folder = folder
        names = [candidate.name for candidate in self.loaded.candidates]
        references = [*(parent.name for parent in self.parents), BASE]
        untuned = base_voice(self.base, self.loaded.recipe.eval_dtype)
        answers = self._ask_all(
            "choose", untuned, [parent.voice for parent in self.parents], self.loaded.candidates
        )
        found = compare_beside(self._asked("choose"), answers, names, references)
        means = _primary_means(self.suites, answers)
        choice = choose(self.suites, means, names, references[:-1], self.loaded.recipe.choose)
        winner = next(one for one in self.loaded.candidates if one.name == choice.winner)
        self.say(f"chosen on the choosing side: {winner.name}")
        path = self._rebuild(winner)
        confirmed = self._ask_all(
            "confirm", untuned, [parent.voice for parent in self.parents], [winner], path
        )
        untuned.release()
        return self._result(answers, found, choice, confirmed, references)

    def _ask_all(
        self,
        side: Side,
        untuned: Voice,
        voices: Sequence[Voice],
        candidates: Sequence[Candidate],
        built: Path | None = None,
    ) -> dict[str, dict[str, SavedArm]]:
        """Every model's answers on one side; a candidate is built when it lacks some, and removed unless it is `built`."""
        every = self.sides[side]
        answers = {BASE: {data.suite.name: self._ask(untuned, data, side, None) for data in every}}
        for voice in voices:
            answers[voice.name] = {data.suite.name: self._ask(voice, data, side, untuned) for data in every}
            voice.release()
        for number, candidate in enumerate(candidates, start=1):
            key = self.key_of(candidate)
            self.say(f"merge {number} of {len(candidates)}: {candidate.name}")
            folder = built or self.folder / "building" / key[:_ID_DIGITS]
            voice = self._voice(candidate, key, folder)
            answers[candidate.name] = {
                data.suite.name: self._ask(voice, data, side, untuned) for data in every
            }
            voice.release()
            if built is None:
                shutil.rmtree(folder, ignore_errors=True)
        return answers

    def _ask(self, voice: Voice, data: SuiteData, side: Side, untuned: Voice | None) -> SavedArm:
        folder = self.folder / "answers" / side / voice.key[:_ID_DIGITS] / data.suite.name
        return voice.ask(data, folder, base=untuned, batch_size=self.loaded.recipe.batch_size, say=self.say)

    def _voice(self, candidate: Candidate, key: str, folder: Path) -> Voice:
        """A candidate that is built when its answers need it. Prompts are made with the base's tokenizer."""

        def load() -> Any:
            self._build(candidate, key, folder)
            source = resolve_model(str(folder))
            return model_voice(candidate.name, source, key, self.loaded.recipe.eval_dtype, None).load()

        return Voice(candidate.name, key, load_tokenizer(self.base), load, self.loaded.recipe.arm)

    def _build(self, candidate: Candidate, key: str, folder: Path) -> dict[str, Any]:
        """The merge, where it is not there yet, and a note on it that stays when its weights go."""
        built = self._notes()
        started = time.monotonic()
        if not folder.is_dir():
            merge = candidate.load(self.loaded.recipe.base, self._whole_parents())
            try:
                merge_models(merge, folder)
            except UserError as error:
                for fault in error.faults:
                    self.say(f"{candidate.name} cannot be merged: {fault.what}")
                raise
        weights = sorted(folder.glob("*.safetensors"))
        note = {
            "name": candidate.name,
            "weights_digest": digest_json({path.name: digest_file(path) for path in weights}),
            "weights_bytes": sum(path.stat().st_size for path in weights),
            "merge_seconds": round(time.monotonic() - started, 2),
        }
        known: dict[str, Any] = built.setdefault(key, note)
        if known["weights_digest"] != note["weights_digest"]:
            raise RuntimeError(f"{candidate.name} was built twice with different weights: {folder}")
        write_json(self.folder / _BUILT, built)
        return known

    def _notes(self) -> dict[str, Any]:
        path = self.folder / _BUILT
        found: dict[str, Any] = read_json(path) if path.is_file() else {}
        return found

    def _whole_parents(self) -> list[str]:
        return [parent.whole(self.folder / "parents", self.say) for parent in self.parents]

    def _rebuild(self, winner: Candidate) -> Path:
        path = self.folder / "winner"
        self._build(winner, self.key_of(winner), path)
        return path

    def _result(
        self,
        answers: Mapping[str, Mapping[str, SavedArm]],
        found: Sequence[Beside],
        choice: Choice,
        confirmed: Mapping[str, Mapping[str, SavedArm]],
        references: Sequence[str],
    ) -> dict[str, Any]:
        recipe = self.loaded.recipe
        claims = standing_claims(self.suites, recipe.confirm, choice.best_parent)
        on_test = compare_beside(self._asked("confirm"), confirmed, [choice.winner], references)
        items = {name: _summary(arm)["items_digest"] for name, arm in confirmed[choice.winner].items()}
        return {
            "format": 1,
            "name": recipe.name,
            "description": recipe.description,
            "digest": self.digest,
            "base": recipe.base,
            "parents": [parent.name for parent in self.parents],
            "suites": [_told(suite) for suite in self.suites],
            "models": _models(answers, self._notes(), self.loaded, self.key_of),
            "comparisons": [one.to_dict() for one in found],
            "choice": {**choice.to_dict(), "lose_at_most": recipe.choose.lose_at_most},
            "confirmation": {
                "models": _models(confirmed, {}, self.loaded, self.key_of),
                "comparisons": [one.to_dict() for one in on_test],
                "items": items,
                "earlier": _earlier(items, self.digest),
                **judge_claims(self.suites, claims, confirmed, choice.winner),
            },
            "winner": {"name": choice.winner, "folder": "winner"},
            "seconds": round(time.monotonic() - self.started, 1),
        }


def _summary(arm: SavedArm) -> dict[str, Any]:
    summary = arm.summary()
    assert summary is not None, "answers of a search have a summary"
    return summary.to_dict()


def _primary_means(
    suites: Sequence[Suite], answers: Mapping[str, Mapping[str, SavedArm]]
) -> dict[str, dict[str, float]]:
    return {
        model: {
            suite.name: _summary(arms[suite.name])["metrics"][suite.primary_metric]["mean"]
            for suite in suites
        }
        for model, arms in answers.items()
    }


def _told(suite: Suite) -> dict[str, Any]:
    primary = suite.scorer_of(suite.primary_metric)
    return {
        "name": suite.name,
        "role": suite.role,
        "metric": suite.primary_metric,
        "metrics": suite.metrics,
        "higher_is_better": primary.higher_is_better,
        "open_ended": primary.open_ended,
        "margin": suite.margin,
        "split": suite.items.split if suite.items.spec is not None else None,
    }


def _models(
    answers: Mapping[str, Mapping[str, SavedArm]],
    notes: Mapping[str, Any],
    loaded: LoadedSearch,
    key_of: Callable[[Candidate], str],
) -> list[dict[str, Any]]:
    """Each model's means with their intervals on every suite, and of a merge its size."""
    candidates = {candidate.name: candidate for candidate in loaded.candidates}
    found = []
    for name, arms in answers.items():
        kind = "merge" if name in candidates else "base" if name == BASE else "parent"
        one: dict[str, Any] = {
            "name": name,
            "kind": kind,
            "suites": {
                suite: {"arm": arm.arm, "metrics": _summary(arm)["metrics"]} for suite, arm in arms.items()
            },
        }
        if kind == "merge" and (note := notes.get(key_of(candidates[name]))) is not None:
            one |= {"weights_bytes": note["weights_bytes"], "merge_seconds": note["merge_seconds"]}
        found.append(one)
    return found


def _earlier(items: Mapping[str, str], digest: str) -> dict[str, list[str]]:
    """Suite -> folders of other searches that confirmed on the same items: the more there are, the less each one proves."""
    found: dict[str, list[str]] = {}
    for path in sorted(searches_root().glob(f"*/{RESULT}")):
        other = read_json(path)
        if other.get("digest") == digest:
            continue
        used = other.get("confirmation", {}).get("items", {})
        for suite, known in items.items():
            if used.get(suite) == known:
                found.setdefault(suite, []).append(path.parent.name)
    return found
