"""Who answers prompts: the model that a run has tuned, a base model, or a server that holds one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.data.spec_generated import AnsweringModel
from finetune.digest import digest_json
from finetune.errors import UserError
from finetune.evaluation.server import ServerModel
from finetune.model.load import load_model, load_tokenizer
from finetune.model.source import resolve_model
from finetune.pipeline.manifest import FILE_NAME
from finetune.pipeline.starts import find_folder, model_folder

Say = Callable[[str], None]


@dataclass(frozen=True)
class Answerer:
    """Who answers: `digest` names it in keys, `load` brings the model when an answer is missing."""

    digest: str
    tokenizer: Any
    load: Callable[[], Any]


def find_answerer(
    section: AnsweringModel, folder: Path, where: str, *, server: ServerModel | None, say: Say
) -> Answerer:
    """Who answers by a spec: a run's tuned model, a base model, or a server that has either. `where`: of the section."""
    if section.run is not None:
        answerer = _tuned_by(section.run, folder, where, say)
    else:
        assert section.id is not None, "the spec has one of the two"
        base = resolve_model(
            model_folder(section.id, folder, where),
            section.revision,
            weights=server is None,
            announce=say,
            where=where,
            revision_where=where,
        )
        answerer = Answerer(
            digest_json({"model": base.digest, "dtype": section.dtype}),
            load_tokenizer(base),
            lambda: load_model(base, dtype=section.dtype, attention="sdpa"),
        )
    if server is None:
        return answerer
    return Answerer(digest_json({"server": server.name}), answerer.tokenizer, lambda: server)


def _tuned_by(name: str, folder: Path, where: str, say: Say) -> Answerer:
    from finetune.pipeline.reevaluate import FinishedRun
    from finetune.pipeline.stages import load_tuned

    found = find_folder(name, folder)
    if found is None or not (found / FILE_NAME).is_file():
        raise UserError(
            f"there is no finished run '{name}'",
            where=where,
            fix="run its recipe first: finetune run RECIPE; `ls runs` lists the runs",
        )
    context = FinishedRun.open(found, say=say).context
    trained, dtype = context.manifest.output_digest("train"), context.inputs.recipe.eval.dtype
    return Answerer(
        digest_json({"trained": trained, "dtype": dtype}),
        context.tuned.tokenizer,
        lambda: load_tuned(context)[0],
    )
