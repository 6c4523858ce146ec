"""Records of a dataset of the Hugging Face hub at a fixed revision, text exactly as its files have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.errors import Fault, UserError
from finetune.evaluation.item_source import ItemsSection

_FAULTS_SHOWN = 5


def hub_records(section: ItemsSection, split: str, *, where: str, folder: Path) -> list[dict[str, Any]]:
    """The records of one split, in order. `hub` may also name a local folder, relative to `folder`.

    Raises UserError when the dataset, its revision, configuration or split is not there or cannot be fetched, and for
    records that cannot be read: a suite leaves none out.
    """
    from finetune.data.read.files import source_files
    from finetune.data.read.record import Reject
    from finetune.data.read.source import iter_records
    from finetune.data.spec_source import HubSource

    assert section.hub is not None and section.revision is not None
    source = HubSource(kind="hub", id=section.hub, revision=section.revision, name=section.name, split=split)
    records: list[dict[str, Any]] = []
    faults: list[Fault] = []
    try:
        files = source_files(source, folder, where=lambda key: f"{where}: items.hub")
    except UserError as error:
        raise UserError([_in_words_of_a_suite(fault) for fault in error.faults]) from None
    for file in files:
        for found in iter_records(file, source):
            if isinstance(found, Reject):
                faults.append(Fault(found.reason, f"{found.source}:{found.line}"))
            else:
                records.append(found.value)
    if len(faults) > _FAULTS_SHOWN:
        faults = [
            *faults[:_FAULTS_SHOWN],
            Fault(f"{len(faults) - _FAULTS_SHOWN} more records cannot be read"),
        ]
    if faults:
        raise UserError(faults)
    return records


def _in_words_of_a_suite(fault: Fault) -> Fault:
    """The remedies of the readers name the keys of a dataset spec."""
    fix = fault.fix.replace("source.id", "items.hub").replace("source.", "items.")
    return Fault(fault.what, fault.where, fault.why, fix)
