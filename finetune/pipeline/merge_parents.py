"""The models that a search over merges starts from: who answers as each, and the folder of whole weights that is merged.

An adapter is merged into its base in fp32 first, so that nothing of what it learnt is rounded away before the merge that
is judged. A parent that is a training recipe is run where it has no finished run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.spec_generated import AnsweringModel
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.canary import adapter_sha256, canary_differs
from finetune.evaluation.items import items_digest
from finetune.evaluation.prompts import ARMS, Arm
from finetune.evaluation.records import is_intact, read_summary, summary_path
from finetune.evaluation.run import ArmJob, prepare_arm
from finetune.evaluation.saved_arms import SavedArm
from finetune.evaluation.suite import Suite
from finetune.evaluation.suite_data import SuiteData
from finetune.merge.adapter import merge_adapter
from finetune.merge.adapter_file import is_adapter_folder
from finetune.merge.inputs import MergeInputs, resolve_inputs
from finetune.model.adapter_files import adapter_digest
from finetune.model.load import load_model, load_tokenizer
from finetune.model.memory import release_memory
from finetune.model.source import ModelSource, resolve_model
from finetune.paths import find_declarative, read_json, runs_root
from finetune.pipeline.answerer import find_answerer
from finetune.pipeline.baseline_store import answer_in_store
from finetune.pipeline.inputs import gather_inputs
from finetune.pipeline.manifest import FILE_NAME
from finetune.pipeline.run import run_recipe
from finetune.pipeline.starts import find_folder
from finetune.recipe.merge_search_section import BASE, ParentSection

Say = Callable[[str], None]
_CANARY_PROMPTS = 2


@dataclass
class Voice:
    """A model that is asked: `key` names its weights and compute type, `load` brings it when an answer is missing.

    arm: how it is asked in suites that are answered in writing; None: with the best prompt a suite has for a model that was
    not tuned. run: whose saved answers may be taken.
    """

    name: str
    key: str
    tokenizer: Any
    load: Callable[[], Any]
    arm: Arm | None
    run: Path | None = None
    _model: Any = field(default=None, repr=False)

    def arm_of(self, suite: Suite) -> Arm:
        """Texts have no prompt: there every model but the base is `tuned`, so that its distance to the base is measured."""
        if self.arm is not None:
            return "tuned" if suite.task == "text" else self.arm
        wanted = suite.baseline_arms(["few_shot"])[0]
        return next(arm for arm in ARMS if arm == wanted)

    def ask(
        self, data: SuiteData, folder: Path, *, base: Voice | None = None, batch_size: int, say: Say
    ) -> SavedArm:
        """The answers to a suite, given where they are missing and saved in `folder` as they come. base: what KL is
        measured against; without it this is the base, whose answers go to the store of all runs."""
        arm = self.arm_of(data.suite)
        job = prepare_arm(
            self.tokenizer, data.suite, data.items, arm=arm, few_shot=data.few_shot_rows, key=self.key
        )
        if base is None:
            model = lambda: self._announced(job, say)  # noqa: E731 - an argument, named for its length
            return SavedArm(
                answer_in_store(job, model_key=self.key, model=model, batch_size=batch_size, say=say), arm
            )
        of_run = [] if self.run is None else [self.run / "eval" / data.suite.name]
        if job.saved(folder) is not None:
            return SavedArm(folder, arm)
        for saved in of_run:
            if _holds(saved, job):
                return SavedArm(saved, arm)
        model = self._announced(job, say)
        has_adapter = hasattr(model, "peft_config")
        if has_adapter:
            canary_differs(model, [prompt.ids for prompt in job.prompts[:_CANARY_PROMPTS]])
        job.evaluate(
            model,
            folder,
            batch_size=batch_size,
            adapter_sha256=adapter_sha256(self.run / "adapter")
            if self.run is not None and has_adapter
            else None,
            base_model=base.model() if data.suite.measures_kl and not has_adapter else None,
            reuse=of_run,
        )
        return SavedArm(folder, arm)

    def _announced(self, job: ArmJob, say: Say) -> Any:
        say(f"evaluate: {job.suite.name}, {len(job.items)} items, {self.name} ({job.arm})")
        return self.model()

    def model(self) -> Any:
        """Loaded once, until `release`."""
        if self._model is None:
            self._model = self.load()
        return self._model

    def release(self) -> None:
        """Let go of the weights."""
        self._model = None
        release_memory()


def _holds(folder: Path, job: ArmJob) -> bool:
    """Whether a run's folder has just these answers. `ArmJob.saved` would score them again, and write there."""
    if not summary_path(folder, job.arm).is_file():
        return False
    summary = read_summary(folder, job.arm)
    asked = (job.key, job.suite.digest, items_digest(job.items))
    return is_intact(folder, summary) and asked == (summary.key, summary.suite_digest, summary.items_digest)


