"""The teacher of a recipe for `finetune plan`: from configurations alone, whether its run is there or not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from finetune.plan.teacher import TeacherPlan
    from finetune.recipe.model_section import ModelSection
    from finetune.recipe.schema import Recipe


def teacher_of_recipe(recipe: Recipe) -> TeacherPlan | None:
    """The teacher that runs beside the student, if one does: the model that is named, or the base of the run that is.

    A run that is not there yet is taken for one of `model.id`, from which a student is usually cut.
    """
    from finetune.cli.plan_page import config_of_model
    from finetune.plan.teacher import TeacherPlan, runs_beside

    section = runs_beside(recipe)
    if section is None:
        return None
    teacher = section.teacher
    if teacher.id is not None:
        named = {"id": teacher.id, "revision": teacher.revision, "quantize": teacher.quantize}
        model = recipe.model.model_copy(update=named)
    else:
        model = _model_of_run(teacher.run) or recipe.model
    config = config_of_model(recipe.model_copy(update={"model": model}))
    return TeacherPlan(config, teacher.dtype, model.quantize, model.double_quantization)


def _model_of_run(run: str | None) -> ModelSection | None:
    """The base of a finished run, and how it is held."""
    from finetune.pipeline.starts import find_folder
    from finetune.recipe.resolve import load_recipe

    folder = find_folder(run or "", Path.cwd())
    if folder is None or not (folder / "recipe.resolved.yaml").is_file():
        return None
    return load_recipe(str(folder / "recipe.resolved.yaml"), ()).model
