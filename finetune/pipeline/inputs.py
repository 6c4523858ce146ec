"""Everything a run reads, found and checked before anything is built or loaded; all faults at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from finetune.digest import digest_json
from finetune.errors import Fault, UserError
from finetune.evaluation.rewards import check_reward_suite
from finetune.evaluation.suite import Suite, load_suite
from finetune.evaluation.suite_data import NO_MARGIN, SuiteData, check_units, load_suite_data
from finetune.model.source import ModelSource, read_config, recorded_revision, resolve_model
from finetune.paths import find_declarative, read_json
from finetune.pipeline.manifest import FILE_NAME
from finetune.pipeline.starts import AdapterStart, find_start, model_folder
from finetune.pipeline.teacher import Teacher, cut_student, named_teacher, run_of_teacher, teacher_of_run
from finetune.pipeline.teacher_text import text_faults
from finetune.recipe.resolve import read_recipe, recipe_digest
from finetune.recipe.schema import Recipe
from finetune.recipe.yaml_loader import Loaded

Found = TypeVar("Found")
_WITH_PATHS = (
    "data.spec",
    "eval.suites",
    "model.id",
    "adapter.start",
    "distil.teacher.run",
    "distil.teacher.id",
)


@dataclass(frozen=True)
class RunInputs:
    """A resolved recipe and what it names. `digest` identifies the run: same digest, same run folder."""

    recipe: Recipe
    path: Path
    digest: str
    spec_path: Path
    suites: tuple[Suite, ...]
    source: ModelSource
    config: dict[str, Any]
    start: AdapterStart | None = None  # the adapter that training goes on from
    teacher: Teacher | None = None
    folders: Mapping[str, str] = field(
        default_factory=dict
    )  # key -> absolute folder that its relative paths start from

    def before_key(self, dtype: str) -> str:
        """Digest of the model before training, as it answers in `dtype`: the base, and the adapter training starts from."""
        content = {"model": self.source.digest, "dtype": dtype}
        if self.start is not None:
            content |= {"start": self.start.digest, "quantize": self.recipe.model.quantize}
        return digest_json(content)

    def data_of(self, suite: Suite) -> SuiteData:
        """Items and examples of a suite, over the recipe's dataset and at most as many items as it asks for.

        Raises UserError for texts that are too few, or too much alike, for a margin of error.
        """
        n = self.recipe.eval.max_items
        data = load_suite_data(suite, dataset_spec=self.spec_path, max_items=n)
        check_units(suite, data.items, max_items=n)
        return data

    @property
    def folder_name(self) -> str:
        return f"{self.recipe.name}-{self.digest[:8]}"


@dataclass(frozen=True)
class FoundInputs:
    """What of a recipe's inputs is there, and the faults of what is not."""

    loaded: Loaded[Recipe]
    folders: Mapping[str, str]
    spec_path: Path | None
    suites: tuple[Suite, ...]
    source: ModelSource | None
    config: dict[str, Any]
    start: AdapterStart | None
    teacher: Teacher | None
    faults: Sequence[Fault]

    @property
    def recipe(self) -> Recipe:
        return self.loaded.value

    def inputs(self) -> RunInputs:
        """What a run needs. Raises UserError with every fault."""
        if self.faults:
            raise UserError(self.faults)
        assert self.spec_path is not None and self.source is not None
        return RunInputs(
            recipe=self.recipe,
            path=self.loaded.path,
            digest=recipe_digest(self.recipe),
            spec_path=self.spec_path,
            suites=self.suites,
            source=self.source,
            config=self.config,
            start=self.start,
            teacher=self.teacher,
            folders=self.folders,
        )


def gather_inputs(
    path: str,
    overrides: Sequence[str] = (),
    *,
    say: Callable[[str], None] | None = None,
    folders: Mapping[str, str] | None = None,
) -> RunInputs:
    """Read the recipe, then find its dataset spec, its suites and its base model.

    folders: for the resolved recipe of a run, where the relative paths of the recipe that was run start. Raises UserError with every fault of the recipe file; once it is sound, with every missing thing it names.
    """
    return find_inputs(path, overrides, say=say, folders=folders).inputs()