@dataclass
class Parent:
    """A model to merge: its voice, and where its whole weights are or come from."""

    voice: Voice
    model: str | None
    adapter: MergeInputs | None

    @property
    def name(self) -> str:
        return self.voice.name

    def whole(self, folder: Path, say: Say) -> str:
        """The folder or name of its whole weights; an adapter's are made in `folder` where they are not there yet."""
        if self.adapter is None:
            assert self.model is not None
            return self.model
        made = folder / self.name
        if not made.is_dir():
            say(f"parent {self.name}: its adapter is merged into the base in fp32")
            found = self.adapter
            merge_adapter(
                found.source, found.adapter_folder, made, dtype="fp32", quantization=found.quantization
            )
        return str(made)


def base_voice(source: ModelSource, dtype: str) -> Voice:
    """The untuned model; the key is that of a run's baseline, so that answers of earlier runs are found."""
    return model_voice(BASE, source, digest_json({"model": source.digest, "dtype": dtype}), dtype, None)


def model_voice(name: str, source: ModelSource, key: str, dtype: str, arm: Arm | None) -> Voice:
    """A model with whole weights."""
    return Voice(
        name, key, load_tokenizer(source), lambda: load_model(source, dtype=dtype, attention="sdpa"), arm
    )


def find_parents(
    sections: Sequence[ParentSection], base: ModelSource, beside: Path, arm: Arm, dtype: str, *, say: Say
) -> list[Parent]:
    """Every parent, found or trained. Raises UserError for one that is not there, or that has another base."""
    return [_find_parent(section, base, beside, arm, dtype, say) for section in sections]


def _find_parent(
    section: ParentSection, base: ModelSource, beside: Path, arm: Arm, dtype: str, say: Say
) -> Parent:
    where = f"parents, {section.name}"
    named = str(_run_of(section.recipe, beside, where, say)) if section.recipe else str(section.model)
    folder = None if named.startswith("builtin:") else find_folder(named, beside)
    if folder is not None and (folder / FILE_NAME).is_file():
        answerer = find_answerer(AnsweringModel(run=str(folder)), beside, where, server=None, say=say)
        voice = Voice(section.name, answerer.digest, answerer.tokenizer, answerer.load, arm, folder)
        if (folder / "model").is_dir():
            return Parent(voice, str(folder / "model"), None)
        return Parent(voice, None, _of_base(resolve_inputs(folder), base, where))
    if folder is not None and is_adapter_folder(folder):
        found = _of_base(resolve_inputs(folder, base=base.id), base, where)
        return Parent(_adapter_voice(section.name, found, arm, dtype), None, found)
    source = resolve_model(str(folder) if folder is not None else named, announce=say, where=where)
    key = digest_json({"model": source.digest, "dtype": dtype})
    return Parent(model_voice(section.name, source, key, dtype, arm), source.path, None)


def _adapter_voice(name: str, found: MergeInputs, arm: Arm, dtype: str) -> Voice:
    from finetune.model.adapter_files import load_adapter

    def load() -> Any:
        return load_adapter(
            load_model(found.source, dtype=dtype, attention="sdpa"), found.adapter_folder, source=found.source
        )

    key = digest_json(
        {"model": found.source.digest, "adapter": adapter_digest(found.adapter_folder), "dtype": dtype}
    )
    return Voice(name, key, load_tokenizer(found.source), load, arm)


def _run_of(recipe: str, beside: Path, where: str, say: Say) -> Path:
    """The run of a training recipe with a finished training; it is run where there is none."""
    path = find_declarative("recipes", recipe, relative_to=beside, where=where)
    folder = runs_root() / gather_inputs(str(path)).folder_name
    manifest = read_json(folder / FILE_NAME) if (folder / FILE_NAME).is_file() else {}
    if not manifest.get("stages", {}).get("train", {}).get("completed"):
        say(f"{where}: {recipe} has no finished run; it is run now")
        folder = run_recipe(str(path), say=say).folder
    return folder.absolute()


def _of_base(found: MergeInputs, base: ModelSource, where: str) -> MergeInputs:
    if found.source.digest != base.digest:
        raise UserError(
            f"the adapter {found.adapter_folder} was trained on {found.source.id}, not on the base {base.id}",
            where=where,
            why="changes of different weights cannot be merged",
            fix="name the base that all parents were trained on",
        )
    return found
