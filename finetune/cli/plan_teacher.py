"""The teacher of a recipe for `finetune plan`: from configurations alone, whether its run is there or not."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

    from finetune.plan.teacher import TeacherPlan
    from finetune.recipe.model_section import ModelSection
    from finetune.recipe.schema import Recipe
    from finetune.recipe.yaml_loader import Loaded


def teacher_of_recipe(loaded: Loaded[Recipe]) -> TeacherPlan | None:
    """The teacher that runs beside the student, if one does: the model that is named, or the base of the run that is.

    A run that is not there yet is taken for one of `model.id`, from which a student is usually cut.
    """
    from finetune.cli.plan_inputs import config_of_model
    from finetune.plan.teacher import TeacherPlan, runs_beside

    recipe = loaded.value
    section, key, revision = runs_beside(recipe), "model.id", "model.revision"
    if section is None:
        return None
    teacher = section.teacher
    if teacher.id is not None:
        named = {"id": teacher.id, "revision": teacher.revision, "quantize": teacher.quantize}
        model, key = recipe.model.model_copy(update=named), "distil.teacher.id"
        revision = "distil.teacher.revision"
    else:
        model = _model_of_run(teacher.run, loaded.folder("distil.teacher.run")) or recipe.model
    taught = recipe.model_copy(update={"model": model})
    config = config_of_model(taught, loaded.folder(key), loaded.where(key), loaded.where(revision))
    return TeacherPlan(config, teacher.dtype, model.quantize, model.double_quantization)


def _model_of_run(run: str | None, relative_to: Path) -> ModelSection | None:
    """The base of a finished run, and how it is held."""
    from finetune.model.source import recorded_revision
    from finetune.pipeline.starts import find_folder
    from finetune.recipe.resolve import load_recipe

    folder = find_folder(run or "", relative_to)
    if folder is None or not (folder / "recipe.resolved.yaml").is_file():
        return None
    model = load_recipe(str(folder / "recipe.resolved.yaml"), ()).model
    return model.model_copy(update={"revision": recorded_revision(model.id, model.revision)})