def find_inputs(
    path: str,
    overrides: Sequence[str] = (),
    *,
    say: Callable[[str], None] | None = None,
    folders: Mapping[str, str] | None = None,
) -> FoundInputs:
    """As `gather_inputs`, but what is missing is told beside what is there. Raises UserError for faults of the recipe file."""
    loaded = read_recipe(path, overrides)
    recipe = loaded.value
    found_in = {key: (folders or {}).get(key, str(loaded.folder(key).absolute())) for key in _WITH_PATHS}
    beside = {key: Path(folder) for key, folder in found_in.items()}
    faults: list[Fault] = []

    def attempt(find: Callable[[], Found]) -> Found | None:
        try:
            return find()
        except UserError as error:
            faults.extend(error.faults)
            return None

    folder, where = beside["data.spec"], loaded.where("data.spec")
    spec_path = attempt(lambda: find_declarative("data", recipe.data.spec, relative_to=folder, where=where))

    def suite_named(name: str) -> Callable[[], Suite]:
        return lambda: load_suite(name, relative_to=beside["eval.suites"], where=loaded.where("eval.suites"))

    suites = [attempt(suite_named(name)) for name in recipe.eval.suites]
    source = attempt(lambda: _find_base(loaded, beside, say, of_run=folders is not None))
    start = attempt(
        lambda: find_start(recipe.adapter, beside["adapter.start"], loaded.where("adapter.start"))
    )
    teacher = None
    if recipe.distil is not None and spec_path is not None and source is not None:
        base, spec = source, spec_path
        taught = attempt(lambda: _teacher_and_student(loaded, beside, base, spec, say))
        teacher, source = taught or (None, source)
    for suite in suites:
        if suite is not None:
            faults += _suite_faults(suite, recipe)
    config = attempt(lambda: read_config(source)) if source is not None else None
    return FoundInputs(
        loaded=loaded,
        folders=found_in,
        spec_path=spec_path,
        suites=tuple(suite for suite in suites if suite is not None),
        source=source,
        config=config or {},
        start=start,
        teacher=teacher,
        faults=faults,
    )


def _find_base(
    loaded: Loaded[Recipe], beside: Mapping[str, Path], say: Callable[[str], None] | None, *, of_run: bool
) -> ModelSource:
    """The model of `model.id`, fetched or converted if need be. `of_run`: the recipe is what a run has recorded."""
    section, where = loaded.value.model, loaded.where("model.id")
    id = model_folder(section.id, beside["model.id"], where)
    return resolve_model(
        id,
        recorded_revision(id, section.revision) if of_run else section.revision,
        trust_remote_code=section.trust_remote_code,
        announce=say,
        where=where,
        revision_where=loaded.where("model.revision"),
    )


def _teacher_and_student(
    loaded: Loaded[Recipe],
    beside: Mapping[str, Path],
    base: ModelSource,
    spec_path: Path,
    say: Callable[[str], None] | None,
) -> tuple[Teacher, ModelSource]:
    """The teacher that a recipe names, and the student: `base`, that of model.id, or what is cut from the teacher."""
    recipe = loaded.value
    assert recipe.distil is not None
    section = recipe.distil
    teacher = _find_teacher(recipe, loaded.where, beside, say)
    if section.way == "answers":
        found_in, where = beside["distil.teacher.run"], loaded.where("data.spec")
        if faults := text_faults(spec_path, section.teacher, found_in, where):
            raise UserError(faults)
    layers = section.student.layers
    if layers is None:
        return teacher, base
    return teacher, cut_student(teacher, layers, base, where=loaded.where("model.id"), say=say)


def _find_teacher(
    recipe: Recipe, where: Callable[[str], str], beside: Mapping[str, Path], say: Callable[[str], None] | None
) -> Teacher:
    """The teacher that a recipe names; that of a run is read from what the run says of itself."""
    assert recipe.distil is not None
    section = recipe.distil.teacher
    if section.run is None:
        key = "distil.teacher.id"
        return named_teacher(section, beside[key], where(key), say, where("distil.teacher.revision"))
    key = "distil.teacher.run"
    folder = run_of_teacher(section, beside[key], where(key))
    beside_it = read_json(folder / FILE_NAME).get("folders", {})
    of_run = gather_inputs(str(folder / "recipe.resolved.yaml"), folders=beside_it)
    return teacher_of_run(section, folder, of_run.source, of_run.recipe.model)


def _suite_faults(suite: Suite, recipe: Recipe) -> list[Fault]:
    """What of a suite does not go with the recipe."""
    faults = _missing_arms(suite, recipe)
    if suite.task == "text" and recipe.eval.max_items == 1:
        faults.append(
            Fault(
                f"eval.max_items leaves one text of suite {suite.name}",
                where="eval.max_items",
                why=NO_MARGIN,
                fix="set eval.max_items to 2 or more, or leave it out",
            )
        )
    if recipe.train.method == "reward":
        try:
            check_reward_suite(suite)
        except UserError as error:
            faults += error.faults
    return faults


def _missing_arms(suite: Suite, recipe: Recipe) -> list[Fault]:
    """A suite that claims an improvement needs every baseline; one that only guards is compared with what it has."""
    shows_its_own = suite.items.lm_eval is not None  # examples are part of such a task's prompts
    if (
        suite.role == "task"
        and not shows_its_own
        and "few_shot" in recipe.eval.baselines
        and suite.few_shot is None
    ):
        return [
            Fault(
                f"suite {suite.name} has no few_shot section, but eval.baselines asks for that arm",
                where=str(suite.path),
                fix="add `few_shot:` to the suite, or set eval.baselines: [zero_shot] and eval.against: zero_shot",
            )
        ]
    return []
