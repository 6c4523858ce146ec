"""Learning what the teacher writes: whether a dataset is of its answers, and what its check said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.data.build import load_spec
from finetune.data.generated.store import MANIFEST, generated_folder
from finetune.data.spec_source import GeneratedSource
from finetune.digest import digest_json
from finetune.errors import Fault
from finetune.paths import read_json
from finetune.pipeline.starts import find_folder
from finetune.recipe.teacher_section import TeacherSection

_TOLD = ("answers", "passed", "pass_rate", "pass_rate_by", "format_failures", "difficulty", "rows")


def text_faults(spec_path: Path, section: TeacherSection, beside: Path, where: str) -> list[Fault]:
    """What is wrong with a dataset that way `answers` shall learn from. `beside`: where the teacher's paths start."""
    generated = _sources(spec_path)
    if not generated:
        return [
            Fault(
                f"{spec_path} holds no answers of a teacher",
                where=where,
                why="distil.way answers learns rows that a source of kind generated has made",
                fix="name a spec with `source: {kind: generated, write: chat, model: …}` (data/README.md), or set distil.way: logits",
            )
        ]
    faults = []
    for source in generated:
        if source.write != "chat":
            faults.append(
                Fault(f"source '{source.name}' writes pairs", where=where, fix="set write: chat in it")
            )
        if not _is_teacher(source, spec_path.parent, section, beside):
            faults.append(
                Fault(
                    f"source '{source.name}' is answered by {source.model.run or source.model.id}, and the teacher is "
                    f"{section.run or section.id}",
                    where=where,
                    why="the student would be compared with a model that has not taught it",
                    fix="name the same model in both",
                )
            )
    return faults


def _is_teacher(source: GeneratedSource, folder: Path, section: TeacherSection, beside: Path) -> bool:
    if section.run is None or source.model.run is None:
        return section.adapter is None and source.model.id is not None and source.model.id == section.id
    found = find_folder(source.model.run, folder)
    return found is not None and found == find_folder(section.run, beside)


def _sources(spec_path: Path) -> list[GeneratedSource]:
    return [source for source in load_spec(spec_path).value.sources if isinstance(source, GeneratedSource)]


def text_facts(spec_path: Path) -> list[dict[str, Any]]:
    """Of every generated source: how many answers passed, and of which difficulty their prompts are."""
    found = []
    for source in _sources(spec_path):
        manifest = read_json(generated_folder(source.name) / MANIFEST)
        told = {name: manifest[name] for name in _TOLD if name in manifest}
        found.append(
            {
                "name": source.name,
                "filter": source.keep.filter,
                "prefer": source.keep.prefer,
                "answers_of": _answers_digest(manifest),
                **told,
            }
        )
    return found


def _answers_digest(manifest: dict[str, Any]) -> str:
    """Of the answers and verdicts that rows were chosen from, whatever was kept of them: by it two choices are found to be
    of the same answers."""
    settings = {name: value for name, value in manifest["source"].items() if name not in ("keep", "write")}
    return digest_json([settings, manifest["model"], manifest["verifier"], manifest["prompts"]["digest"]])
