"""Curation that looks at all rows: rows that say the same, contradictions, and what the answers have in common.

What is found is told in the manifest with its first examples; what is dropped is in the ledger, row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from finetune.data.curate.functions import function_digest
from finetune.data.curate.near import NearDuplicates, find_near_duplicates, representatives
from finetune.data.curate.tokens import Texts
from finetune.data.rows import SIDES, Progress, Row, Side
from finetune.data.spec import DatasetSpec
from finetune.data.spec_curate import CurateSection, NearSection, SemanticSection
from finetune.data.stages.filter_rows import FLAGS, filter_digest
from finetune.data.stages.settle import DUPLICATE, Verdicts
from finetune.data.stages.table import Ints, RowTable
from finetune.data.stages.work import WorkFolder
from finetune.data.texts import calls_of, whole_text

NEAR, SEMANTIC, CONTRADICTION = "near_duplicate", "semantic_duplicate", "contradiction"
_SHOWN_GROUPS, _SHOWN_ROWS, _SHOWN_CHARACTERS = 5, 5, 200
_SHOWN_PILES = 8


def leave_out_alike(
    table: RowTable,
    section: CurateSection,
    folder: Path,
    verdicts: Verdicts,
    work: WorkFolder,
    on_progress: Progress,
) -> dict[str, Any]:
    """Find rows that say the same as another and rows that contradict each other, and drop them where the spec says so.

    `folder` is that of the spec. Returns what was found, by key of the spec.
    """
    found: dict[str, Any] = {}
    drops_exact = section.exact_duplicates == "drop"
    if section.near_duplicates is not None:
        found["near_duplicates"] = _one_of_each(
            table, NEAR, section.near_duplicates, folder, verdicts, work, on_progress, drops_exact=drops_exact
        )
    if section.semantic_duplicates is not None:
        found["semantic_duplicates"] = _one_of_each(
            table,
            SEMANTIC,
            section.semantic_duplicates,
            folder,
            verdicts,
            work,
            on_progress,
            drops_exact=drops_exact,
        )
    if section.contradictions != "off":
        found["contradictions"] = _contradictions(table, verdicts, drop=section.contradictions == "drop")
    on_progress(1.0)
    return found


def curation_digest(spec: DatasetSpec, folder: Path) -> list[Any]:
    """What decides the curation besides the spec: marks, and the code of functions that it names."""
    semantic = spec.curate.semantic_duplicates
    own = [] if semantic is None else [function_digest(semantic.embedding, folder=folder)]
    return [filter_digest(spec.curate, None if spec.marks is None else folder / spec.marks, folder), own]


def _one_of_each(
    table: RowTable,
    reason: str,
    section: NearSection | SemanticSection,
    folder: Path,
    verdicts: Verdicts,
    work: WorkFolder,
    on_progress: Progress,
    *,
    drops_exact: bool,
) -> dict[str, Any]:
    """Of rows alike the first stays: pinned rows stand first, then rows in an order that is their own."""
    if section.action == "drop" and drops_exact:
        _drop_duplicates(table, verdicts)
    rows = _in_order(table, verdicts.kept)

    def find() -> dict[str, Any]:
        near = _search(table.texts(rows, whole_text), section, folder, on_progress)
        kept_for = representatives(len(rows), near)
        lost = np.flatnonzero(kept_for != np.arange(len(rows)))
        return {
            "rows": rows[lost],
            "cause": rows[kept_for[lost]],
            "pairs": np.array([len(near)]),
            "unchecked": np.array([len(near.unchecked)]),
        }

    held = work.remembered(reason, find)
    is_free = ~table.pinned[held["rows"]]
    lost, cause = held["rows"][is_free], held["cause"][is_free]
    if section.action == "drop":
        verdicts.drop(reason, lost, cause)
    first = [
        {"row": table.text("id", row), "like": table.text("id", other)}
        for row, other in zip(lost[:_SHOWN_ROWS].tolist(), cause[:_SHOWN_ROWS].tolist(), strict=True)
    ]
    return {
        "action": section.action,
        "rows": len(lost),
        "pairs": int(held["pairs"][0]),
        "unchecked": int(held["unchecked"][0]),
        "first": first,
    }


def _in_order(table: RowTable, rows: Ints) -> Ints:
    in_order: Ints = rows[np.lexsort((table.place[rows], ~table.pinned[rows]))]
    return in_order


def _drop_duplicates(table: RowTable, verdicts: Verdicts) -> None:
    """Exact duplicates are counted as what they are, not as near ones."""
    rows = _in_order(table, verdicts.kept)
    _, first, which = np.unique(table.content.codes[rows], return_index=True, return_inverse=True)
    cause = rows[first[which]]
    is_lost = (cause != rows) & ~table.pinned[rows]
    verdicts.drop(DUPLICATE, rows[is_lost], cause[is_lost])


def describe_duplicates(table: RowTable, section: CurateSection, verdicts: Verdicts) -> dict[str, Any]:
    """Exact duplicates that were dropped or that stay, with the places of the first and of the rows that they repeat."""
    if section.exact_duplicates == "off":
        return {}
    if DUPLICATE in verdicts.reasons:
        lost = np.flatnonzero(verdicts.reason == verdicts.reasons.index(DUPLICATE))
    else:
        lost = np.empty(0, np.int64)
    cause = verdicts.cause[lost]
    if section.exact_duplicates == "report":
        rows = _in_order(table, verdicts.kept)
        _, first, which = np.unique(table.content.codes[rows], return_index=True, return_inverse=True)
        stay = rows[first[which]] != rows
        lost, cause = np.concatenate([lost, rows[stay]]), np.concatenate([cause, rows[first[which]][stay]])
    shown = [
        {"row": table.text("source", row), "like": table.text("source", other)}
        for row, other in zip(lost[:_SHOWN_ROWS].tolist(), cause[:_SHOWN_ROWS].tolist(), strict=True)
    ]
    return {"exact_duplicates": {"action": section.exact_duplicates, "rows": len(lost), "first": shown}}


def _search(
    texts: Texts, section: NearSection | SemanticSection, folder: Path, on_progress: Progress
) -> NearDuplicates:
    if isinstance(section, NearSection):
        return find_near_duplicates(texts, threshold=section.threshold, on_progress=on_progress)
    from finetune.data.curate.semantic import find_semantic_duplicates, load_embedding

    embed = load_embedding(section.embedding, folder=folder, where="curate.semantic_duplicates.embedding")
    return find_semantic_duplicates(texts, embed, threshold=section.threshold)


def _contradictions(table: RowTable, verdicts: Verdicts, *, drop: bool) -> dict[str, Any]:
    """Rows with the same prompt and different answers, both folded."""
    rows = verdicts.kept
    rows = rows[table.answer.codes[rows] >= 0]
    pairs = np.stack([table.prompt.codes[rows], table.answer.codes[rows]], axis=1)
    distinct = np.unique(pairs, axis=0)
    asked, n_answers = np.unique(distinct[:, 0], return_counts=True)
    contested = asked[n_answers > 1]
    lost = rows[np.isin(table.prompt.codes[rows], contested)]
    lost = lost[np.argsort(table.place[lost])]
    groups = table.prompt.codes[lost]
    _, first_at = np.unique(groups, return_index=True)
    first = [
        [_answer_of(table, int(row)) for row in lost[groups == groups[at]][:_SHOWN_ROWS]]
        for at in np.sort(first_at)[:_SHOWN_GROUPS]
    ]
    if drop:
        verdicts.drop(CONTRADICTION, lost[~table.pinned[lost]])
    return {
        "action": "drop" if drop else "report",
        "questions": len(contested),
        "rows": len(lost),
        "first": first,
    }


def describe_rows(
    table: RowTable,
    section: CurateSection,
    chosen: Mapping[Side, Ints],
    findings: Mapping[str, int],
) -> dict[str, Any]:
    """What the chosen rows hold: flagged rows, personal data by kind, forms of the answers, tags by side.

    Forms are measured on train rows, of many on a sample that does not depend on where rows stood.
    """
    used = np.unique(np.concatenate(list(chosen.values())))
    described: dict[str, Any] = {}
    flags = np.asarray(table.column("flags"), np.int64)
    for key, bit in FLAGS.items():
        if getattr(section, key) != "off":
            flagged = used[flags[used] & bit > 0]
            first = flagged[np.argsort(table.place[flagged])][:_SHOWN_ROWS].tolist()
            described[key] = {
                "action": getattr(section, key),
                "rows": len(flagged),
                "first": [_answer_of(table, row) for row in first],
            }
    if section.personal_data != "off":
        described["personal_data"]["findings"] = dict(sorted(findings.items()))
        described["personal_data"].pop("first")  # the manifest is not the place to repeat them
    if section.consistency != "off":
        described |= _describe_answers(table, section, np.unique(chosen["train"]))
    described["coverage"] = _coverage(table, chosen)
    return described


def _describe_answers(table: RowTable, section: CurateSection, rows: Ints) -> dict[str, Any]:
    from finetune.data.curate.answers import find_repeated
    from finetune.data.curate.consistency import ASPECTS, measure_consistency

    rows = rows[table.answer.codes[rows] >= 0]
    rows = table.sample(rows, section.sample_rows)
    held = {row: one for row in rows.tolist() if not calls_of(one := table.row(row))}
    rows = np.array(list(held), np.int64)
    answers = [one.answer for one in held.values()]
    within = None
    if section.consistent_within is not None:
        values = table.tag(section.consistent_within)
        within = ["" if code < 0 else str(values.values[int(code)]) for code in values.codes[rows].tolist()]
    mixes = []
    aspects = [name for name in ASPECTS if name != "language" or section.consistency == "languages"]
    for mix in measure_consistency(answers, within=within, aspects=aspects):
        piles = [
            {
                "value": pile.value,
                "share": round(pile.share, 4),
                "like": _shown(answers[pile.rows[0]]) if pile.rows else "",
            }
            for pile in mix.piles[:_SHOWN_PILES]
        ]
        within_key = {} if mix.within is None else {"within": mix.within}
        mixes.append(
            {
                "aspect": mix.aspect,
                **within_key,
                "minority_share": round(mix.minority_share, 4),
                "warned": mix.warned,
                "piles": piles,
            }
        )
    repeated = [
        {"kind": one.kind, "rows": one.n_rows, "text": _shown(one.text)}
        for one in find_repeated(answers)[:_SHOWN_GROUPS]
    ]
    return {"consistency": {"measured_rows": len(rows), "mixes": mixes}, "repeated": repeated}


def _coverage(table: RowTable, chosen: Mapping[Side, Ints]) -> list[dict[str, Any]]:
    from finetune.data.curate.coverage import tag_coverage

    tags = table.column("tags")
    counts: Counter[tuple[str, str]] = Counter()
    for side in SIDES:
        texts = tags.take(pa.array(np.unique(chosen[side])))
        for entry in texts.value_counts().to_pylist():
            counts[side, entry["values"]] += entry["counts"]
    if not any(text for _, text in counts):
        return []
    rows = (
        (side, orjson.loads(text) if text else {}) for (side, text), n in counts.items() for _ in range(n)
    )
    return [found.to_dict() for found in tag_coverage(rows)]


def warnings_of(curation: Mapping[str, Any]) -> list[str]:
    """What a person should look at before training, a line each."""
    lines = []
    for mix in curation.get("consistency", {}).get("mixes", ()):
        if mix["warned"]:
            within = f" of {mix['within']}" if mix.get("within") else ""
            piles = ", ".join(f"{pile['value']} {pile['share']:.0%}" for pile in mix["piles"][:3])
            lines.append(
                f"{mix['minority_share']:.0%} of the answers{within} differ from the rest in {mix['aspect']}: {piles}"
            )
    found = curation.get("contradictions", {})
    if found.get("questions") and found["action"] == "report":
        lines.append(f"{found['questions']} questions have different answers, in {found['rows']} rows")
    named = {"refusals": "refusals", "empty_answers": "empty answers"}
    for key, name in named.items():
        if curation.get(key, {}).get("rows"):
            lines.append(f"{curation[key]['rows']} answers are {name}")
    personal = curation.get("personal_data", {})
    if personal.get("rows") and personal["action"] == "report":
        kinds = ", ".join(f"{kind} {n}" for kind, n in personal["findings"].items())
        lines.append(f"{personal['rows']} rows hold personal data: {kinds}")
    for one in curation.get("repeated", ()):
        lines.append(f"{one['rows']} rows share the same {one['kind']}: {one['text']}")
    for tag in curation.get("coverage", ()):
        if tag["unmeasured"]:
            values = ", ".join(tag["unmeasured"][:_SHOWN_ROWS])
            lines.append(f"tag {tag['tag']}: no evaluation row has {values}")
    return lines


def _answer_of(table: RowTable, row: int) -> dict[str, str]:
    held: Row = table.row(row)
    return {"id": held.id, "answer": _shown(held.answer)}


def _shown(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _SHOWN_CHARACTERS else f"{line[:_SHOWN_CHARACTERS]}…"
