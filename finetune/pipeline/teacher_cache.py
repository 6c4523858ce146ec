"""The teacher cache of a recipe: which one it is, filling it, and handing it to the trainer. Kept under runs/teachers.

A cache is named by everything that decides it, so recipes that differ in loss, learning rate or student share one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.tokenise import TokenisedRow
from finetune.digest import digest_json
from finetune.distil.aligned.teaching import AlignedRows, AlignedTeaching
from finetune.distil.cache.coding import Coding, TopK
from finetune.distil.cache.layout import CacheIdentity, CacheManifest, cache_key, rows_digest
from finetune.distil.cache.measure import LOW_COVERAGE
from finetune.distil.cache.read import CachedTeaching, TeacherCache
from finetune.distil.cache.server import ServerSaying
from finetune.distil.cache.write import ModelSaying, Saying, cache_teacher, coding_of
from finetune.distil.trainer import shared_vocabulary
from finetune.paths import runs_root
from finetune.pipeline.teacher import Teacher
from finetune.recipe.distil_section import DistilSection
from finetune.telemetry.progress import Progress

if TYPE_CHECKING:
    from finetune.pipeline.inputs import RunInputs

Say = Callable[[str], None]


class _LoadedWhenAsked:
    """A teacher that is brought into memory by the first question: a complete cache asks none."""

    def __init__(self, load: Callable[[], Any]) -> None:
        self._load = load

    @cached_property
    def _saying(self) -> ModelSaying:
        return ModelSaying(self._load())

    def top_k(
        self, rows: Sequence[TokenisedRow], coding: Coding, sample_every: int
    ) -> tuple[TopK, dict[str, Any]]:
        return self._saying.top_k(rows, coding, sample_every)


@dataclass(frozen=True)
class RecipeCache:
    """The cache that a recipe needs for its tokenised train rows, made or not."""

    teacher: Teacher
    section: DistilSection
    rows: Sequence[TokenisedRow]
    identity: CacheIdentity
    coding: Coding

    @classmethod
    def of(
        cls,
        inputs: RunInputs,
        tokenizer: Any,
        rows: Sequence[TokenisedRow],
        aligned: AlignedRows | None = None,
    ) -> RecipeCache:
        """tokenizer: the student's. aligned: the rows in the teacher's own tokens, where those differ; they are what it is
        asked about. Raises UserError where the teacher has other tokens without it, and for a k above the vocabulary."""
        assert inputs.teacher is not None and inputs.recipe.distil is not None
        teacher, section = inputs.teacher, inputs.recipe.distil
        teachers = teacher.load_tokenizer()
        if aligned is None:
            n_vocabulary = shared_vocabulary(tokenizer, teachers)
        else:
            n_vocabulary, rows = aligned.shared.n_teacher, aligned.teacher_rows
        identity = CacheIdentity(
            teacher=teacher.key(section.teacher.dtype),
            tokenizer=digest_json(teachers.get_vocab()),
            data=rows_digest(rows),
            teacher_name=teacher.name,
        )
        coding = coding_of(
            k=section.cache.k,
            vocabulary=n_vocabulary,
            dtype=section.cache.dtype,
            temperatures=[section.loss.temperature, *section.cache.temperatures],
        )
        return cls(teacher, section, rows, identity, coding)

    @property
    def folder(self) -> Path:
        return runs_root() / "teachers" / cache_key(self.identity, self.coding)[:16]

    def fill(self, say: Say, saying: Saying | None = None) -> CacheManifest:
        """Make what is missing of the cache; nothing is loaded when it is complete. saying: who speaks for the teacher, such
        as a server; without it that of the recipe does, or the teacher is loaded here."""
        if saying is None and self.teacher.server is not None:
            saying = ServerSaying(self.teacher.server)
        saying = saying or _LoadedWhenAsked(lambda: self.teacher.load(dtype=self.section.teacher.dtype))
        total = sum(row.n_targets for row in self.rows)
        with Progress("teacher cache", total, "targets") as progress:
            return cache_teacher(
                saying,
                self.rows,
                self.folder,
                identity=self.identity,
                coding=self.coding,
                least_coverage=self.section.cache.coverage,
                say=say,
                progress=progress.advance,
            )

    def teaching(self, say: Say, aligned: AlignedRows | None = None) -> CachedTeaching | AlignedTeaching:
        """What the trainer reads; the cache is filled first where something of it is missing or damaged."""
        self.fill(say)
        cache = TeacherCache.open(self.folder, self.rows, self.identity, verify=False)
        if aligned is not None:
            return AlignedTeaching.cached(aligned, cache, self.section.loss.temperature)
        return CachedTeaching(cache, self.section.loss.temperature)


def low_coverage(manifest: CacheManifest) -> str | None:
    """A warning where a tenth of the teacher's mass or more is outside what is kept, at some planned temperature."""
    found = manifest.measured.get("coverage", {})
    low = {temperature: one["mean"] for temperature, one in found.items() if one["mean"] < LOW_COVERAGE}
    if not low:
        return None
    told = ", ".join(f"{mean:.1%} at temperature {temperature}" for temperature, mean in low.items())
    return (
        f"warning: teacher cache: the top {manifest.coding.k} hold {told} of the teacher's mass: what is outside is one outcome, "
        "and the student ends further from its teacher\n  raise distil.cache.k, or set distil.targets: live"
    )


def cache_facts(cache: RecipeCache, manifest: CacheManifest) -> dict[str, Any]:
    """What people want to know of a finished cache."""
    found = manifest.to_dict()
    kept = ("key", "complete", "bytes_per_target", "rows", "targets", "coverage", "reconstruction")
    return {
        "folder": str(cache.folder),
        "teacher": cache.teacher.name,
        "k": cache.coding.k,
        "formula": cache.coding.formula(),
        "bytes_on_disk": manifest.bytes_on_disk,
        **{name: found[name] for name in kept if name in found},
    }
