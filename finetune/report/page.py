"""The report page of a run: one file, no network, verdict first. How hostile text stays text is in `rendering`."""

from __future__ import annotations

from pathlib import Path

from finetune.paths import write_atomic
from finetune.recipe.adapter_section import VIRTUAL_TOKENS
from finetune.report.accounts import read_ledger, read_memory, read_provenance, summary_of
from finetune.report.answers import read_answers
from finetune.report.checks import read_checks
from finetune.report.curves import read_curves
from finetune.report.distillation import read_distillation
from finetune.report.forest import four_cells, read_forests
from finetune.report.next_steps import read_next_steps, shown_folder
from finetune.report.numbers import sentence_case
from finetune.report.read import RunFiles, as_dict, as_list, as_text, read_run
from finetune.report.rendering import render
from finetune.report.samples import read_samples
from finetune.report.slices import read_slices
from finetune.report.tables import read_costs, read_metrics
from finetune.report.trust import read_trust
from finetune.report.verdict import read_verdict

FILE_NAME = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write `report.html` into the run folder, atomically, from the files that are there; returns its path.

    Whatever is missing or damaged is named on the page. Raises UserError when the folder is not that of a run or
    cannot be written.
    """
    path = run_folder / FILE_NAME
    write_atomic(path, render_page(read_run(run_folder)))
    return path


def render_page(run: RunFiles) -> str:
    """The whole page as HTML; equal files give equal bytes."""
    verdict = read_verdict(run)
    ledger, memory = read_ledger(run), read_memory(run)
    against = (
        verdict.primary.text("baseline") if verdict.primary else as_text(run.recipe_value("eval.against"))
    )
    others = [
        cells for one in verdict.comparisons if one is not verdict.primary and (cells := four_cells(one))
    ]
    return render(
        "page.html.j2",
        title=as_text(run.manifest.get("recipe_name")) or as_text(run.recipe.get("name")) or run.folder.name,
        description=as_text(run.recipe.get("description")),
        heading=_heading(run),
        verdict=verdict,
        profile=as_text(run.recipe.get("profile")),
        summary=summary_of(ledger, memory),
        forests=read_forests(verdict.comparisons, verdict.primary),
        cells=four_cells(verdict.primary) if verdict.primary else None,
        other_cells=others,
        metrics=read_metrics(run),
        checks=read_checks(run),
        curves=read_curves(run),
        samples=read_samples(run),
        memory=memory,
        ledger=ledger,
        slices=read_slices(run),
        trust=read_trust(run),
        costs=read_costs(run, against or "few_shot"),
        distillation=read_distillation(run),
        readings=read_answers(run, verdict.primary, verdict.comparisons),
        provenance=read_provenance(run),
        recipe_text=run.recipe_text,
        folder=shown_folder(run.folder),
        gaps=run.gaps,
        notes=_notes(run),
        claims=_claims(run),
        steps=read_next_steps(run, verdict),
    )


def _heading(run: RunFiles) -> list[tuple[str, str]]:
    """What was tuned and how, in the words of the recipe; keys that the recipe lacks are left out."""
    names = {"model.id": "model", "adapter.kind": "adapter", "adapter.rank": "rank", "data.spec": "data"}
    names |= {"model.quantize": "quantized", "train.learning_rate": "learning rate", "seed": "seed"}
    if run.recipe_value("adapter.kind") in ("none", "ia3", "bitfit", *VIRTUAL_TOKENS):
        del names["adapter.rank"]  # its default, which nothing reads
    pairs = [(name, run.recipe_value(key)) for key, name in names.items()]
    pairs = [(name, value) for name, value in pairs if value not in (None, "none")]
    digest, created = as_text(run.manifest.get("recipe_digest")), as_text(run.manifest.get("created"))
    pairs += [("recipe", digest[:8])] if digest else []
    pairs += [("created", created[:16].replace("T", " "))] if created else []
    return [(name, str(value)) for name, value in pairs]


def _notes(run: RunFiles) -> list[str]:
    """Remarks on the fairness of each suite's comparison, and on what its deciding comparison leaves open."""
    found = []
    several = len(run.suite_records) > 1
    for suite, record in run.suite_records.items():
        texts = [text for note in as_list(record.get("notes")) if (text := as_text(note))]
        found += [f"{suite}: {text}" if several else sentence_case(text) for text in texts]
    return found


def _claims(run: RunFiles) -> str | None:
    """What the p-values of several suites were corrected for; nothing where one suite claims an improvement."""
    tasks = [one for one in run.suite_records.values() if one.get("role") == "task"]
    return as_text(as_dict(run.comparison.get("correction")).get("explained")) if len(tasks) > 1 else None
