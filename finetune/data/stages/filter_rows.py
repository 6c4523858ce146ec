"""What is decided of one row by itself while it is read: masking, languages, refusals, verifiers. Nothing of other rows."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.data.curate.answers import is_empty, is_refusal
from finetune.data.curate.command import CommandVerifier
from finetune.data.curate.functions import function_digest
from finetune.data.curate.verifiers import FAILED, RowDict, Verdict, load_verifier
from finetune.data.marks import MarkFile, apply_mark
from finetune.data.rows import Row
from finetune.data.spec_curate import CurateSection, VerifierSection
from finetune.data.texts import calls_of
from finetune.digest import digest_file
from finetune.errors import UserError

REFUSAL, EMPTY, PERSONAL = 1, 2, 4
FLAGS = {"refusals": REFUSAL, "empty_answers": EMPTY, "personal_data": PERSONAL}
"""Key of the spec -> the bit that a row has in the column `flags`."""
_WITHOUT_ANSWER = frozenset({"text", "tokens"})
_LEAST_JUDGED = 20


@dataclass(frozen=True, slots=True)
class Left:
    """A row that is not taken: why it is counted so, and what the ledger says besides."""

    row: Row
    reason: str
    entry: Mapping[str, Any] = field(default_factory=dict)


def filter_digest(section: CurateSection, marks: Path | None, folder: Path) -> list[Any]:
    """All that decides what `RowFilter` does: keys of the section, marks, and the code of functions beside the spec."""
    given = section.model_dump(mode="json")
    keys = ("empty_answers", "refusals", "personal_data", "region", "languages", "verifiers")
    own = [one.function for one in section.verifiers if one.function is not None]
    marked = digest_file(marks) if marks is not None and marks.is_file() else None
    return [{key: given[key] for key in keys}, [function_digest(name, folder=folder) for name in own], marked]


class RowFilter:
    """Use as a context: commands that judge rows end with it. `counts` are findings by kind, for the manifest."""

    def __init__(self, section: CurateSection, marks: Path | None, folder: Path) -> None:
        self._section, self._folder = section, folder
        self._marks = MarkFile(marks).read() if marks is not None else {}
        self._verifiers: list[tuple[VerifierSection, Callable[[RowDict], Verdict]]] = []
        self._open = contextlib.ExitStack()
        self._failed: Counter[str] = Counter()
        self._judged: Counter[str] = Counter()
        self._last_failure: dict[str, str] = {}
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> RowFilter:
        for section in self._section.verifiers:
            self._verifiers.append((section, self._load(section)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._open.close()
        if error is None:
            for section in self._section.verifiers:
                self._require_working(section)

    def __call__(self, rows: Iterable[Row]) -> Iterator[tuple[Row, int] | Left]:
        """Each row with its flags, or why it is left out."""
        for row in rows:
            yield self._judge(row)

    def _judge(self, row: Row) -> tuple[Row, int] | Left:
        section = self._section
        flags = 0
        if row.kind not in _WITHOUT_ANSWER:
            answer = row.answer
            flags |= EMPTY if section.empty_answers != "off" and is_empty(answer) and not calls_of(row) else 0
            flags |= REFUSAL if section.refusals != "off" and is_refusal(answer) else 0
        if flags & EMPTY and section.empty_answers == "drop":
            return Left(row, "empty_answer")
        if flags & REFUSAL and section.refusals == "drop":
            return Left(row, "refusal")
        if section.languages and (language := self._other_language(row)):
            return Left(row, "other_language", {"language": language})
        for verifier, judge in self._verifiers:
            verdict = self._ask(verifier, judge, row)
            if not verdict.keep:
                given = {} if verdict.score is None else {"score": verdict.score}
                return Left(row, f"rejected_by_{verifier.name}", {"why": verdict.reason, **given})
        if section.personal_data != "off":
            found: Counter[str] = Counter()
            masked = self._masked(row, found)
            if found:
                self.counts.update(found)
                flags |= PERSONAL
                if section.personal_data == "drop":
                    return Left(row, "personal_data", {"kinds": sorted(found)})
                row = masked if section.personal_data == "mask" else row
        return self._marked(row, flags) if self._marks else (row, flags)

    def _marked(self, row: Row, flags: int) -> tuple[Row, int] | Left:
        """What a reader decided; marks are on rows as they were shown, so masked ones."""
        mark = self._marks.get(row.content_digest())
        changed, reason = apply_mark(row, mark)
        if changed is not None:
            return changed, flags
        assert mark is not None
        return Left(row, reason, {"note": mark.note} if mark.note else {})

    def _masked(self, row: Row, found: Counter[str]) -> Row:
        from finetune.data.curate.personal import mask_row  # loads plans of telephone numbers

        return mask_row(row, region=self._section.region, counts=found)

    def _other_language(self, row: Row) -> str:
        """The language of the answer, or of text, when it is clearly none of those wanted."""
        from finetune.data.curate.language import UNDETERMINED, language_of  # loads a model

        language = language_of(row.text if row.kind in _WITHOUT_ANSWER else row.answer)
        return "" if language in (UNDETERMINED, *self._section.languages) else language

    def _load(self, section: VerifierSection) -> Callable[[RowDict], Verdict]:
        where = f"curate.verifiers: {section.name}"
        if section.function is not None:
            return load_verifier(
                section.function, folder=self._folder, threshold=section.threshold, where=where
            )
        if section.judge is not None:
            from finetune.data.curate.judge import JudgeVerifier  # brings a client of HTTP

            return JudgeVerifier(
                section.judge,
                threshold=section.threshold,
                seconds_per_row=section.seconds_per_row,
                where=where,
            )
        assert section.command is not None
        return self._open.enter_context(
            CommandVerifier(
                section.command,
                folder=self._folder,
                threshold=section.threshold,
                seconds_per_row=section.seconds_per_row,
                where=where,
            )
        )

    def _ask(self, section: VerifierSection, judge: Callable[[RowDict], Verdict], row: Row) -> Verdict:
        verdict = judge(row.to_dict())
        self._judged[section.name] += 1
        if verdict.failed:
            self._failed[section.name] += 1
            self._last_failure[section.name] = verdict.reason
            if self._judged[section.name] >= _LEAST_JUDGED:
                self._require_working(section)
        return verdict

    def _require_working(self, section: VerifierSection) -> None:
        """A broken verifier must not empty a data set without a word."""
        failed, judged = self._failed[section.name], self._judged[section.name]
        if failed > section.max_failed_share * judged:
            raise UserError(
                f"the verifier '{section.name}' failed on {failed} of {judged} rows",
                where="curate.verifiers",
                why=self._last_failure[section.name].removeprefix(f"{FAILED}: "),
                fix="mend the verifier, or raise its max_failed_share",
            )
